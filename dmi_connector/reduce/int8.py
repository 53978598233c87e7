# SPDX-License-Identifier: Apache-2.0
"""int8: values scaled to 8 bits. Row: `width` int8, zeros up to a multiple of 4, then a float32 scale (and offset), or
with `group` one bfloat16 scale for each group of that many values, the last maybe shorter, and zeros up to a multiple
of 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dmi_connector.reduce.base import (
    ReduceError,
    Reduction,
    as_bytes,
    bfloat16_to_float32,
    field,
    over,
    pad,
    steps_over,
)

if TYPE_CHECKING:
    import torch

GROUPS = (16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Int8(Reduction):
    """value = int8 * scale (+ offset with `affine`). Symmetric: scale = max|x| / 127, of the row or of each group.
    Affine: the row's range on -127 to 127. Zeros have scale 0. NaN and infinities are not kept, nor are rows that span
    less than 2**-100 (groups: whose scale is less).

    With groups of 32 a row's cosine is above 0.9999 whatever its values, outliers among them.
    """

    affine: bool = False
    group: int = 0
    kind: ClassVar[str] = "int8"

    def __post_init__(self) -> None:
        if self.group and self.group not in GROUPS:
            raise ReduceError(f"reduce: int8({self.group}) is not valid; groups have one of {GROUPS} values")
        if self.group and self.affine:
            raise ReduceError(f"reduce: int8(affine,{self.group}) is not valid; groups are symmetric, leave affine out")

    def _groups(self, width: int) -> int:
        return -(-width // self.group)

    def stored_width(self, width: int, dtype: str) -> int:
        if self.group:
            return pad(width) + pad(2 * self._groups(width))
        return pad(width) + (8 if self.affine else 4)

    def encode(self, values: torch.Tensor, layer: int = 0, numbers: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        x = values.float()
        width = x.shape[1]
        if self.group:
            groups = torch.nn.functional.pad(x, (0, self._groups(width) * self.group - width))
            groups = groups.view(x.shape[0], -1, self.group)
            stored = over(groups.abs().amax(2, keepdim=True), 127).bfloat16()
            inverse, centred, ends = steps_over(1, stored.float()), groups, [stored[..., 0]]
            if stored.shape[1] % 2:
                ends.append(torch.zeros_like(stored[:, :1, 0]))
        elif self.affine:
            low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
            inverse, offset = steps_over(254, high - low), (high + low) / 2 + 0.0  # never -0.0
            centred, ends = x - offset, [over(high - low, 254), offset]
        else:
            largest = x.abs().amax(1, keepdim=True)
            inverse, centred, ends = steps_over(127, largest), x, [over(largest, 127)]
        quantised = (centred * inverse).round().clamp(-127, 127).to(torch.int8)
        quantised = quantised.reshape(x.shape[0], -1)[:, :width]
        if extra := pad(width) - width:
            quantised = torch.nn.functional.pad(quantised, (0, extra))
        return as_bytes(quantised, *ends)

    def fused(self, dtype: str) -> tuple[str, int]:
        return ("groups", self.group) if self.group else ("affine" if self.affine else "int8", 0)

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        at = pad(width)
        values = field(stored, 0, width, "i1").astype(np.float32)
        if self.group:
            scales = bfloat16_to_float32(field(stored, at, self._groups(width), "<u2"))
            return values * np.repeat(scales, self.group, axis=-1)[..., :width]
        values = values * field(stored, at, 1, "<f4")
        return values + field(stored, at + 4, 1, "<f4") if self.affine else values
