# SPDX-License-Identifier: Apache-2.0
"""The difference between the mean rows of two sets of captures, for steering vectors and linear probes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from dmi_connector.analysis.training.rows import BLOCK, check_one_layer, hook_rows, present_rows
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.captures import of_one_model
from dmi_connector.captures.finite import FiniteCheck, not_finite
from dmi_connector.captures.own_values import check_own_values, other_values
from dmi_connector.reduce import Keeps


@dataclass(frozen=True)
class MeanDifference:
    """The mean rows of a hook in two sets of captures. `mean_difference` makes it.

    first, second: mean rows, float64 [width]. scores: the scores of the rows of each set, float32 [rows], see `score`.
    """

    first: np.ndarray
    second: np.ndarray
    scores: tuple[np.ndarray, np.ndarray]

    @property
    def vector(self) -> np.ndarray:
        """first - second, float32 [width]: a steering vector."""
        return (self.first - self.second).astype(np.float32)

    @property
    def separation(self) -> float:
        """Distance of the means in standard deviations of the scores within the sets (d' of signal detection).

        NaN if the means are equal, if the scores of each set are all equal, or if the sets together have fewer than 3
        rows.
        """
        squares = sum(float(np.square(scores - scores.mean(dtype=np.float64)).sum()) for scores in self.scores)
        spare = sum(map(len, self.scores)) - 2
        return float(1 / np.sqrt(squares / spare)) if spare > 0 and squares > 0 else float("nan")

    def score(self, rows: np.ndarray) -> np.ndarray:
        """Position of rows [n, width] between the means, float32 [n]: 1 at `first`, 0 at `second`.

        A row with a score above 0.5 is nearer to `first` along the difference. Scores are NaN if the means are equal.
        """
        vector = self.first - self.second
        length = vector @ vector
        return np.asarray((rows - self.second) @ vector / (length if length else np.nan), np.float32)


ROWS = ("all", "prompt", "generated", "last")
"""Values of `rows`, which select rows of a capture. "last" is the last row of the prompt."""


def mean_difference(
    first: Capture | Iterable[Capture],
    second: Capture | Iterable[Capture],
    hook: str,
    layer: int | None = None,
    rows: str = "all",
    finite: FiniteCheck | None = None,
) -> MeanDifference:
    """Compute the mean rows of a hook in two sets of captures, and score their rows (Marks and Tegmark, 2023).

    layer: required if several layers were captured. rows: "all", "prompt", "generated", or "last" (the prompt's last
    row). Missing rows are left out. finite: counts rows with a NaN or an infinity, which are then left out; None: these
    rows are kept. Every store is read twice, in blocks.

    Raises KeyError for a hook or layer that was not captured. Raises ValueError for another `rows`, for logits, for
    several layers without `layer`, for attention summaries and values of probes, for rows of different widths or
    projections, for a set of several models (the two sets may be of different models), and for a set without a row.
    """
    if rows not in ROWS:
        raise ValueError(f"rows {rows!r} is not valid; use {', '.join(map(repr, ROWS))}")
    sets = [[s] if isinstance(s, Capture) else list(s) if isinstance(s, Iterator) else s for s in (first, second)]
    forms: list[object] = []
    means = [_mean(captures, hook, layer, rows, finite, forms) for captures in sets]
    if len(means[0]) != len(means[1]):
        raise ValueError(f"rows of {hook!r} have {len(means[0])} values in one set, {len(means[1])} in the other")
    found = MeanDifference(means[0], means[1], (np.zeros(0), np.zeros(0)))
    scores = [np.concatenate([found.score(block) for block in row_blocks(s, hook, layer, rows, finite)]) for s in sets]
    return replace(found, scores=(scores[0], scores[1]))


def _mean(
    captures: Iterable[Capture],
    hook: str,
    layer: int | None,
    rows: str,
    finite: FiniteCheck | None = None,
    forms: list[object] | None = None,
) -> np.ndarray:
    """The mean of the selected rows, float64 [width]. Raises ValueError if no row is selected or widths differ."""
    count, total = 0, np.zeros(1)
    for block in row_blocks(captures, hook, layer, rows, finite, forms):
        if count and block.shape[1] != len(total):
            raise ValueError(f"rows of {hook!r} have {block.shape[1]} values in one capture, {len(total)} in others")
        count, total = count + len(block), total + block.sum(0, dtype=np.float64)
    if not count:
        raise ValueError(f"a set of captures has no row of {hook!r} that rows={rows!r} selects")
    return total / count


def row_blocks(
    captures: Iterable[Capture],
    hook: str,
    layer: int | None,
    rows: str,
    finite: FiniteCheck | None = None,
    forms: list[object] | None = None,
) -> Iterator[np.ndarray]:
    """Yield the selected rows in blocks [n, width].

    finite: as in `mean_difference`. forms: list to which the result of `other_values` for the first store is added, if
    it is empty. Raises ValueError for a store with another result.
    """
    forms = [] if forms is None else forms
    for capture in of_one_model(captures):
        check_one_layer(capture, hook, layer)
        check_own_values(capture, hook, layer, Keeps.DIRECTIONS)
        form = other_values(capture, hook, layer)
        forms += [] if forms else [form]
        if form != forms[0]:
            raise ValueError(f"{capture.path} holds {hook!r} in another projection than others; leave it out")
        wanted = _wanted(capture, rows)
        for first in range(0, len(wanted), BLOCK):
            some = wanted[first : first + BLOCK]
            block = hook_rows(capture, hook, layer, some)
            if finite is not None and len(bad := not_finite(block)):
                finite.see(capture.path, some[bad])
                block = np.delete(block, bad, axis=0)
            yield block


def _wanted(capture: Capture, rows: str) -> np.ndarray:
    """Indexes of the selected rows of a store."""
    there, phase = present_rows(capture), capture.phase
    if rows == "prompt":
        there &= phase == 0
    elif rows == "generated":
        there &= phase == 1
    elif rows == "last":
        there &= capture.positions == capture.prompt_len - 1
    return np.flatnonzero(there)
