# SPDX-License-Identifier: Apache-2.0
"""rp(k): each row times a fixed random matrix [width, k], stored as int8 with a row scale (see int8.py).

With `group`, each group of `group` values of a row is projected separately, with the same matrix [group, k] for all
groups, and the results are concatenated. If `group` is head_dim, each head is projected separately.

The CPU computes the matrix R from the seed with numpy's Philox generator, in float64, and rounds it to bfloat16. GPUs
get a copy, so the matrix is bitwise equal on all devices. For a row x, E|x R|^2 = |x|^2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import ml_dtypes
import numpy as np

from dmi_connector.reduce.base import Keeps, Reduction
from dmi_connector.reduce.errors import ReduceError
from dmi_connector.reduce.int8 import Int8
from dmi_connector.reduce.measures import ReducedRows, pairs, probes

if TYPE_CHECKING:
    import torch

    from dmi_connector.reduce.basis import LayerBasis

DISTRIBUTIONS = ("orthogonal", "gaussian", "sign")


@lru_cache(maxsize=8)
def matrix(width: int, k: int, seed: int, distribution: str) -> np.ndarray:
    """The matrix, float32 [width, k].

    orthogonal: k random columns of a cosine transform with random row signs, times sqrt(width/k). gaussian: normal with
    variance 1/k. sign: sqrt(3/k) times -1, 0 or 1 with probability 1/6, 2/3, 1/6.
    """
    draw = np.random.Philox(key=[seed, (width << 32) | k]).random_raw
    if distribution == "orthogonal":
        signs, keys = draw(2 * width).reshape(2, width)
        frequency = np.sort(np.argsort(keys, kind="stable")[:k])
        angle = (2 * np.arange(width)[:, None] + 1) * frequency % (4 * width)  # in quarter turns / width
        values = np.cos(np.pi * angle / (2 * width)) * np.sqrt(np.where(frequency == 0, 1, 2) / k)
        return _final(np.where(signs >> np.uint64(63), -1.0, 1.0)[:, None] * values)
    raw = draw(2 * width * k).reshape(2, width, k)
    first = ((raw[0] >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1)
    if distribution == "sign":
        values = np.where(first < 1 / 6, -1.0, np.where(first < 1 / 3, 1.0, 0.0)) * np.sqrt(3 / k)
    else:
        second = (raw[1] >> np.uint64(11)).astype(np.float64) * 2.0**-53
        values = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second) / np.sqrt(k)
    return _final(values)


def _final(values: np.ndarray) -> np.ndarray:
    """Values rounded to bfloat16, as a read-only float32 array."""
    result = values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    result.flags.writeable = False
    return result


@cache
def _on_device(
    width: int, k: int, seed: int, distribution: str, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    import torch

    return torch.from_numpy(matrix(width, k, seed, distribution).copy()).to(device, dtype)


@dataclass(frozen=True)
class SeededProjection(Reduction):
    """Projects each row to k values by a matrix that the seed determines.

    Decoded rows are the k values. `project` projects a direction in the hook's space in the same way.
    """

    k: int = 512
    seed: int = 0
    keeps: ClassVar[Keeps] = Keeps.NORMS | Keeps.DIRECTIONS
    projects: ClassVar[bool] = True
    measured: ClassVar[Mapping[str, str]] = {
        "pairs": "correlation of the cosines between rows, before and after",
        "probes": "correlation of probe scores, before and after: the minimum over all probes",
    }
    number: ClassVar[str] = "k"
    named: ClassVar[tuple[str, ...]] = ("seed",)
    at_end: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ReduceError(f"reduce: {self.kind}({self.k}) is not valid; project to 1 value or more")
        if not 0 <= self.seed < 1 << 64:
            raise ReduceError(f"reduce: the seed {self.seed} of {self.kind} is not valid; give 0 to 2**64 - 1")

    def check(self, width: int) -> None:
        if self.k > width:
            raise ReduceError(
                f"reduce: {self.kind}({self.k}) is wider than the {width} values of a row; give a smaller k"
            )

    def projected(self, width: int) -> int:
        """Number of values to which a slice of `width` values is projected."""
        return self.k

    def slice_projected(self, values: np.ndarray) -> np.ndarray:
        """Project a slice [width] of a direction like a row in `before`. Returns float32 [projected(width)]."""
        raise NotImplementedError

    def stored_width(self, width: int, dtype: str) -> int:
        return Int8().stored_width(self.projected(width), dtype)

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        return Int8().encode(self.before(values))

    def fused(self, dtype: str) -> tuple[str, int]:
        return Int8().fused(dtype)

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        return Int8().decode(stored, self.projected(width), dtype)

    def merge(self, parts: list[np.ndarray]) -> np.ndarray:
        """Concatenate the parts: each slice of a row is projected separately."""
        return np.concatenate(parts, axis=-1)

    def measures(self, rows: ReducedRows) -> dict[str, float]:
        return {"pairs": pairs(rows), "probes": probes(rows, self.project)}

    def project(self, direction: np.ndarray, basis: LayerBasis | None = None, shards: int = 1) -> np.ndarray:
        """Project a direction [width] in the hook's space to float32 [k].

        `decoded rows @ result` approximates `rows @ direction`. Slices of the direction are projected separately, like
        slices of rows.
        """
        return self.merge([self.slice_projected(part) for part in np.split(np.asarray(direction, np.float32), shards)])


@dataclass(frozen=True)
class RandomProjection(SeededProjection):
    """Keeps norms, cosines and dot products approximately.

    The error of a cosine is about sqrt(1/k - 1/width) for orthogonal columns, else 1/sqrt(k). With `group`, this holds
    for norms, cosines and products of each group, and `width` in the formula is `group`.
    """

    distribution: str = "orthogonal"
    group: int = 0
    kind: ClassVar[str] = "rp"
    forms: ClassVar[tuple[str, ...]] = (
        "rp(k)",
        "rp(k,gaussian)",
        "rp(k,sign)",
        "rp(k,seed=n)",
        "rp(k,group=d)",
        "rp(k,channel=file)",
    )
    compared: ClassVar[tuple[str, ...]] = ("rp(512)", "rp(512,gaussian)")
    flags: ClassVar[Mapping[str, tuple[str, Any]]] = {name: ("distribution", name) for name in DISTRIBUTIONS}
    named: ClassVar[tuple[str, ...]] = ("seed", "group")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distribution not in DISTRIBUTIONS:
            raise ReduceError(f"reduce: rp has no distribution {self.distribution!r}; use {' or '.join(DISTRIBUTIONS)}")

    def settings(self) -> dict[str, Any]:
        values = super().settings()
        if not self.group:  # older readers do not know this setting
            del values["group"]
        return values

    def check(self, width: int) -> None:
        if self.group and (width % self.group or self.k > self.group):
            raise ReduceError(
                f"reduce: rp({self.k},group={self.group}) does not fit the {width} values of a row; give a group that"
                " divides them, such as head_dim, and a k of at most the group"
            )
        super().check(width)

    def projected(self, width: int) -> int:
        return self.k * (width // self.group if self.group else 1)

    def slice_projected(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(self.rows_projected(values[None])[0])

    def rows_projected(self, rows: np.ndarray) -> np.ndarray:
        """Project rows [n, width] of a slice. Returns float32 [n, projected(width)]."""
        groups = rows.reshape(-1, self.group or rows.shape[1])
        basis = matrix(groups.shape[1], self.k, self.seed, self.distribution)
        return np.asarray(groups @ basis, np.float32).reshape(len(rows), self.projected(rows.shape[1]))

    def prepare(self, width: int, device: torch.device, layer: int, shard: int) -> None:
        import torch

        for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
            _on_device(self.group or width, self.k, self.seed, self.distribution, device, dtype)

    def before(self, values: torch.Tensor, layer: int = 0) -> torch.Tensor:
        import torch

        if self.group and values.shape[1] > self.group:
            return self.before(values.reshape(-1, self.group)).view(len(values), self.projected(values.shape[1]))
        if values.is_cuda and values.dtype == torch.bfloat16:
            basis = _on_device(values.shape[1], self.k, self.seed, self.distribution, values.device, values.dtype)
            return torch.mm(values, basis, out_dtype=torch.float32)  # exact products, summed in float32
        basis = _on_device(values.shape[1], self.k, self.seed, self.distribution, values.device, torch.float32)
        return values.float() @ basis

    def before_layers(self, values: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        import torch

        tokens, count, width = values.shape
        if self.group or not values.is_cuda or values.dtype != torch.bfloat16:
            return self.before(values.reshape(-1, width)).view(tokens, count, self.projected(width))
        basis = _on_device(width, self.k, self.seed, self.distribution, values.device, values.dtype)
        products = torch.bmm(values.transpose(0, 1), basis.expand(count, -1, -1), out_dtype=torch.float32)
        return products.transpose(0, 1)

    def scratch(self, width: int, dtype: str) -> int:
        products = 4 * self.projected(width)
        if dtype == "bfloat16":
            return products + (2 * width if self.group else 0)
        joined = (2 if dtype == "float16" else 4) * width  # a copy that joins the layers
        return products + 4 * width + joined
