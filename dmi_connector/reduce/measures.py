# SPDX-License-Identifier: Apache-2.0
"""The measures of `dmi fidelity`: they compare decoded rows of a reduction with the full rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PAIRS = 512
"""Maximum number of rows whose pairwise cosines are compared."""
PROBES = 16
"""Maximum number of probes. A probe is the mean row of a frequent token minus the mean row of all other tokens."""
OF_VALUES = {
    "cosine_least": "lowest cosine between a row and its decoded row",
    "cosine_median": "median of these cosines",
    "importance": "Spearman correlation of the mean |x| of each neuron, before and after",
    "error": "norm of the difference divided by the norm, over all rows together",
}
"""{measure of `of_values`: its meaning}."""


@dataclass(frozen=True)
class ReducedRows:
    """Rows of one layer of a hook, before and after a reduction.

    rows: the full rows, float32 [n, width]. stored: the stored rows, [n, stored width]. decoded: the decoded rows,
    float32 [n, decoded width]. tokens: token ids of the rows, int32 [n]. layer: layer number, 0 for a hook that exists
    once. dtype: dtype of the values before the reduction.
    """

    rows: np.ndarray
    stored: np.ndarray
    decoded: np.ndarray
    tokens: np.ndarray
    layer: int
    dtype: str


def of_values(rows: ReducedRows) -> dict[str, float]:
    """Measures of a reduction that keeps every value: cosines of rows, importance, and error.

    A measure is NaN if it is undefined. For example, rows that are all zero have no cosine.
    """
    cosines = _row_cosines(rows.rows, rows.decoded)
    if not len(cosines):
        cosines = np.array([np.nan])
    found = {"cosine_least": float(cosines.min()), "cosine_median": float(np.median(cosines))}
    with np.errstate(invalid="ignore", divide="ignore"):
        return {**found, "importance": importance(rows.rows, rows.decoded), "error": error(rows.rows, rows.decoded)}


def _row_cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosines between rows of `a` and `b`, float64 [rows], without rows that are zero in both, or not finite.

    A row that is zero in only one of them has the cosine 0.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    norms = np.stack([np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)])
    there = np.isfinite(norms).all(0) & norms.any(0)
    product = norms.prod(0)[there]
    return np.asarray((a * b).sum(1)[there] / np.where(product > 0, product, 1))


def error(a: np.ndarray, b: np.ndarray) -> float:
    """Norm of the difference divided by the norm of `a`, over all rows together."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def importance(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman correlation of the mean |x| of each neuron in rows `a` with that in rows `b`."""
    return spearman(np.abs(a).mean(0), np.abs(b).mean(0))


def _unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30))


def pairs(rows: ReducedRows) -> float:
    """Correlation of the cosines between pairs of rows before the reduction with those after it."""
    chosen = np.random.default_rng(0).permutation(len(rows.rows))[:PAIRS]
    above = np.triu_indices(len(chosen), 1)
    before, after = (_unit(x[chosen].astype(np.float64)) for x in (rows.rows, rows.decoded))
    return float(np.corrcoef((before @ before.T)[above], (after @ after.T)[above])[0, 1])


def probes(rows: ReducedRows, project: Callable[[np.ndarray], np.ndarray]) -> float:
    """Correlation of the scores of a probe before the reduction with those after it: the minimum over all probes.

    NaN if all rows have the same token, or if a correlation is undefined, as it is if all decoded rows are equal.

    project: function that projects a probe [width] to the space of decoded rows.
    """
    ids, counts = np.unique(rows.tokens, return_counts=True)
    scores = []
    for token in ids[np.argsort(-counts, kind="stable")][:PROBES]:
        mine = rows.tokens == token
        if mine.all():
            continue
        probe = rows.rows[mine].mean(0) - rows.rows[~mine].mean(0)
        scores.append(np.corrcoef(rows.rows @ probe, rows.decoded @ project(probe))[0, 1])
    return float(np.min(scores)) if scores else np.nan  # unlike `min`, NaN if any of them is NaN


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """The ranks of values. Equal values get their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts + 1) / 2)[inverse])
