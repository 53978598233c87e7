# SPDX-License-Identifier: Apache-2.0
"""Scores of probes of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class RequestScores:
    """Scores of one request by position.

    wanted: the probes. first: position of the first row that has scores. stop: position up to which rows are here.
    checked: position up to which rows were compared with `stop_if`. rows: float32 [stop - first, values] of each probe.
    short: whether the request came to its own end while it was preempted. The scores of its last step are then missing.
    """

    wanted: tuple[str, ...]
    first: int = 0
    stop: int = 0
    checked: int = 0
    short: bool = False
    rows: dict[str, np.ndarray] = field(default_factory=dict)

    def begin(self, first: int) -> None:
        """The request is scheduled for the first time."""
        self.first = self.stop = self.checked = first

    def add(self, rows: Mapping[str, np.ndarray], count: int) -> None:
        """The next `count` rows of each probe."""
        for name, more in rows.items():
            self.rows[name] = np.concatenate([self.rows[name], more]) if name in self.rows else more
        self.stop += count

    def of(self, name: str) -> np.ndarray:
        """float32 [rows, values], from position `first` on."""
        return self.rows.get(name, np.zeros((0, 0), np.float32))
