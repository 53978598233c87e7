# SPDX-License-Identifier: Apache-2.0
"""The lane: copies rows from the GPU to the ring.

    rows in the cache --gather kernel--> staging memory (GPU) --copies--> ring (pinned host memory) --> coordinator

Several chunks form a parcel, which takes one copy and one message. While staging memory and ring have room, the
engine's thread launches the gathers of all parcels. If there is no room, rows stay in the cache, and the lane's
thread gathers them later. The engine does not wait.

All gathers run on the engine's stream, whichever thread launches them. Kernels on a second stream make later replays of
CUDA graphs 5 % slower. One stream also needs no events: kernels launched before a gather have written their rows.

The copy engine processes a stream's queue in order, and the sampled tokens of each step need it too. So copies are cut
into slices, which go to two streams in turn (gpu_copies.py).

One thread gathers, issues copies and delivers, in rounds, because each wake-up may stall the engine's thread.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.logger import init_logger

from dmi_connector.engine.kernels.gather import gather_index, gather_rows
from dmi_connector.engine.transfer.chunk_transfer import PAYLOAD_ALIGN, CaptureExport, ChunkTransfer, Parcel
from dmi_connector.engine.transfer.gpu_copies import SliceCopier
from dmi_connector.engine.transfer.pinning import SLICE_BYTES, PinnedRing
from dmi_connector.engine.transfer.staging import Index, Staged, Staging
from dmi_connector.store.format.completeness import Cause
from dmi_connector.store.write.ring import Ring

logger = init_logger("vllm.dmi_connector")

_BATCH_S = 0.002
"""Batching delay of the lane's thread, in seconds."""
_ROUND = 4
"""A round waits for about a quarter of the copies. The others keep the link busy until more rows are gathered."""
PARCEL_BYTES = 128 << 20
"""Maximum size of a parcel with several chunks. Its ring memory is free once writers have read all of it."""
_PARCEL_SHARE = 1 / 4
"""Maximum share of the staging memory, and of the ring, that a parcel with several chunks takes."""
_MEASURED_BYTES = 64 << 20
"""Bytes copied to measure the link's speed at start."""
_SLICE_BYTES = 8 << 20
"""Bytes per slice. With this size, copies reach 53.5 GB/s of the link's 55.2 (H200). A small copy takes 154 us during
such copies, 111 us alone, and up to 37 ms behind a copy that is not sliced.
"""
assert SLICE_BYTES % _SLICE_BYTES == 0, "a copy would reach over two pinned slices"


@dataclass
class _Copy:
    """One copy into the ring, and a function to call after it.

    source: tensor that is copied to ring byte `offset` after `ready`; None: nothing is copied. deliver: called after
    the copy. staged: the source's staging memory, if it has any. copied: event after the copy; None until it is issued,
    and without a source.
    """

    source: torch.Tensor | None
    offset: int
    ready: torch.cuda.Event | None
    deliver: Callable[[], None]
    staged: Staged | None = None
    copied: torch.cuda.Event | None = None


_LOOK = _Copy(None, 0, None, lambda: None)
"""Wakes the lane's thread, which then gathers waiting transfers."""


class DeviceLane:
    """Moves gathered rows of one GPU into the ring, whose memory is pinned for it (pinning.py).

    Transfers are copied and delivered in the order in which their gathers were issued. `then` queues other work after
    them. least_bytes: minimum bytes of the ring that are pinned when the constructor returns. Two full chunks and the
    logits of two steps must fit into them.

    If a copy fails, the lane's thread ends, and calls that give it rows or wait for it raise RuntimeError.
    """

    def __init__(self, ring: Ring, staging_bytes: int, rows: torch.Tensor, least_bytes: int = 0) -> None:
        self.ring, self._room_in_ring = torch.from_numpy(ring.memory), lambda: ring.usable
        self.rows, self.device = rows, rows.device
        self._pinned = PinnedRing(ring, max(least_bytes, _MEASURED_BYTES), rows.device)
        self.staging = Staging(staging_bytes, rows.device)
        self._base = self.ring.data_ptr()
        self.copier = SliceCopier(_SLICE_BYTES, rows.device, self._base)
        self.stream = torch.cuda.current_stream(rows.device)  # the engine's
        self.waiting: deque[ChunkTransfer] = deque()
        self._index = Index(rows.device)
        self._tables: dict[int, torch.Tensor] = {}  # by id of a table that is alive
        self._changed = threading.Condition()
        self._work: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._issued: deque[_Copy] = deque()  # only for the lane's thread
        self._more = True  # whether more work may be queued; only for the lane's thread
        self._failed: Exception | None = None  # what ended the lane's thread
        self._thread = threading.Thread(target=self._run, name="dmi-lane", daemon=True)
        self._thread.start()

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def send(self, transfers: Sequence[ChunkTransfer]) -> None:
        """Gather transfers for which there is room, on the current stream. The lane's thread gathers the others."""
        with self._changed:
            self.check()
            self.stream = torch.cuda.current_stream(self.device)
            issued = 0 if self.waiting else self._issue(transfers)
            if issued < len(transfers):
                self.waiting.extend(transfers[issued:])
                self._work.put(_LOOK)

    def flush(self, capture: CaptureExport, drop: bool) -> None:
        """Gather the waiting transfers of a capture now, because its blocks are about to be reused.

        drop: whether rows are dropped if there is no room; otherwise the call waits for room.
        """
        with self._changed:
            mine = deque(t for t in self.waiting if t.capture is capture)
            if mine:
                self.waiting = deque(t for t in self.waiting if t.capture is not capture)
                self._gather_now(mine, lambda: False, drop)

    def gather_until(self, done: Callable[[], bool], drop: bool) -> None:
        """Gather waiting transfers in order until `done()`, because their pages will be reused. drop: see `flush`."""
        with self._changed:
            self._gather_now(self.waiting, done, drop)

    def _gather_now(self, transfers: deque[ChunkTransfer], done: Callable[[], bool], drop: bool) -> None:
        """Gather transfers in order until `done()`. Removes gathered and dropped ones from `transfers`."""
        self.stream = torch.cuda.current_stream(self.device)
        while transfers and not done():
            issued = self._issue(transfers)
            for _ in range(issued):
                transfers.popleft()
            if drop and not issued:
                transfers.popleft().lose(Cause.FELL_BEHIND)
            elif not issued:
                self.check()
                self._changed.wait(_BATCH_S)

    def send_tensor(self, source: torch.Tensor, offset: int, deliver: Callable[[], None]) -> None:
        """Copy `source` (uint8, 1-D, ready on the current stream) to ring byte `offset`, then call `deliver`."""
        ready = torch.cuda.Event()
        ready.record()
        self._work.put(_Copy(source, offset, ready, deliver))

    def then(self, work: Callable[[], None]) -> None:
        """Run `work` on the lane's thread after everything issued before it."""
        self._work.put(_Copy(None, 0, None, work))

    @property
    def staged(self) -> bool:
        """Whether rows lie in staging memory."""
        with self._changed:
            return any(staged.copied is None or not staged.copied.query() for staged in self.staging.used)

    def drain(self) -> None:
        """Wait until the rows of all transfers have left the GPU. Does not wait for tensors of `send_tensor`."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed is not None or not (self.waiting or self.staged))
            self.check()

    def check(self) -> None:
        """Raise RuntimeError if the lane's thread has ended by an error."""
        if self._failed is not None:
            raise RuntimeError(f"rows can no longer be copied off {self.device}: {self._failed}") from self._failed

    # ---- issuing gathers, with the lock held ------------------------------------------------------------------------

    def _issue(self, transfers: Iterable[ChunkTransfer]) -> int:
        """Gather transfers in order, as far as staging memory and ring have room. Returns how many were processed."""
        room: list[tuple[Parcel, Staged]] = []
        for parcel in self._parcels(transfers):
            staged = self.staging.reserve(parcel.nbytes)
            if staged is None:
                break
            if not parcel.reserve():
                self.staging.cancel(staged)
                break
            room.append((parcel, staged))
        if not room:
            return 0
        taken = [transfer for parcel, _ in room for transfer in parcel.transfers]
        try:
            if self.stream == torch.cuda.current_stream(self.device):
                ready = self._gather(room)
            else:
                with torch.cuda.stream(self.stream):
                    ready = self._gather(room)
        except Exception as error:  # such as too little GPU memory: the engine continues, and the stores list the loss
            logger.exception("rows could not be gathered")
            for parcel, staged in reversed(room):
                self.staging.cancel(staged)
                parcel.lose(Cause.NOT_GATHERED, error=f"{type(error).__name__}: {error}")
            return len(taken)
        for parcel, staged in room:
            assert parcel.extent is not None
            source = self.staging.buffer[staged.start : staged.start + parcel.nbytes]
            self._work.put(_Copy(source, parcel.extent.offset, ready, parcel.deliver, staged))
        for transfer in taken:
            transfer.capture.progress.gather(len(transfer.slots))
            transfer.gathered = True  # last: the end of the capture may now be queued after it (`then`)
        return len(taken)

    def _parcels(self, transfers: Iterable[ChunkTransfer]) -> Iterator[Parcel]:
        """Group transfers into parcels, in order."""
        most = min(PARCEL_BYTES, int(min(self.staging.nbytes, self._room_in_ring()) * _PARCEL_SHARE))
        together: list[ChunkTransfer] = []
        nbytes = 0
        for transfer in transfers:
            size = -(-transfer.nbytes // PAYLOAD_ALIGN) * PAYLOAD_ALIGN
            if nbytes + size > most and together:
                yield Parcel(together)
                together, nbytes = [], 0
            together.append(transfer)
            nbytes += size
        if together:
            yield Parcel(together)

    def _gather(self, room: Sequence[tuple[Parcel, Staged]]) -> torch.cuda.Event:
        """Launch the gathers, one per table. Returns an event recorded after them."""
        by_table: dict[int, tuple[np.ndarray, list[tuple[int, np.ndarray]]]] = {}
        for parcel, staged in room:
            for transfer, offset in zip(parcel.transfers, parcel.offsets, strict=True):
                payloads = by_table.setdefault(id(transfer.table), (transfer.table, []))[1]
                payloads.append((staged.start + offset, transfer.slots))
        for table, payloads in by_table.values():
            index = self._index.on_gpu(gather_index(payloads))
            gather_rows(self.rows, index, self._on_gpu(table), self.staging.buffer)
        ready = torch.cuda.Event()
        ready.record()
        self._index.until(ready)
        return ready

    def _on_gpu(self, table: np.ndarray) -> torch.Tensor:
        """A layout's table on the GPU. It is copied once, and freed with the layout, which transfers keep alive."""
        key = id(table)
        if key not in self._tables:
            self._tables[key] = torch.tensor(table, device=self.device)
            weakref.finalize(table, self._tables.pop, key).atexit = False
        return self._tables[key]

    # ---- the lane's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._move()
        except Exception as error:  # such as an error of the GPU, after which nothing can be copied
            logger.exception("rows can no longer be copied off %s", self.device)
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _move(self) -> None:
        """Issue and deliver copies, and gather waiting transfers, until the shutdown."""
        torch.cuda.set_device(self.device)
        self.copier.start()
        while self._more or self._issued or self.waiting:
            if not (self._issued or self.waiting):
                self._take(self._work.get())
            self._issue_copies()
            self._wait_for_copies()
            time.sleep(_BATCH_S)
            arrived = self._take_arrived()
            self._gather_waiting()
            self._issue_copies()
            _deliver(arrived)

    def _issue_copies(self) -> None:
        """Issue the copies that are queued."""
        while not self._work.empty():
            self._take(self._work.get())

    def _take(self, copy: _Copy | None) -> None:
        """Issue one copy. None: no more work will come."""
        if copy is None:
            self._more = False
        elif copy is not _LOOK:
            if copy.source is not None and copy.ready is not None:
                copy.copied = self.copier.copy(copy.source, self._base + copy.offset, copy.ready)
                if copy.staged is not None:
                    copy.staged.copied = copy.copied
            self._issued.append(copy)

    def _wait_for_copies(self) -> None:
        """Wait for a part of the copies, then issue those that were queued in the meantime."""
        copies = [copy.copied for copy in self._issued if copy.copied is not None]
        if copies:
            copies[len(copies) // _ROUND].synchronize()
            self._issue_copies()

    def _take_arrived(self) -> deque[_Copy]:
        """Remove finished copies from the queue, and return them."""
        arrived: deque[_Copy] = deque()
        while self._issued and (self._issued[0].copied is None or self._issued[0].copied.query()):
            arrived.append(self._issued.popleft())
        return arrived

    def _gather_waiting(self) -> None:
        """Gather waiting transfers for which there is room now, and wake threads that wait for room."""
        with self._changed:
            for _ in range(self._issue(self.waiting)):
                self.waiting.popleft()
            self._changed.notify_all()

    # ---- start and end ----------------------------------------------------------------------------------------------

    def warm_up(self, table: np.ndarray) -> None:
        """Compile the gather kernel now instead of during the first request."""
        index = torch.from_numpy(gather_index([(0, np.zeros(1, np.int64))])).to(self.device)
        gather_rows(self.rows, index, self._on_gpu(table), self.staging.buffer)

    def link_bytes_per_second(self) -> float:
        """Speed of copies into the ring, measured with up to _MEASURED_BYTES."""
        nbytes = min(_MEASURED_BYTES, self.staging.nbytes, self.ring.numel())
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(2):
            begin.record()
            self.ring[:nbytes].copy_(self.staging.buffer[:nbytes], non_blocking=True)
            end.record()
        end.synchronize()
        return nbytes / begin.elapsed_time(end) * 1e3

    def finish_gathers(self, seconds: float) -> None:
        """Wait up to `seconds` until all transfers that were sent are gathered. Nothing may be sent afterwards.

        Does not wait if the lane has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failed is not None or not self.waiting, seconds)

    def shutdown(self, seconds: float) -> None:
        """Finish copies and deliveries, then stop the thread, within `seconds`. Call `finish_gathers` before."""
        self._work.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            logger.error("copies did not end within %g s of the shutdown: their rows are missing", seconds)
            return  # the thread still uses the pinned memory
        self._pinned.close()


def _deliver(arrived: deque[_Copy]) -> None:
    """Deliver finished copies. Each is removed from `arrived` before its delivery, so that its memory can be freed."""
    while arrived:
        try:
            arrived.popleft().deliver()
        except Exception:  # its capture never completes; later ones must still be delivered
            logger.exception("handling a finished copy failed")
