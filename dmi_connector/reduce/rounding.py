# SPDX-License-Identifier: Apache-2.0
"""round(bits): fewer mantissa bits in the same dtype, so that the lossless codec compresses better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dmi_connector.reduce.base import Reduction
from dmi_connector.reduce.errors import ReduceError

if TYPE_CHECKING:
    import torch

MANTISSA = {"bfloat16": 7, "float16": 10, "float32": 23}
"""Number of mantissa bits of each dtype."""


@dataclass(frozen=True)
class Round(Reduction):
    """Round to nearest, ties to even, to `bits` mantissa bits. The other mantissa bits become zero.

    A value that would round beyond the range of the dtype becomes the largest value with `bits` mantissa bits. The
    relative error is at most 2**-(bits + 1), except for subnormal values. Rounding saves only disk space: rows have
    their full size in the cache and on the link.
    """

    bits: int = 4
    kind: ClassVar[str] = "round"
    forms: ClassVar[tuple[str, ...]] = ("round(b)",)
    compared: ClassVar[tuple[str, ...]] = ("round(3)",)
    number: ClassVar[str] = "bits"

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 23:
            raise ReduceError(f"reduce: round({self.bits}) is not valid; give 1 to 23 mantissa bits")

    def stored_dtype(self, dtype: str) -> str:
        return dtype

    def stored_width(self, width: int, dtype: str) -> int:
        return width

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        drop = MANTISSA[str(values.dtype).removeprefix("torch.")] - self.bits
        if drop <= 0:
            return values
        integer = torch.int16 if values.element_size() == 2 else torch.int32
        bits = values.contiguous().view(integer)
        # Add half of the last kept bit, minus one if that bit is 0, then truncate. So ties go to even. A carry out of
        # the mantissa increments the exponent, which is the correct result.
        odd = (bits >> drop) & 1
        kept = ~((1 << drop) - 1)
        rounded = ((bits + ((1 << (drop - 1)) - 1) + odd) & kept).view(values.dtype)
        rounded = torch.where(rounded.isinf(), (bits & kept).view(values.dtype), rounded)
        return torch.where(values.isfinite(), rounded, values)

    def fused(self, dtype: str) -> tuple[str, int]:
        drop = MANTISSA[dtype] - self.bits
        return ("round", drop) if drop > 0 else ("copy", 0)

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        return stored.astype(np.float32)
