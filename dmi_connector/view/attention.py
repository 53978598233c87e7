# SPDX-License-Identifier: Apache-2.0
"""Computes attention weights of heads between the tokens that the page shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dmi_connector.analysis.patterns import SUMMARY, attention_pattern, pattern_hooks
from dmi_connector.analysis.training.rows import attribute
from dmi_connector.captures.attention import heads_of, queries_and_keys, window_of_head
from dmi_connector.captures.capture import Capture
from dmi_connector.store.read.files.thread_pool import in_threads, read_threads


def shown(capture: Capture) -> dict[str, Any]:
    """The layers whose attention can be shown, as JSON. until: first row for which the store lacks an earlier key."""
    captured = sorted({layer for layers in capture.layers.values() for layer in layers})
    layers = [layer for layer in captured if pattern_hooks(capture, layer)]
    until = int(capture.attrs["num_tokens"])
    if any(pattern_hooks(capture, layer) != (SUMMARY,) for layer in layers):
        until = 0 if capture.attrs["start"] else min([until, *(start for start, _ in capture.missing)])
    return {"layers": layers, "until": until}


def window(capture: Capture, layer: int, head: int, rows: slice) -> np.ndarray:
    """Attention weights of the queries `rows` on the keys `rows`, float32 [queries, 1 + keys].

    The first column is the weight of each query on all keys before the window. Keys after a query have weight 0. If
    only the hook `pattern` was captured, which lists the largest weights, all other keys have weight 0 too.

    Raises KeyError and ValueError like `attention_pattern`.
    """
    if pattern_hooks(capture, layer) in ((), (SUMMARY,)):
        return _of_summary(capture, layer, head, rows)
    attribute(capture, "dims")
    q, k = queries_and_keys(capture, layer, range(rows.start, rows.stop), head)
    return window_of_head(capture, layer, head, q, k, rows.start)


def windows(capture: Capture, layer: int, rows: slice) -> Iterator[np.ndarray]:
    """`window` of each head, in order. Queries and keys are read once."""
    if pattern_hooks(capture, layer) in ((), (SUMMARY,)):
        yield from (_of_summary(capture, layer, head, rows) for head in range(heads_of(capture)))
        return
    attribute(capture, "dims")
    q, k = queries_and_keys(capture, layer, range(rows.start, rows.stop))
    heads = range(heads_of(capture))
    for first in range(0, len(heads), read_threads()):
        some = heads[first : first + read_threads()]
        found: dict[int, np.ndarray] = {}

        def fill(head: int, found: dict[int, np.ndarray] = found) -> None:
            found[head] = window_of_head(capture, layer, head, q, k, rows.start)

        in_threads(fill, some)
        yield from (found[head] for head in some)


def _of_summary(capture: Capture, layer: int, head: int, rows: slice) -> np.ndarray:
    weights = attention_pattern(capture, layer, head, rows)
    return np.concatenate([weights[:, : rows.start].sum(axis=1, keepdims=True), weights[:, rows]], axis=1)


def pooled(weights: np.ndarray, most: int) -> np.ndarray:
    """Max-pool weights [queries, keys] to at most `most` x `most` cells."""
    step = max(1, -(-max(weights.shape) // most))
    for axis in (0, 1):
        weights = np.maximum.reduceat(weights, np.arange(0, weights.shape[axis], step), axis=axis)
    return weights


def largest(capture: Capture, layer: int, head: int, row: int, count: int = 10) -> list[dict[str, Any]]:
    """The keys with the `count` largest weights of one query, in descending order, as JSON: [{row, weight}]."""
    weights = attention_pattern(capture, layer, head, slice(row, row + 1))[0]
    order = np.argsort(-weights, kind="stable")[:count]
    return [{"row": int(key), "weight": float(weights[key])} for key in order if weights[key] > 0]
