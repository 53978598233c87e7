# SPDX-License-Identifier: Apache-2.0
"""Checks the sums of the residual stream.

resid_mid[l] = resid_pre[l] + attn_out[l]
resid_pre[l + 1] = resid_mid[l] + mlp_out[l]                  (resid_final after the last layer)

In models whose attention and MLP run in parallel (attribute `parallel`), and if resid_mid[l] is not stored:

resid_pre[l + 1] = resid_pre[l] + attn_out[l] + mlp_out[l]

In models whose layers have one block each (attribute `mlp_layers`: the layers with an MLP):

resid_pre[l + 1] = resid_pre[l] + attn_out[l]                 (mlp_out[l] in layers with an MLP)

Some models add visual features after their first layers (attribute `visual_layers`). There the second sum holds only
for text tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dmi_connector.store.format import schema
from dmi_connector.store.format.shard_index import EMPTY
from dmi_connector.store.read.arrays.hook_array import HookArray
from dmi_connector.store.read.arrays.shard_reader import ShardReader
from dmi_connector.store.read.files.thread_pool import each_of

TOLERANCE = {"bfloat16": 2 * 2.0**-8, "float16": 2 * 2.0**-11, "float32": 1e-5, "float64": 1e-12}
"""Maximum error of a sum of two terms, relative to the largest magnitude in the three rows. For bfloat16 and float16
it is 1 to 2 ulp of that magnitude. For a sum of three terms the maximum is 1.5 times as large.
"""
Term = tuple[str, int]
"""(hook, layer)."""


def equations(attrs: Mapping[str, Any], arrays: Mapping[str, HookArray]) -> list[tuple[Term, ...]]:
    """The sums that can be checked, because all their terms are stored: (sum, term, term, ...)."""
    layers = {name: list(array.layers) or [0] for name, array in arrays.items() if not array.reduce}
    one_block = attrs.get("mlp_layers")
    last = int(attrs.get("num_layers") or max((max(ls) for ls in layers.values()), default=0) + 1) - 1
    found: list[tuple[Term, ...]] = []
    for layer in range(last + 1):
        after: Term = ("resid_final", 0) if layer == last else ("resid_pre", layer + 1)
        if one_block is not None:
            found.append((after, ("resid_pre", layer), ("mlp_out" if layer in one_block else "attn_out", layer)))
            continue
        if attrs.get("parallel") or layer not in layers.get("resid_mid", ()):
            found.append((after, ("resid_pre", layer), ("attn_out", layer), ("mlp_out", layer)))
            continue
        found.append((("resid_mid", layer), ("resid_pre", layer), ("attn_out", layer)))
        found.append((after, ("resid_mid", layer), ("mlp_out", layer)))
    return [e for e in found if all(name in layers and layer in layers[name] for name, layer in e)]


def stated(attrs: Mapping[str, Any]) -> bool:
    """Whether the attributes of a store state that its sums hold, for all rows or for text tokens."""
    return bool(attrs.get("identities") or attrs.get("visual_layers"))


def for_text(attrs: Mapping[str, Any], equation: tuple[Term, ...]) -> bool:
    """Whether a sum holds only for text tokens."""
    (total, _), *_, (_, layer) = equation
    return total in ("resid_pre", "resid_final") and layer < int(attrs.get("visual_layers", 0))


def _text_rows(attrs: Mapping[str, Any]) -> np.ndarray:
    """Whether each row is a text token, bool [tokens]."""
    start, text = int(attrs["start"]), np.ones(int(attrs["num_tokens"]), bool)
    for first, stop in schema.media_positions(attrs):
        text[max(0, first - start) : max(0, stop - start)] = False
    return text


def check_identities(
    attrs: Mapping[str, Any], arrays: Mapping[str, HookArray], threads: int = 1
) -> list[tuple[str, str]]:
    """Check every sum on every stored token. Returns (where, what) for each sum and chunk of tokens with an error.

    Rows with a NaN or an infinity are skipped. threads: number of threads that check segments.
    """
    wanted = equations(attrs, arrays)
    if not wanted:
        return []
    text, segments = _text_rows(attrs), arrays[wanted[0][0][0]].segments

    def check(segment: int) -> list[tuple[str, str]]:
        return list(_check_segment(attrs, arrays, wanted, text, segment))

    return [problem for found in each_of(check, range(segments), threads) for problem in found]


def _check_segment(
    attrs: Mapping[str, Any],
    arrays: Mapping[str, HookArray],
    wanted: Sequence[tuple[Term, ...]],
    text: np.ndarray,
    segment: int,
) -> Iterator[tuple[str, str]]:
    """Check the sums of one segment. wanted: the sums. text: whether each row of the store is a text token."""
    spans = sorted({(slot[-1], first, stop) for slot, first, stop in arrays[wanted[0][0][0]].chunks(segment, 0)})
    readers = {
        (name, shard): ShardReader.open(arrays[name], segment, shard)
        for name in {name for equation in wanted for name, _ in equation}
        for shard in range(arrays[name].shards)
        if arrays[name].path(segment, shard) in attrs["files"]
    }
    for n, first, stop in spans:
        rows: dict[Term, np.ndarray | None] = {}
        for equation in wanted:
            # A term occurs only in consecutive sums, so only the chunks of one sum are kept.
            rows = {
                (name, layer): rows[name, layer]
                if (name, layer) in rows
                else _rows(arrays[name], readers, layer, n, stop - first)
                for name, layer in equation
            }
            terms = [found for found in rows.values() if found is not None]
            if len(terms) < len(equation):
                continue  # missing rows, which an incomplete store lists
            scale = np.max([np.abs(term).max(axis=1) for term in terms], axis=0)
            with np.errstate(invalid="ignore", over="ignore"):
                error = np.abs(terms[0] - sum(terms[1:])).max(axis=1)
            error[~np.isfinite(scale)] = 0
            if for_text(attrs, equation):
                error *= text[first:stop]
            most = TOLERANCE[arrays[equation[0][0]].dtype.name] * (len(equation) - 1) / 2
            bad = np.flatnonzero(error > most * scale)
            if len(bad):
                worst = int(np.argmax(error))
                total, parts = equation[0], " + ".join(name for name, _ in equation[1:])
                yield (
                    f"{total[0]} layer {total[1]} token {first + int(bad[0])}",
                    f"it is not {parts} of layer {equation[1][1]}: {len(bad)} of tokens {first}-{stop - 1}"
                    f" are off, at most by {error[worst]:.3g} at magnitude {scale[worst]:.3g}",
                )


def _rows(
    array: HookArray, readers: Mapping[tuple[str, int], ShardReader], layer: int, n: int, count: int
) -> np.ndarray | None:
    shard, index = divmod(array.layers.index(layer) if array.layers else 0, array.part_layers)
    reader, slot = readers.get((array.name, shard)), (index, n)
    if reader is None or reader.index[slot][0] == EMPTY:
        return None
    wide = np.float64 if array.dtype.name in ("float32", "float64") else np.float32
    return np.asarray(reader.chunk(slot)[:count].astype(wide))
