# SPDX-License-Identifier: Apache-2.0
"""Functions that prepare values for a tap."""

from __future__ import annotations

from typing import Any

import torch

from dmi_connector.engine.model.architectures import Architecture


def copied(value: torch.Tensor) -> torch.Tensor:
    """A copy for a tap. The compiled model then computes the same as without it, and may overwrite the original.

    Inductor keeps fused sums and norms in float32. An opaque op reads tensors in the model's dtype. Without a copy, the
    model would continue from the rounded tensor. Inductor removes a plain clone as a no-op, so this negates twice.
    """
    return torch.neg(torch.neg(value)) if torch.compiler.is_compiling() else value


def first(output: Any) -> torch.Tensor:
    """A module's output, or its first element if it is a tuple."""
    value: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return value


def norm_outputs(arch: Architecture, args: tuple[Any, ...], output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, residual stream) of a fused add-and-norm, or of a plain norm."""
    if isinstance(output, tuple):
        return output[0], args[0] if arch.plain_norms else output[1]
    return output, args[0]
