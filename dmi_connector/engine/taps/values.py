# SPDX-License-Identifier: Apache-2.0
"""Values on their way to a tap."""

from __future__ import annotations

import torch


def copied(value: torch.Tensor) -> torch.Tensor:
    """A copy for a tap. The compiled model then computes the same as without it, and may overwrite the original.

    Inductor keeps fused sums and norms in float32. What an opaque op reads must be written in the model's dtype, and
    everything after it would go on from the rounded tensor. (A plain clone is removed as a no-op.)
    """
    return torch.neg(torch.neg(value)) if torch.compiler.is_compiling() else value
