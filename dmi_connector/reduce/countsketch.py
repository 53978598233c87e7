# SPDX-License-Identifier: Apache-2.0
"""cs(k): a CountSketch (Charikar, Chen, Farach-Colton, 2002). Each dimension is multiplied by a sign and assigned to
one of k buckets. The value of a bucket is the sum of its dimensions.

The sums are stored as int8 with a row scale (see int8.py), or with `exact` as k float32 values. numpy's Philox
generator computes buckets and signs from the seed. A permutation assigns dimensions to buckets, so the sizes of buckets
differ by at most one. The columns of the sketch matrix [width, k] are orthogonal. The sketch y of a row x has
E|y|^2 = |x|^2 over random signs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dmi_connector.reduce.base import as_bytes, unpack_floats
from dmi_connector.reduce.projection import SeededProjection

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=8)
def table(width: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(order int64, signs float32), [width], read-only: dimension order[j] goes to bucket j mod k with signs[j]."""
    signs, keys = np.random.Philox(key=[seed, (width << 32) | k]).random_raw(2 * width).reshape(2, width)
    order = np.argsort(keys, kind="stable")
    found = order, np.where(signs >> np.uint64(63), -1.0, 1.0).astype(np.float32)
    for array in found:
        array.flags.writeable = False
    return found


@cache
def _on_device(width: int, k: int, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`table`, padded to a multiple of k. The padding repeats dimensions of the same buckets, with sign 0."""
    import torch

    (order, signs), lacking = table(width, k, seed), -width % k
    order = np.append(order, order[k - lacking : k])
    return torch.from_numpy(order).to(device), torch.from_numpy(np.pad(signs, (0, lacking))).to(device)


@dataclass(frozen=True)
class CountSketch(SeededProjection):
    """Keeps norms, cosines and dot products approximately, like `rp`, with one addition per value instead of k.

    exact: store the sums as float32.
    """

    exact: bool = False
    kind: ClassVar[str] = "cs"
    forms: ClassVar[tuple[str, ...]] = ("cs(k)", "cs(k,exact)", "cs(k,seed=n)")
    compared: ClassVar[tuple[str, ...]] = ("cs(512)",)
    flags: ClassVar[Mapping[str, tuple[str, Any]]] = {"exact": ("exact", True), "int8": ("exact", False)}

    def slice_projected(self, values: np.ndarray) -> np.ndarray:
        order, signs = table(len(values), self.k, self.seed)
        sums = np.zeros(-(-len(values) // self.k) * self.k, np.float32)
        sums[: len(values)] = values[order] * signs
        return np.asarray(sums.reshape(-1, self.k).sum(0))

    def prepare(self, width: int, device: torch.device, layer: int, shard: int) -> None:
        _on_device(width, self.k, self.seed, device)

    def before(self, values: torch.Tensor, layer: int = 0) -> torch.Tensor:
        order, signs = _on_device(values.shape[-1], self.k, self.seed, values.device)
        return (values[..., order] * signs).unflatten(-1, (-1, self.k)).sum(-2)

    def before_layers(self, values: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        return self.before(values)

    def scratch(self, width: int, dtype: str) -> int:
        padded = width + -width % self.k
        return 8 * padded + 4 * self.k  # the gathered values and their product with the signs; the sums

    def stored_width(self, width: int, dtype: str) -> int:
        return 4 * self.k if self.exact else super().stored_width(width, dtype)

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        return as_bytes(self.before(values)) if self.exact else super().encode(values, layer, slots)

    def fused(self, dtype: str) -> tuple[str, int]:
        return ("copy", 0) if self.exact else super().fused(dtype)

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        return unpack_floats(stored, 0, self.k, "float32") if self.exact else super().decode(stored, width, dtype)
