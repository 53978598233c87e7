# SPDX-License-Identifier: Apache-2.0
"""Attention weights of one head, cut to the tokens that the page shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from dmi_connector.store.read.capture import Capture

_SUMMARY = "pattern"


def layers(capture: Capture) -> list[int]:
    """The layers whose attention can be shown: of `q_rot` and `k_rot` (or `q` and `k`) both, else of `pattern`."""
    for names in (("q_rot", "k_rot"), ("q", "k"), (_SUMMARY,)):
        if all(name in capture for name in names):
            return sorted(set.intersection(*(set(capture.layers[name]) for name in names)))
    return []


def window(capture: Capture, layer: int, head: int, rows: slice) -> np.ndarray:
    """Weights of the queries `rows` on the keys `rows`, float32 [queries, 1 + keys].

    The first column is what each query gives to keys before the window. Keys after a query have weight 0. With a
    summary (`pattern`) alone, so have keys that are not among the largest; the first column then has those stored.

    Raises KeyError and ValueError as `Capture.attention` does.
    """
    weights = _weights(capture, layer, head, rows)
    return np.concatenate([weights[:, : rows.start].sum(axis=1, keepdims=True), weights[:, rows]], axis=1)


def largest(capture: Capture, layer: int, head: int, row: int, count: int = 10) -> list[dict[str, Any]]:
    """The keys that one query gives the largest weights, as JSON: their rows and weights, by falling weight."""
    weights = _weights(capture, layer, head, slice(row, row + 1))[0]
    order = np.argsort(-weights, kind="stable")[:count]
    return [{"row": int(key), "weight": float(weights[key])} for key in order if weights[key] > 0]


def _weights(capture: Capture, layer: int, head: int, rows: slice) -> np.ndarray:
    """float32 [queries, keys up to the last query]."""
    if _SUMMARY not in capture or all(name in capture for name in ("q_rot", "k_rot")):
        return capture.attention(layer, head, rows)
    positions, weights, _ = capture.attention_summary(layer, None, rows)
    if not 0 <= head < positions.shape[1]:
        raise ValueError(f"head {head} does not exist: the model has heads 0 to {positions.shape[1] - 1}")
    keys = positions[:, head] - int(capture.attrs["start"])
    out = np.zeros((len(keys), rows.stop), np.float32)
    queries, places = np.nonzero(keys >= 0)
    out[queries, keys[queries, places]] = weights[:, head][queries, places]
    return out
