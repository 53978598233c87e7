# SPDX-License-Identifier: Apache-2.0
"""What every reduction is: an encoder in torch (on the device of the values), a decoder in numpy, the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    import torch

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1}


class ReduceError(ValueError):
    """A reduction that does not exist or does not fit its hook; the message names the option and the fix."""


@dataclass(frozen=True)
class Reduction:
    """One reduction with its settings.

    Rows of `width` values become rows of `stored_width(width, dtype)` values of `stored_dtype(dtype)`: for all but
    `round` these are bytes, laid out as the class says (docs/FORMAT.md, section 11).
    """

    kind: ClassVar[str] = "none"
    at_end: ClassVar[bool] = False
    """Whether it takes so long for a few tokens that all layers are better done at once, at the end of a step."""

    def check(self, width: int) -> None:
        """Raises ReduceError when `width` values cannot be reduced so."""

    def bind(self, hook: str, layers: Sequence[int], width: int, shards: int) -> Reduction:
        """This reduction for one hook, of which each of `shards` slices has `width` values. Raises ReduceError."""
        self.check(width)
        return self

    def prepare(self, width: int, device: torch.device, layer: int, shard: int) -> None:
        """Put what `encode` needs for slice `shard` on the device, so that it allocates nothing else later."""

    def stored_dtype(self, dtype: str) -> str:
        return "uint8"

    def stored_width(self, width: int, dtype: str) -> int:
        raise NotImplementedError

    def encode(self, values: torch.Tensor, layer: int = 0, numbers: torch.Tensor | None = None) -> torch.Tensor:
        """Rows [tokens, width] of a float dtype -> [tokens, stored width] of the stored dtype, on the same device.

        numbers: int64 [tokens], which tell apart rows that are alike where an encoder draws (the slots they go to;
        without them, the order of the rows).
        """
        raise NotImplementedError

    def before(self, values: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """What library operations do first where a kernel of ours does the rest: a projection."""
        return values

    def before_layers(self, values: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        """The same for values [tokens, layers, width] of all of `layers`."""
        return values

    def scratch(self, width: int, dtype: str) -> int:
        """Bytes for each row of `width` values that `before` allocates on a GPU."""
        return 0

    def fused(self, dtype: str) -> tuple[str, int]:
        """How that kernel (engine/triton_reduce.py) writes what `before` gives: a mode and its number."""
        raise NotImplementedError

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        """Rows [..., stored width] -> float32 [..., width] (rp and pca: [..., k])."""
        raise NotImplementedError

    def merge(self, parts: list[np.ndarray]) -> np.ndarray:
        """Decoded rows of all tensor-parallel slices -> those of the whole."""
        return np.concatenate(parts, axis=-1)

    def settings(self) -> dict[str, Any]:
        """What a store has to say to be decoded, with `kind`."""
        return {"kind": self.kind, **asdict(self)}


LEAST_SPAN = 2.0**-100
"""Spans below it are taken for none (a row, or a group with its scale, of next to nothing): nothing divided by one may
overflow."""


def over(span: torch.Tensor, steps: float) -> torch.Tensor:
    """span / steps. Two tensors are divided as IEEE says on every device; for a number torch takes its reciprocal."""
    import torch

    return span / torch.full_like(span, steps)


def steps_over(steps: float, span: torch.Tensor) -> torch.Tensor:
    """steps / span, 0 where the span is next to nothing."""
    import torch

    return torch.where(span >= LEAST_SPAN, torch.full_like(span, steps) / span, 0)


def as_bytes(*parts: torch.Tensor) -> torch.Tensor:
    """Parts [tokens, n] of any dtype -> their bytes side by side, uint8 [tokens, sum]."""
    import torch

    return torch.cat([p.contiguous().view(torch.uint8) for p in parts], dim=1)


def field(stored: np.ndarray, start: int, count: int, dtype: str) -> np.ndarray:
    """`count` values of a numpy dtype from byte `start` of each row [..., bytes]."""
    size = np.dtype(dtype).itemsize
    return np.ascontiguousarray(stored[..., start : start + count * size]).view(dtype)


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """uint16 bit patterns -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def floats(stored: np.ndarray, start: int, count: int, dtype: str) -> np.ndarray:
    """`count` values of a model dtype from byte `start` of each row, as float32."""
    if dtype == "bfloat16":
        return bfloat16_to_float32(field(stored, start, count, "<u2"))
    return field(stored, start, count, {"float16": "<f2", "float32": "<f4"}[dtype]).astype(np.float32)


def pad(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of 4, where float32 fields begin."""
    return -(-nbytes // 4) * 4
