# SPDX-License-Identifier: Apache-2.0
"""The kernel that reads scores out of rows, and the pinned memory that it writes them to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from dmi_connector.engine.kernels import scores as kernel
from dmi_connector.engine.kernels.scores import ReadScores
from dmi_connector.engine.messages import ScoreRows
from dmi_connector.engine.transfer import scores as transfer
from dmi_connector.engine.transfer.scores import Pinned, ScoreReader
from tests import kernelkit as kit
from tests import runner


@pytest.mark.parametrize("most", [1024, 2])
@pytest.mark.parametrize("places", [[4], [4, 5, 6], [20, 3, 4, 5, 11]], ids=str)
def test_scores_come_from_their_places_in_the_rows(
    monkeypatch: pytest.MonkeyPatch, places: list[int], most: int
) -> None:
    """most: scores that a program copies. Words around the scores stay as they are."""
    monkeypatch.setattr(kernel, "_MOST_BLOCK", most)
    rows = torch.randn(kit.ROWS, 32, device=kit.DEVICE)
    memory = torch.full((64,), 7, dtype=torch.int32, pin_memory=runner.GPU)
    words, slots = memory.numpy(), np.array([9, 0, 40, 9])
    words[8:16].view(np.int64)[:] = slots
    read = ReadScores(torch.tensor(places, device=kit.DEVICE))
    read(rows.view(torch.uint8), memory, 8, 20, 4)
    if runner.GPU:
        torch.cuda.synchronize()
    end = 20 + 4 * len(places)
    found = words[20:end].view(np.float32).reshape(4, len(places))
    np.testing.assert_array_equal(found, rows.cpu().numpy()[slots][:, places])
    assert (words[:8] == 7).all() and (words[16:20] == 7).all() and (words[end:] == 7).all()


class Done:
    """An event of work that is done once `over` is set."""

    over = False

    def query(self) -> bool:
        return self.over


def test_pinned_memory_is_used_once_and_stays_until_the_gpu_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_WORDS", 16)
    pinned, events = Pinned(pin=False), [Done() for _ in range(4)]
    taken = []
    for event, count in zip(events, (5, 6, 9, 40), strict=True):
        memory, words, at = pinned.take(count)
        words[at : at + count] = count
        pinned.used(event)  # type: ignore[arg-type]
        taken.append((memory.data_ptr(), at, count, words))
    assert [at for _, at, _, _ in taken] == [0, 8, 0, 0], "each begins at a multiple of 16 bytes"
    assert taken[0][0] == taken[1][0] and len({address for address, *_ in taken}) == 3
    assert all((words[at : at + count] == count).all() for _, at, count, words in taken)
    assert len(pinned._before) == 2, "the GPU may still read them"
    events[1].over = True
    pinned.take(100)
    assert [done for done, _ in pinned._before] == [events[2], events[3]]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_reader_gives_the_scores_of_each_step(monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]) -> None:
    """By the kernel, as on a GPU. Scores of a step stay as they are when later ones come."""
    monkeypatch.setattr(transfer, "_WORDS", 64)
    layout: Any = SimpleNamespace(scored=[SimpleNamespace(offset=(64, 80)[i], stored=(2, 2)) for i in order])
    rows = torch.randn(kit.ROWS, 32, device=kit.DEVICE)
    reader = ScoreReader(layout, 3, rows.view(torch.uint8))
    if not runner.GPU:
        event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, query=lambda: True)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        reader._kernel, reader._pinned = ReadScores(reader._places), Pinned(pin=False)
    rng, steps = np.random.default_rng(0), []
    for count in (3, 1, 9, 20, 4):
        asked = ScoreRows(*(rng.integers(0, kit.ROWS, count) for _ in range(3)))
        steps.append((asked.slots, reader.read(asked)))
        assert steps[-1][1].ready is not None
    columns = [(16, 20)[i] + n for i in order for n in range(2)]
    for slots, found in steps:
        assert found.rank == 3
        np.testing.assert_array_equal(found.values, rows.cpu().numpy()[slots][:, columns])
