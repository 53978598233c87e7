# SPDX-License-Identifier: Apache-2.0
"""Logits are copied into the ring: the position of each byte. The memory of the CPU stands for that of the GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from dmi_connector.engine.transfer.logits import LogitsExport, _fill
from dmi_connector.store.format.completeness import Cause


class Event:
    """A fake event that is complete once `done` is set."""

    def __init__(self, done: bool = True) -> None:
        self.done, self.recorded = done, False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.done


# ---- logits ---------------------------------------------------------------------------------------------------------


class Capture:
    def __init__(self, start: int = 0, out: Any = "out", logits: Any = "logits") -> None:
        self.start, self.out, self.layout = start, out, SimpleNamespace(logits=logits)
        self.losses: list[tuple[Any, ...]] = []

    def lose(self, *given: Any) -> None:
        self.losses.append(given)


class Worker:
    """A fake exporter. has_room: whether its ring has room."""

    def __init__(self, has_room: bool = True, lane: Any = None) -> None:
        self.memory, self.has_room, self.lane = np.zeros(4096, np.uint8), has_room, lane
        self.captures: dict[int, Capture] = {}
        self.asked: list[int] = []
        self.layer = SimpleNamespace(row_dtype=torch.float32, step=None)
        self.progress = SimpleNamespace(counts={"bytes_exported": 5})
        self.ring = SimpleNamespace(view=lambda extent: self.memory[extent.offset : extent.offset + extent.nbytes])

    def room(self, nbytes: int) -> Any:
        self.asked.append(nbytes)
        return SimpleNamespace(offset=32, nbytes=nbytes) if self.has_room else None


LOGITS = torch.arange(9, dtype=torch.float32).view(3, 3)
SLOTS = torch.tensor([7, 1 << 40, 9])
NBYTES = 48 + 24
"""36 bytes of logits, padded to a multiple of 16, and three slots."""


@pytest.mark.parametrize("lane", [False, True])
def test_logits_come_first_and_slots_last(lane: bool) -> None:
    sent: list[Any] = []
    worker: Any = Worker()
    if lane:
        worker.lane = SimpleNamespace(send_tensor=lambda *given: sent.append(given))
    found: list[Any] = []
    export = LogitsExport(worker, lambda *_: None, False)
    assert export._send(LOGITS.double().t().contiguous().t(), SLOTS, lambda *given: found.append(given)) is True
    assert worker.asked == [NBYTES]
    if lane:
        assert found == []
        ((source, offset, there),) = sent
        assert (source.dtype, len(source), offset, source.device) == (torch.uint8, NBYTES, 32, LOGITS.device)
        worker.memory[32 : 32 + NBYTES] = source.numpy()
        there()
    ((extent, slots, row_bytes),) = found
    assert (extent.offset, slots.tolist(), row_bytes) == (32, SLOTS.tolist(), 12)
    assert worker.memory[32:68].view("f4").tolist() == list(range(9))
    assert worker.progress.counts == {"bytes_exported": 5 + NBYTES}


def test_logits_without_room_are_not_sent() -> None:
    worker: Any = Worker(has_room=False)
    assert LogitsExport(worker, lambda *_: None, False)._send(LOGITS, SLOTS, lambda *_: None) is False
    assert worker.progress.counts == {"bytes_exported": 5}


def test_bytes_between_logits_and_slots_stay() -> None:
    target = torch.full((NBYTES,), 3, dtype=torch.uint8)
    _fill(target, LOGITS, SLOTS)
    assert target[:36].view(torch.float32).tolist() == LOGITS.ravel().tolist()
    assert target[36:48].tolist() == [3] * 12 and target[48:].view(torch.int64).tolist() == SLOTS.tolist()


def accepted(capture: int, slots: list[int], first: int, position: int, step: int) -> Any:
    return SimpleNamespace(capture=capture, slots=np.array(slots), first=first, position=position, step=step)


@pytest.mark.parametrize("room", [True, False])
def test_accepted_tokens_of_running_and_ended_captures_are_exported(room: bool) -> None:
    """Only captures with logits get them. A sample that is missing or finds no room is lost at its row."""
    posted: list[Any] = []
    worker: Any = Worker(has_room=room)
    one, none, other, silent = Capture(start=10), Capture(logits=None), Capture(start=3), Capture(out=None)
    worker.captures = {1: one, 2: none, 3: other, 4: silent}
    export = LogitsExport(worker, lambda *given: posted.append(given), True)
    asked: list[Any] = []

    class Held:
        def take(self, slots: list[int], last: list[int]) -> Any:
            asked.append((slots, last))
            return torch.arange(5, dtype=torch.float32).view(5, 1), torch.tensor([1, 0, 1, 1, 1], dtype=torch.int32)

        def drop(self, decided: Any) -> None:
            asked.append(decided)

    export.draft_logits = Held()  # type: ignore[assignment]
    end: Any = SimpleNamespace(accepted=[accepted(3, [8], 2, 5, 7), accepted(4, [9], 0, 0, 7)])
    messages: Any = [accepted(1, [20, 21, 22], 4, 30, 6), accepted(2, [5], 0, 0, 6)]
    metadata: Any = SimpleNamespace(
        samples=[], logits_step=8, logits_slots=[1], accepted=messages, closes=[end], decided=5
    )
    export.begin(metadata)
    assert asked == [([20, 21, 22, 8, 9], [6, 6, 6, 7, 7]), 5]
    behind = Cause.FELL_BEHIND
    if room:
        ((extent, found),) = posted
        assert extent.offset == 32
        assert found == [("out", "logits", 4, 30, 0), ("out", "logits", 6, 32, 8), ("out", "logits", 2, 5, 12)]
        assert (one.losses, other.losses, silent.losses) == ([(21, 1, behind)], [], [])
    else:
        assert posted == [] and one.losses == [(20, 1, behind), (21, 1, behind), (22, 1, behind)]
        assert (other.losses, silent.losses) == ([(2, 1, behind)], [(0, 1, behind)])


@pytest.mark.parametrize(("drafts", "post"), [(False, True), (True, False)])
def test_without_draft_tokens_or_stores_nothing_is_kept(drafts: bool, post: bool) -> None:
    worker: Any = Worker()
    export = LogitsExport(worker, (lambda *_: None) if post else None, drafts)
    export.draft_logits = None  # type: ignore[assignment]
    metadata: Any = SimpleNamespace(samples=["s"], logits_step=8, logits_slots=[1], accepted=[], closes=[], decided=5)
    export.begin(metadata)
    assert (export._samples, export._step, export._slots) == (["s"], 8, [1])
    export.export(LOGITS)
    assert (export._samples, export._step) == ([], 0)
