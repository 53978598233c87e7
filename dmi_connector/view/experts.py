# SPDX-License-Identifier: Apache-2.0
"""Which experts the tokens of a window were routed to, and how often each expert was chosen."""

from __future__ import annotations

from typing import Any

import numpy as np

from dmi_connector.captures.capture import Capture

IDS, WEIGHTS = "topk_ids", "topk_weights"
_ROWS = 4096
"""Rows that are read at a time."""


def shown(capture: Capture) -> dict[str, Any] | None:
    """As JSON: the layers with experts, their number, and the experts of each token; None if none are captured."""
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
    """Numbers of the experts, or their weights, in descending order of weight: float32 [layers, tokens, top k].

    NaN for rows that the store lacks. Raises KeyError for what was not captured.
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
