# SPDX-License-Identifier: Apache-2.0
"""Attention patterns from stored queries and keys, or from stored summaries."""

from __future__ import annotations

import numpy as np

from dmi_connector.analysis.training.rows import attribute
from dmi_connector.captures.attention import check_head, query_rows, seen_by_attention
from dmi_connector.captures.capture import Capture
from dmi_connector.reduce import Keeps
from dmi_connector.store.read.hook_names import HookTable

SUMMARY = "pattern"


def pattern_hooks(capture: Capture, layer: int | None = None) -> tuple[str, ...]:
    """The hooks from which a pattern is computed: a pair of queries and keys, or ("pattern",), or () without either.

    If the pair and `pattern` were captured, the pair is used, with two exceptions. `pattern` is used if the store lacks
    rows of the pair, or if a reduction does not keep the values of queries or keys. `pattern` is also used for older
    stores with `q` and `k`, because these stores do not say whether attention rotates `q` and `k`.

    layer: a layer, or None for any layer.
    """
    pair, table = seen_by_attention(capture), HookTable.of(capture.attrs)
    held = [names for names in (pair, (SUMMARY,)) if all(table.holds(name, layer) for name in names)]
    unsure = pair == ("q", "k") and "rotary" not in capture.attrs
    if len(held) > 1 and (unsure or capture.attrs["start"] or capture.missing or _other(capture, pair, layer)):
        held.reverse()
    return held[0] if held else ()


def _other(capture: Capture, hooks: tuple[str, ...], layer: int | None) -> bool:
    """Whether the reduction of one of the hooks does not keep its values, such as a projection."""
    found = [capture.reduction(hook, layer) for hook in hooks]
    return any(reduction is not None and Keeps.VALUES not in reduction.keeps for reduction in found)


def attention_pattern(
    capture: Capture, layer: int, head: int | None = None, queries: slice | None = None
) -> np.ndarray:
    """Attention weights float32 [heads, queries, keys], or [queries, keys] of one head.

    The weights are computed from queries and keys (`Capture.attention`), or read from `pattern`, which has the largest
    weights of each head. With `pattern` all other weights are 0. queries: rows of the store, a slice with step 1; None:
    all. Keys are all rows up to the last query.

    Raises KeyError if neither was captured, and ValueError as `Capture.attention` does.
    """
    names = pattern_hooks(capture, layer) or pattern_hooks(capture)
    if not names:
        q, k = seen_by_attention(capture)
        preset = " (preset attention)" if q == "q_rot" else ""
        raise KeyError(f"{capture.path} has no attention; capture {q} and {k}{preset}, or pattern")
    if names == (SUMMARY,):
        return _dense(capture, layer, head, queries)
    attribute(capture, "dims")
    return capture.attention(layer, head, queries)


def _dense(capture: Capture, layer: int, head: int | None, queries: slice | None) -> np.ndarray:
    """The weights of `pattern` as `attention_pattern` returns them."""
    rows = query_rows(capture, queries)
    positions, weights, _ = capture.attention_summary(layer, None, slice(rows.start, rows.stop))
    heads = positions.shape[1]
    check_head(head, heads)
    wanted = range(heads) if head is None else [range(heads)[head]]
    keys = positions[:, wanted] - int(capture.attrs["start"])
    dense = np.zeros((len(wanted), len(rows), rows.stop), np.float32)
    row, of_head, place = np.nonzero(keys >= 0)  # -1 marks an empty place; a key may be before the store's first row
    dense[of_head, row, keys[row, of_head, place]] = weights[:, wanted][row, of_head, place]
    return dense if head is None else dense[0]
