# SPDX-License-Identifier: Apache-2.0
"""Paces the writers: the coordinator sets their duty cycle in shared memory, and they follow it.

Writers on all cores slow down an engine even with a low priority, because they share execution units and memory with
it. So they work only the minimum share of their time

- on all rows, while the ring has room for everything that open captures may still bring;
- on rows of generated tokens, while half of the ring is free.

Rows that have waited for LATE_S are written at once. When FULL of the ring is in use, chunks may stay uncompressed
(plain.py).
"""

from __future__ import annotations

import mmap
import os
import time
from typing import NamedTuple

EASY, FULL = 0.5, 0.75
"""Shares of the ring in use. Up to EASY, writers work the minimum share of their time; from FULL up, all the time."""
SURE = 0.95
"""The ring has room for everything if waiting and coming bytes fill at most this share of it."""
SOON_S, LATE_S = 1.0, 3.0
"""Once rows have waited for SOON_S, a writer rests less; once they have waited for LATE_S, it does not rest."""
ROOM_BYTES = 16 << 30
"""Maximum ring size for pacing. A larger backlog would delay stores and the end of the engine. 16 writers with zstd
write this much in about 3 s.
"""
_SLICE_S = 0.01
"""Interval at which a resting writer checks whether the pace has changed."""


class Shares(NamedTuple):
    """Shares of a writer's time, 0 to 1, for rows of generated tokens and for rows of prompts."""

    generated: float
    prompt: float


_STEPS = 255
"""A share is stored as one byte, 1 to _STEPS."""
_BEHIND = len(Shares._fields)
"""Offset of the byte for `behind`, after the shares."""


class Pace:
    """Shares in shared memory, which one process sets and others read. fd: its file descriptor, None to create it."""

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("dmi-pace", os.MFD_CLOEXEC)
            os.ftruncate(fd, mmap.PAGESIZE)
            self.fd, self._memory = fd, mmap.mmap(fd, mmap.PAGESIZE)
            self.shares = Shares(1.0, 1.0)
        else:
            self.fd, self._memory = fd, mmap.mmap(fd, mmap.PAGESIZE)

    @property
    def behind(self) -> bool:
        """Whether the ring is so full that the engine may soon wait."""
        return bool(self._memory[_BEHIND])

    @behind.setter
    def behind(self, behind: bool) -> None:
        self._memory[_BEHIND] = behind

    @property
    def shares(self) -> Shares:
        """The current shares, in steps of 1/_STEPS."""
        return Shares(self._memory[0] / _STEPS, self._memory[1] / _STEPS)

    @shares.setter
    def shares(self, shares: Shares) -> None:
        for place, share in enumerate(shares):
            self._memory[place] = max(1, min(_STEPS, round(share * _STEPS)))

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def rest(self, worked: float, generated: bool, since: float) -> None:
        """Sleep until worked / (worked + slept) is at most the writer's share, which may change meanwhile.

        worked: seconds of work for the last payload. generated: whether the waiting rows are of generated tokens.
        since: when they began to wait (time.monotonic()).
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
    """The shares for rows that have not waited long.

    least: the minimum share. in_use: share of the ring that waits for writers. to_come: bytes that open captures may
    still bring, as a share of the ring.
    """
    if in_use + to_come <= SURE:
        return Shares(least, least)
    return Shares(least + (1 - least) * _between(in_use, EASY, FULL), 1.0)


def _between(value: float, low: float, high: float) -> float:
    """0 up to `low`, 1 at `high` and above."""
    return max(0.0, min(1.0, (value - low) / (high - low)))
