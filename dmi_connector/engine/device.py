# SPDX-License-Identifier: Apache-2.0
"""The way off the GPU: gather on the main stream, copy on a side stream, deliver on a thread.

    paged rows --gather kernel, main stream--> staging (GPU) --one copy, side stream--> ring (pinned) --thread--> writers

Everything is ordered by CUDA events, so nothing here waits on the engine's thread; only a full ring does, by policy.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from vllm.logger import init_logger

from dmi_connector.engine.kernels import gather_rows

logger = init_logger("vllm.dmi_connector")

_ALIGN = 512


@dataclass
class Staged:
    """A piece of staging memory in use: bytes [start, end), free once `copied` has happened."""

    start: int
    end: int
    copied: torch.cuda.Event


class Staging:
    """FIFO of variable-size pieces in one GPU buffer."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes = nbytes
        self._used: deque[Staged] = deque()
        self._head = 0

    def reserve(self, nbytes: int, force: bool) -> int | None:
        """Offset of `nbytes` contiguous free bytes, or None when there is no room yet.

        force: never None; the current stream is made to wait for copies that still use the space.
        """
        size = -(-nbytes // _ALIGN) * _ALIGN
        if size > self.nbytes:
            raise ValueError(f"{nbytes} bytes do not fit the staging buffer of {self.nbytes} bytes")
        while self._used and self._used[0].copied.query():
            self._used.popleft()
        if not self._used:
            self._head = 0
        start = self._head if self._head + size <= self.nbytes else 0
        while any(s.start < start + size and start < s.end for s in self._used):
            if not force:
                return None
            torch.cuda.current_stream().wait_event(self._used.popleft().copied)
        self._head = start + size
        return start

    def hold(self, start: int, nbytes: int, copied: torch.cuda.Event) -> None:
        self._used.append(Staged(start, start + -(-nbytes // _ALIGN) * _ALIGN, copied))


class DeviceLane:
    """Moves gathered rows of one GPU into the shared ring.

    ring: uint8 array of shared memory; it is registered as pinned memory here. Deliveries run in order on one thread,
    each after its own copy has arrived.
    """

    def __init__(self, ring: np.ndarray, staging_bytes: int, device: torch.device) -> None:
        self.ring = torch.from_numpy(ring)
        error = torch.cuda.cudart().cudaHostRegister(self.ring.data_ptr(), ring.nbytes, 0)
        if int(error) != 0:
            raise RuntimeError(
                f"host_buffer_bytes: {ring.nbytes} bytes could not be pinned ({error}); give a smaller size or raise the limit"
            )
        self.staging = Staging(staging_bytes, device)
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._pieces: dict[int, torch.Tensor] = {}
        self._queue: queue.SimpleQueue[tuple[torch.cuda.Event | None, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver, name="dmi-deliver", daemon=True)
        self._thread.start()

    def room(self, nbytes: int, force: bool) -> int | None:
        return self.staging.reserve(nbytes, force)

    def gather(self, rows: torch.Tensor, slots: np.ndarray, pieces: np.ndarray, start: int, nbytes: int) -> None:
        """Gather rows into staging at `start`; see `kernels.gather_rows`."""
        key = id(pieces)
        if key not in self._pieces:
            self._pieces[key] = torch.from_numpy(pieces).to(self.device)
        target = self.staging.buffer[start : start + nbytes]
        gather_rows(rows, torch.from_numpy(slots).to(self.device, non_blocking=True), self._pieces[key], target)

    def copy_out(self, start: int, nbytes: int, offset: int, deliver: Callable[[], None]) -> None:
        """Copy staging [start, +nbytes) to ring [offset, +nbytes); `deliver` runs on the thread when it is there."""
        filled, copied = torch.cuda.Event(), torch.cuda.Event(blocking=True)
        filled.record()
        self.stream.wait_event(filled)
        with torch.cuda.stream(self.stream):
            self.ring[offset : offset + nbytes].copy_(self.staging.buffer[start : start + nbytes], non_blocking=True)
            copied.record()
        self.staging.hold(start, nbytes, copied)
        self._queue.put((copied, deliver))

    def then(self, deliver: Callable[[], None]) -> None:
        """Run `deliver` on the thread after everything queued before it."""
        self._queue.put((None, deliver))

    def link_bytes_per_second(self) -> float:
        """Speed of copies into the ring, measured once over 64 MiB."""
        nbytes = min(64 << 20, self.staging.nbytes, self.ring.numel())
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                begin.record()
                self.ring[:nbytes].copy_(self.staging.buffer[:nbytes], non_blocking=True)
                end.record()
        end.synchronize()
        return nbytes / begin.elapsed_time(end) * 1e3

    def _deliver(self) -> None:
        while (item := self._queue.get()) is not None:
            event, deliver = item
            if event is not None:
                event.synchronize()
            try:
                deliver()
            except Exception:  # the capture it belongs to never completes; later ones must still be delivered
                logger.exception("a delivery failed")

    def shutdown(self) -> None:
        self._queue.put(None)
        self._thread.join(60)
        torch.cuda.cudart().cudaHostUnregister(self.ring.data_ptr())
