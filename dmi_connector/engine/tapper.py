# SPDX-License-Identifier: Apache-2.0
"""From values that hooks have found to the ops that write them: what waits for a common write, in a layer (`Group`) and
over several (`Held`), and the call of the op (`Tapper`).

The op mutates a one-element token buffer: that keeps it alive and in order under torch.compile, and costs nothing.
Offsets are counted from the first of the layer, and a tensor stands for where that is: so the graphs of equal layers
are equal, and vLLM compiles one of them.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank

from dmi_connector.engine import tap_op
from dmi_connector.engine.at_end import AtEnd
from dmi_connector.engine.compilation import Compilation
from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.kernels import MAX_VALUES
from dmi_connector.hooks import HOOKS
from dmi_connector.layout import Segment, shard_of

_LASTING = frozenset(("resid_pre", "resid_mid", "q", "k"))
"""Hooks whose values nothing takes over later under torch.compile."""
_HELD_BYTES = 64 << 10
"""Bytes of a token that `Held` keeps: a step of many tokens needs so much more memory for each."""


class Group:
    """Values of one layer that wait for their common write."""

    def __init__(self, tapper: Tapper) -> None:
        self.tapper = tapper
        self.segments: list[Segment] = []
        self.values: list[torch.Tensor] = []

    def add(self, segment: Segment | None, value: Any) -> None:
        if segment is not None:
            self.segments.append(segment)
            self.values.append(value)

    def pause(self, more: bool) -> None:
        """End of a group: write now, or with the rest of the layer if `more` is to come and this is being compiled."""
        if not (more and torch.compiler.is_compiling()):
            self.flush()

    def flush(self, beside: bool = True) -> None:
        """Write now. beside: whether nothing changes the values unknown to the compiler before the next op."""
        segments, values = list(self.segments), list(self.values)
        # Emptied, not replaced: Dynamo carries out what happens to the lists themselves, and tensors left in one would
        # be outputs of the compiled graph, alive until the forward ends.
        self.segments.clear()
        self.values.clear()
        if segments:
            self.tapper.write(segments, values, beside)


class Held:
    """Values of layers in a row that one op writes, when the last of them is done: only under torch.compile, and only
    of layers of which nothing but narrow values that last is selected. Graphs of layers that only hold are equal, and
    so are those that write.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._last: dict[int, int] = {}  # layer whose values are held -> the one after which they are written
        run: list[int] = []
        values = nbytes = 0
        for layer in sorted({s.layer for s in segments}):
            mine = [s for s in segments if s.layer == layer and HOOKS[s.hook].scope != "once"]
            if not mine or any(s.hook not in _LASTING or s.reduction is not None for s in mine):
                continue
            more = sum(s.nbytes for s in mine)
            if values + len(mine) > MAX_VALUES or nbytes + more > _HELD_BYTES:
                run, values, nbytes = [], 0, 0
            run, values, nbytes = [*run, layer], values + len(mine), nbytes + more
            self._last |= dict.fromkeys(run, layer)
        self._tappers: list[Tapper] = []
        self._segments: list[Segment] = []
        self._values: list[torch.Tensor] = []

    def takes(self, layer: int | None) -> bool:
        return layer in self._last

    def add(self, tapper: Tapper, layer: int, segments: list[Segment], values: list[torch.Tensor]) -> None:
        self._tappers.append(tapper)
        self._segments.extend(segments)
        self._values.extend(values)
        if self._last[layer] == layer:
            first, segments, values = self._tappers[0], list(self._segments), list(self._values)
            for held in (self._tappers, self._segments, self._values):  # emptied, not replaced: see `Group.flush`
                held.clear()
            first.write_now(segments, values)


class Tapper:
    """Writes groups of values of one layer, or of what exists once in a model (layer None)."""

    def __init__(
        self,
        model: nn.Module,
        context: CaptureContext,
        layer: int | None,
        at_end: AtEnd,
        compilation: Compilation,
        held: Held | None = None,
    ) -> None:
        self.compilation = compilation
        self.layer, self.held = layer, held if held is not None and held.takes(layer) else None
        self.layer_name = context.layer_name
        self.token = model.get_buffer("dmi_token")
        mine = [s.offset for s in context.layout.segments if layer is not None and s.layer == layer]
        self.start = min(mine, default=0)
        name = f"dmi_base_{'once' if layer is None else layer}"
        model.register_buffer(name, torch.zeros(1, dtype=torch.int32), persistent=False)
        self.base = model.get_buffer(name)
        tap_op.stand_for(self.base, tap_op.Place(self.start, layer or 0, weakref.ref(at_end)))
        self.at_end = at_end
        self.settings: dict[str, str] = {}
        rank = get_tensor_model_parallel_rank() if context.tp > 1 else 0
        for segment in context.layout.segments:
            once = HOOKS[segment.hook].scope == "once"
            if segment.reduction is not None and (once if layer is None else not once and segment.layer == layer):
                shard = shard_of(HOOKS[segment.hook], context.dims, context.tp, rank).shard
                segment.reduction.prepare(segment.width, self.base.device, segment.layer, shard)
                self.settings[segment.hook] = json.dumps(segment.reduction.settings())

    def write(self, segments: list[Segment], values: list[torch.Tensor], beside: bool = True) -> None:
        """Write a group, now or with those of other layers, all of which last. beside: see `Group.flush`."""
        if self.held is not None and self.layer is not None and torch.compiler.is_compiling():
            self.held.add(self, self.layer, segments, values)
        else:
            self.write_now(segments, values, beside)

    def write_now(self, segments: list[Segment], values: list[torch.Tensor], beside: bool = True) -> None:
        """One op for each dtype among `segments` (nearly always one), of this layer or of later ones."""
        for dtype in dict.fromkeys(s.dtype for s in segments):
            rows = []
            offsets = []
            how = []
            for segment, value in zip(segments, values, strict=True):
                if segment.dtype == dtype:
                    rows.append(value.reshape(-1, segment.width).to(getattr(torch, dtype)))
                    offsets.append(segment.offset - self.start)
                    how.append("null" if segment.reduction is None else self.settings[segment.hook])
            reductions = "[" + ",".join(how) + "]" if any(h != "null" for h in how) else ""
            later = beside and not self.compilation.in_place and torch.compiler.is_compiling()
            torch.ops.dmi.tap(rows, self.token, self.base, offsets, reductions, later, self.layer_name)

    def join(self) -> None:
        """What an earlier tap writes on a branch is written before what comes next. Nothing to do unless compiled."""
        if torch.compiler.is_compiling():
            torch.ops.dmi.tap_join(self.token)

    def end(self, like: torch.Tensor) -> None:
        """Nothing more is written in this forward. like: a tensor with one entry for each token."""
        if self.at_end.tokens or torch.compiler.is_compiling():
            torch.ops.dmi.tap_end(like, self.token, self.base, self.layer_name)
