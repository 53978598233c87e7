# SPDX-License-Identifier: Apache-2.0
"""From rows to payloads: which bytes of a row go where when a chunk of rows is gathered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dmi_connector.engine.context import CaptureContext
from dmi_connector.hooks import HOOKS, hook_dtype
from dmi_connector.layout import HEADER_SENT_BYTES, ArraySpec, PayloadLayout, shard_of


@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """The payload of one selection of hooks on one rank.

    payload: its arrays, logits last. table: int64 [fields, 3], one line for each field of a row that is copied: byte
    offset in the row, bytes, byte offset in the payload divided by the rows of the payload. The last line is the
    header.
    """

    payload: PayloadLayout
    table: np.ndarray

    @property
    def logits(self) -> ArraySpec | None:
        """The array of logits, if this rank writes one."""
        last = self.payload.arrays[-1] if self.payload.arrays else None
        return last if last is not None and last.per_sample else None


def chunk_layout(context: CaptureContext, hooks: Mapping[str, tuple[int, ...]], rank: int) -> ChunkLayout:
    """The layout for a capture of `hooks` on tensor-parallel rank `rank`.

    Hooks that another rank writes are left out.
    """
    arrays: list[ArraySpec] = []
    elsewhere: list[ArraySpec] = []
    logits: list[ArraySpec] = []
    table: list[tuple[int, int, int]] = []
    base = 0
    writer = context.layout.writer
    for name, layers in hooks.items():
        hook = HOOKS[name]
        dtype = hook_dtype(hook, context.dtype)
        if hook.scope == "sampled":
            logits.append(ArraySpec(name, dtype, (), context.dims.width(hook)))
            continue
        shard = shard_of(hook, context.dims, context.tp, rank)
        mine = writer[name] == rank if name in writer else shard.owner
        if not mine and not (name in writer and rank == 0):
            continue
        of_rows = context.layouts[writer.get(name, rank)]
        fields = [f for layer in layers if (f := of_rows.find(name, layer)) is not None]
        assert len(fields) == len(layers) > 0, (name, layers)
        for row_field in fields if mine else ():
            assert row_field.nbytes % 4 == 0, f"{name}: {row_field.nbytes} bytes; the gather kernel would cut the row"
            table.append((row_field.offset, row_field.nbytes, base))
            base += row_field.nbytes
        (stored_dtype, stored_width), reduction = fields[0].stored, fields[0].reduction
        reduce = None
        if reduction is not None:
            reduce = {**reduction.settings(), "dtype": dtype, "width": shard.width * shard.shards}
        width = stored_width * shard.shards
        spec = ArraySpec(name, stored_dtype, layers, width, shard.shards, shard.shard, reduce=reduce)
        (arrays if mine else elsewhere).append(spec)
    options = context.options
    payload = PayloadLayout(
        (*arrays, *(logits if rank == 0 else ())),
        options.chunk_tokens,
        options.segment_tokens,
        options.codec,
        tuple(elsewhere),
    )
    assert base == payload.header_base
    table.append((0, HEADER_SENT_BYTES, base))
    return ChunkLayout(payload, np.asarray(table, dtype=np.int64))
