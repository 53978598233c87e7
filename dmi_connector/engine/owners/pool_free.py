# SPDX-License-Identifier: Apache-2.0
"""Tracks which pages of a pool are free, and which will be free once their rows are gathered."""

from __future__ import annotations

from collections import deque


class Pages:
    """The pages of a pool, by number. The caller gives pages back in the order in which it hands over their rows.

    count: number of pages. Page 0 is not counted: on a CPU, values of tokens without a row are written to it. free:
    pages without rows. `_handed`: (n, page) for each page whose rows may be pending. The page is free once workers have
    gathered n rows since the start.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = deque(range(1, count + 1))
        self._handed: deque[tuple[int, int]] = deque()
        self._need = 0

    def take(self) -> int:
        """Allocate a page. If no page is free, this is the page that will be free next, see `take_need`.

        Raises RuntimeError if there is no page. The admission of requests prevents this case.
        """
        if self.free:
            return self.free.popleft()
        if not self._handed:
            raise RuntimeError("the pool has no free page, although pages are reserved for every admitted request")
        self._need, page = self._handed.popleft()
        return page

    def give_back(self, page: int, handed: int) -> None:
        """Take a page back. handed: number of rows handed to the workers since the start, up to the page's last row."""
        self._handed.append((handed, page))

    def gathered(self, rows: int) -> None:
        """Free the pages whose rows are gathered. rows: number of rows that workers have gathered since the start."""
        while self._handed and self._handed[0][0] <= rows:
            self.free.append(self._handed.popleft()[1])

    def take_need(self) -> int:
        """Number of rows that workers must have gathered since the start before the next forward; 0 for none.

        That forward writes the pages that were taken since the last call, and their old rows must be gathered first.
        """
        need, self._need = self._need, 0
        return need
