# SPDX-License-Identifier: Apache-2.0
"""The row layout that a selection gives for a model.

It packs every selected hook of one token, as its reduction leaves it, side by side into one row of bytes: the unit that
taps write and the exporter reads. Nothing here imports torch or vllm.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dmi_connector.hooks import ALIASES, HOOKS, Hook, ModelDims, Selection, hook_dtype, suggest
from dmi_connector.reduce import ReduceError, Reduction, parse
from dmi_connector.reduce.attn import AttentionSummary

Reductions = Mapping[str, Reduction]

ROW_ALIGN = 16
"""Every segment of a row starts at a multiple of this many bytes, so that kernels use 16-byte accesses."""

ROW_BYTES_ALIGN = 64
"""Rows are a multiple of this many bytes long."""

HEADER_BYTES = 64
"""A row begins with its own token id and position (two int32), then spare bytes: rows check themselves."""

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "uint8": 1}


@dataclass(frozen=True)
class Segment:
    """One hook of one layer inside a row, on one tensor-parallel rank. offset and nbytes are bytes, width elements of
    the hook; what a reduction makes of them lies in the row.
    """

    hook: str
    layer: int
    dtype: str
    width: int
    offset: int
    reduction: Reduction | None = None

    @property
    def stored(self) -> tuple[str, int]:
        """(dtype, width) of what lies in the row."""
        if self.reduction is None:
            return self.dtype, self.width
        return self.reduction.stored_dtype(self.dtype), self.reduction.stored_width(self.width, self.dtype)

    @property
    def nbytes(self) -> int:
        dtype, width = self.stored
        return width * ITEMSIZE[dtype]


@dataclass(frozen=True)
class HookShard:
    """How a hook's width is split: `shards` slices of `width` elements, of which this rank holds number `shard`.

    owner is False where another rank holds the same slice and writes it.
    """

    width: int
    shards: int
    shard: int
    owner: bool


def shard_of(hook: Hook, dims: ModelDims, tp: int, rank: int) -> HookShard:
    """Split of `hook` over `tp` ranks, as vLLM splits it (KV heads are replicated when there are fewer than ranks)."""
    width = dims.width(hook)
    if not hook.sharded or tp == 1:
        return HookShard(width, 1, 0, rank == 0)
    if hook.width == "K" and dims.kv_heads < tp:
        copies = tp // dims.kv_heads
        return HookShard(dims.head_dim, dims.kv_heads, rank // copies, rank % copies == 0)
    return HookShard(width // tp, tp, rank, True)


@dataclass(frozen=True)
class RowLayout:
    """Where every selected hook lies in a row of `row_bytes` bytes. The same on every tensor-parallel rank."""

    segments: tuple[Segment, ...]
    row_bytes: int

    def find(self, hook: str, layer: int) -> Segment | None:
        return self._index().get((hook, layer))

    def _index(self) -> dict[tuple[str, int], Segment]:
        cached: dict[tuple[str, int], Segment] | None = self.__dict__.get("_by_name")
        if cached is None:
            cached = {(s.hook, s.layer): s for s in self.segments}
            object.__setattr__(self, "_by_name", cached)
        return cached


def hook_reductions(rules: Sequence[tuple[str, str]], selection: Selection, dims: ModelDims, tp: int) -> Reductions:
    """Which hook is reduced how: the first of `rules` (patterns separated by commas, reduction) that matches decides.

    Wildcards pass over hooks of whole numbers and over logits; naming one of these, or what is not captured, is an
    error. Raises ReduceError.
    """
    found: dict[str, Reduction | None] = {}
    able = [n for n in selection.hooks if HOOKS[n].dtype != "int32" and HOOKS[n].scope != "sampled"]
    for patterns, spec in rules:
        reduction = parse(spec)
        fitting = [n for n in able if (n == "pattern") == isinstance(reduction, AttentionSummary)]
        for pattern in filter(None, (p.strip() for p in patterns.split(","))):
            name = ALIASES.get(pattern, pattern)
            names = fnmatch.filter(fitting, name)
            if not names and set(name) & set("*?["):
                if not fnmatch.filter(HOOKS, name):
                    raise ReduceError(f"reduce: pattern {pattern!r} matches no hook; hooks: {', '.join(HOOKS)}")
                continue
            if not names and name in selection.hooks:
                fix = "give it attn(m), as in 'attn(8)'" if name == "pattern" else "leave it out or give it 'none'"
                raise ReduceError(f"reduce: {pattern} cannot be reduced so ({spec}); {fix}")
            if not names:
                near = suggest(pattern, selection.hooks)
                raise ReduceError(f"reduce: {pattern!r} is not captured{near}; captured: {', '.join(selection.hooks)}")
            for hook in names:
                if hook not in found:
                    shard = shard_of(HOOKS[hook], dims, tp, 0)
                    layers = selection.hooks[hook]
                    found[hook] = reduction and reduction.bind(hook, layers, shard.width, shard.shards)
    if "pattern" in selection.hooks and found.get("pattern") is None:
        raise ReduceError("hooks: pattern is captured in summary only; say how in reduce, as in {'pattern': 'attn(8)'}")
    return {name: reduction for name, reduction in found.items() if reduction is not None}


def row_layout(
    selection: Selection, dims: ModelDims, dtype: str, tp: int = 1, reductions: Reductions | None = None
) -> RowLayout:
    """Pack the row hooks of `selection` side by side, layer by layer, each segment 16-byte aligned.

    dtype: the model's ("bfloat16", "float16" or "float32").
    """
    offset = HEADER_BYTES
    segments = []
    order = sorted(
        ((layer, list(HOOKS).index(name), name) for name, layers in selection.row_hooks.items() for layer in layers)
    )
    for layer, _, name in order:
        hook = HOOKS[name]
        width, reduction = shard_of(hook, dims, tp, 0).width, (reductions or {}).get(name)
        segment = Segment(name, layer, hook_dtype(hook, dtype), width, offset, reduction)
        segments.append(segment)
        offset += math.ceil(segment.nbytes / ROW_ALIGN) * ROW_ALIGN
    return RowLayout(tuple(segments), math.ceil(offset / ROW_BYTES_ALIGN) * ROW_BYTES_ALIGN)
