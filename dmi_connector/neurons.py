# SPDX-License-Identifier: Apache-2.0
"""How strongly each neuron of a hook acts: mean |x| over the rows of many captures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dmi_connector.store.reader import Capture

BLOCK = 4096
"""Rows read at once."""


@dataclass(frozen=True)
class Tally:
    """What `rows` rows say of each neuron's |x|. All arrays are float64 [width]: the sum where a value was kept and in
    how many rows that was, and the same where it was not, but sampled, with the sum of squares there.
    """

    rows: int
    kept: np.ndarray
    kept_rows: np.ndarray
    sampled: np.ndarray
    sampled_rows: np.ndarray
    sampled_squares: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> Tally:
        """Of rows [rows, width] with every value."""
        none = np.zeros(values.shape[1])
        return cls(len(values), np.abs(values).sum(0, np.float64), none + len(values), none, none, none)

    @classmethod
    def beside(cls, slices: Sequence[Tally]) -> Tally:
        """Of slices of the same rows."""
        return cls(slices[0].rows, *(np.concatenate([getattr(s, f) for s in slices]) for f in _FIELDS))

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.rows + other.rows, *(getattr(self, f) + getattr(other, f) for f in _FIELDS))

    def mean(self) -> np.ndarray:
        """Mean |x|, float64 [width]. Rows where a value was not kept count as those do where it was sampled: with their
        mean, drawn towards that of all neurons as far as so few samples cannot tell them apart (empirical Bayes; the
        spread about a neuron's mean is taken to be that of all neurons together).
        """
        count = self.sampled_rows
        several = count > 1
        if not several.any():
            return self.kept / self.rows
        everywhere = self.sampled.sum() / count.sum()
        own = np.divide(self.sampled, count, out=np.full_like(count, everywhere), where=count > 0)
        within = (self.sampled_squares - count * own**2).sum() / (count[count > 0] - 1).sum()
        noise = np.divide(max(within, 0.0), count, out=np.full_like(count, np.inf), where=count > 0)
        signal = max(0.0, own[several].var() - noise[several].mean())
        trust = np.divide(signal, signal + noise, out=np.ones_like(noise), where=noise > 0)
        rest = everywhere + trust * (own - everywhere)
        return np.asarray((self.kept + (self.rows - self.kept_rows) * rest) / self.rows)


_FIELDS = tuple(f.name for f in fields(Tally) if f.name != "rows")


def importance(captures: Capture | Iterable[Capture], hook: str, layer: int | None = None) -> np.ndarray:
    """Mean |x| of each neuron of a hook over all rows of `captures` that are not missing, float64 [width].

    layer: needed where the captures hold the hook for several. Of a hook stored by `topk`, what was not kept counts
    through the values that were sampled beside, see `Tally.mean` (without a sample: as 0). Raises
    KeyError for a hook or layer that was not captured, ValueError for one stored as a projection or summary, for
    logits and whole numbers, for captures of different widths, and where there is no row.
    """
    total: Tally | None = None
    for capture in captures if isinstance(captures, Iterable) else [captures]:
        for rows in capture.runs(BLOCK):
            one = capture.tally(hook, layer, rows)
            if total is not None and len(total.kept) != len(one.kept):
                raise ValueError(f"{capture.path} has {len(one.kept)} values of {hook} a row, others {len(total.kept)}")
            total = one if total is None else total + one
    if total is None:
        raise ValueError(f"no capture has a row of {hook!r}")
    return total.mean()
