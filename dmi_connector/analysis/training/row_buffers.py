# SPDX-License-Identifier: Apache-2.0
"""Memory for the rows that a `TokenDataset` reads at a time."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from dmi_connector.captures.row_view import RowView


class RowBuffers:
    """Buffers of `most` rows of each hook, which are used again when nobody has a part of them any more.

    Fresh memory for each would cost as many page faults. A copy in another process begins without a buffer.
    """

    def __init__(self, views: dict[str, RowView], most: int) -> None:
        self._views, self._most = views, most
        self._made: dict[str, list[np.ndarray]] = {name: [] for name in views}

    def __reduce__(self) -> tuple[Any, ...]:
        return RowBuffers, (self._views, self._most)

    def take(self, rows: int) -> dict[str, np.ndarray]:
        """name -> [1, rows, stored width]."""
        return {name: self._free(name)[:, :rows] for name in self._views}

    def _free(self, name: str) -> np.ndarray:
        made = self._made[name]
        for i in range(len(made)):
            # The list and the call hold a reference each. Each part of the buffer, numpy's or torch's, holds another.
            if sys.getrefcount(made[i]) == 2:
                return made[i]
        made.append(self._views[name].buffer(self._most))
        return made[-1]


def part_of(rows: dict[str, np.ndarray], start: int, count: int) -> dict[str, np.ndarray]:
    """Rows [start, start + count) of each hook."""
    return {name: part[:, start : start + count] for name, part in rows.items()}


def length_of(parts: list[dict[str, np.ndarray]]) -> int:
    """Rows of all parts."""
    return sum(next(iter(part.values())).shape[1] for part in parts)
