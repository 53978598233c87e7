# SPDX-License-Identifier: Apache-2.0
"""Batches of tapped values. The values of a batch that have the same dtype are written by one call of `dmi::tap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank

from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.gpu_memory import kept_in_sleep
from dmi_connector.engine.kernels.row_writer import MAX_VALUES
from dmi_connector.engine.taps import op  # noqa: F401 (importing it registers the ops)
from dmi_connector.engine.taps.compilation import Compilation
from dmi_connector.engine.taps.deferred import DeferredReductions
from dmi_connector.engine.taps.op import Place, stand_for
from dmi_connector.hooks import HOOKS
from dmi_connector.layout import RowField
from dmi_connector.ranks import shard_of

_LASTING = frozenset(("resid_pre", "resid_mid", "q", "k"))
"""Hooks whose tapped tensors a compiled model does not overwrite before its forward ends (see `Keep` in points.py)."""
_BATCH_BYTES = 64 << 10
"""Maximum bytes per token of a batch of several layers, because a batch keeps its tensors alive until it is written."""


def in_layer(field: RowField) -> bool:
    """Whether the hook of a field is tapped per layer, not once in the model."""
    return HOOKS[field.tapped].scope != "once"


def batches_of_layers(fields: Sequence[RowField]) -> list[list[int]]:
    """Groups of layers whose values a compiled model writes with one op. Layers of a group are in ascending order.

    A layer is in a group if all its selected hooks are in _LASTING and none is reduced. The other layers are in no
    group. A group has at most MAX_VALUES values. A group of several layers has at most _BATCH_BYTES bytes per token.
    """
    batches: list[list[int]] = []
    values = nbytes = 0
    for layer in sorted({f.layer for f in fields}):
        mine = [f for f in fields if f.layer == layer and in_layer(f)]
        if not mine or any(f.hook not in _LASTING or f.reduction is not None for f in mine):
            continue
        more = sum(f.nbytes for f in mine)
        if not batches or values + len(mine) > MAX_VALUES or nbytes + more > _BATCH_BYTES:
            batches.append([])
            values = nbytes = 0
        batches[-1].append(layer)
        values, nbytes = values + len(mine), nbytes + more
    return batches


@dataclass
class _Hook:
    """A forward hook on the module at `path`.

    call: the function that torch calls. before: whether it is a pre-hook. options: keyword arguments for torch's
    `register_forward_hook` or `register_forward_pre_hook`. direct: whether the model calls the module's `forward`
    directly, which skips forward hooks. `forward` is then wrapped instead. module: the module on which the hook is
    registered. handle: removes a forward hook; None if `direct`.
    """

    path: str
    call: Callable[..., Any]
    before: bool
    options: dict[str, bool]
    direct: bool = False
    module: nn.Module | None = None
    handle: torch.utils.hooks.RemovableHandle | None = None

    def register(self, module: nn.Module) -> None:
        """Register the hook on `module`. A forward hook is first removed from the previous module."""
        if self.handle is not None:
            self.handle.remove()
        self.module = module
        if self.direct:
            _calls_before(module).append(self.call)
        else:
            register = module.register_forward_pre_hook if self.before else module.register_forward_hook
            self.handle = register(self.call, **self.options)


def _calls_before(module: nn.Module) -> list[Callable[..., Any]]:
    """The functions that run before `forward` of a module, in a list to append to. The first call wraps `forward`."""
    calls: list[Callable[..., Any]]
    if "dmi_calls" not in vars(module):
        calls, inner = [], module.forward

        @wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            for call in calls:
                call(module, args)
            return inner(*args, **kwargs)

        module.dmi_calls, module.forward = calls, forward  # type: ignore[assignment]
    calls = vars(module)["dmi_calls"]
    return calls


class ModelTaps:
    """State that the taps of one model share.

    token: the tensor that all ops take (op.py). deferred: the deferred reductions of the model. ends: whether
    `dmi::tap_end` has work: deferred reductions, or scores to copy. resting: whether forward hooks do nothing. A draft
    model may share modules with the target, such as the embedding. `resting` is then true except during the target's
    own forward (`models.Tapped.dmi_forward`), so the draft's forward writes no rows.
    """

    def __init__(self, model: nn.Module, context: CaptureContext, compilation: Compilation) -> None:
        model.register_buffer("dmi_token", torch.zeros(1, dtype=torch.int32), persistent=False)
        self.token = model.get_buffer("dmi_token")
        self.context, self.compilation = context, compilation
        self.deferred = DeferredReductions(context.layout.fields, self.token.device, context.may_sleep)
        self.ends = bool(self.deferred.tokens or context.layout.scored)
        self.resting = self._may_rest = context.drafting is not None and context.drafting.shares_modules
        self._model = model
        self._hooks: list[_Hook] = []

    def hook(self, path: str, call: Callable[..., Any], before: bool = False, **options: bool) -> None:
        """Register a forward hook (a pre-hook if `before`) on the module at `path`.

        options: keyword arguments for its registration in torch, see `_Hook`. Raises ValueError if the model has no
        such module.
        """
        self._add(_Hook(path, call, before, options))

    def before_attention(self, path: str, call: Callable[..., Any]) -> None:
        """Call `call(module, args)` before the attention at `path`. Raises ValueError if the model has no such module.

        vLLM's Transformers backend calls the `forward` of attention layers directly, which skips forward hooks.
        """
        self._add(_Hook(path, call, True, {}, direct=self.context.arch.in_transformers))

    def _add(self, hook: _Hook) -> None:
        """Register a hook. Raises ValueError if the model has no module at its path."""
        try:
            module = self._model.get_submodule(hook.path)
        except AttributeError as error:
            raise ValueError(
                f"model: {self.context.arch.name} has no module {hook.path!r} as vLLM built it; leave out the hooks "
                "that are read there, or turn off the feature that replaced it (docs/HOOKS.md says what is read where)"
            ) from error
        if self._may_rest:
            hook.call = self._unless_resting(hook.call)
        hook.register(module)
        self._hooks.append(hook)

    def _unless_resting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def hook(*args: Any, **kwargs: Any) -> Any:  # Dynamo makes `resting` a constant of the graph
            return None if self.resting else call(*args, **kwargs)

        return hook

    def module(self, path: str) -> nn.Module:
        """The module of the model at `path`."""
        return self._model.get_submodule(path)

    def follow(self) -> None:
        """Move hooks from modules that were replaced to their replacements, such as LoRA layers."""
        for hook in self._hooks:
            module = self._model.get_submodule(hook.path)
            if module is not hook.module:
                hook.register(module)

    @cached_property
    def once(self) -> TapBatch:
        """The batch of hooks that exist once in the model. `TapBatch.again` makes more batches of these hooks."""
        fields = [f for f in self.context.layout.fields if not in_layer(f)]
        return self._batch("once", fields, 0)

    def batch(self, layers: Sequence[int]) -> TapBatch:
        """Make the batch of one or several layers."""
        fields = [f for f in self.context.layout.fields if f.layer in layers and in_layer(f)]
        # Offsets are relative to the batch's smallest. So equal layers have equal graphs, and vLLM compiles only one.
        return self._batch(str(layers[0]), fields, min(f.offset for f in fields))

    def _batch(self, name: str, fields: Sequence[RowField], start: int) -> TapBatch:
        tp = self.context.tp
        rank = get_tensor_model_parallel_rank() if tp > 1 else 0
        device, reductions = self.token.device, {f.offset: f.reduction for f in fields if f.reduction is not None}

        def prepare() -> None:
            for f in fields:
                if f.reduction is not None:
                    shard = shard_of(self.context.dims.hooks[f.hook], self.context.dims, tp, rank).shard
                    f.reduction.prepare(f.width, device, f.layer, shard)

        if reductions:
            kept_in_sleep(prepare, device, self.context.may_sleep)
        buffer = f"dmi_place_{name}"
        self._model.register_buffer(buffer, torch.zeros(1, dtype=torch.int32), persistent=False)
        layer = fields[0].layer if fields else 0
        place = Place(start, layer, reductions, self.deferred, self.context.coverage)
        return TapBatch(self, self._model.get_buffer(buffer), place)


class TapBatch:
    """A batch of values that are written together.

    tensor: the graph input that identifies `place` (see `stand_for`). fields: the fields added since the last `write`.
    values: a tensor [..., width] for each.
    """

    def __init__(self, taps: ModelTaps, tensor: torch.Tensor, place: Place) -> None:
        self.taps, self.tensor, self.place = taps, tensor, place
        stand_for(tensor, place)
        self.fields: list[RowField] = []
        self.values: list[torch.Tensor] = []

    def again(self) -> TapBatch:
        """Make another batch with the same `place`, without values."""
        return TapBatch(self.taps, self.tensor, self.place)

    def add(self, row_field: RowField | None, value: torch.Tensor) -> None:
        """Add the value of a field, [..., width]. Does nothing if `row_field` is None: the hook is not selected."""
        if row_field is not None:
            self.fields.append(row_field)
            self.values.append(value)

    def add_all(self, fields: Sequence[RowField], value: torch.Tensor) -> None:
        """Add one value, [..., width], for several fields: a hook, and the probes that are computed from it."""
        for row_field in fields:
            self.add(row_field, value)

    def pause(self, more_compiled: bool, more_eager: bool = False) -> None:
        """Write the batch, unless more values will be added before it is written.

        more_compiled: whether a compiled model writes it later. more_eager: whether eager mode does.
        """
        if not (more_compiled if torch.compiler.is_compiling() else more_eager):
            self.write()

    def write(self) -> None:
        """Write the values of the batch, with one op per dtype, and empty the batch."""
        fields, values = list(self.fields), list(self.values)
        # The lists are cleared, not replaced. Dynamo replays changes of lists after the graph. A tensor left in a list
        # would be an output of the compiled graph, and stay alive until the forward ends.
        self.fields.clear()
        self.values.clear()
        for dtype in dict.fromkeys(f.dtype for f in fields):
            mine = [(f, v) for f, v in zip(fields, values, strict=True) if f.dtype == dtype]
            rows = [value.reshape(-1, f.width).to(getattr(torch, dtype)) for f, value in mine]
            offsets = [f.offset - self.place.start for f, _ in mine]
            torch.ops.dmi.tap(rows, self.taps.token, self.tensor, offsets, self.taps.context.cache_layer)

    def end(self, like: torch.Tensor) -> None:
        """End the taps of this forward with `dmi::tap_end`, if the op has work.

        like: a tensor whose first dimension is tokens.
        """
        taps = self.taps
        if taps.ends:
            torch.ops.dmi.tap_end(like, taps.token, self.tensor, taps.context.cache_layer)
