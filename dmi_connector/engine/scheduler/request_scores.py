# SPDX-License-Identifier: Apache-2.0
"""Holds the scores of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class RequestScores:
    """Scores of one request by position.

    wanted: names of the probes. first: position of the first row with scores. stop: position up to which scores were
    added. checked: position up to which rows were compared with `stop_if`. rows: float32 [stop - first, values] by
    probe. short: whether the scores of its last step are missing, because it ended while it was preempted.
    """

    wanted: tuple[str, ...]
    first: int = 0
    stop: int = 0
    checked: int = 0
    short: bool = False
    rows: dict[str, np.ndarray] = field(default_factory=dict)

    def begin(self, first: int) -> None:
        """The request is scheduled for the first time. first: position of the first row with scores."""
        self.first = self.stop = self.checked = first

    def add(self, rows: Mapping[str, np.ndarray], count: int) -> None:
        """Add the next `count` rows of each probe."""
        for name, more in rows.items():
            self.rows[name] = np.concatenate([self.rows[name], more]) if name in self.rows else more
        self.stop += count

    def of(self, name: str) -> np.ndarray:
        """The scores of one probe from position `first` on, float32 [rows, values]."""
        return self.rows.get(name, np.zeros((0, 0), np.float32))
