# SPDX-License-Identifier: Apache-2.0
"""Scores of the last steps, as the workers sent them. Most are not looked at until their request ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dmi_connector.engine.messages import StepScores

_STEPS, _ROWS = 64, 16384
"""Steps and rows to keep at most. A step of decoding has few rows, one of prompts thousands."""
_LEAST_ROOM = 1024
"""Initial capacity in rows. It doubles when it is full."""


class ScoredRows(NamedTuple):
    """Rows of several steps.

    captures, positions: int64 [rows]. values: float32 [rows, values], by rank.
    """

    captures: np.ndarray
    positions: np.ndarray
    values: dict[int, np.ndarray]

    def of(self, index: np.ndarray) -> ScoredRows:
        """Those at the places `index`, as copies."""
        return ScoredRows(self.captures[index], self.positions[index], {r: v[index] for r, v in self.values.items()})

    def by_capture(self) -> Iterator[tuple[int, slice]]:
        """Each capture with its rows, of rows that are sorted by capture."""
        ends = [*(np.flatnonzero(np.diff(self.captures)) + 1).tolist(), len(self.captures)]
        begin = 0
        for end in ends if len(self.captures) else ():
            yield int(self.captures[begin]), slice(begin, end)
            begin = end


class LateScores:
    """The scores of the last steps. added: number of steps that were ever added.

    Scores of a step are copied once, when some are looked at: until then nothing waits for the GPU.
    """

    def __init__(self) -> None:
        self.added = 0
        self._steps = self._rows = 0
        self._captures, self._positions = (np.empty(_LEAST_ROOM, np.int64) for _ in range(2))
        self._values: dict[int, np.ndarray] = {}
        self._late: list[tuple[int, Sequence[StepScores]]] = []  # first row of a step, and what is still to be copied

    @property
    def full(self) -> bool:
        """Whether there are as many as should be kept."""
        return self._steps >= _STEPS or self._rows >= _ROWS

    def add(self, answers: Sequence[StepScores]) -> None:
        """A step has ended. answers: of each rank. Waits for nothing."""
        asked, first = answers[0].asked, self._rows
        end = first + len(asked.slots)
        if end > len(self._captures):
            self._captures, self._positions = (_with_room(x, end) for x in (self._captures, self._positions))
        self._captures[first:end], self._positions[first:end] = asked.captures, asked.positions
        self._late.append((first, answers))
        self.added, self._steps, self._rows = self.added + 1, self._steps + 1, end

    def _all(self) -> ScoredRows:
        """All rows, in the order in which they were computed, as views. Waits until they have been copied off the
        GPU.
        """
        for first, answers in self._late:
            for answer in answers:
                rows = answer.values
                known = self._values.get(answer.rank)
                if known is None:
                    known = np.empty((0, rows.shape[1]), np.float32)
                if len(known) < self._rows:
                    known = self._values[answer.rank] = _with_room(known, len(self._captures))
                known[first : first + len(rows)] = rows
        self._late.clear()
        values = {rank: rows[: self._rows] for rank, rows in self._values.items()}
        return ScoredRows(self._captures[: self._rows], self._positions[: self._rows], values)

    def of(self, capture: int) -> ScoredRows:
        """The rows of one capture, in the order in which they were computed. They stay here."""
        rows = self._all()
        return rows.of(np.flatnonzero(rows.captures == capture))

    def take(self) -> ScoredRows:
        """All rows, sorted by capture, those of one in the order in which they were computed. None stays here."""
        rows = self._all()
        found = rows.of(np.argsort(rows.captures, kind="stable"))
        self._steps = self._rows = 0
        return found


def _with_room(array: np.ndarray, rows: int) -> np.ndarray:
    """A copy with room for `rows` rows or more: twice as many as before."""
    grown = np.empty((max(rows, 2 * len(array)), *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown
