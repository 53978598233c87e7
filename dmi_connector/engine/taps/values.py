# SPDX-License-Identifier: Apache-2.0
"""Functions that prepare values for a tap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dmi_connector.engine.model.architectures import Architecture


def copied(value: torch.Tensor) -> torch.Tensor:
    """A copy of a value for a tap; in eager mode the value itself.

    Inductor keeps the results of fused sums and norms in float32. A tap is an opaque op, so Inductor writes its input
    to memory in the model's dtype. If the tap took the value itself, the model would continue from the rounded tensor.
    With a copy, the compiled model computes the same as without the tap, and may overwrite the value.

    The copy is the value negated twice, because Inductor removes a plain clone as a no-op.
    """
    return torch.neg(torch.neg(value)) if torch.compiler.is_compiling() else value


def first(output: Any) -> torch.Tensor:
    """The output of a module, or the first element of an output that is a tuple."""
    value: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return value


def as_built(arch: Architecture, layer: nn.Module) -> Architecture:
    """The architecture of a layer, with the kind of norms that vLLM built. layer: a layer of the model.

    From vLLM 0.33 on, Cohere 2 with experts has fused add-and-norms if its config has `rms_norm_eps`.
    """
    return replace(arch, plain_norms=False) if getattr(layer, "uses_rms_norm", False) else arch


def norm_outputs(arch: Architecture, args: tuple[Any, ...], output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, residual stream) of a fused add-and-norm, or of a plain norm. args, output: of the norm module."""
    if isinstance(output, tuple):
        return output[0], args[0] if arch.plain_norms else output[1]
    return output, args[0]
