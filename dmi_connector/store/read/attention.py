# SPDX-License-Identifier: Apache-2.0
"""Rebuilds attention patterns from stored queries and keys. Fused attention kernels never write the pattern."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dmi_connector.store.read.capture import Capture

_QUERIES = 256
"""Queries computed at a time for each head, so that scores take little memory beside the result."""


def attention(capture: Capture, layer: int, head: int | None = None, queries: slice | None = None) -> np.ndarray:
    """Attention weights of one layer, float32 [heads, queries, keys], or [queries, keys] for one `head`.

    softmax(q k' / sqrt(head_dim)) over the keys at or before each query (Vaswani et al., 2017), from `q_rot` and
    `k_rot`, or from `q` and `k` for models without rotary embedding. Grouped heads share their keys. Valid
    for layers with full attention that scale by the root of head_dim: all supported architectures.

    queries: rows of the store, all by default. Keys are all rows up to the last query.

    Raises KeyError when queries or keys were not captured. Raises ValueError when earlier rows were not captured, or
    for a head that does not exist.
    """
    names = ("q_rot", "k_rot") if "q_rot" in capture or "k_rot" in capture or "q" not in capture else ("q", "k")
    dims = capture.attrs["dims"]
    heads, kv_heads, size = (int(dims[name]) for name in ("heads", "kv_heads", "head_dim"))
    if head is not None and not -heads <= head < heads:
        raise ValueError(f"head {head} does not exist: the model has heads 0 to {heads - 1}")
    rows = range(int(capture.attrs["num_tokens"]))[queries or slice(None)]
    if rows.step != 1:
        raise ValueError(f"queries {queries} must be a slice with step 1")
    stop = rows.stop if len(rows) else 0
    lacking = [r for r in capture.missing if r[0] < stop]
    if int(capture.attrs["start"]) or lacking:
        raise ValueError(f"{capture.path} lacks rows before the queries, and attention needs all of them as keys")
    q = capture.numpy(names[0], layer, slice(rows.start, rows.stop)).reshape(len(rows), heads, size)
    k = capture.numpy(names[1], layer, slice(0, stop)).reshape(stop, kv_heads, size)
    wanted = range(heads) if head is None else [range(heads)[head]]
    weights = np.zeros((len(wanted), len(rows), stop), np.float32)
    for i, h in enumerate(wanted):
        keys = k[:, h // (heads // kv_heads)].T
        for first in range(0, len(rows), _QUERIES):
            block = slice(first, min(first + _QUERIES, len(rows)))
            scores = (q[block, h] @ keys) * np.float32(size**-0.5)
            positions = np.arange(rows.start + block.start, rows.start + block.stop)
            scores[np.arange(stop)[None, :] > positions[:, None]] = -np.inf
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            weights[i, block] = scores / scores.sum(axis=1, keepdims=True)
    return weights if head is None else weights[0]
