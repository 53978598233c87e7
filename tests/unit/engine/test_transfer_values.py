# SPDX-License-Identifier: Apache-2.0
"""Scores and logits on their way off the GPU, with CPU memory in its place: where each byte comes to lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from dmi_connector.engine.messages import ScoreRows
from dmi_connector.engine.transfer import scores as scores_module
from dmi_connector.engine.transfer.logits import LogitsExport, _fill
from dmi_connector.engine.transfer.scores import Pinned, ScoreReader, read_scores
from dmi_connector.store.format.completeness import Cause


class Event:
    """Happened as soon as `done` says so."""

    def __init__(self, done: bool = True) -> None:
        self.done, self.recorded = done, False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.done


# ---- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [[2, 3, 4], [4, 2], [0, 1, 3], [5], []])
def test_scores_are_read_at_their_places(places: list[int]) -> None:
    words = np.arange(24, dtype="f4").reshape(4, 6)
    found = read_scores(words, np.array([3, 0, 3]), np.array(places, int))
    assert found.shape == (3, len(places))
    assert found.tolist() == [[6.0 * row + at for at in places] for row in (3, 0, 3)]


def layout_of(*fields: tuple[int, int]) -> Any:
    """Scored fields at these bytes with so many values."""
    return SimpleNamespace(scored=[SimpleNamespace(offset=at, stored=("float32", count)) for at, count in fields])


def test_scores_on_a_cpu_are_read_at_once() -> None:
    rows = torch.arange(32, dtype=torch.float32).view(4, 8)
    asked = ScoreRows(np.array([7, 8]), np.array([0, 1]), np.array([2, 1]))
    found = ScoreReader(layout_of((4, 2), (20, 1)), 3, rows.view(torch.uint8)).read(asked)
    assert (found.rank, found.asked, found.ready) == (3, asked, None)
    assert found.late.tolist() == [[17.0, 18.0, 21.0], [9.0, 10.0, 13.0]]


def test_pinned_memory_is_used_from_start_to_end_and_kept_until_the_gpu_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, Any, Any]] = []
    empty = torch.empty

    def noted(count: int, dtype: Any, pin_memory: bool = False) -> torch.Tensor:
        made.append((count, dtype, pin_memory))
        return empty(count, dtype=dtype)

    monkeypatch.setattr(scores_module, "_WORDS", 16)
    monkeypatch.setattr(scores_module.torch, "empty", noted)
    memory, events = Pinned(), [Event(False), Event(False), Event(False)]
    first, words, at = memory.take(5)
    assert made == [(0, torch.int32, False), (16, torch.int32, True)] and at == 0 and len(words) == 16
    words[3] = 77
    assert first[3] == 77, "both are the same memory"
    memory.used(events[0])
    assert memory.take(1)[2] == 8 and memory.take(4)[2] == 12, "each begins at 16 bytes"
    memory.used(events[1])
    second, _, at = memory.take(1)
    assert at == 0 and second is not first and memory._before == [(events[1], first)] and len(made) == 3
    third, words, at = memory.take(40)
    assert (at, len(words), made[-1]) == (0, 40, (40, torch.int32, True))
    assert memory._before == [(events[1], first), (events[1], second)]
    memory.used(events[2])
    events[1].done = True
    memory.take(1)
    assert memory._before == [(events[2], third)], "others are given back"
    assert Pinned(pin=False).take(1)[2] == 0 and made[-1] == (16, torch.int32, False)


def test_scores_on_a_gpu_lie_behind_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first read compiles the kernel. Two words have a slot."""
    launched: list[tuple[Any, ...]] = []

    class Kernel:
        def __init__(self, places: torch.Tensor) -> None:
            assert places.tolist() == [1, 2, 5] and places.dtype == torch.int64

        def __call__(self, rows: Any, memory: torch.Tensor, at: int, end: int, count: int) -> None:
            slots = memory.numpy()[at:end].view(np.int64).tolist()
            launched.append((rows, at, end, count, slots))
            memory.numpy()[end : end + 3 * count].view("f4")[:] = np.arange(3 * count)

    class Rows:
        is_cuda, device = True, torch.device("cpu")

    monkeypatch.setattr(scores_module, "ReadScores", Kernel)
    monkeypatch.setattr(scores_module, "Pinned", lambda: Pinned(pin=False))
    monkeypatch.setattr(scores_module.torch.cuda, "Event", Event)
    rows: Any = Rows()
    reader = ScoreReader(layout_of((4, 2), (20, 1)), 3, rows)
    assert launched == [(rows, 0, 2, 1, [0])]
    asked = ScoreRows(*(np.array([5, 9]) for _ in range(3)))
    found = reader.read(asked)
    assert launched[1:] == [(rows, 8, 12, 2, [5, 9])]
    assert (found.rank, found.asked, found.late.tolist()) == (3, asked, [[0, 1, 2], [3, 4, 5]])
    assert found.ready.recorded and reader._pinned is not None and reader._pinned._done is found.ready
    assert ScoreReader(layout_of(), 0, rows)._pinned is None, "without probes there is nothing to compile"


# ---- logits ---------------------------------------------------------------------------------------------------------


class Capture:
    def __init__(self, start: int = 0, out: Any = "out", logits: Any = "logits") -> None:
        self.start, self.out, self.layout = start, out, SimpleNamespace(logits=logits)
        self.losses: list[tuple[Any, ...]] = []

    def lose(self, *given: Any) -> None:
        self.losses.append(given)


class Worker:
    """Stands for an exporter. room: whether its ring has any."""

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
"""36 bytes of logits, up to a multiple of 16, and three slots."""


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
    """Of captures with logits. What is not there any more, or finds no room, is lost at its row."""
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
