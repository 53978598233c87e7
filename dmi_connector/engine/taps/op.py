# SPDX-License-Identifier: Apache-2.0
"""The custom ops of taps.

    dmi::tap        writes values to the rows of this step's tokens; reduces hooks that have a reduction
    dmi::tap_header writes row headers in models whose positions have several axes (inputs.py)
    dmi::tap_end    runs after a step's last tap: reduces deferred values (deferred.py), copies scores (host_scores.py)

Each op declares that it mutates the one-element tensor `token`, although it does not write to this tensor. The
declaration keeps torch.compile from removing or reordering the ops.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from vllm import forward_context

from dmi_connector.engine.kernels.launch import DECODE_TOKENS
from dmi_connector.engine.kernels.row_writer import RowWriter
from dmi_connector.engine.model.coverage import Coverage, poison
from dmi_connector.engine.taps.deferred import SCRATCH, DeferredReductions
from dmi_connector.reduce import Reduction

logger = logging.getLogger("vllm.dmi_connector")

_LIB = torch.library.Library("dmi", "FRAGMENT")
_TAGS = (torch.Tag.flexible_layout,)
"""Tags of the ops. Without `flexible_layout` Inductor copies values whose strides differ from those in the trace."""
_LIB.define(
    "tap(Tensor[] values, Tensor(a!) token, Tensor place, int[] offsets, str cache_layer) -> ()",
    tags=_TAGS,
)
_LIB.define(
    "tap_header(Tensor ids, Tensor positions, Tensor(a!) token, Tensor place, int[] offsets, str cache_layer) -> ()",
    tags=_TAGS,
)
_LIB.define("tap_end(Tensor like, Tensor(a!) token, Tensor place, str cache_layer) -> ()", tags=_TAGS)

_REDUCE_TOKENS, _LEAST_TOKENS = 1024, 64
"""Maximum and minimum number of tokens that encoders reduce at a time on a CPU. They reduce fewer than the maximum if
one of them would allocate more than SCRATCH bytes. A GPU has the same minimum, but not this maximum.
"""


@dataclass(frozen=True)
class Tap:
    """Writes the values of one call of `dmi::tap`.

    writer: writes the values of up to `at_once` tokens. deferred: the buffer for values that are reduced at the end of
    the step; None if no value is deferred.
    """

    writer: RowWriter
    at_once: int
    deferred: DeferredReductions | None

    def write(self, rows: torch.Tensor, slots: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """Write `values[i][t]` to row `slots[t]`.

        rows: uint8 [slots, row bytes]. slots: int64 [>= tokens]. values: [tokens, width] each.
        """
        tokens = values[0].shape[0]
        if self.deferred is not None:  # in one write: row t of the buffer belongs to token t of the step
            self.writer(rows, slots, values, self.deferred.buffer)
        elif tokens <= self.at_once:
            self.writer(rows, slots, values)
        else:
            for first in range(0, tokens, self.at_once):
                self.writer(rows, slots[first:], [v[first : first + self.at_once] for v in values])


@dataclass(eq=False)
class Place:
    """Arguments of `dmi::tap` that a compiled graph does not contain (see `_PLACES`), shared by the taps of a
    `TapBatch`.

    start: byte offset in a row; the offsets in calls of `dmi::tap` are relative to it. layer: the layer whose values
    are reduced. reductions: byte offset in a row -> reduction of the value there. deferred, coverage: those of the
    model. taps: (whether the tap defers, *offsets) -> the tap, made at the first call.
    """

    start: int
    layer: int
    reductions: Mapping[int, Reduction]
    deferred: DeferredReductions
    coverage: Coverage = field(default_factory=Coverage)
    taps: dict[tuple[object, ...], Tap] = field(default_factory=dict)

    def tap(self, values: Sequence[torch.Tensor], offsets: Sequence[int]) -> Tap:
        """The tap that writes these values. offsets: byte offset of each value in a row, relative to `start`."""
        starts = [self.start + offset for offset in offsets]
        reductions = [self.reductions.get(start) for start in starts]
        defers = any(reductions) and self.deferred.takes(values[0].shape[0])
        key = (defers, *offsets)
        if key not in self.taps:
            deferred = self.deferred if defers else None
            places = deferred.places(starts) if deferred is not None else ()
            widths = [value.shape[1] for value in values]
            writer = RowWriter(widths, values[0].dtype, starts, reductions, self.layer, places)
            self.taps[key] = Tap(writer, tokens_at_once(values, reductions), deferred)
        return self.taps[key]


_PLACES: weakref.WeakValueDictionary[int, Place] = weakref.WeakValueDictionary()
"""Address of a tensor -> the `Place` that the tensor identifies. The model's taps own the places.

Equal layers must have equal graphs, so that vLLM compiles one graph for all of them. A number or a layer's name would
be a constant of the graph, and differ between layers. A tensor is an input of the graph. Its address identifies the
place, because its value cannot: reading a value from a GPU synchronises, which is an error during CUDA graph capture.
A CPU tensor could be read, but it would be on another device than the values. Such inputs were not tested with Inductor
and CUDA graphs.

Tensors of live models have different addresses. The places of a model are freed with the model. A tensor that was
copied or moved, as by `model.to()`, has no place: the op raises KeyError and writes no row.
"""


def stand_for(tensor: torch.Tensor, place: Place) -> None:
    """Register the tensor that identifies `place` in compiled graphs, see `_PLACES`."""
    _PLACES[tensor.data_ptr()] = place


def rows_and_slots(cache_layer: str, first: bool = False) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(rows, uint8 [slots, row bytes]; slots of this forward's tokens, int64 [>= tokens]).

    None outside a forward, and in vLLM's profiling run, because rows have no memory yet. cache_layer: the name of the
    layer that has the rows (`CaptureContext.cache_layer`). first: whether this is the first tap of a forward.
    """
    if not forward_context.is_forward_context_available():
        return None
    forward = forward_context.get_forward_context()
    memory = forward.no_compile_layers.get(cache_layer)
    return None if memory is None else memory.rows_and_slots(forward, first)


def _tap(
    values: list[torch.Tensor], token: torch.Tensor, place: torch.Tensor, offsets: list[int], cache_layer: str
) -> None:
    """Write `values` to the rows of this step's tokens.

    values: [tokens, width] each, of one dtype. place: the tensor that identifies the `Place`. offsets: byte offset of
    each value, relative to `Place.start`.
    """
    where = _PLACES[place.data_ptr()]
    if not forward_context.is_forward_context_available():
        return  # outside a forward no token has a row
    where.coverage.wrote(where.start, offsets, values[0].shape[0], forward_context.get_forward_context())
    first = where.start + offsets[0] == where.coverage.first_at
    found = rows_and_slots(cache_layer, first)
    if found is None:
        return
    rows, slots = found
    if first and where.coverage.poisons:
        poison(rows, slots[: values[0].shape[0]])
    known = len(where.taps)
    where.tap(values, offsets).write(rows, slots, values)
    if len(where.taps) > known and rows.is_cuda and not torch.cuda.is_current_stream_capturing():
        compile_others(where, rows, values, offsets)


def _tap_header(
    ids: torch.Tensor, positions: torch.Tensor, token: torch.Tensor, place: torch.Tensor, offsets: list[int], layer: str
) -> None:
    """Write the token id, the position in the request, and the position on each axis of M-RoPE.

    ids: int [tokens]. positions: int [axes, tokens], the positions on the axes. After an image these differ from the
    position in the request. So the position in the request is read from the batch metadata, from which vLLM also
    computes slots.
    """
    at = positions[0]
    if forward_context.is_forward_context_available():
        memory = forward_context.get_forward_context().no_compile_layers.get(layer)
        planned = None if memory is None or memory.step is None else memory.step.positions
        if planned is not None and len(planned) >= len(ids):  # not in a profiling run, which has no batch metadata
            at = planned[: len(ids)]
    values = [value.to(torch.int32) for value in (ids[:, None], at[:, None], positions.T)]
    _tap(values, token, place, offsets, layer)


def compile_others(place: Place, rows: torch.Tensor, values: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
    """Compile the kernels for smaller and larger steps, by running them on padding. They write nothing for padding.

    Otherwise the first prompt would wait for Triton. If this fails, a warning is logged, and the first prompt compiles
    the kernels.

    rows: uint8 [slots, row bytes]. values: [tokens, width] each; their contents are not read. offsets: see `Place.tap`.
    """
    counts = {1, DECODE_TOKENS + 1}
    if any(place.start + offset in place.reductions for offset in offsets):
        counts.add(place.deferred.tokens + 1)
    try:
        for tokens in sorted(counts):
            padding = [value.new_zeros(tokens, value.shape[1]) for value in values]
            slots = torch.full((tokens,), -1, dtype=torch.int64, device=rows.device)
            place.tap(padding, offsets).write(rows, slots, padding)
    except Exception as error:
        logger.warning(
            "dmi_connector: kernels could not be compiled ahead of time (%s: %s)", type(error).__name__, error
        )


def _tap_end(like: torch.Tensor, token: torch.Tensor, place: torch.Tensor, cache_layer: str) -> None:
    """Reduce deferred values and copy scores, after the last tap of a step. like: a tensor [tokens, ...]."""
    if found := rows_and_slots(cache_layer):
        forward, tokens = forward_context.get_forward_context(), like.shape[0]
        _PLACES[place.data_ptr()].deferred.reduce(*found, tokens)
        memory = forward.no_compile_layers[cache_layer]
        if memory.scores is not None:
            memory.scores.copy(*found, memory.slots_in_cache(forward)[:tokens])


def tokens_at_once(values: Sequence[torch.Tensor], reductions: Sequence[Reduction | None]) -> int:
    """Maximum number of tokens per write. A GPU has no limit unless encoders would allocate more than SCRATCH bytes."""
    if not any(reductions):
        return sys.maxsize
    pairs = zip(values, reductions, strict=True)
    scratch = [r.scratch(v.shape[1], str(v.dtype).removeprefix("torch.")) for v, r in pairs if r is not None]
    # A large autoencoder allocates much per token, so it gets fewer tokens.
    least = min(_REDUCE_TOKENS, max(_LEAST_TOKENS, SCRATCH // max(1, *scratch)))
    if not values[0].is_cuda:
        return least
    return max(least, SCRATCH // sum(scratch)) if any(scratch) else sys.maxsize


for _name, _op in (("tap", _tap), ("tap_header", _tap_header), ("tap_end", _tap_end)):
    for _key in ("CPU", "CUDA"):
        _LIB.impl(_name, _op, _key)
    _LIB.impl(_name, lambda *_: None, "Meta")
