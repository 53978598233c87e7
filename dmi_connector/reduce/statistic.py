# SPDX-License-Identifier: Apache-2.0
"""A statistic: one number of each row, such as its norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

OfRows = Callable[[np.ndarray, int], np.ndarray]
"""(rows [n, width], index) -> [n]."""


@dataclass(frozen=True)
class Statistic:
    """One number for each row. index_name: what its index counts, None where it takes none. signed: below 0 too.

    unit: "" where it has none. values_each: values of a row that belong to one index, so that a row has width /
    values_each of them.
    """

    name: str
    of: OfRows
    index_name: str | None = None
    signed: bool = False
    unit: str = ""
    values_each: int = 1

    def words(self, index: int) -> str:
        """The name, with the index and the unit if there are any."""
        name = self.name
        if self.index_name is not None:
            name = f"{name.removesuffix(' of')} of {self.index_name} {index}"
        return f"{name} ({self.unit})" if self.unit else name
