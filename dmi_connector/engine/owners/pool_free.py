# SPDX-License-Identifier: Apache-2.0
"""The pages of a pool by number: which are free, and which will be once their rows are gathered."""

from __future__ import annotations

from collections import deque


class Pages:
    """Pages by number, given out and taken back in the order in which their rows are handed to the workers.

    count: of pages, without page 0, where torch puts what has no row. free: pages without rows. Behind them, `_handed`:
    (rows handed since the start, page), to be used again once so many rows are gathered.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = deque(range(1, count + 1))
        self._handed: deque[tuple[int, int]] = deque()
        self._need = 0

    def take(self) -> int:
        """A page. Admission sees to it that there is one."""
        if self.free:
            return self.free.popleft()
        if not self._handed:
            raise RuntimeError("the pool has no free page, although every request was admitted with room")
        self._need, page = self._handed.popleft()
        return page

    def give_back(self, page: int, handed: int) -> None:
        """Take a page back. handed: rows handed since the start when its last row was."""
        self._handed.append((handed, page))

    def gathered(self, rows: int) -> None:
        """So many rows are gathered since the start."""
        while self._handed and self._handed[0][0] <= rows:
            self.free.append(self._handed.popleft()[1])

    def take_need(self) -> int:
        """Rows that must be gathered before pages taken since the last call are written."""
        need, self._need = self._need, 0
        return need
