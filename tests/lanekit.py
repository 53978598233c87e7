# SPDX-License-Identifier: Apache-2.0
"""A `DeviceLane` with CPU memory instead of CUDA, which records the chunks that are sent and their results."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from dmi_connector.engine.transfer import gpu_lane, pinning
from dmi_connector.engine.transfer.chunk_transfer import CaptureExport, ChunkTransfer, Progress
from dmi_connector.engine.transfer.gpu_lane import DeviceLane
from dmi_connector.store.format.completeness import Cause
from dmi_connector.store.write.ring import Extent, Ring
from tests import storekit as kit

ROW_BYTES, ROWS = 2048, 8
CHUNK = ROW_BYTES * 2
"""Bytes of the chunks here: two rows."""
TABLE = np.array([[0, ROW_BYTES, 0]])
BEHIND = Cause.FELL_BEHIND.value[1]


class Event:
    """Fake CUDA event. It is complete at once, except for copies over the link while the link is blocked."""

    link = threading.Event()

    def __init__(self, **_: Any) -> None:
        self.of_link = self.recorded = False

    def record(self, *_: Any) -> None:
        self.recorded = True

    def query(self) -> bool:
        return not self.of_link or self.link.is_set()

    def synchronize(self) -> None:
        if self.of_link:
            assert self.link.wait(kit.PATIENCE)


class Copier:
    """Copies at once. The event of a copy completes when the link is unblocked."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def start(self) -> None:
        return

    @staticmethod
    def copy(source: torch.Tensor, target: int, ready: Event) -> Event:
        assert ready.recorded
        ctypes.memmove(target, source.data_ptr(), source.numel())
        copied = Event()
        copied.of_link = True
        return copied


class Lane:
    """A lane, its ring, and the payloads that it has delivered."""

    def __init__(self, chunks_in_staging: int, chunks_in_ring: int) -> None:
        self.rows = torch.randint(0, 255, (ROWS * 8, ROW_BYTES), dtype=torch.uint8)
        self.ring = Ring(chunks_in_ring * CHUNK)
        self.extents: list[Extent] = []
        self.delivered: list[tuple[int, bytes]] = []
        self.progress = Progress()
        self.lane = DeviceLane(self.ring, chunks_in_staging * CHUNK, self.rows)

    def capture(self, table: np.ndarray = TABLE) -> CaptureExport:
        """A capture of some fields of the rows, which records delivered payloads. It does not release ring memory."""

        def parcel(extent: Extent, parts: list[tuple[Any, int, int, int]]) -> None:
            self.extents.append(extent)
            for capture, first, count, offset in parts:
                assert count == 2
                payload = self.ring.view(extent)[offset : offset + 2 * capture.token_bytes]
                self.delivered.append((first // 2, payload.tobytes()))

        token_bytes = int(table[:, 1].sum())
        layout: Any = SimpleNamespace(payload=SimpleNamespace(token_bytes=token_bytes), table=table)
        out: Any = SimpleNamespace(parcel=parcel, token_bytes=token_bytes)
        return CaptureExport(1, layout, out, 0, self.ring, self.progress)

    def chunk(self, number: int, capture: CaptureExport | None = None) -> ChunkTransfer:
        """A chunk of the rows 2 * number and 2 * number + 1."""
        return ChunkTransfer(capture or self.capture(), 2 * number, np.array([2 * number, 2 * number + 1]))

    def wanted(self, number: int) -> tuple[int, bytes]:
        return number, self.rows[2 * number : 2 * number + 2].numpy().tobytes()


def lost(*transfers: ChunkTransfer) -> list[tuple[int, str]]:
    """(number, reason) of each lost chunk."""
    found = {loss.rows: loss.words for t in transfers for loss in t.capture.losses}
    return [(start // 2, words) for rows, words in found.items() for start, _ in rows]


class Engine:
    """The stream of the engine's thread. Every call from another thread returns a new stream."""

    stream: ClassVar[object] = object()

    @classmethod
    def current(cls, _device: object) -> object:
        return cls.stream if threading.current_thread() is threading.main_thread() else object()


_streams: list[object] = []


@contextmanager
def chosen(stream: object) -> Iterator[None]:
    _streams.append(stream)
    try:
        yield
    finally:
        _streams.pop()


def simulate(patch: pytest.MonkeyPatch) -> list[int]:
    """Replace CUDA by CPU memory. Returns a list. Each gather appends its number of rows."""
    found: list[int] = []
    gather = gpu_lane.gather_rows
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    for name, fake in (
        ("Event", Event),
        ("current_stream", Engine.current),
        ("stream", chosen),
        ("set_device", lambda _device: None),
        ("cudart", lambda: cudart),
    ):
        patch.setattr(torch.cuda, name, fake)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    patch.setattr(gpu_lane, "SliceCopier", Copier)
    patch.setattr(pinning, "relax_captures", lambda: None)

    def gather_rows(rows: torch.Tensor, index: torch.Tensor, *rest: torch.Tensor) -> None:
        current = _streams[-1] if _streams else Engine.current(None)
        assert current is Engine.stream, "kernels on another stream slow down graphs that are replayed later"
        found.append(len(index))
        gather(rows, index, *rest)

    patch.setattr(gpu_lane, "gather_rows", gather_rows)
    Event.link = threading.Event()
    Event.link.set()
    return found
