# SPDX-License-Identifier: Apache-2.0
"""The memory layouts of rows in GPU memory, and of payloads on their way to a store.

Taps (forward hooks of the model) write rows. A row has the values of all selected hooks for one token. A payload holds
the values of a chunk of rows array by array, as the store does. Nothing here imports torch or vllm.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from dmi_connector.codecs import CODECS
from dmi_connector.dtypes import ITEMSIZE
from dmi_connector.hooks import ALIASES, HOOKS, ModelDims, Selection, hook_dtype
from dmi_connector.ranks import Place, shard_of, writers_of_stages, writers_of_whole
from dmi_connector.reduce import ReduceError, Reduction, parse, summaries
from dmi_connector.reduce.probe import Probe
from dmi_connector.wording import suggest

Reductions = Mapping[str, Reduction]

ROW_ALIGN = 16
"""Each field of a row starts at a multiple of this many bytes, so that kernels use 16-byte accesses."""

ROW_BYTES_ALIGN = 64
"""The length of a row is a multiple of this many bytes."""

HEADER_BYTES = 64
"""Bytes of the header at the start of a row: token id and position (two int32), then padding."""

HEADER_SENT_BYTES = 8
"""Bytes of a row's header in a payload: token id and position. The coordinator process checks both."""

TOKEN_ARRAYS = {"token_ids": "int32", "positions": "int32", "phase": "uint8"}
"""Name -> dtype of the 1-D arrays that each store has beside its hooks."""

DRAFT_INDEX = "draft_index"
"""An additional 1-D array in stores of requests with speculative decoding."""

DRAFT_UNKNOWN = 255
"""Value of draft_index if a token's step is unknown: two steps returned results at once, as after an engine pause."""

ALL_TOKEN_ARRAYS = {**TOKEN_ARRAYS, DRAFT_INDEX: "uint8"}
"""Name -> dtype of every 1-D array that a store may have beside its hooks."""

AXES = "mrope_positions"
"""The hook with the position of each token on each axis of M-RoPE."""

RESERVED = (*ALL_TOKEN_ARRAYS, "logits_positions")
"""Names of arrays beside the hooks of a store. No hook may have one of these names."""
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
"""Valid names of arrays. Each array is a directory in the store."""


@dataclass(frozen=True)
class RowField:
    """One hook of one layer in a row, on one rank.

    dtype, width: dtype and number of the hook's values before reduction. offset: byte offset in the row. source: for a
    probe, the hook from which it is computed.
    """

    hook: str
    layer: int
    dtype: str
    width: int
    offset: int
    reduction: Reduction | None = None
    source: str = ""

    @property
    def tapped(self) -> str:
        """The hook of the model from whose values this field is computed."""
        return self.source or self.hook

    @property
    def stored(self) -> tuple[str, int]:
        """(dtype, number of values) in the row, after reduction."""
        if self.reduction is None:
            return self.dtype, self.width
        return self.reduction.stored_dtype(self.dtype), self.reduction.stored_width(self.width, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes in the row, without padding."""
        dtype, width = self.stored
        return width * ITEMSIZE[dtype]


@dataclass(frozen=True)
class RowLayout:
    """The fields of the rows of one rank.

    fields: in the order of their offsets. row_bytes: bytes of the longest row of any rank; all ranks use it.
    writer: (hook, layer) -> the rank that writes it. It has only replicated hooks, or with pipeline stages all hooks.
    """

    fields: tuple[RowField, ...]
    row_bytes: int
    writer: Mapping[Place, int]

    def find(self, hook: str, layer: int) -> RowField | None:
        """The field of one hook and layer; None if it is not selected, or if another rank writes it."""
        return self._by_name.get((hook, layer))

    def taking(self, hook: str, layer: int) -> list[RowField]:
        """The fields computed from the values of one hook and layer: the hook's own field, and fields of probes."""
        return self._by_tap.get((hook, layer), [])

    @cached_property
    def scored(self) -> list[RowField]:
        """The fields of probes, in the order of the row. Fields of autoencoders are not among them."""
        return [f for f in self.fields if isinstance(f.reduction, Probe)]

    @cached_property
    def _by_name(self) -> dict[tuple[str, int], RowField]:
        return {(f.hook, f.layer): f for f in self.fields}

    @cached_property
    def _by_tap(self) -> dict[tuple[str, int], list[RowField]]:
        found: dict[tuple[str, int], list[RowField]] = {}
        for row_field in self.fields:
            found.setdefault((row_field.tapped, row_field.layer), []).append(row_field)
        return found


def hook_reductions(rules: Sequence[tuple[str, str]], selection: Selection, dims: ModelDims, tp: int) -> Reductions:
    """The reduction of each hook that has one.

    rules: (comma-separated patterns, reduction) pairs. The first pattern that matches a hook decides. Wildcards skip
    integer hooks, logits and probes. tp: tensor-parallel size.

    Raises ReduceError for a rule that reduces an integer hook, logits or a probe by name, or names a hook that is not
    captured. Also raises ReduceError for a captured hook that needs a reduction and has none.
    """
    found: dict[str, Reduction | None] = {}
    able = [n for n in selection.row_hooks if dims.hooks[n].dtype != "int32" and not dims.hooks[n].source]
    summarised = summaries()
    for patterns, spec in rules:
        reduction = parse(spec)
        only = reduction.only if reduction is not None else frozenset()
        there = able if reduction is not None else selection.hooks
        fitting = [n for n in there if (n in only if only else n not in summarised)]
        wanted = [p.strip() for p in patterns.split(",") if p.strip()]
        if not wanted:
            raise ReduceError(f"reduce: {patterns!r} names no hook; give a pattern of hooks, as in 'resid_*'")
        for pattern in wanted:
            name = ALIASES.get(pattern, pattern)
            names = fnmatch.filter(fitting, name)
            if not names and set(name) & set("*?["):
                if not fnmatch.filter(HOOKS, name):
                    raise ReduceError(f"reduce: pattern {pattern!r} matches no hook; hooks: {', '.join(HOOKS)}")
                continue
            if not names and name in selection.hooks:
                fix = "leave it out or give it 'none'"
                if name in summarised:
                    fix = f"give it {summarised[name].forms[0]}, as in {summarised[name].example!r}"
                raise ReduceError(f"reduce: {pattern} cannot have the reduction {spec!r}; {fix}")
            if not names:
                near = suggest(pattern, selection.hooks)
                raise ReduceError(f"reduce: {pattern!r} is not captured{near}; captured: {', '.join(selection.hooks)}")
            for hook in names:
                if hook not in found:
                    shard = shard_of(dims.hooks[hook], dims, tp, 0)
                    layers = selection.hooks[hook]
                    found[hook] = reduction and reduction.bind(hook, layers, shard.width, shard.shards)
    for hook, kind in summarised.items():
        if hook in selection.hooks and found.get(hook) is None:
            how = {hook: kind.example}
            raise ReduceError(f"hooks: {hook} can only be captured with a reduction; give one in reduce, as in {how}")
    return {name: reduction for name, reduction in found.items() if reduction is not None}


def row_layouts(
    selection: Selection,
    dims: ModelDims,
    dtype: str,
    tp: int = 1,
    reductions: Reductions | None = None,
    stages: Sequence[range] = (),
) -> tuple[RowLayout, ...]:
    """The row layout of each rank. Fields are ordered by layer, then by hook, and aligned to ROW_ALIGN.

    dtype: dtype of the model ("bfloat16", "float16" or "float32"). tp: tensor-parallel size, the number of ranks
    without pipeline stages. stages: the layers of each rank's pipeline stage, () without stages. The rows of every rank
    have `mrope_positions`, because the kernel that writes the header writes them too.
    """
    order = sorted(
        (
            (layer, list(dims.hooks).index(name), name)
            for name, layers in selection.row_hooks.items()
            for layer in layers
        )
    )
    fields = []
    for layer, _, name in order:
        hook = dims.hooks[name]
        width, reduction = shard_of(hook, dims, tp, 0).width, (reductions or {}).get(name)
        fields.append(RowField(name, layer, hook_dtype(hook, dtype), width, 0, reduction, hook.source))
    sampled = [HOOKS[name] for name in selection.hooks.keys() - selection.row_hooks.keys()]
    logits = sum(dims.width(hook) * ITEMSIZE[hook_dtype(hook, dtype)] for hook in sampled)
    nbytes = {(f.hook, f.layer): f.nbytes for f in fields}
    writer = writers_of_stages(nbytes, dims, stages) if stages else writers_of_whole(nbytes, logits, dims, tp)

    def writes(rank: int, f: RowField) -> bool:
        owner = shard_of(dims.hooks[f.hook], dims, tp, rank).owner
        return writer.get((f.hook, f.layer), rank if owner else None) == rank or f.hook == AXES

    packed = [_pack([f for f in fields if writes(rank, f)]) for rank in range(len(stages) or tp)]
    longest = max(nbytes for _, nbytes in packed)
    return tuple(RowLayout(mine, longest, writer) for mine, _ in packed)


def _pack(fields: Sequence[RowField]) -> tuple[tuple[RowField, ...], int]:
    """Assign byte offsets to fields. Returns (the fields with offsets, bytes per row)."""
    offset, packed = HEADER_BYTES, []
    for row_field in fields:
        packed.append(replace(row_field, offset=offset))
        offset += math.ceil(row_field.nbytes / ROW_ALIGN) * ROW_ALIGN
    return tuple(packed), math.ceil(offset / ROW_BYTES_ALIGN) * ROW_BYTES_ALIGN


@dataclass(frozen=True)
class ArraySpec:
    """One array of a store, and the part of it that one rank writes.

    A hook array is `[layers, tokens, width]`. With `layers=()` the hook exists once, and the layer axis has length 1. A
    per-sample array (`per_sample=True`: logits) is `[samples, width]`. For names in `hooks.HOOKS`, `layers` and
    `per_sample` follow the hook's scope: a hook that exists once or per sample has `layers=()`.

    layers, width: of the whole array. reduce: settings of the reduction (docs/FORMAT.md, section 11), None without one.
    shards: number of files per segment, into which the array is split. rank: index of this rank's file. part_layers: 0
    splits the width: each file has `width / shards` columns. Otherwise the layers are split: each file has
    `part_layers` layers, beginning at index `rank * part_layers`, and the last file has the rest.

    Raises ValueError for a name, dtype or split that the format cannot hold.
    """

    name: str
    dtype: str
    layers: tuple[int, ...]
    width: int
    shards: int = 1
    rank: int = 0
    per_sample: bool = False
    reduce: Mapping[str, Any] | None = None
    part_layers: int = 0

    def __post_init__(self) -> None:
        scope = HOOKS[self.name].scope if self.name in HOOKS else None
        object.__setattr__(self, "layers", () if scope in ("once", "sampled") else tuple(map(int, self.layers)))
        object.__setattr__(self, "per_sample", self.per_sample or scope == "sampled")
        if not _NAME.match(self.name) or self.name in RESERVED:
            raise ValueError(f"array name {self.name!r} cannot be stored: use letters, digits, '_', '-', '.'")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"array {self.name!r}: dtype {self.dtype!r} is unknown: use one of {', '.join(ITEMSIZE)}")
        if self.part_layers and (self.per_sample or -(-self.n_layers // self.part_layers) != self.shards):
            raise ValueError(
                f"array {self.name!r}: {self.n_layers} layers in parts of {self.part_layers} do not make"
                f" {self.shards} shards"
            )
        if self.width < 1 or self.shards < 1 or self.width % self.slices:
            raise ValueError(f"array {self.name!r}: width {self.width} does not split into {self.shards} shards")
        if not 0 <= self.rank < self.shards:
            raise ValueError(
                f"array {self.name!r}: rank {self.rank} is outside its {self.shards} shards;"
                " an unsharded array has only rank 0"
            )
        if self.per_sample and self.layers:
            raise ValueError(f"array {self.name!r}: a per-sample array has no layers, got {self.layers}")
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"array {self.name!r}: layers must ascend without repeats, got {self.layers}")

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def n_layers(self) -> int:
        """Length of the layer axis of the whole array (1 for a hook that exists once)."""
        return max(1, len(self.layers))

    @property
    def slices(self) -> int:
        """Number of files over which the width is split."""
        return 1 if self.part_layers else self.shards

    @property
    def local_width(self) -> int:
        """Columns in this rank's file."""
        return self.width // self.slices

    @property
    def shard_layers(self) -> int:
        """Layers in each file except the last."""
        return self.part_layers or self.n_layers

    @property
    def first_layer(self) -> int:
        """Index in `layers` of the first layer in this rank's file."""
        return self.rank * self.part_layers

    @property
    def local_layers(self) -> int:
        """Layers in this rank's file."""
        return min(self.shard_layers, self.n_layers - self.first_layer)

    @property
    def token_bytes(self) -> int:
        """Uncompressed bytes of one token, or one sample, in this rank's file."""
        return self.local_layers * self.local_width * self.itemsize

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; `ArraySpec(**d)` rebuilds it."""
        return {**asdict(self), "layers": list(self.layers)}


@dataclass(frozen=True)
class PayloadLayout:
    """The payload that one rank sends for a capture, and how it is stored.

    The payload of a chunk of n rows holds the arrays in order, except per-sample arrays. Array j is a C-order `[local
    layers, n, local width]` block at byte `bases[j] * n`. The headers of the n rows, each HEADER_SENT_BYTES long, begin
    at byte `header_base * n`. Samples of per-sample arrays are sent in separate payloads.

    arrays: the arrays that this rank writes. chunk_tokens: rows of a full chunk. segment_tokens: rows of a full shard.
    codec: a name in `codecs.CODECS`. elsewhere: on rank 0, the arrays that only other ranks write; on others ().

    Raises ValueError for values that the format cannot hold.
    """

    arrays: tuple[ArraySpec, ...]
    chunk_tokens: int = 128
    segment_tokens: int = 1024
    codec: str = "zstd"
    elsewhere: tuple[ArraySpec, ...] = ()

    def __post_init__(self) -> None:
        chunk, segment = self.chunk_tokens, self.segment_tokens
        names = [(a.name, a.rank) for a in (*self.arrays, *self.elsewhere)]
        if len(set(names)) != len(names):
            raise ValueError(f"array names repeat: {names}")
        if chunk < 1:
            raise ValueError(f"chunk_tokens {chunk} is too small: use 1 or more, 128 by default")
        if segment < chunk or segment % chunk:
            raise ValueError(f"segment_tokens {segment} must be a multiple of chunk_tokens {chunk}")
        if self.codec not in CODECS:
            raise ValueError(f"codec {self.codec!r} is unknown: use one of {', '.join(CODECS)}")

    @cached_property
    def bases(self) -> tuple[int, ...]:
        """Byte offset of each array in a payload of one row; 0 for per-sample arrays."""
        found, at = [], 0
        for spec in self.arrays:
            found.append(0 if spec.per_sample else at)
            at += 0 if spec.per_sample else spec.token_bytes
        return tuple(found)

    def find(self, name: str) -> tuple[ArraySpec, int] | None:
        """An array and its entry in `bases`; None if this rank does not write it."""
        found = zip(self.arrays, self.bases, strict=True)
        return next(((spec, base) for spec, base in found if spec.name == name), None)

    @cached_property
    def header_base(self) -> int:
        """Byte offset of the row header in a payload of one row."""
        return sum(a.token_bytes for a in self.arrays if not a.per_sample)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of a payload of one row, header included."""
        return self.header_base + HEADER_SENT_BYTES

    @property
    def has_samples(self) -> bool:
        """Whether there is a per-sample array."""
        return any(a.per_sample for a in self.arrays)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict for `from_json`."""
        return {
            "arrays": [a.to_json() for a in self.arrays],
            "chunk_tokens": self.chunk_tokens,
            "segment_tokens": self.segment_tokens,
            "codec": self.codec,
            "elsewhere": [a.to_json() for a in self.elsewhere],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PayloadLayout:
        """Rebuild a layout from the result of `to_json`."""
        arrays = {name: tuple(ArraySpec(**a) for a in values[name]) for name in ("arrays", "elsewhere")}
        return cls(**{**values, **arrays})
