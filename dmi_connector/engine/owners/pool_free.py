# SPDX-License-Identifier: Apache-2.0
"""Tracks which pages of a pool are free, and which become free once their rows are gathered."""

from __future__ import annotations

from collections import deque


class Pages:
    """Page numbers of a pool. Pages are taken back in the order in which their rows are handed to the workers.

    count: number of pages, without page 0, where torch writes values of tokens without a row. free: pages without rows.
    `_handed` has pages whose rows may still be pending: (n, page) is free once n rows are gathered since the start.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = deque(range(1, count + 1))
        self._handed: deque[tuple[int, int]] = deque()
        self._need = 0

    def take(self) -> int:
        """Allocate a page. Admission ensures that there is one."""
        if self.free:
            return self.free.popleft()
        if not self._handed:
            raise RuntimeError("the pool has no free page, although every request was admitted with room")
        self._need, page = self._handed.popleft()
        return page

    def give_back(self, page: int, handed: int) -> None:
        """Take a page back. handed: number of rows handed since the start, including its last row."""
        self._handed.append((handed, page))

    def gathered(self, rows: int) -> None:
        """Free the pages whose rows are gathered. rows: number of rows gathered since the start."""
        while self._handed and self._handed[0][0] <= rows:
            self.free.append(self._handed.popleft()[1])

    def take_need(self) -> int:
        """Number of rows, since the start, to gather before pages that were taken since the last call are written."""
        need, self._need = self._need, 0
        return need
