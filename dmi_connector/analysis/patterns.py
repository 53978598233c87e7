# SPDX-License-Identifier: Apache-2.0
"""Attention patterns from whatever a store holds of them: queries and keys, or summaries."""

from __future__ import annotations

import numpy as np

from dmi_connector.store.read.capture import Capture


def attention_pattern(capture: Capture, layer: int, head: int | None = None) -> np.ndarray:
    """Attention weights float32 [heads, tokens, tokens], or [tokens, tokens] of one head.

    Rebuilt from queries and keys (`Capture.attention`), or from `pattern`, where each head's largest weights are
    stored: then all others are 0. Raises KeyError where neither was captured, ValueError as `Capture.attention`.
    """
    if "pattern" not in capture or "q_rot" in capture or "q" in capture:
        return capture.attention(layer, head)
    positions, weights, _ = capture.attention_summary(layer)
    tokens, heads, _ = positions.shape
    if head is not None and not -heads <= head < heads:
        raise ValueError(f"head {head} does not exist: the model has heads 0 to {heads - 1}")
    keys = positions - int(capture.attrs["start"])
    dense = np.zeros((heads, tokens, tokens), np.float32)
    seen = (keys >= 0) & (keys < tokens)  # -1 marks an empty place; a key may lie before the store's first row
    row, of_head, place = np.nonzero(seen)
    dense[of_head, row, keys[row, of_head, place]] = weights[row, of_head, place]
    return dense if head is None else dense[head]
