# SPDX-License-Identifier: Apache-2.0
"""Scores of probes of one running request."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_LEAST_ROWS = 256
"""Room for rows that a request begins with. It doubles."""


@dataclass(eq=False)
class RequestScores:
    """Scores of one request by position.

    A row that is computed again, after a preemption or in the place of a rejected draft token, replaces the one before.
    So all below the end of the request are final at its end.

    wanted: the probes. first: position of the first row, -1 before there is one. asked: position up to which the
    workers were asked. until: first position that is not asked for, as far as is known. stop: position up to which rows
    are here. checked: position up to which rows were compared with `stop_if`. sorted: steps whose answers are here, as
    `LateScores.added` counts them. rows: float32 [room, values] of each probe, from position `first` on.
    """

    wanted: tuple[str, ...]
    first: int = -1
    asked: int = 0
    until: int = 0
    stop: int = 0
    checked: int = 0
    sorted: int = 0
    rows: dict[str, np.ndarray] = field(default_factory=dict)

    def put(self, name: str, positions: np.ndarray, rows: np.ndarray) -> None:
        """Rows have come, [n, values]. positions: of each; the last one of a position counts."""
        known = self.rows.get(name)
        stop = int(positions.max()) + 1
        if known is None or len(known) < stop - self.first:
            grown = np.full((max(_LEAST_ROWS, 2 * (stop - self.first)), rows.shape[1]), np.nan, np.float32)
            if known is not None:
                grown[: len(known)] = known
            known = self.rows[name] = grown
        known[positions - self.first] = rows
        self.stop = max(self.stop, stop)

    def of(self, name: str, end: int) -> np.ndarray:
        """float32 [rows, values] of positions from `first` on, below `end`."""
        count = max(0, min(self.stop, end) - self.first)
        return self.rows[name][:count] if name in self.rows else np.zeros((0, 0), np.float32)
