# SPDX-License-Identifier: Apache-2.0
"""The ring: shared memory that the engine fills and writer processes read."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

ALIGN = 4096
"""Extents begin at multiples of this many bytes."""


@dataclass(eq=False)
class Extent:
    """Contiguous bytes of the ring: `nbytes` bytes from `offset`. They are freed when `refs` reaches 0."""

    offset: int
    nbytes: int
    refs: int = 1

    @property
    def size(self) -> int:
        """Bytes that the extent takes, alignment included."""
        return max(1, -(-self.nbytes // ALIGN)) * ALIGN

    @property
    def end(self) -> int:
        """The offset at which the next extent can begin."""
        return self.offset + self.size


class RingBase:
    """The shared memory, with reference counts of its extents. All methods are thread-safe."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        # Views of this array keep the mapping alive, also after `close`.
        self.memory: np.ndarray = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        self._changed = threading.Condition()

    def add_users(self, extent: Extent, refs: int = 1) -> None:
        """Add `refs` users to an extent. Raises ValueError if it was freed."""
        with self._changed:
            if extent.refs < 1:
                raise ValueError(f"{extent} was released already")
            extent.refs += refs

    def release(self, extent: Extent) -> None:
        """Remove one user of an extent. The last one frees the extent. Raises ValueError if it was freed already."""
        with self._changed:
            if extent.refs < 1:
                raise ValueError(f"{extent} was released already")
            extent.refs -= 1
            if extent.refs == 0:
                self._free(extent)

    def _free(self, extent: Extent) -> None:
        """Free an extent without users. Called with the lock held."""
        raise NotImplementedError

    @property
    def used(self) -> int:
        """Bytes from the oldest extent in use to the latest extent, alignment and gaps included."""
        raise NotImplementedError

    def view(self, extent: Extent) -> np.ndarray:
        """The bytes of an extent as a uint8 array on the shared memory."""
        return self.memory[extent.offset : extent.offset + extent.nbytes]


class Ring(RingBase):
    """Variable-size FIFO allocator over shared memory (a memfd), aligned to 4096 bytes.

    Extents are allocated in order, and may be released in any order. The space of an extent is reused once all earlier
    extents are released too.

    usable: number of bytes from the start that may be allocated (see `allow`); all bytes by default. most: the maximum
    to which `usable` can grow.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < ALIGN:
            raise ValueError(f"ring_bytes {nbytes} is too small: use {ALIGN} or more, large enough for a full chunk")
        nbytes = nbytes // ALIGN * ALIGN
        fd = os.memfd_create("dmi-ring", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        super().__init__(fd, nbytes)
        self.usable = self.most = nbytes
        self._extents: deque[Extent] = deque()  # in the order of allocation; also freed ones behind one in use

    @property
    def used(self) -> int:
        with self._changed:
            if not self._extents or self.fd < 0:
                return 0
            first, last = self._extents[0], self._extents[-1]
            return last.end - first.offset if last.offset >= first.offset else self.usable - first.offset + last.end

    def close(self) -> None:
        """Close the ring. The memory is freed with its last view. Pending and later calls of `alloc` return None."""
        with self._changed:
            if self.fd < 0:
                return
            os.close(self.fd)
            self.fd, self.usable, self.memory = -1, 0, np.empty(0, np.uint8)
            self._changed.notify_all()

    def allow(self, usable: int, final: bool = False) -> None:
        """Allocate only in the first `usable` bytes. The number can shrink only while no extent is in use.

        final: whether `usable` will not grow again. Otherwise `alloc` waits until it is large enough.
        """
        with self._changed:
            if usable < self.usable and self._extents:
                raise ValueError(f"the ring is in use: it cannot shrink from {self.usable} to {usable} bytes")
            self.usable = usable
            if final:
                self.most = usable
            self._changed.notify_all()

    def alloc(self, nbytes: int, timeout: float | None = None) -> Extent | None:
        """Allocate `nbytes` bytes. Waits up to `timeout` seconds for space (None: forever, 0: not at all).

        Returns None if there was no space in time, or if the ring is closed. Raises ValueError if the extent is larger
        than `most`.
        """
        extent = Extent(0, nbytes)
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self.fd >= 0:
                if extent.size > self.most:
                    whole = self.most == self.nbytes
                    fix = "use a larger host_buffer_bytes" if whole else "raise the limit of locked memory (ulimit -l)"
                    raise ValueError(
                        f"{nbytes} bytes do not fit in the {self.most} bytes of the ring: {fix}, or use smaller chunks"
                    )
                if (at := self._place(extent.size)) is not None:
                    extent.offset = at
                    self._extents.append(extent)
                    return extent
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)
            return None

    def _place(self, size: int) -> int | None:
        """Offset of `size` contiguous free bytes, after the last extent or at the start; None if there are none."""
        if not self._extents:
            return 0 if size <= self.usable else None
        first, last = self._extents[0].offset, self._extents[-1]
        if last.offset < first:  # wrapped around: only the gap between the last extent and the first is free
            return last.end if last.end + size <= first else None
        if last.end + size <= self.usable:
            return last.end
        return 0 if size <= first else None

    def _free(self, extent: Extent) -> None:
        while self._extents and self._extents[0].refs == 0:
            self._extents.popleft()
        self._changed.notify_all()
