# SPDX-License-Identifier: Apache-2.0
"""The way off the GPU: gather into staging, copy to the pinned ring in small pieces, deliver on a thread.

    paged rows --gather kernel--> staging (GPU) --copies, two streams--> ring (pinned host memory) --> coordinator

While staging has room the engine's thread issues one gather a step. What finds no room waits with the lane's own
thread, which gathers as staging drains: the rows stay in the paged cache, and the engine goes on. All gathers are
launched on the engine's stream, whichever thread does it: kernels on another one, at times a single launch, leave later
replays of CUDA graphs in the process 5 % slower (docs/PERFORMANCE.md), and a gather leaves nothing of the GPU's memory
bandwidth to others anyway. So they also need no events: what was launched before them has been written.

The copy engine works through a stream's queue in order, and every step's sampled tokens need it too. So copies are cut
and go to two streams in turn, each waiting for the one before (copies.py): at every cut the engine is free for others,
and nobody has to stand by to pace them.

One thread gathers what waited, issues copies and delivers, a round for all that came together: each time a thread of
this process wakes up, or takes back the interpreter's lock, the engine's may have to wait.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.logger import init_logger

from dmi_connector.engine.copies import PieceCopier
from dmi_connector.engine.kernels import gather_index, gather_rows

logger = init_logger("vllm.dmi_connector")

FELL_BEHIND = "writing fell behind (policy drop)"
_ALIGN = 512
_BREATH_S = 0.002
"""How long the lane's thread lets work come together."""
_SHARE = 4
"""A round waits for a quarter of what is under way; the rest keeps the link busy until more is gathered."""
_COPY_BYTES = 8 << 20
"""53.5 of 55.2 GB/s, and a small copy in between takes 154 us instead of 111 (H200; whole copies: up to 37 ms)."""


class Staged:
    """A piece of staging memory in use: bytes [start, end), free once `copied` has happened (None: not issued)."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.copied: torch.cuda.Event | None = None


@dataclass(eq=False)
class Piece:
    """Rows of one chunk on their way. owner: their capture. slots, table: what to gather (`kernels.gather_rows`).

    ring_space: takes ring memory and gives its offset, or None when it is full. deliver: called on the delivery thread
    once the bytes are there. lose: called instead, with the reason, when they will never be.
    gathered: whether the gather is issued: what the engine's stream does from then on may overwrite its rows. lost: it
    never will be.
    """

    owner: object
    slots: np.ndarray
    table: np.ndarray
    nbytes: int
    ring_space: Callable[[], int | None]
    deliver: Callable[[], None]
    lose: Callable[[str], None]
    gathered: bool = False
    lost: bool = False

    @property
    def waits(self) -> bool:
        """Whether its rows are still needed in the cache."""
        return not (self.gathered or self.lost)


@dataclass
class Copy:
    """Bytes to copy into the ring at `offset` after `ready`; `source` None carries only the delivery. copied: the event
    that follows the copy, once it is issued.
    """

    source: torch.Tensor | None
    offset: int
    ready: torch.cuda.Event | None
    deliver: Callable[[], None]
    staged: Staged | None = None
    copied: torch.cuda.Event | None = None


_LOOK = Copy(None, 0, None, lambda: None)
"""Only wakes the lane's thread up, which looks for what waits to be gathered."""


class Staging:
    """FIFO of variable-size pieces in one GPU buffer. Call with the lane's lock held."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes = nbytes
        self.used: deque[Staged] = deque()
        self._head = 0

    def reserve(self, nbytes: int) -> Staged | None:
        """Take `nbytes` contiguous bytes, or None when there is no room yet."""
        size = -(-nbytes // _ALIGN) * _ALIGN
        if size > self.nbytes:
            raise ValueError(f"{nbytes} bytes do not fit the staging buffer of {self.nbytes} bytes")
        while self.used and self.used[0].copied is not None and self.used[0].copied.query():
            self.used.popleft()
        if not self.used:
            self._head = 0
        start, tail = self._head, self.used[0].start if self.used else self.nbytes
        if self.used and start <= tail:  # in use from the tail over the end of the buffer to the head
            end = tail
        elif start + size <= self.nbytes:
            end = self.nbytes
        else:
            start, end = 0, tail
        if start + size > end:
            return None
        self._head = start + size
        staged = Staged(start, start + size)
        self.used.append(staged)
        return staged

    def cancel(self, staged: Staged) -> None:
        """Give back what was reserved last."""
        assert self.used.pop() is staged
        self._head = staged.start


class DeviceLane:
    """Moves gathered rows of one GPU into the shared ring.

    ring: uint8 array of shared memory; it is registered as pinned memory here. Pieces are copied and delivered in the
    order in which their gathers were issued; `then` orders other work behind them.
    """

    def __init__(self, ring: np.ndarray, staging_bytes: int, rows: torch.Tensor) -> None:
        self.ring = torch.from_numpy(ring)
        error = torch.cuda.cudart().cudaHostRegister(self.ring.data_ptr(), ring.nbytes, 0)
        if int(error) != 0:
            raise RuntimeError(
                f"host_buffer_bytes: {ring.nbytes} bytes could not be pinned ({error}); "
                "give a smaller size or raise the limit"
            )
        self.rows, self.device = rows, rows.device
        self.staging = Staging(staging_bytes, rows.device)
        self.copier = PieceCopier(_COPY_BYTES, rows.device)
        self.stream = torch.cuda.current_stream(rows.device)
        self.waiting: deque[Piece] = deque()
        self._tables: dict[int, torch.Tensor] = {}
        self._changed = threading.Condition()
        self._work: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._base = self.ring.data_ptr()
        self._thread = threading.Thread(target=self._run, name="dmi-lane", daemon=True)
        self._thread.start()

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def send(self, pieces: Sequence[Piece]) -> None:
        """Gather on the current stream what there is room for now, and leave the rest to the lane's thread."""
        with self._changed:
            self.stream = torch.cuda.current_stream(self.device)
            issued = 0 if self.waiting else self._issue(pieces)
            if issued < len(pieces):
                self.waiting.extend(pieces[issued:])
                self._work.put(_LOOK)

    def flush(self, owner: object, drop: bool) -> None:
        """Get the waiting pieces of `owner` gathered now: its blocks are about to be reused.

        drop: give up what finds no room instead of waiting for it.
        """
        with self._changed:
            mine = [p for p in self.waiting if p.owner is owner]
            if mine:
                self.stream = torch.cuda.current_stream(self.device)
                self.waiting = deque(p for p in self.waiting if p.owner is not owner)
            while mine:
                mine = mine[self._issue(mine) :]
                if mine and drop:
                    for piece in mine:
                        self._give_up(piece, FELL_BEHIND)
                    return
                if mine:
                    self._changed.wait(0.002)

    def send_tensor(self, source: torch.Tensor, offset: int, deliver: Callable[[], None]) -> None:
        """Copy `source` (uint8, 1-D, ready on the current stream) to ring `offset`, then `deliver`."""
        ready = torch.cuda.Event()
        ready.record()
        self._work.put(Copy(source, offset, ready, deliver))

    def then(self, work: Callable[[], None]) -> None:
        """Run `work` on the lane's thread after everything issued before it."""
        self._work.put(Copy(None, 0, None, work))

    # ---- issuing, under the lock ----------------------------------------------------------------------------------

    def _issue(self, pieces: Iterable[Piece]) -> int:
        """Gather pieces on the engine's stream, in order, as far as staging and ring have room. Returns how many.

        Pieces that share a table share a launch.
        """
        room: list[tuple[Piece, Staged, int]] = []
        for piece in pieces:
            staged = self.staging.reserve(piece.nbytes)
            if staged is None:
                break
            offset = piece.ring_space()
            if offset is None:
                self.staging.cancel(staged)
                break
            room.append((piece, staged, offset))
        if not room:
            return 0
        try:
            with torch.cuda.stream(self.stream):
                ready = self._gather([(piece, staged) for piece, staged, _ in room])
        except Exception as error:  # as when GPU memory is short: the engine goes on, and the stores say so
            logger.exception("rows could not be gathered")
            for piece, staged, _ in reversed(room):
                self.staging.cancel(staged)
                self._give_up(piece, f"rows could not be gathered ({type(error).__name__}: {error})")
            return len(room)
        for piece, staged, offset in room:
            source = self.staging.buffer[staged.start : staged.start + piece.nbytes]
            self._work.put(Copy(source, offset, ready, piece.deliver, staged))
            piece.gathered = True  # who sees this may have other work delivered after it (`then`)
        return len(room)

    def _gather(self, room: Sequence[tuple[Piece, Staged]]) -> torch.cuda.Event:
        by_table: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}
        for piece, staged in room:
            index = by_table.setdefault(id(piece.table), (piece.table, []))[1]
            index.append(gather_index(piece.slots, staged.start))
        for table, parts in by_table.values():
            host = torch.from_numpy(np.concatenate(parts)).pin_memory()
            gather_rows(self.rows, host.to(self.device, non_blocking=True), self._on_gpu(table), self.staging.buffer)
        ready = torch.cuda.Event()
        ready.record()
        return ready

    @staticmethod
    def _give_up(piece: Piece, reason: str) -> None:
        piece.lost = True
        piece.lose(reason)

    def _on_gpu(self, table: np.ndarray) -> torch.Tensor:
        """A plan's table on the GPU, copied once."""
        key = id(table)
        if key not in self._tables:
            self._tables[key] = torch.from_numpy(table).to(self.device)
        return self._tables[key]

    # ---- the lane's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.cuda.set_device(self.device)
        self.copier.start()
        issued: deque[Copy] = deque()
        more = True
        while more or issued or self.waiting:
            if not (issued or self.waiting):
                more = self._begin(self._work.get(), issued)
            more = self._begin_queued(issued) and more
            if copies := [copy.copied for copy in issued if copy.copied is not None]:
                copies[len(copies) // _SHARE].synchronize()
                more = self._begin_queued(issued) and more
            time.sleep(_BREATH_S)
            arrived: deque[Copy] = deque()
            while issued and (issued[0].copied is None or issued[0].copied.query()):
                arrived.append(issued.popleft())
            self._gather_waiting()
            more = self._begin_queued(issued) and more
            while arrived:
                try:
                    arrived.popleft().deliver()
                except Exception:  # the capture it belongs to never completes; later ones must still be delivered
                    logger.exception("a delivery failed")

    def _gather_waiting(self) -> None:
        """Gather what there is room for by now; who waits for room looks again."""
        with self._changed:
            for _ in range(self._issue(self.waiting)):
                self.waiting.popleft()
            self._changed.notify_all()

    def _begin_queued(self, issued: deque[Copy]) -> bool:
        """Issue the copies that are queued and append them to `issued`. Returns False once no more will come."""
        more = True
        while not self._work.empty():
            more = self._begin(self._work.get(), issued) and more
        return more

    def _begin(self, copy: Copy | None, issued: deque[Copy]) -> bool:
        if copy is None:
            return False
        if copy is not _LOOK:
            if copy.source is not None and copy.ready is not None:
                copy.copied = self.copier.copy(copy.source, self._base + copy.offset, copy.ready)
                if copy.staged is not None:
                    copy.staged.copied = copy.copied
            issued.append(copy)
        return True

    # ---- other ----------------------------------------------------------------------------------------------------

    def warm_up(self, table: np.ndarray) -> None:
        """Compile the gather kernel now, and not under the first request that it serves."""
        index = torch.from_numpy(gather_index(np.zeros(1, np.int64), 0)).to(self.device)
        gather_rows(self.rows, index, self._on_gpu(table), self.staging.buffer)

    def link_bytes_per_second(self) -> float:
        """Speed of copies into the ring, measured once over 64 MiB."""
        nbytes = min(64 << 20, self.staging.nbytes, self.ring.numel())
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(2):
            begin.record()
            self.ring[:nbytes].copy_(self.staging.buffer[:nbytes], non_blocking=True)
            end.record()
        end.synchronize()
        return nbytes / begin.elapsed_time(end) * 1e3

    def finish_gathers(self, seconds: float) -> None:
        """Wait until everything that was sent is gathered; nothing may be sent after this."""
        with self._changed:
            self._changed.wait_for(lambda: not self.waiting, seconds)

    def shutdown(self, seconds: float) -> None:
        """After `finish_gathers`: finish the copies and deliveries, then stop the thread."""
        self._work.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            logger.error("copies did not end within %g s of the shutdown: what they held is missing", seconds)
            return  # it still uses the memory
        torch.cuda.cudart().cudaHostUnregister(self.ring.data_ptr())
