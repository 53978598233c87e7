# SPDX-License-Identifier: Apache-2.0
"""Computes which bytes of a row are copied to which place of a payload, the bytes of a gathered chunk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dmi_connector.codecs import CODECS
from dmi_connector.engine.context import CaptureContext
from dmi_connector.hooks import hook_dtype
from dmi_connector.layout import HEADER_SENT_BYTES, ArraySpec, PayloadLayout, RowField
from dmi_connector.option_values import OptionError
from dmi_connector.ranks import shard_of


@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """The payload of one selection of hooks on one rank.

    payload: its arrays, with logits last. table: int64 [fields, 3], with a line for each copied field of a row: byte
    offset in the row, number of bytes, and byte offset in the payload of a single row. In the payload of n rows, the
    offset is n times as large. The last line is the header.
    """

    payload: PayloadLayout
    table: np.ndarray

    @property
    def logits(self) -> ArraySpec | None:
        """The array of logits, if this rank writes one."""
        last = self.payload.arrays[-1] if self.payload.arrays else None
        return last if last is not None and last.per_sample else None


def run_length(writers: Sequence[int | None]) -> int:
    """The largest n for which each run of layers [i * n, (i + 1) * n) has one writer. writers: rank of each layer."""
    changes = [n for n in range(1, len(writers)) if writers[n] != writers[n - 1]]
    return math.gcd(*changes) if changes else len(writers)


def chunk_layout(context: CaptureContext, hooks: Mapping[str, tuple[int, ...]], rank: int) -> ChunkLayout:
    """The layout for a capture of `hooks` on rank `rank`.

    Fields that another rank writes are omitted. If ranks divide the layers of a hook, its array has one file per run of
    layers (`run_length`).
    Raises OptionError if a chunk is too large for the codec, or if the size of a field is not a multiple of 4 bytes.
    """
    arrays: list[ArraySpec] = []
    elsewhere: list[ArraySpec] = []
    logits: list[ArraySpec] = []
    table: list[tuple[int, int, int]] = []
    base = 0
    writer = context.layout.writer
    for name, layers in hooks.items():
        hook = context.dims.hooks[name]
        dtype = hook_dtype(hook, context.dtype)
        if hook.scope == "sampled":
            logits.append(ArraySpec(name, dtype, (), context.dims.width(hook)))
            continue
        shard = shard_of(hook, context.dims, context.tp, rank)
        writers = [writer.get((name, layer), rank if shard.owner else None) for layer in layers]
        size = run_length(writers)
        parts = [n for n, who in enumerate(writers[::size]) if who == rank]
        if not parts and not ((name, layers[0]) in writer and rank == 0):
            continue
        rows = [context.layouts[writer.get((name, layer), rank)] for layer in layers]
        fields = [f for of_row, layer in zip(rows, layers, strict=True) if (f := of_row.find(name, layer)) is not None]
        assert len(fields) == len(layers) > 0, (name, layers)
        (stored_dtype, stored_width), reduction = fields[0].stored, fields[0].reduction
        reduce = None
        if reduction is not None:
            reduce = {**reduction.settings(), "dtype": dtype, "width": shard.width * shard.shards}
        width, whole = stored_width * shard.shards, size == len(layers)
        axis = layers if hook.layered else ()
        spec = ArraySpec(name, stored_dtype, axis, width, shard.shards, shard.shard, reduce=reduce)
        if not whole:
            spec = replace(spec, shards=len(writers[::size]), rank=0, part_layers=size)
        for part in parts:
            for row_field in fields[part * size : (part + 1) * size]:
                _check_words(row_field, dtype)
                table.append((row_field.offset, row_field.nbytes, base))
                base += row_field.nbytes
            arrays.append(spec if whole else replace(spec, rank=part))
        if not parts:
            elsewhere.append(spec)
    options = context.options
    payload = PayloadLayout(
        (*arrays, *(logits if rank == 0 else ())),
        options.chunk_tokens,
        options.segment_tokens,
        options.codec,
        tuple(elsewhere),
    )
    _check_chunks(payload)
    assert base == payload.header_base
    table.append((0, HEADER_SENT_BYTES, base))
    return ChunkLayout(payload, np.asarray(table, dtype=np.int64))


def _check_words(row_field: RowField, dtype: str) -> None:
    """Raise OptionError for a field whose size is not a multiple of 4 bytes, because the gather copies such words."""
    if row_field.nbytes % 4:
        raise OptionError(
            f"hooks: {row_field.hook} has {row_field.stored[1]} values per token on a rank, and an odd number of "
            f"{dtype} values cannot be copied; leave it out, reduce it to int8, or set dtype to float32"
        )


def _check_chunks(payload: PayloadLayout) -> None:
    """Raise OptionError if `chunk_tokens` rows of one layer in one file, a Zarr chunk, are too large for the codec."""
    for spec in payload.arrays:
        most = CODECS[payload.codec].most_bytes // (spec.local_width * spec.itemsize)
        if payload.chunk_tokens > most:
            raise OptionError(
                f"chunk_tokens: {payload.chunk_tokens} rows of {spec.name} are too large for a chunk with codec"
                f" {payload.codec!r}; give at most {most}, or codec 'none'"
            )


def sent_bytes(context: CaptureContext) -> list[int]:
    """Bytes of a row of all selected hooks in a payload, by rank. Raises OptionError as `chunk_layout` does."""
    hooks = context.selection.hooks
    return [chunk_layout(context, hooks, rank).payload.token_bytes for rank in range(context.ranks)]
