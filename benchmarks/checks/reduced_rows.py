# SPDX-License-Identifier: Apache-2.0
"""Computes the rows that a reduction should decode to, for check_gpu.py."""

from __future__ import annotations

from typing import Any

import numpy as np


def kept_rows(reduction: Any, values: np.ndarray, got: np.ndarray, basis: str) -> tuple[np.ndarray, float]:
    """(expected decoded rows of the float32 `values` [layers, n, ..., width]; for top k the gap, else 0).

    got: the decoded rows of the store, [layers, n, ...]. The gap is explained at `check_gpu.MOST_GAP`.
    """
    from dmi_connector.reduce.basis import Basis
    from dmi_connector.reduce.pca import Pca
    from dmi_connector.reduce.projection import RandomProjection, matrix
    from dmi_connector.reduce.topk import TopK

    if isinstance(reduction, RandomProjection):
        return values @ matrix(values.shape[-1], reduction.k, reduction.seed, reduction.distribution), 0.0
    if isinstance(reduction, Pca):
        rows = values.reshape(*values.shape[:2], -1)  # heads are concatenated
        parts = [Basis.load(basis).of(reduction.hook, layer, reduction.k) for layer in range(len(rows))]
        return np.stack([(r - p.mean) @ (p.components / p.std) for r, p in zip(rows, parts, strict=True)]), 0.0
    if isinstance(reduction, TopK):
        kept, magnitude = got != 0, np.abs(values)
        left_out = np.where(kept, 0, magnitude).max(-1) - np.where(kept, magnitude, np.inf).min(-1)
        return np.where(kept, values, 0), float((left_out / magnitude.max(-1)).max())
    return values, 0.0


def attention_error(capture: Any) -> float:
    """The largest error of the stored attention weights, compared with the pattern that q_rot and k_rot give.

    An error is the difference of a stored weight from the weight of the same key in the pattern, or the amount by which
    a weight that was left out exceeds the smallest stored weight.
    """
    worst = 0.0
    reduction = capture.reduction("pattern")
    for layer in range(capture.attrs["num_layers"]):
        positions, weights, _ = reduction.split(capture.numpy("pattern", layer))  # [rows, heads, m]
        pattern = capture.attention(layer).transpose(1, 0, 2)
        there = np.where(positions >= 0, np.take_along_axis(pattern, np.maximum(positions, 0), -1), 0)
        worst = float(np.maximum(worst, np.abs(weights - there).max()))
        rest = pattern.copy()
        np.put_along_axis(rest, np.maximum(positions, 0), 0, -1)
        worst = float(np.maximum(worst, (rest.max(-1) - weights[..., -1]).max()))
    return worst
