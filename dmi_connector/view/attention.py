# SPDX-License-Identifier: Apache-2.0
"""Attention weights of one head, cut to the tokens that the page shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from dmi_connector.store.read.capture import Capture

_SUMMARY = "pattern"
_UNROTATED = ("GPT2LMHeadModel", "OPTForCausalLM", "BloomForCausalLM")
"""Architectures without rotary embedding: in others, `q` and `k` are not what attention sees."""


def shown(capture: Capture) -> dict[str, Any]:
    """What can be shown, as JSON. layers: their numbers. until: the first row that lacks keys before it."""
    names = _hooks(capture)
    layers = sorted(set.intersection(*(set(capture.layers[name]) for name in names))) if names else []
    until = int(capture.attrs["num_tokens"])
    if names != (_SUMMARY,):
        until = 0 if capture.attrs["start"] else min([until, *(start for start, _ in capture.missing)])
    return {"layers": layers, "until": until}


def _hooks(capture: Capture) -> tuple[str, ...]:
    """What attention is rebuilt from, () if it cannot be."""
    pairs: list[tuple[str, ...]] = [("q_rot", "k_rot"), (_SUMMARY,)]
    if capture.attrs.get("architecture") in _UNROTATED:
        pairs.append(("q", "k"))
    return next((names for names in pairs if all(name in capture for name in names)), ())


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
    hooks = _hooks(capture)
    if not hooks:
        raise ValueError(
            f"{capture.path} has no attention to show; capture q_rot and k_rot (preset attention), or pattern"
        )
    if hooks != (_SUMMARY,):
        return capture.attention(layer, head, rows)
    positions, weights, _ = capture.attention_summary(layer, None, rows)
    if not 0 <= head < positions.shape[1]:
        raise ValueError(f"head {head} does not exist: the model has heads 0 to {positions.shape[1] - 1}")
    keys = positions[:, head] - int(capture.attrs["start"])
    out = np.zeros((len(keys), rows.stop), np.float32)
    queries, places = np.nonzero(keys >= 0)
    out[queries, keys[queries, places]] = weights[:, head][queries, places]
    return out
