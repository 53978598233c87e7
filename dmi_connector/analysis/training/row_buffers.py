# SPDX-License-Identifier: Apache-2.0
"""Reusable buffers for the rows that `TokenDataset` reads."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from dmi_connector.captures.row_view import RowView


class RowBuffers:
    """Buffers of `most` rows for each hook. A buffer is reused once no numpy or torch view of it exists.

    New buffers would cause page faults. A pickled `RowBuffers` has no buffers, so that another process makes its own.
    """

    def __init__(self, views: dict[str, RowView], most: int) -> None:
        self._views, self._most = views, most
        self._made: dict[str, list[np.ndarray]] = {name: [] for name in views}

    def __reduce__(self) -> tuple[Any, ...]:
        return RowBuffers, (self._views, self._most)

    def take(self, rows: int) -> dict[str, np.ndarray]:
        """{hook: a free buffer, [1, rows, stored width]}."""
        return {name: self._free(name)[:, :rows] for name in self._views}

    def _free(self, name: str) -> np.ndarray:
        made = self._made[name]
        for i in range(len(made)):
            # The list and the argument of getrefcount hold one reference each. Each numpy or torch view holds one more.
            if sys.getrefcount(made[i]) == 2:
                return made[i]
        made.append(self._views[name].buffer(self._most))
        return made[-1]


def part_of(rows: dict[str, np.ndarray], start: int, count: int) -> dict[str, np.ndarray]:
    """Rows [start, start + count) of each hook, as views. rows: {hook: [1, rows, stored width]}."""
    return {name: part[:, start : start + count] for name, part in rows.items()}


def length_of(parts: list[dict[str, np.ndarray]]) -> int:
    """The total number of rows of `parts`."""
    return sum(next(iter(part.values())).shape[1] for part in parts)
