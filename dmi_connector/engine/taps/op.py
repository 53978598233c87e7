# SPDX-License-Identifier: Apache-2.0
"""The custom ops of taps.

    dmi::tap        writes values into this step's paged rows, reduced if selected
    dmi::tap_header writes row headers where positions have several axes (inputs.py)
    dmi::tap_join   makes the model wait for the previous tap (overlap.py)
    dmi::tap_end    ends a step's taps: reduces what they deferred (deferred.py), copies scores (host_scores.py)

Each op mutates a one-element token buffer. The mutation keeps torch.compile from removing or reordering the op, at no
cost.
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
from dmi_connector.engine.taps.overlap import captured_branch
from dmi_connector.reduce import Reduction

logger = logging.getLogger("vllm.dmi_connector")

_LIB = torch.library.Library("dmi", "FRAGMENT")
_TAGS = (torch.Tag.flexible_layout,)
"""Tags of the ops. Without them Inductor copies values whose layout differs from the traced one."""
_LIB.define(
    "tap(Tensor[] values, Tensor(a!) token, Tensor place, int[] offsets, bool beside, str cache_layer) -> ()",
    tags=_TAGS,
)
_LIB.define(
    "tap_header(Tensor ids, Tensor positions, Tensor(a!) token, Tensor place, int[] offsets, str cache_layer) -> ()",
    tags=_TAGS,
)
_LIB.define("tap_join(Tensor(a!) token) -> ()", tags=_TAGS)
_LIB.define("tap_end(Tensor like, Tensor(a!) token, Tensor place, str cache_layer) -> ()", tags=_TAGS)

_REDUCE_TOKENS, _LEAST_TOKENS = 1024, 64
"""Default and minimum number of tokens that torch reduces at a time. It reduces fewer than the default if one value
would need more than SCRATCH, because vLLM's memory profile does not include the memory of encoders.
"""


@dataclass(frozen=True)
class Tap:
    """Writes one set of values.

    at_once: maximum number of tokens per write. deferred: the buffer of values that are reduced at the end of the step.
    """

    writer: RowWriter
    at_once: int
    deferred: DeferredReductions | None

    def write(self, rows: torch.Tensor, slots: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """Write `values[i][t]` to row `slots[t]`."""
        tokens = values[0].shape[0]
        if self.deferred is not None:  # all at once: a row of the buffer belongs to a token of the step
            self.writer(rows, slots, values, self.deferred.buffer)
        elif tokens <= self.at_once:
            self.writer(rows, slots, values)
        else:
            for first in range(0, tokens, self.at_once):
                self.writer(rows, slots[first:], [v[first : first + self.at_once] for v in values])


@dataclass(eq=False)
class Place:
    """The arguments of a batch's taps that cannot be passed to the op through the graph.

    start: byte offset in a row to which offsets are relative. layer: layer number, for reductions. reductions: by byte
    offset in a row. deferred, coverage: of the model. taps: the taps that have run.
    """

    start: int
    layer: int
    reductions: Mapping[int, Reduction]
    deferred: DeferredReductions
    coverage: Coverage = field(default_factory=Coverage)
    taps: dict[tuple[object, ...], Tap] = field(default_factory=dict)

    def tap(self, values: Sequence[torch.Tensor], offsets: Sequence[int]) -> Tap:
        """The tap that writes these values at `offsets` of its rows."""
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
"""Address of the tensor that stands for a place -> the place. The model's taps own the places.

Graphs of equal layers must be equal, so that vLLM compiles one for all of them. A number or a layer's name would be a
constant of its graph, but a tensor is an input. Its value cannot identify the place: reading it from a GPU
synchronises, which is an error while a CUDA graph is captured. A CPU tensor could be read. But it would be an input on
another device than the values, which was not tested on a GPU with Inductor and CUDA graphs.

Tensors of live models have different addresses, and the places of a freed model go with it. A tensor that was copied or
moved, as by `model.to()`, has no place: the op ends with a KeyError and writes no row.
"""


def stand_for(tensor: torch.Tensor, place: Place) -> None:
    """Let a tensor stand for a place. Graphs take it as an input: see `_PLACES`."""
    _PLACES[tensor.data_ptr()] = place


def rows_and_slots(cache_layer: str, first: bool = False) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(rows, slots of this step's tokens). None in a profiling run, when there is no cache yet, and outside a forward.

    first: this is the first tap of a forward.
    """
    if not forward_context.is_forward_context_available():
        return None
    forward = forward_context.get_forward_context()
    memory = forward.no_compile_layers.get(cache_layer)
    return None if memory is None else memory.rows_and_slots(forward, first)


def _tap(
    values: list[torch.Tensor],
    token: torch.Tensor,
    place: torch.Tensor,
    offsets: list[int],
    beside: bool,
    cache_layer: str,
) -> None:
    """Write `values` into this step's rows.

    values: [tokens, width] each. offsets: bytes from the start of the place. beside: the values are not overwritten
    until the next tap, so this tap may run on a branch.
    """
    where = _PLACES[place.data_ptr()]
    if not forward_context.is_forward_context_available():
        return  # values outside a forward do not belong to a row
    where.coverage.wrote(where.start, offsets, values[0].shape[0], forward_context.get_forward_context())
    first = where.start + offsets[0] == where.coverage.first_at
    found = rows_and_slots(cache_layer, first)
    if found is None:
        return
    rows, slots = found
    if first and where.coverage.poisons:
        poison(rows, slots[: values[0].shape[0]])
    known = len(where.taps)
    tap = where.tap(values, offsets)
    branch = captured_branch(rows.device) if beside else None
    if branch is None:
        tap.write(rows, slots, values)
    else:
        forward = forward_context.get_forward_context()
        branch.join(forward)
        with branch.beside(forward, values):
            tap.write(rows, slots, values)
    if len(where.taps) > known and rows.is_cuda and not torch.cuda.is_current_stream_capturing():
        compile_others(where, rows, values, offsets)


def _tap_header(
    ids: torch.Tensor, positions: torch.Tensor, token: torch.Tensor, place: torch.Tensor, offsets: list[int], layer: str
) -> None:
    """Write token id, position in the request, and position on each axis.

    ids: int [tokens]. positions: int [axes, tokens]. After an image they differ from the position in the request, which
    is read from the batch metadata. vLLM assigns slots by the same positions.
    """
    at = positions[0]
    if forward_context.is_forward_context_available():
        memory = forward_context.get_forward_context().no_compile_layers.get(layer)
        planned = None if memory is None or memory.step is None else memory.step.positions
        if planned is not None and len(planned) >= len(ids):  # neither is there in a profiling run
            at = planned[: len(ids)]
    values = [value.to(torch.int32) for value in (ids[:, None], at[:, None], positions.T)]
    _tap(values, token, place, offsets, False, layer)


def compile_others(place: Place, rows: torch.Tensor, values: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
    """Compile the kernels that smaller and larger steps need, by running them on padding, which they skip.

    Otherwise the first prompt would wait for Triton. A failure is logged, and the first prompt then compiles the
    kernels.
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
        logger.warning("dmi_connector: kernels could not be compiled ahead (%s: %s)", type(error).__name__, error)


def _tap_join(token: torch.Tensor) -> None:
    """Make the model wait for the previous tap, if it runs on a branch."""
    if branch := captured_branch(token.device):
        branch.join(forward_context.get_forward_context())


def _tap_end(like: torch.Tensor, token: torch.Tensor, place: torch.Tensor, cache_layer: str) -> None:
    """End the taps of a step. like: a tensor with one entry per token."""
    if found := rows_and_slots(cache_layer):
        forward, tokens = forward_context.get_forward_context(), like.shape[0]
        if branch := captured_branch(like.device):
            branch.join(forward)
        _PLACES[place.data_ptr()].deferred.reduce(*found, tokens)
        memory = forward.no_compile_layers[cache_layer]
        if memory.scores is not None:
            memory.scores.copy(*found, memory.slots_in_cache(forward)[:tokens])


def tokens_at_once(values: Sequence[torch.Tensor], reductions: Sequence[Reduction | None]) -> int:
    """Maximum number of tokens per write. On a GPU it is unlimited, unless projections would allocate too much."""
    if not any(reductions):
        return sys.maxsize
    pairs = zip(values, reductions, strict=True)
    scratch = [r.scratch(v.shape[1], str(v.dtype).removeprefix("torch.")) for v, r in pairs if r is not None]
    # A large autoencoder is limited to fewer tokens.
    least = min(_REDUCE_TOKENS, max(_LEAST_TOKENS, SCRATCH // max(1, *scratch)))
    if not values[0].is_cuda:
        return least
    return max(least, SCRATCH // sum(scratch)) if any(scratch) else sys.maxsize


for _name, _op in (("tap", _tap), ("tap_header", _tap_header), ("tap_join", _tap_join), ("tap_end", _tap_end)):
    for _key in ("CPU", "CUDA"):
        _LIB.impl(_name, _op, _key)
    _LIB.impl(_name, lambda *_: None, "Meta")
