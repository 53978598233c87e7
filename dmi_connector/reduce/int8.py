# SPDX-License-Identifier: Apache-2.0
"""int8: each row scaled to 8 bits. Row: `width` int8, zeros up to a multiple of 4, then float32 scale (and offset)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dmi_connector.reduce.base import Reduction, as_bytes, field, pad

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Int8(Reduction):
    """value = int8 * scale (+ offset with `affine`). Symmetric: scale = max|x| / 127. Affine: the row's range on -127
    to 127. A row of zeros has scale 0; NaN and infinities are not kept.
    """

    affine: bool = False
    kind: ClassVar[str] = "int8"

    def stored_width(self, width: int, dtype: str) -> int:
        return pad(width) + (8 if self.affine else 4)

    def encode(self, values: torch.Tensor, layer: int = 0) -> torch.Tensor:
        import torch

        x = values.float()
        if self.affine:
            low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
            scale, offset = (high - low) / 254, (high + low) / 2 + 0.0  # never -0.0
        else:
            scale, offset = x.abs().amax(1, keepdim=True) / 127, None
        centred = x if offset is None else x - offset
        quantised = torch.where(scale > 0, centred / scale, 0).round().clamp(-127, 127).to(torch.int8)
        if extra := pad(x.shape[1]) - x.shape[1]:
            quantised = torch.nn.functional.pad(quantised, (0, extra))
        return as_bytes(quantised, scale) if offset is None else as_bytes(quantised, scale, offset)

    def fused(self, dtype: str) -> tuple[str, int]:
        return ("affine" if self.affine else "int8"), 0

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        at = pad(width)
        values = field(stored, 0, width, "i1").astype(np.float32) * field(stored, at, 1, "<f4")
        return values + field(stored, at + 4, 1, "<f4") if self.affine else values
