# SPDX-License-Identifier: Apache-2.0
"""int8: values scaled to 8 bits.

A stored row is `width` int8 values, zeros up to a multiple of 4 bytes, a float32 scale, and with `affine` a float32
offset. With `group`, one bfloat16 scale per group of `group` values takes the place of the scale, and zeros up to a
multiple of 4 bytes follow. The last group may be shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dmi_connector.reduce.base import (
    ReduceError,
    Reduction,
    as_bytes,
    over,
    pad,
    steps_over,
    times_scale,
    unpack,
    unpack_floats,
)

if TYPE_CHECKING:
    import torch

GROUPS = (16, 32, 64, 128, 256, 512, 1024)
"""Group sizes that the kernel supports."""


@dataclass(frozen=True)
class Int8(Reduction):
    """value = int8 * scale (+ offset with `affine`).

    Symmetric: scale = max|x| / 127, over the row or over each group. Affine: the range of the row is mapped to -127 to
    127. Rows of zeros have scale 0. If a row or group has a NaN or an infinity, all its values decode to NaN. With
    `affine` the same happens if the span of a row, its maximum minus its minimum, overflows float32.

    Rows with max|x| below 2**-100 decode to zeros, and groups with max|x| below 127 * 2**-100. With `affine`, rows with
    a span below 2**-100 decode to the middle of their range.

    With groups of 32, the cosine between a row and its decoded row is above 0.9999, also for rows with outliers.
    """

    affine: bool = False
    group: int = 0
    kind: ClassVar[str] = "int8"
    forms: ClassVar[tuple[str, ...]] = ("int8", "int8(affine)", "int8(g)", "int8(channel=file)")
    compared: ClassVar[tuple[str, ...]] = ("int8", "int8(affine)", "int8(32)")
    flags: ClassVar[Mapping[str, tuple[str, Any]]] = {"affine": ("affine", True), "symmetric": ("affine", False)}
    number: ClassVar[str] = "group"

    def __post_init__(self) -> None:
        if self.group and self.group not in GROUPS:
            raise ReduceError(f"reduce: int8({self.group}) is not valid; the group size must be one of {GROUPS}")
        if self.group and self.affine:
            raise ReduceError(f"reduce: int8(affine,{self.group}) is not valid; groups are symmetric, leave affine out")

    def _groups(self, width: int) -> int:
        return -(-width // self.group)

    def stored_width(self, width: int, dtype: str) -> int:
        if self.group:
            return pad(width) + pad(2 * self._groups(width))
        return pad(width) + (8 if self.affine else 4)

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        x = values.float()
        width = x.shape[1]
        if self.group:
            groups = torch.nn.functional.pad(x, (0, self._groups(width) * self.group - width))
            groups = groups.unflatten(1, (-1, self.group))
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
        quantised = quantised.flatten(1)[:, :width]
        if extra := pad(width) - width:
            quantised = torch.nn.functional.pad(quantised, (0, extra))
        return as_bytes(quantised, *ends)

    def fused(self, dtype: str) -> tuple[str, int]:
        return ("groups", self.group) if self.group else ("affine" if self.affine else "int8", 0)

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        at = pad(width)
        values = unpack_floats(stored, 0, width, "int8")
        if self.group:
            scales = unpack_floats(stored, at, self._groups(width), "bfloat16")
            return times_scale(values, np.repeat(scales, self.group, axis=-1)[..., :width])
        values = times_scale(values, unpack(stored, at, 1, "float32"))
        return values + unpack(stored, at + 4, 1, "float32") if self.affine else values
