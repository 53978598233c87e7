# SPDX-License-Identifier: Apache-2.0
"""How much of their time writers work: the coordinator says it in shared memory, they rest for what is left.

Writers on all cores slow an engine that decodes, whatever their priority: they share its cores' execution units and
the memory. While the ring has room there is no hurry, so they spread their work.
"""

from __future__ import annotations

import mmap
import os
import time

EASY, FULL = 0.5, 0.75
"""Parts of the ring in use up to which writers work least, and from which on all the time."""
ROOM_BYTES = 16 << 30
"""Of a larger ring, what these are parts of: what waits delays stores, and has to be written when the engine ends. With
zstd 16 writers take some 3 s for it.
"""
_SLICE_S = 0.01


class Pace:
    """A share of time, 0 to 1, that one process sets and others read. fd: of the memory, None to make it."""

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("dmi-pace", os.MFD_CLOEXEC)
            os.ftruncate(fd, mmap.PAGESIZE)
            self.fd, self._memory = fd, mmap.mmap(fd, mmap.PAGESIZE)
            self.share = 1.0
        else:
            self.fd, self._memory = fd, mmap.mmap(fd, mmap.PAGESIZE)

    @property
    def share(self) -> float:
        """Of a writer's time, in steps of 1/255."""
        return self._memory[0] / 255

    @share.setter
    def share(self, share: float) -> None:
        self._memory[0] = max(1, min(255, round(share * 255)))

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def rest(self, worked: float) -> None:
        """Wait as long as it takes for `worked` seconds to be the share, which may change meanwhile."""
        began = time.monotonic()
        while (left := began + worked * (1 / self.share - 1) - time.monotonic()) > 0:
            time.sleep(min(left, _SLICE_S))


def share_for(least: float, in_use: float) -> float:
    """The share of time at which writers work while `in_use` of the ring, 0 to 1, waits for them."""
    return least + (1 - least) * max(0.0, min(1.0, (in_use - EASY) / (FULL - EASY)))
