# SPDX-License-Identifier: Apache-2.0
"""Sums for estimates of the mean |x| of each neuron, even if only some values of a row are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np


@dataclass(frozen=True)
class Tally:
    """Sums of |x| over `rows` rows. All arrays are float64 [width].

    kept, kept_rows: sum over the rows in which the value was kept, and the number of these rows. sampled, sampled_rows,
    sampled_squares: sum, number and sum of squares for the rows in which the value was only sampled. clipped: number of
    rows in which the value was beyond the range of its scale (`int8(channel=file)`), 0 for other reductions.
    """

    rows: int
    kept: np.ndarray
    kept_rows: np.ndarray
    sampled: np.ndarray
    sampled_rows: np.ndarray
    sampled_squares: np.ndarray
    clipped: np.ndarray = field(default_factory=lambda: np.zeros(()))

    def __post_init__(self) -> None:
        object.__setattr__(self, "clipped", np.broadcast_to(self.clipped, self.kept.shape))

    @classmethod
    def of(cls, values: np.ndarray) -> Tally:
        """The tally of rows [rows, width] with all values."""
        none = np.zeros(values.shape[1])
        return cls(len(values), np.abs(values).sum(0, np.float64), none + len(values), none, none, none)

    @classmethod
    def beside(cls, slices: Sequence[Tally]) -> Tally:
        """Join tallies of slices of the same rows along the width."""
        return cls(slices[0].rows, *(np.concatenate([getattr(s, f) for s in slices]) for f in _SUMS))

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.rows + other.rows, *(getattr(self, f) + getattr(other, f) for f in _SUMS))

    def mean(self) -> np.ndarray:
        """Mean |x|, float64 [width].

        For rows without the value of a neuron, the mean of its samples is used. That mean is shrunk towards the mean of
        all neurons, more with fewer samples (empirical Bayes, assuming the same variance for all neurons). If no neuron
        was sampled twice, the variance is unknown, and the mean of all neurons is used. Without any sample, such rows
        count as 0.
        """
        count = self.sampled_rows
        if not count.any():
            return self.kept / self.rows
        everywhere = self.sampled.sum() / count.sum()
        several = count > 1
        if not several.any():
            return np.asarray((self.kept + (self.rows - self.kept_rows) * everywhere) / self.rows)
        own = np.divide(self.sampled, count, out=np.full_like(count, everywhere), where=count > 0)
        within = (self.sampled_squares - count * own**2).sum() / (count[count > 0] - 1).sum()
        noise = np.divide(max(within, 0.0), count, out=np.full_like(count, np.inf), where=count > 0)
        signal = max(0.0, own[several].var() - noise[several].mean())
        trust = np.divide(signal, signal + noise, out=np.ones_like(noise), where=noise > 0)
        rest = everywhere + trust * (own - everywhere)
        return np.asarray((self.kept + (self.rows - self.kept_rows) * rest) / self.rows)


_SUMS = tuple(f.name for f in fields(Tally) if f.name != "rows")
