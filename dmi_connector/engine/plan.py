# SPDX-License-Identifier: Apache-2.0
"""The payload of a capture: which bytes of a row go where when a chunk of rows is gathered in store layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dmi_connector.engine.context import CaptureContext
from dmi_connector.hooks import HOOKS, hook_dtype
from dmi_connector.layout import shard_of
from dmi_connector.store.schema import ArraySpec

HEADER = (0, 8)
"""Byte range of token id and position (two int32) in a row; it travels last in every payload, for the check."""


@dataclass(frozen=True)
class Plan:
    """Payload of `n` rows: array after array, each a C-order [layers, n, local width] block, then n headers.

    arrays: what this rank writes, in payload order. pieces: int64 [segments, 3] with the byte offset in a row, the
    byte count, and the byte offset in the payload divided by n. token_bytes: payload bytes of one row.
    """

    arrays: tuple[ArraySpec, ...]
    pieces: np.ndarray
    token_bytes: int
    logits: ArraySpec | None

    @cached_property
    def header_base(self) -> int:
        """Payload offset of the headers divided by n."""
        return self.token_bytes - HEADER[1]


def make_plan(context: CaptureContext, hooks: dict[str, tuple[int, ...]], rank: int) -> Plan:
    """Plan for a capture of `hooks` on tensor-parallel rank `rank`; hooks another rank owns are left out."""
    arrays, pieces, base = [], [], 0
    logits = None
    for name, layers in hooks.items():
        hook = HOOKS[name]
        shard = shard_of(hook, context.dims, context.tp, rank)
        dtype = hook_dtype(hook, context.dtype)
        if hook.scope == "sampled":
            logits = ArraySpec(name, dtype, (), context.dims.width(hook)) if rank == 0 else None
            continue
        if not shard.owner:
            continue
        found = [context.layout.find(name, layer) for layer in layers]
        segments = [s for s in found if s is not None]
        assert len(segments) == len(layers) > 0, (name, layers)
        for segment in segments:
            pieces.append((segment.offset, segment.nbytes, base))
            base += segment.nbytes
        (stored_dtype, stored_width), reduction = segments[0].stored, segments[0].reduction
        reduce = None
        if reduction is not None:
            reduce = {**reduction.settings(), "dtype": dtype, "width": shard.width * shard.shards}
        width = stored_width * shard.shards
        arrays.append(ArraySpec(name, stored_dtype, layers, width, shard.shards, shard.shard, reduce=reduce))
    pieces.append((HEADER[0], HEADER[1], base))
    return Plan(tuple(arrays), np.asarray(pieces, dtype=np.int64), base + HEADER[1], logits)
