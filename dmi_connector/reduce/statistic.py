# SPDX-License-Identifier: Apache-2.0
"""Defines a statistic: one number per row, such as its norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

OfRows = Callable[[np.ndarray, int], np.ndarray]
"""Function (rows [n, width], index) -> [n]."""


@dataclass(frozen=True)
class Statistic:
    """One number per row.

    index_name: name of the index, such as "head"; None without an index. signed: whether the number may be below 0.
    unit: "" without a unit. values_each: number of values of a row per index, so that width / values_each is the number
    of indexes.
    """

    name: str
    of: OfRows
    index_name: str | None = None
    signed: bool = False
    unit: str = ""
    values_each: int = 1

    def words(self, index: int) -> str:
        """The name, with index and unit if there are any."""
        name = self.name
        if self.index_name is not None:
            name = f"{name.removesuffix(' of')} of {self.index_name} {index}"
        return f"{name} ({self.unit})" if self.unit else name
