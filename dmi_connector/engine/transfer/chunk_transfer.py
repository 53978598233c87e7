# SPDX-License-Identifier: Apache-2.0
"""Captures under way on one worker, and chunks of their rows on the way into the ring, several in a parcel."""

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
"""Payloads begin at multiples of this many bytes of a parcel."""


class Progress:
    """What one worker has exported: counts for metrics (metrics.py), and reports for the scheduler."""

    def __init__(self) -> None:
        self.counts: dict[str, int | float] = {
            "bytes_exported": 0,
            "lost_ranges": 0,
            "lost_rows": 0,
            "blocked_seconds": 0.0,
        }
        self.unwritten: list[str] = []  # hooks that no tap wrote, of the first chunk in which some were found
        self.gathered = 0  # rows whose gather is issued, as last counted
        self._new: deque[int] = deque()  # not yet in `gathered`; the lane's thread appends too
        self._lost: dict[int, list[list[int]]] = {}

    def gather(self, rows: int) -> None:
        """Rows are gathered, or given up: their blocks are not needed any more."""
        self._new.append(rows)

    def lose(self, capture: int, first: int, rows: int) -> None:
        """Rows [first, first + rows) of a capture were given up."""
        self._lost.setdefault(capture, []).append([first, first + rows])
        self.counts["lost_ranges"] += 1
        self.counts["lost_rows"] += rows

    @property
    def lost(self) -> bool:
        """Whether rows were given up that no report names."""
        return bool(self._lost)

    def count(self) -> int:
        """Rows whose gather is issued. Only for the engine's thread."""
        while self._new:
            self.gathered += self._new.popleft()
        return self.gathered

    def report(self) -> Report:
        """What is new for the scheduler."""
        self.count()
        report = Report(self.gathered, self._lost)
        self._lost = {}
        return report


@dataclass(eq=False)
class CaptureExport:
    """One capture on this worker.

    out: where its rows go, None for sinks without stores. start: position of its first row. losses: rows given up.
    due: parts of its rows that wait for those of others. waiting: transfers that were left to the lane's thread.
    checked: whether values that no tap wrote are looked for.
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
        """Rows [first, first + rows) are given up."""
        self.progress.lose(self.number, first, rows)
        add_loss(self.losses, Loss.of(cause, [[first, first + rows]], **facts))


@dataclass(eq=False)
class ChunkTransfer:
    """Rows of one chunk on their way.

    first: number of the first row in the store. slots: where the rows lie, int64 [rows]. gathered: the gather is
    issued; what comes later on the engine's stream may overwrite the rows. lost: the rows are given up. nbytes: of the
    payload.
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
        """What to copy of each row (see `ChunkLayout`)."""
        return self.capture.layout.table

    @property
    def waits(self) -> bool:
        """Whether its rows are still needed in the cache."""
        return not (self.gathered or self.lost)

    def lose(self, cause: Cause, **facts: object) -> None:
        """Give the rows up."""
        self.lost = True
        self.capture.progress.gather(len(self.slots))
        self.capture.lose(self.first, len(self.slots), cause, **facts)


@dataclass(eq=False)
class Parcel:
    """Chunks that travel together: in one copy, in one piece of ring memory, with one message.

    offsets: where each payload begins in it, in bytes. nbytes: of all. extent: ring memory, once there is some.
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
        """Whose memory it takes."""
        return self.transfers[0].capture.ring

    def reserve(self) -> bool:
        """Take ring memory. Returns False if there is none now."""
        self.extent = self.ring.alloc(self.nbytes, 0.0)
        return self.extent is not None

    def deliver(self) -> None:
        """The payloads are in the ring: hand them to the coordinator."""
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
        """Hooks that no tap wrote in some row of a payload."""
        assert self.extent is not None
        payload = self.ring.view(self.extent)[offset : offset + transfer.nbytes]
        return unwritten(payload, transfer.capture.layout.payload, len(transfer.slots))

    def lose(self, cause: Cause, **facts: object) -> None:
        """Give all rows up, and the ring memory back."""
        if self.extent is not None:
            self.ring.release(self.extent)
        for transfer in self.transfers:
            transfer.lose(cause, **facts)
