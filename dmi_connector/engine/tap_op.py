# SPDX-License-Identifier: Apache-2.0
"""The custom op that taps call: it reduces values and writes them into this step's paged rows."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

import torch

from dmi_connector.engine.kernels import reduce_rows, write_rows
from dmi_connector.reduce import Reduction, from_settings

_LIB = torch.library.Library("dmi", "FRAGMENT")
_LIB.define("tap(Tensor[] values, Tensor(a!) token, Tensor base, int[] offsets, str reductions, str layer) -> ()")
_TOKENS = 1024
_SCRATCH = 64 << 20
"""Tokens that are reduced at a time where torch does it, and bytes where a kernel does: vLLM's memory profile does not
see what encoders and projections allocate."""


@dataclass(frozen=True)
class Place:
    """What a `base` tensor stands for: byte offset in a row, and number of the layer."""

    start: int
    layer: int


_PLACES: dict[int, Place] = {}
"""By the tensor's address."""


def stand_for(base: torch.Tensor, start: int, layer: int) -> None:
    """Let a tensor stand for a place: graphs of equal layers take it as an input and so are equal."""
    _PLACES[base.data_ptr()] = Place(start, layer)


def _tap(
    values: list[torch.Tensor],
    token: torch.Tensor,
    base: torch.Tensor,
    offsets: list[int],
    reductions: str,
    layer: str,
) -> None:
    """Write `values` ([tokens, width] each, last dimension contiguous) into this step's rows, at byte `offsets` from
    where `base` says. reductions: "" for none, else a JSON list of one reduction's settings, or null, for each value.
    """
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    owner = context.no_compile_layers.get(layer)
    slots = context.slot_mapping.get(layer) if isinstance(context.slot_mapping, dict) else None
    if owner is None or slots is None or owner.rows is None:
        return  # a profiling run: the cache does not exist yet
    place = _PLACES[base.data_ptr()]
    starts = [place.start + offset for offset in offsets]
    if not reductions:
        write_rows(owner.rows, slots, values, starts)
        return
    chosen = _parsed(reductions)
    tokens = tokens_at_once(values, chosen)
    for first in range(0, values[0].shape[0], tokens):
        part = [v[first : first + tokens] for v in values]
        reduce_rows(owner.rows, slots[first:], part, starts, chosen, place.layer)


def tokens_at_once(values: list[torch.Tensor], reductions: list[Reduction | None]) -> int:
    """How many tokens one call may reduce: on a GPU all, unless projections would allocate too much."""
    if not values[0].is_cuda:
        return _TOKENS
    pairs = zip(values, reductions, strict=True)
    scratch = sum(r.scratch(v.shape[1], str(v.dtype).removeprefix("torch.")) for v, r in pairs if r is not None)
    return max(_TOKENS, _SCRATCH // scratch) if scratch else max(1, values[0].shape[0])


@functools.cache
def _parsed(text: str) -> list[Reduction | None]:
    return [None if settings is None else from_settings(settings) for settings in json.loads(text)]


for _key in ("CPU", "CUDA"):
    _LIB.impl("tap", _tap, _key)
_LIB.impl("tap", lambda *_: None, "Meta")
