# SPDX-License-Identifier: Apache-2.0
"""fp8: each row scaled into float8 e4m3. Row: `width` e4m3fn, zeros up to a multiple of 4, then the float32 scale."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dmi_connector.reduce.base import Reduction, as_bytes, field, over, pad, steps_over

if TYPE_CHECKING:
    import torch

LARGEST = 448.0


@cache
def table() -> np.ndarray:
    """The float32 value of each of the 256 e4m3fn bit patterns."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values = np.where(bits & 0x7F == 0x7F, np.nan, values)
    return np.where(bits & 0x80, -values, values).astype(np.float32)


@dataclass(frozen=True)
class Fp8(Reduction):
    """value = e4m3 * scale with scale = max|x| / 448: relative precision 2**-4 over five orders of magnitude."""

    kind: ClassVar[str] = "fp8"

    def stored_width(self, width: int, dtype: str) -> int:
        return pad(width) + 4

    def encode(self, values: torch.Tensor, layer: int = 0, numbers: torch.Tensor | None = None) -> torch.Tensor:
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
        return table()[stored[..., :width]] * field(stored, pad(width), 1, "<f4")
