# SPDX-License-Identifier: Apache-2.0
"""GPU memory of the lane: staging memory, where gathered rows wait for their copy, and the entries of gathers."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

_ALIGN = 512
"""Alignment of staging memory in bytes."""
_INDEX_ROWS = 4096
"""Minimum capacity of an index buffer, in entries."""


class Staged:
    """Staging memory in use: bytes [start, end). It is free after the event `copied`; None: the copy is not issued."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.copied: torch.cuda.Event | None = None


class Staging:
    """FIFO allocator over one GPU buffer. Call it with the lane's lock held."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes = nbytes
        self.used: deque[Staged] = deque()
        self._head = 0

    def reserve(self, nbytes: int) -> Staged | None:
        """Take `nbytes` contiguous bytes; None if there is no room yet."""
        size = -(-nbytes // _ALIGN) * _ALIGN
        if size > self.nbytes:
            raise ValueError(f"{nbytes} bytes do not fit the staging buffer of {self.nbytes} bytes")
        while self.used and self.used[0].copied is not None and self.used[0].copied.query():
            self.used.popleft()
        if not self.used:
            self._head = 0
        start, tail = self._head, self.used[0].start if self.used else self.nbytes
        if self.used and start <= tail:  # the used part wraps around the end of the buffer
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
        """Free the memory that was reserved last."""
        last = self.used.pop()
        assert last is staged
        self._head = staged.start


class Index:
    """Reusable buffers for the index entries of gathers: in pinned memory and on the GPU. Needs the lane's lock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: deque[tuple[torch.cuda.Event, torch.Tensor, torch.Tensor]] = deque()  # reusable after the event
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    def on_gpu(self, entries: np.ndarray) -> torch.Tensor:
        """Copy entries to the GPU on the current stream. The result is valid until the event given to `until`."""
        count, memory = len(entries), None
        if self._free and self._free[0][0].query():
            _, *memory = self._free.popleft()
        if memory is None or len(memory[0]) < count:
            with torch.inference_mode(False):  # the lane's thread writes to it outside inference mode
                host = torch.empty(max(_INDEX_ROWS, count), entries.shape[1], dtype=torch.int64).pin_memory()
                memory = [host, torch.empty_like(host, device=self._device)]
        host, there = memory
        self._taken.append((host, there))
        host.numpy()[:count] = entries
        return there[:count].copy_(host[:count], non_blocking=True)

    def until(self, done: torch.cuda.Event) -> None:
        """Allow reuse of the buffers of all entries copied so far, after the recorded event `done`."""
        self._free += [(done, *memory) for memory in self._taken]
        self._taken.clear()
