# SPDX-License-Identifier: Apache-2.0
"""A worker's reports of lost and gathered rows to the scheduler, and the memory of lost chunks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
from dmi_connector.engine.messages import Report
from dmi_connector.engine.model.coverage import UNWRITTEN
from dmi_connector.engine.transfer.chunk_transfer import CaptureExport, ChunkTransfer, Parcel, Progress
from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.write.ring import Ring
from tests.exporterkit import Noted
from tests.trackerkit import ask, dropped, generate, make_tracker


@pytest.fixture
def ring() -> Iterator[Ring]:
    one = Ring(8192)
    yield one
    os.close(one.fd)


def export(ring: Ring, number: int = 7) -> CaptureExport:
    layout: Any = SimpleNamespace(payload=SimpleNamespace(token_bytes=100), table=None)
    return CaptureExport(number, layout, None, 0, ring, Progress())


def test_a_report_lists_each_loss_once(ring: Ring) -> None:
    capture = export(ring)
    capture.progress.gather(5)
    capture.lose(16, 16, Cause.FELL_BEHIND)
    capture.lose(40, 8, Cause.FELL_BEHIND)
    first, second = capture.progress.report(), capture.progress.report()
    assert (first.gathered, first.lost) == (5, {7: [dropped([16, 32], [40, 48])]})
    assert (second.gathered, second.lost) == (5, {})
    assert (capture.progress.counts["lost_ranges"], capture.progress.counts["lost_rows"]) == (2, 24)
    capture.progress.gather(3)
    capture.lose(0, 1, Cause.FELL_BEHIND)
    third = capture.progress.report()
    assert (third.gathered, third.lost) == (8, {7: [dropped([0, 1])]})
    assert [(loss.cause, loss.rows) for loss in capture.losses] == [(Cause.FELL_BEHIND, ((16, 32), (40, 48), (0, 1)))]


def test_a_response_names_lost_rows_once_however_many_steps_follow(ring: Ring, tmp_path: Path) -> None:
    """The worker reports after each step."""
    tracker, request = make_tracker(tmp_path, "resid_pre"), ask({"include_output_tokens": True}, 40)
    tracker.on_new_request(request)  # type: ignore[arg-type]
    capture, step = export(ring, 1), tracker.step

    def step_with_report(*arguments: Any) -> Any:
        tracker._rows_since = 1 << 61
        found = step(*arguments)
        if found.chunks and found.chunks[0].first == 0:
            capture.lose(16, 16, Cause.FELL_BEHIND)
            capture.lose(0, 8, Cause.FELL_BEHIND)
        tracker.on_report(capture.progress.report())
        return found

    tracker.step = step_with_report  # type: ignore[method-assign]
    _, response = generate(tracker, request, 5)
    assert response is not None and response["dmi_missing"] == [[0, 8], [16, 32]]


def test_losses_of_ended_requests_are_not_kept(tmp_path: Path) -> None:
    tracker, request = make_tracker(tmp_path, "resid_pre"), ask({}, 40)
    tracker.on_new_request(request)  # type: ignore[arg-type]
    generate(tracker, request, 1)
    tracker.on_report(Report(9, {1: [dropped([0, 8])]}))
    assert tracker.lost == {} and tracker.gathered == 9


def test_reports_of_ranks_are_joined(tmp_path: Path) -> None:
    both = Report(5, {1: [dropped([0, 4])], 2: [dropped([8, 9])]}).aggregate(
        Report(9, {1: [dropped([4, 8])], 3: [dropped([1, 2])]}, leaving=True)
    )
    assert both == Report(
        5, {1: [dropped([0, 4]), dropped([4, 8])], 2: [dropped([8, 9])], 3: [dropped([1, 2])]}, leaving=True
    )


def test_a_lost_parcel_gives_its_ring_memory_back(ring: Ring) -> None:
    capture = export(ring)
    chunks = [ChunkTransfer(capture, 20, np.arange(30)), ChunkTransfer(export(ring, 8), 0, np.arange(10))]
    parcel = Parcel(chunks)
    assert (parcel.offsets, parcel.nbytes) == ([0, 3072], 4072)
    assert all(chunk.waits for chunk in chunks) and parcel.reserve() and ring.used == 4096
    parcel.lose(Cause.NOT_GATHERED, error="no memory")
    assert ring.used == 0 and all(chunk.lost and not chunk.waits for chunk in chunks)
    reported, loss = capture.progress.report(), Loss.of(Cause.NOT_GATHERED, [[20, 50]], error="no memory")
    assert (reported.lost, reported.gathered) == ({7: [loss]}, 30)
    assert [loss.words for loss in capture.losses] == ["rows could not be gathered (no memory)"]


def test_a_parcel_does_not_wait_for_room_in_the_ring(ring: Ring) -> None:
    full = ring.alloc(8192, 0)
    parcel = Parcel([ChunkTransfer(export(ring), 0, np.arange(30))])
    assert full is not None and not parcel.reserve() and parcel.extent is None
    parcel.lose(Cause.FELL_BEHIND)  # it has no memory to release
    assert ring.used == 8192


EMBED = PayloadLayout((ArraySpec("embed", "float32", (), 8),))
STARTS = 16, 0, 32
"""First row of each payload's chunk in a parcel of three captures."""
COUNT = 30


def parcel_of(ring: Ring, checked: bool) -> tuple[Parcel, list[Noted], Progress]:
    """A parcel with a chunk of each of three captures in the ring. Their values differ."""
    layout: Any = SimpleNamespace(payload=EMBED, table=None)
    notes, progress = [Noted(ring, EMBED.token_bytes) for _ in STARTS], Progress()
    captures = [CaptureExport(i, layout, note, 0, ring, progress, checked=checked) for i, note in enumerate(notes)]  # type: ignore[arg-type]
    chunks = [ChunkTransfer(capture, first, np.arange(COUNT)) for capture, first in zip(captures, STARTS, strict=True)]
    parcel = Parcel(chunks)
    assert parcel.reserve() and parcel.extent is not None
    for number, (chunk, offset) in enumerate(zip(chunks, parcel.offsets, strict=True)):
        ring.view(parcel.extent)[offset : offset + chunk.nbytes] = number + 1
    return parcel, notes, progress


@pytest.mark.parametrize("poisoned", [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("row", [0, COUNT - 1])
def test_each_payload_of_a_parcel_is_looked_at(ring: Ring, poisoned: tuple[int, ...], row: int) -> None:
    """A payload with rows that no tap wrote is lost. The other payloads are delivered."""
    parcel, notes, progress = parcel_of(ring, checked=True)
    assert parcel.extent is not None
    for number in poisoned:
        at = parcel.offsets[number] + row * EMBED.arrays[0].token_bytes
        ring.view(parcel.extent)[at : at + 4] = np.array([UNWRITTEN] * 2, np.uint16).view(np.uint8)
    parcel.deliver()
    for number, (note, chunk) in enumerate(zip(notes, parcel.transfers, strict=True)):
        losses = [(loss.cause, loss.rows) for loss in chunk.capture.losses]
        lost = (STARTS[number], STARTS[number] + COUNT)
        assert losses == ([(Cause.UNWRITTEN, (lost,))] if number in poisoned else []), number
        whole = (STARTS[number], COUNT, bytes([number + 1]) * chunk.nbytes)
        assert note.chunks == ([] if number in poisoned else [whole]), number
    assert progress.counts["bytes_exported"] == sum(chunk.nbytes for chunk in parcel.transfers)
    assert progress.counts["lost_rows"] == COUNT * len(poisoned)
    assert progress.report().lost == {
        n: chunk.capture.losses for n, chunk in enumerate(parcel.transfers) if n in poisoned
    }
    assert (ring.used == 0) == (len(poisoned) == 3), "a parcel without rows must release its memory"


def test_captures_that_are_not_checked_may_hold_the_pattern(ring: Ring) -> None:
    parcel, notes, _ = parcel_of(ring, checked=False)
    assert parcel.extent is not None
    ring.view(parcel.extent)[: parcel.nbytes] = np.resize(
        np.array([UNWRITTEN], np.uint16).view(np.uint8), parcel.nbytes
    )
    parcel.deliver()
    assert [len(note.chunks) for note in notes] == [1, 1, 1]
