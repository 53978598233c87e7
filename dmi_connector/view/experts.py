# SPDX-License-Identifier: Apache-2.0
"""Reads which experts the tokens of a window were routed to, and counts how often each expert was chosen."""

from __future__ import annotations

from typing import Any

import numpy as np

from dmi_connector.captures.capture import Capture

IDS, WEIGHTS = "topk_ids", "topk_weights"
_ROWS = 4096
"""Number of rows read at a time."""


def shown(capture: Capture) -> dict[str, Any] | None:
    """The experts that can be shown, as JSON; None if `topk_ids` was not captured.

    layers: layers with experts. count: number of experts. each: number of experts per token. weights: whether
    `topk_weights` was captured.
    """
    if IDS not in capture:
        return None
    facts = capture.attrs.get("experts") or {}
    if "count" in facts:
        count = int(facts["count"])
    elif "router_logits" in capture:
        count = capture.shape("router_logits")[-1]
    else:
        count = int(max((rows.max(initial=-1) for rows in _rows(capture, None)), default=-1)) + 1
    return {
        "layers": capture.layers[IDS],
        "count": count,
        "each": capture.shape(IDS)[-1],
        "weights": WEIGHTS in capture,
    }


def window(capture: Capture, rows: slice, weights: bool) -> np.ndarray:
    """Expert numbers, or their weights, in descending order of weight: float32 [layers, tokens, top k].

    NaN for rows that the store lacks. Raises KeyError if the hook was not captured.
    """
    values = capture.numpy(WEIGHTS if weights else IDS, tokens=rows).astype(np.float32)
    for start, stop in capture.missing:
        values[:, max(start - rows.start, 0) : max(stop - rows.start, 0)] = np.nan
    return values


def load(capture: Capture, layer: int, count: int) -> np.ndarray:
    """How often each expert of a layer was chosen, over all rows of the store: int64 [experts]."""
    found = np.zeros(count, np.int64)
    for rows in _rows(capture, layer):
        found += np.bincount(rows.ravel(), minlength=count)[:count]
    return found


def _rows(capture: Capture, layer: int | None) -> Any:
    return (capture.numpy(IDS, layer, run) for run in capture.runs(_ROWS))
