# SPDX-License-Identifier: Apache-2.0
"""fp8: each row scaled to float8 e4m3.

A stored row is `width` e4m3fn values, zeros up to a multiple of 4 bytes, and a float32 scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import ml_dtypes
import numpy as np

from dmi_connector.reduce.base import Reduction, as_bytes, over, pad, steps_over, times_scale, unpack

if TYPE_CHECKING:
    import torch

LARGEST = 448.0
"""Largest finite number in e4m3fn."""

_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""The value of each bit pattern. Looking values up takes a third of the time of a cast by ml_dtypes."""


@dataclass(frozen=True)
class Fp8(Reduction):
    """value = e4m3 * scale with scale = max|x| / 448. The relative error is at most 2**-4 if |x| >= max|x| / 28672."""

    kind: ClassVar[str] = "fp8"
    forms: ClassVar[tuple[str, ...]] = ("fp8",)
    compared: ClassVar[tuple[str, ...]] = ("fp8",)

    def stored_width(self, width: int, dtype: str) -> int:
        return pad(width) + 4

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        x = values.float()
        largest = x.abs().amax(1, keepdim=True)
        scaled = (x * steps_over(LARGEST, largest)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        bits = scaled.view(torch.uint8)
        if extra := pad(x.shape[1]) - x.shape[1]:
            bits = torch.nn.functional.pad(bits, (0, extra))
        return as_bytes(bits, over(largest, LARGEST))

    def fused(self, dtype: str) -> tuple[str, int]:
        return "fp8", 0

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        return times_scale(_VALUES[stored[..., :width]], unpack(stored, pad(width), 1, "float32"))
