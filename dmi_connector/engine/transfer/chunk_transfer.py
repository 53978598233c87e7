# SPDX-License-Identifier: Apache-2.0
"""Tracks the running captures of one worker, and the transfers of their chunks into the ring."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from dmi_connector.engine.messages import Report
from dmi_connector.engine.transfer.chunk_layout import ChunkLayout
from dmi_connector.engine.transfer.poison_check import unwritten
from dmi_connector.store.format.completeness import Cause, Loss, add_loss
from dmi_connector.store.write.client import OpenCapture
from dmi_connector.store.write.ring import Extent, Ring

PAYLOAD_ALIGN = 512
"""Alignment of payloads in a parcel, in bytes."""


class Progress:
    """Counts the exports of one worker, for metrics (metrics.py) and for reports to the scheduler."""

    def __init__(self) -> None:
        self.counts: dict[str, int | float] = {
            "bytes_exported": 0,
            "lost_ranges": 0,
            "lost_rows": 0,
            "blocked_seconds": 0.0,
        }
        self.unwritten: list[str] = []  # hooks that no tap wrote, from the first chunk that has such hooks
        self.gathered = 0  # rows whose gather is issued, as of the last `count`
        self._new: deque[int] = deque()  # rows not yet in `gathered`; the lane's thread appends, too
        self._lost: dict[int, list[Loss]] = {}

    def gather(self, rows: int) -> None:
        """The gather of `rows` rows is issued, or these rows are dropped. Their blocks are no longer needed."""
        self._new.append(rows)

    def lose(self, capture: int, loss: Loss) -> None:
        """Rows of a capture are dropped."""
        add_loss(self._lost.setdefault(capture, []), loss)
        self.counts["lost_ranges"] += len(loss.rows)
        self.counts["lost_rows"] += sum(stop - start for start, stop in loss.rows)

    @property
    def lost(self) -> bool:
        """Whether rows were dropped since the last report."""
        return bool(self._lost)

    def count(self) -> int:
        """Number of rows whose gather is issued since the start. Only for the engine's thread."""
        while self._new:
            self.gathered += self._new.popleft()
        return self.gathered

    def report(self) -> Report:
        """The next report to the scheduler."""
        self.count()
        report = Report(self.gathered, self._lost)
        self._lost = {}
        return report


@dataclass(eq=False)
class CaptureExport:
    """One capture on this worker.

    out: receives its rows; None for sinks without stores. start: position of its first row. losses: dropped rows. due:
    number of its entries in `Exporter.due`. waiting: transfers that were left to the lane's thread. checked: whether
    its chunks are checked for values that no tap wrote.
    """

    number: int
    layout: ChunkLayout
    out: OpenCapture | None
    start: int
    ring: Ring
    progress: Progress
    losses: list[Loss] = field(default_factory=list)
    due: int = 0
    waiting: list[ChunkTransfer] = field(default_factory=list)
    checked: bool = False

    def lose(self, first: int, rows: int, cause: Cause, **facts: object) -> None:
        """Drop rows [first, first + rows)."""
        loss = Loss.of(cause, [[first, first + rows]], **facts)
        self.progress.lose(self.number, loss)
        add_loss(self.losses, loss)


@dataclass(eq=False)
class ChunkTransfer:
    """The transfer of one chunk.

    first: index of the first row in the store. slots: slots of the rows, int64 [rows]. gathered: whether the gather is
    issued; later work on the engine's stream may overwrite the rows. lost: whether the rows are dropped. nbytes: bytes
    of the payload.
    """

    capture: CaptureExport
    first: int
    slots: np.ndarray
    gathered: bool = False
    lost: bool = False
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.capture.layout.payload.token_bytes * len(self.slots)

    @property
    def table(self) -> np.ndarray:
        """`ChunkLayout.table` of the capture."""
        return self.capture.layout.table

    @property
    def waits(self) -> bool:
        """Whether the rows are still needed in the cache."""
        return not (self.gathered or self.lost)

    def lose(self, cause: Cause, **facts: object) -> None:
        """Drop the rows."""
        self.lost = True
        self.capture.progress.gather(len(self.slots))
        self.capture.lose(self.first, len(self.slots), cause, **facts)


@dataclass(eq=False)
class Parcel:
    """Chunks that share one copy, one extent (contiguous range) of the ring, and one message to the coordinator.

    offsets: first byte of each payload in the parcel. nbytes: bytes of the parcel. extent: its ring memory, None before
    `reserve`.
    """

    transfers: list[ChunkTransfer]
    offsets: list[int] = field(default_factory=list)
    nbytes: int = 0
    extent: Extent | None = None

    def __post_init__(self) -> None:
        for transfer in self.transfers:
            self.offsets.append(-(-self.nbytes // PAYLOAD_ALIGN) * PAYLOAD_ALIGN)
            self.nbytes = self.offsets[-1] + transfer.nbytes

    @property
    def ring(self) -> Ring:
        """The ring that gets the parcel."""
        return self.transfers[0].capture.ring

    def reserve(self) -> bool:
        """Allocate ring memory. Returns False if there is no room now."""
        self.extent = self.ring.alloc(self.nbytes, 0.0)
        return self.extent is not None

    def deliver(self) -> None:
        """Hand the payloads, which are in the ring, to the coordinator."""
        assert self.extent is not None
        parts = []
        for transfer, offset in zip(self.transfers, self.offsets, strict=True):
            capture = transfer.capture
            capture.progress.counts["bytes_exported"] += transfer.nbytes
            if capture.checked and (hooks := self._unwritten(transfer, offset)):
                capture.progress.unwritten = capture.progress.unwritten or hooks
                capture.lose(transfer.first, len(transfer.slots), Cause.UNWRITTEN, hooks=", ".join(hooks))
            elif capture.out is not None:
                parts.append((capture.out, transfer.first, len(transfer.slots), offset))
        if parts:
            parts[0][0].parcel(self.extent, parts)
        else:
            self.ring.release(self.extent)

    def _unwritten(self, transfer: ChunkTransfer, offset: int) -> list[str]:
        """Hooks that no tap wrote in at least one row of a payload."""
        assert self.extent is not None
        payload = self.ring.view(self.extent)[offset : offset + transfer.nbytes]
        return unwritten(payload, transfer.capture.layout.payload, len(transfer.slots))

    def lose(self, cause: Cause, **facts: object) -> None:
        """Drop all rows, and free the ring memory."""
        if self.extent is not None:
            self.ring.release(self.extent)
        for transfer in self.transfers:
            transfer.lose(cause, **facts)
