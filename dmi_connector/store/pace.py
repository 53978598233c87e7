# SPDX-License-Identifier: Apache-2.0
"""How much of their time writers work: the coordinator says it in shared memory, they rest before each payload.

Writers on all cores slow an engine, whatever their priority: they share its cores' execution units and the memory. So
they spread their work while the ring is sure to hold all that open captures may yet bring, rows of prompts too; else
while rows of generated tokens come and there is room; and in either case for three seconds at most.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import NamedTuple

EASY, FULL = 0.5, 0.75
"""Parts of the ring in use up to which writers work least, and from which on all the time."""
SURE = 0.95
"""Part of the ring that what waits and what may yet come must not exceed, for the ring to be sure to hold it."""
SOON_S, LATE_S = 1.0, 3.0
"""How long rows wait before a writer works more, and from when on it works all the time."""
ROOM_BYTES = 16 << 30
"""Of a larger ring, what these are parts of: what waits delays stores, and has to be written when the engine ends. With
zstd 16 writers take some 3 s for it.
"""
_SLICE_S = 0.01


class Shares(NamedTuple):
    """Of a writer's time, 0 to 1: for rows of generated tokens, and for those of prompts."""

    generated: float
    prompt: float


class Pace:
    """Shares of time that one process sets and others read. fd: of the memory, None to make it."""

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("dmi-pace", os.MFD_CLOEXEC)
            os.ftruncate(fd, mmap.PAGESIZE)
            self.fd, self._memory = fd, mmap.mmap(fd, mmap.PAGESIZE)
            self.shares = Shares(1.0, 1.0)
        else:
            self.fd, self._memory = fd, mmap.mmap(fd, mmap.PAGESIZE)

    @property
    def shares(self) -> Shares:
        """In steps of 1/255."""
        return Shares(self._memory[0] / 255, self._memory[1] / 255)

    @shares.setter
    def shares(self, shares: Shares) -> None:
        for place, share in enumerate(shares):
            self._memory[place] = max(1, min(255, round(share * 255)))

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def rest(self, worked: float, generated: bool, since: float) -> None:
        """Wait as long as it takes for `worked` seconds to be the share, which may change meanwhile. generated: whether
        the rows that wait are of generated tokens; since: when they began to, of time.monotonic().
        """
        began = time.monotonic()
        while True:
            now, share = time.monotonic(), self.shares.generated if generated else self.shares.prompt
            share += (1 - share) * _between(now - since, SOON_S, LATE_S)
            left = began + worked * (1 / share - 1) - now
            if left <= 0:
                return
            time.sleep(min(left, _SLICE_S))


def shares_for(least: float, in_use: float, to_come: float) -> Shares:
    """The shares of time at which writers work on rows that have not waited for long. in_use: part of the ring that
    waits for them; to_come: what open captures may yet bring, as a part of it.
    """
    if in_use + to_come <= SURE:
        return Shares(least, least)
    return Shares(least + (1 - least) * _between(in_use, EASY, FULL), 1.0)


def _between(value: float, low: float, high: float) -> float:
    """0 up to `low`, 1 from `high` on."""
    return max(0.0, min(1.0, (value - low) / (high - low)))
