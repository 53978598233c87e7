# SPDX-License-Identifier: Apache-2.0
"""Scores of the last steps, as the workers sent them. Most are not looked at until their request ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dmi_connector.engine.messages import StepScores

_STEPS, _ROWS = 64, 16384
"""Steps and rows to keep at most. A step of decoding has few rows, one of prompts thousands."""


class ScoredRows(NamedTuple):
    """Rows of several steps, in the order in which they were computed.

    captures, positions: int64 [rows]. values: float32 [rows, values], by rank.
    """

    captures: np.ndarray
    positions: np.ndarray
    values: dict[int, np.ndarray]

    def of(self, index: np.ndarray) -> ScoredRows:
        """Those at the places `index`."""
        return ScoredRows(self.captures[index], self.positions[index], {r: v[index] for r, v in self.values.items()})


class LateScores:
    """The scores of the last steps. added: number of steps that were ever added."""

    def __init__(self) -> None:
        self.added = 0
        self._rows = 0
        self._captures: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._answers: list[Sequence[StepScores]] = []
        self._joined: ScoredRows | None = None

    @property
    def full(self) -> bool:
        """Whether there are as many as should be kept."""
        return len(self._answers) >= _STEPS or self._rows >= _ROWS

    def add(self, answers: Sequence[StepScores]) -> None:
        """A step has ended. answers: of each rank. Waits for nothing."""
        asked = answers[0].asked
        self._captures.append(np.array(asked.captures, np.int64))
        self._positions.append(np.array(asked.positions, np.int64))
        self._answers.append(answers)
        self._joined = None
        self.added, self._rows = self.added + 1, self._rows + len(asked.slots)

    def rows(self) -> ScoredRows:
        """All rows. Waits until they have been copied off the GPU."""
        if self._joined is None:
            each: dict[int, list[np.ndarray]] = {}
            for answers in self._answers:
                for answer in answers:
                    each.setdefault(answer.rank, []).append(answer.values)
            none = np.zeros(0, np.int64)  # as long as there is no step
            captures, positions = (np.concatenate([none, *of]) for of in (self._captures, self._positions))
            values = {rank: np.concatenate(found) for rank, found in each.items()}
            self._joined = ScoredRows(captures, positions, values)
        return self._joined

    def of(self, capture: int) -> ScoredRows:
        """The rows of one capture. They stay here."""
        rows = self.rows()
        return rows.of(np.flatnonzero(rows.captures == capture))

    def take(self) -> dict[int, ScoredRows]:
        """All rows by capture. None stays here."""
        rows = self.rows()
        order = np.argsort(rows.captures, kind="stable")
        captures, begins = np.unique(rows.captures[order], return_index=True)
        found = {int(n): rows.of(index) for n, index in zip(captures, np.split(order, begins[1:]), strict=True)}
        self._captures, self._positions, self._answers, self._joined, self._rows = [], [], [], None, 0
        return found
