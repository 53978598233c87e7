# SPDX-License-Identifier: Apache-2.0
"""Taps after the last layer: `resid_final` and `final_ln`. They are the last taps of a step.

In a pipeline stage before the last stage, the taps of a step end after the last layer of that stage.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from dmi_connector.engine.model.architectures import FORWARD
from dmi_connector.engine.taps.batches import ModelTaps
from dmi_connector.engine.taps.values import as_built, copied, first, norm_outputs


def install_final(taps: ModelTaps) -> None:
    """Register the taps at the final norm, or at the last layer if the architecture names no final norm.

    In an earlier pipeline stage, register only the end of a step's taps (`TapBatch.end`).
    """
    context, arch, batch = taps.context, taps.context.arch, taps.once.again()
    final, normed = context.layout.taking("resid_final", 0), context.layout.taking("final_ln", 0)
    terms = _last_terms(taps) if final else []
    ends = arch.positions != FORWARD  # otherwise `end_forward` ends the taps of a step

    def at_final_norm(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        value, stream = norm_outputs(built, args, output)
        if final:
            batch.add_all(final, _sum(terms, stream))
        batch.add_all(normed, copied(value) if taps.compilation.copies else value)
        batch.write()
        batch.end(value.flatten(0, -2))

    def after_last_layer(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if final:
            batch.add_all(final, _sum(terms, first(output)))
        batch.write()
        if ends:
            batch.end(first(output).flatten(0, -2))

    def after_stage(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        batch.end(first(output).flatten(0, -2))

    if not context.last_stage:
        taps.hook(arch.path(context.here[-1], "layer"), after_stage)
        return
    last = arch.path(context.dims.layers - 1, "layer")
    built, path = as_built(arch, taps.module(last)), arch.final_norm or last
    if arch.final_norm:
        taps.hook(path, at_final_norm)
    elif final or ends:
        taps.hook(path, after_last_layer)
    for row_field in (*final, *normed):
        context.coverage.expect(row_field, path)


def _last_terms(taps: ModelTaps) -> list[torch.Tensor]:
    """A list to which hooks add the terms whose sum is the last layer's output, while Dynamo traces the model.

    The list stays empty in eager mode, and for models that vLLM's Transformers backend does not serve.

    If a tap reads the sum, Inductor may write the sum to memory. The final norm would then read values that are rounded
    to the model's dtype. So the tap adds copies of the terms itself.

    The result is a list, not a dict: Dynamo replays changes of a dict with a call of `update`. vLLM takes any call of
    that name for the update of a buffer, and refuses the compiled code.
    """
    context, arch = taps.context, taps.context.arch
    terms: list[torch.Tensor] = []
    inputs = ["layer"] if arch.parallel else ["ln2" if arch.ln2 else "before_mlp"]
    outputs = [*(["attn_norm" if arch.attn_norm else "o_proj"] * arch.parallel), "mlp_norm" if arch.mlp_norm else "mlp"]
    if not arch.in_transformers or not all(getattr(arch, name) for name in (*inputs, *outputs)):
        return terms

    def note(begins: bool, value: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            if begins:
                terms.clear()  # may have terms of a trace that failed
            terms.append(value)

    last = context.dims.layers - 1
    for name in inputs:
        taps.hook(arch.path(last, name), lambda _module, args: note(True, args[0]), before=True)
    for name in outputs:
        taps.hook(arch.path(last, name), lambda _module, _args, output: note(False, first(output)))
    return terms


def _sum(terms: list[torch.Tensor], stream: torch.Tensor) -> torch.Tensor:
    """A copy of the residual stream: the sum of copies of `terms`, or if empty a copy of `stream`. Clears `terms`."""
    if not terms:
        return copied(stream)
    values = [copied(value) for value in reversed(terms)]
    terms.clear()  # tensors left in it would be outputs of the compiled graph
    return functools.reduce(torch.add, values)
