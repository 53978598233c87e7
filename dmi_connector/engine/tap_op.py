# SPDX-License-Identifier: Apache-2.0
"""The custom ops that taps call: `dmi::tap` writes values into this step's paged rows, reduced where that is wanted,
`dmi::tap_end` what the taps of a step have put aside (at_end.py).

While vLLM captures a whole step in one CUDA graph, taps of a compiled model write on a branch beside the model's
kernels (`Branch`): most of what they take is waiting, for the kernel before them and for memory. The next op first lets
the model's stream wait for that of the one before; for one that reduces `dmi::tap_join` does so before the next
attention already (docs/REDUCTIONS.md). Until then nothing may write into the memory of the values: the branch holds
them, so that the allocator does not hand it out, and the compiled model overwrites nothing (`compilation.write_once`).
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from vllm import forward_context
from vllm.config import CUDAGraphMode

from dmi_connector.engine.at_end import SCRATCH, AtEnd
from dmi_connector.engine.kernels import DECODE_TOKENS, RowWriter
from dmi_connector.reduce import Reduction, from_settings

logger = logging.getLogger("vllm.dmi_connector")
_LIB = torch.library.Library("dmi", "FRAGMENT")
# Else Inductor copies values that it would write in another layout than the one that was traced.
_TAGS = (torch.Tag.flexible_layout,)
_LIB.define(
    "tap(Tensor[] values, Tensor(a!) token, Tensor base, int[] offsets, str reductions, bool beside, str layer) -> ()",
    tags=_TAGS,
)
_LIB.define("tap_join(Tensor(a!) token) -> ()", tags=_TAGS)
_LIB.define("tap_end(Tensor like, Tensor(a!) token, Tensor base, str layer) -> ()", tags=_TAGS)
_TOKENS = 1024
"""Tokens that are reduced at a time where torch does it: vLLM's memory profile does not see what encoders allocate."""


class Tap(NamedTuple):
    """What one tap does. at_once: tokens it may write at a time."""

    write: RowWriter
    at_once: int


@dataclass(frozen=True)
class Place:
    """What a `base` tensor stands for: byte offset in a row, number of the layer, and what its model puts aside (the
    model's taps own that, so that its memory goes with the model). taps: those that have run.
    """

    start: int
    layer: int
    at_end: weakref.ref[AtEnd]
    taps: dict[tuple[object, ...], Tap] = field(default_factory=dict)


_PLACES: dict[int, Place] = {}
"""By the tensor's address."""


def stand_for(base: torch.Tensor, place: Place) -> None:
    """Let a tensor stand for a place: graphs of equal layers take it as an input and so are equal."""
    _PLACES[base.data_ptr()] = place


class Pending(NamedTuple):
    """What a branch may be doing yet. forward: vLLM's context of the forward it belongs to. values: what it reads."""

    forward: weakref.ref[object]
    written: torch.cuda.Event
    values: list[torch.Tensor]


class Branch:
    """A branch of the CUDA graph that is being captured: one tap after the other, beside the model's kernels."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pending: Pending | None = None

    @contextmanager
    def beside(self, forward: object, values: list[torch.Tensor]) -> Iterator[None]:
        """What is launched inside comes after all the model has launched, and what the model launches then need not
        wait for it. values: what it reads.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        self._pending = Pending(weakref.ref(forward), self._stream.record_event(), values)

    def join(self, forward: object) -> None:
        """Let the model wait for what was launched on the branch. What an earlier forward left, whose capture failed,
        is forgotten.
        """
        pending, self._pending = self._pending, None
        if pending is not None and pending.forward() is forward:
            torch.cuda.current_stream().wait_event(pending.written)


_branch = functools.cache(Branch)


def _captured_branch(device: torch.device) -> Branch | None:
    """The branch of the whole step of which a CUDA graph is captured just now, None while there is no such thing: that
    of a piece of a model ends before the next tap.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    whole = forward_context.get_forward_context().cudagraph_runtime_mode != CUDAGraphMode.PIECEWISE
    return _branch(device) if whole else None


def _rows_and_slots(layer: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The paged rows and where this step's tokens go; None in a profiling run, when the cache does not exist yet."""
    context = forward_context.get_forward_context()
    owner = context.no_compile_layers.get(layer)
    slots = context.slot_mapping.get(layer) if isinstance(context.slot_mapping, dict) else None
    rows = None if owner is None else owner.rows
    return None if rows is None or slots is None else (rows, slots)


def _tap(
    values: list[torch.Tensor],
    token: torch.Tensor,
    base: torch.Tensor,
    offsets: list[int],
    reductions: str,
    beside: bool,
    layer: str,
) -> None:
    """Write `values` ([tokens, width] each, last dimension contiguous) into this step's rows, at byte `offsets` from
    where `base` says. reductions: "" for none, else a JSON list of one reduction's settings, or null, for each value.
    beside: whether nothing changes the values until the next op, so that they may be written on a branch.
    """
    found = _rows_and_slots(layer)
    if found is None:
        return
    rows, slots = found
    place = _PLACES[base.data_ptr()]
    known = len(place.taps)
    tap, aside = _tap_of(place, values, offsets, reductions)
    branch = _captured_branch(rows.device) if beside else None
    if branch is None:
        _write(tap, aside, rows, slots, values)
    else:
        forward = forward_context.get_forward_context()
        branch.join(forward)
        with branch.beside(forward, values):
            _write(tap, aside, rows, slots, values)
    if len(place.taps) > known and rows.is_cuda and not torch.cuda.is_current_stream_capturing():
        compile_others(place, rows, values, offsets, reductions)


def _tap_of(place: Place, values: list[torch.Tensor], offsets: list[int], reductions: str) -> tuple[Tap, AtEnd | None]:
    """What writes so many tokens of such values, and what it puts some of them aside in."""
    aside = _at_end(place) if reductions else None
    if aside is not None and not aside.takes(values[0].shape[0]):
        aside = None
    key = (reductions, aside is not None, *offsets)
    tap = place.taps.get(key)
    if tap is None:
        starts, chosen = [place.start + offset for offset in offsets], _parsed(reductions)
        widths, places = [value.shape[1] for value in values], aside.places(starts) if aside is not None else ()
        writer = RowWriter(widths, values[0].dtype, starts, chosen, place.layer, places)
        tap = place.taps[key] = Tap(writer, tokens_at_once(values, chosen))
    return tap, aside


def _write(tap: Tap, aside: AtEnd | None, rows: torch.Tensor, slots: torch.Tensor, values: list[torch.Tensor]) -> None:
    tokens = values[0].shape[0]
    if aside is not None:  # in one piece: a row of its buffer belongs to a token of the step
        tap.write(rows, slots, values, aside.buffer)
    elif tokens <= tap.at_once:
        tap.write(rows, slots, values)
    else:
        for first in range(0, tokens, tap.at_once):
            tap.write(rows, slots[first:], [v[first : first + tap.at_once] for v in values])


def compile_others(
    place: Place, rows: torch.Tensor, values: list[torch.Tensor], offsets: list[int], reductions: str
) -> None:
    """Run the kernels that values like these take when there are fewer or more of them: on padding, which they skip.
    Else a first prompt would wait until Triton has compiled them. What fails here is left to that prompt.
    """
    counts = {1, DECODE_TOKENS + 1}
    if reductions:
        counts.add(_at_end(place).tokens + 1)  # more than are put aside
    try:
        for tokens in sorted(counts):
            padding = [value.new_zeros(tokens, value.shape[1]) for value in values]
            slots = torch.full((tokens,), -1, dtype=torch.int64, device=rows.device)
            _write(*_tap_of(place, padding, offsets, reductions), rows, slots, padding)
    except Exception as error:
        logger.warning("dmi_connector: kernels could not be compiled ahead (%s: %s)", type(error).__name__, error)


def _tap_join(token: torch.Tensor) -> None:
    """Let the model wait for the tap before, if that writes on a branch."""
    if branch := _captured_branch(token.device):
        branch.join(forward_context.get_forward_context())


def _tap_end(like: torch.Tensor, token: torch.Tensor, base: torch.Tensor, layer: str) -> None:
    """The last tap of a step is done. like: a tensor with one entry for each token."""
    if found := _rows_and_slots(layer):
        if branch := _captured_branch(like.device):
            branch.join(forward_context.get_forward_context())
        _at_end(_PLACES[base.data_ptr()]).reduce(*found, like.shape[0])


def _at_end(place: Place) -> AtEnd:
    at_end = place.at_end()
    assert at_end is not None, "the model runs, so its taps are there"
    return at_end


def tokens_at_once(values: list[torch.Tensor], reductions: list[Reduction | None]) -> int:
    """How many tokens one call may write: on a GPU any number, unless projections would allocate too much."""
    if not any(reductions):
        return sys.maxsize
    if not values[0].is_cuda:
        return _TOKENS
    pairs = zip(values, reductions, strict=True)
    scratch = sum(r.scratch(v.shape[1], str(v.dtype).removeprefix("torch.")) for v, r in pairs if r is not None)
    return max(_TOKENS, SCRATCH // scratch) if scratch else sys.maxsize


@functools.cache
def _parsed(text: str) -> list[Reduction | None]:
    return [None if settings is None else from_settings(settings) for settings in json.loads(text or "[]")]


for _name, _op in (("tap", _tap), ("tap_join", _tap_join), ("tap_end", _tap_end)):
    for _key in ("CPU", "CUDA"):
        _LIB.impl(_name, _op, _key)
    _LIB.impl(_name, lambda *_: None, "Meta")
