# SPDX-License-Identifier: Apache-2.0
"""The interface of a reduction: settings, an encoder in torch that runs on the values' device, a decoder in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dmi_connector.dtypes import numpy_dtype

if TYPE_CHECKING:
    import torch


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
    """Whether small steps reduce all layers together at the end of the step. For kernels that wait more than compute.
    """

    def check(self, width: int) -> None:
        """Check that rows of `width` values can be reduced. Raises ReduceError."""

    def bind(self, hook: str, layers: Sequence[int], width: int, shards: int) -> Reduction:
        """This reduction for one hook. shards: slices of its width. width: values of one slice. Raises ReduceError."""
        self.check(width)
        return self

    def prepare(self, width: int, device: torch.device, layer: int, shard: int) -> None:
        """Put what `encode` needs for slice `shard` on the device. `encode` may run in a CUDA graph and must not."""

    def stored_dtype(self, dtype: str) -> str:
        """Dtype of stored rows for values of `dtype`."""
        return "uint8"

    def stored_width(self, width: int, dtype: str) -> int:
        """Elements of a stored row for `width` values of `dtype`."""
        raise NotImplementedError

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        """Rows [tokens, width] of a float dtype -> [tokens, stored width] of the stored dtype, on the same device.

        slots: of the rows, int64 [tokens]; None: the order of the rows. An encoder that samples starts from them, so
        that equal rows get different samples.
        """
        raise NotImplementedError

    def before(self, values: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """The part that library operations compute before our kernel: a projection. values: [tokens, width]."""
        return values

    def before_layers(self, values: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        """The same for all of `layers`. values: [tokens, layers, width]."""
        return values

    def scratch(self, width: int, dtype: str) -> int:
        """Bytes that `before` allocates on a GPU for each row of `width` values."""
        return 0

    def fused(self, dtype: str) -> tuple[str, int]:
        """(mode, number) of the kernel in engine/kernels/reduce.py that encodes the result of `before`."""
        raise NotImplementedError

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        """Stored rows [..., stored width] -> float32 [..., width]; for rp and pca [..., k]."""
        raise NotImplementedError

    def merge(self, parts: list[np.ndarray]) -> np.ndarray:
        """Decoded rows of all tensor-parallel slices, in order -> rows of the whole hook."""
        return np.concatenate(parts, axis=-1)

    def settings(self) -> dict[str, Any]:
        """The settings that a store keeps, with `kind`. `from_settings` rebuilds the reduction."""
        return {"kind": self.kind, **asdict(self)}


LEAST_SPAN = 2.0**-100
"""Rows and groups with a smaller span become zeros, so that no quotient overflows."""


def over(span: torch.Tensor, steps: float) -> torch.Tensor:
    """span / steps, rounded as IEEE 754 says on every device. (torch divides by a number through its reciprocal.)"""
    import torch

    return span / torch.full_like(span, steps)


def steps_over(steps: float, span: torch.Tensor) -> torch.Tensor:
    """steps / span; 0 where the span is below LEAST_SPAN."""
    import torch

    return torch.where(span >= LEAST_SPAN, torch.full_like(span, steps) / span, 0)


def as_bytes(*parts: torch.Tensor) -> torch.Tensor:
    """Parts [tokens, n] of any dtype -> their bytes side by side, uint8 [tokens, sum]."""
    import torch

    return torch.cat([p.contiguous().view(torch.uint8) for p in parts], dim=1)


def unpack(stored: np.ndarray, start: int, count: int, dtype: str) -> np.ndarray:
    """`count` values of `dtype` (a name of dtypes.py) from byte `start` of each row [..., bytes]."""
    kind = numpy_dtype(dtype)
    return np.ascontiguousarray(stored[..., start : start + count * kind.itemsize]).view(kind)


def unpack_floats(stored: np.ndarray, start: int, count: int, dtype: str) -> np.ndarray:
    """`unpack`, then float32."""
    return unpack(stored, start, count, dtype).astype(np.float32)


def pad(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of 4, where float32 fields begin."""
    return -(-nbytes // 4) * 4
