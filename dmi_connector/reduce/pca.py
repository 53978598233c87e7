# SPDX-License-Identifier: Apache-2.0
"""pca(file): scores of principal components that were fitted offline, each divided by its standard deviation.

The scores are stored as int8 with a row scale (see int8.py). The basis stays in its file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dmi_connector.reduce.base import Keeps
from dmi_connector.reduce.basis import Basis, LayerBasis
from dmi_connector.reduce.errors import ReduceError
from dmi_connector.reduce.fitted import FittedReduction
from dmi_connector.reduce.int8 import Int8
from dmi_connector.reduce.measures import OF_VALUES, ReducedRows, error, importance

if TYPE_CHECKING:
    import torch

_LEAST_STD, _TINY = 1e-6, 1e-30
"""Least standard deviation that scores are divided by, as a share of the largest; least value of the largest."""


@dataclass(frozen=True)
class Pca(FittedReduction):
    """Decoded rows are the k scores. They have unit variance on the rows that the basis was fitted on.

    k: components to keep, 0 for all.
    """

    k: int = 0
    kind: ClassVar[str] = "pca"
    forms: ClassVar[tuple[str, ...]] = ("pca(file)", "pca(file,k=n)")
    keeps: ClassVar[Keeps] = Keeps.DIRECTIONS
    projects: ClassVar[bool] = True
    measured: ClassVar[Mapping[str, str]] = {
        "variance": "share of the variance about the mean that is read back",
        "importance": OF_VALUES["importance"],
        "error": OF_VALUES["error"],
    }
    at_end: ClassVar[bool] = True
    file: ClassVar[type[Basis]] = Basis

    @classmethod
    def from_text(cls, inside: str) -> Pca:
        """The reduction that "FILE" or "FILE, k=64" names. Raises ReduceError."""
        path, _, rest = inside.partition(",")
        name, _, number = rest.replace(" ", "").partition("=")
        if rest and not (name == "k" and number.isdecimal() and int(number) > 0):
            raise ReduceError(f"reduce: {rest.strip()!r} in 'pca({inside})' is unknown; pca takes a file and k=NUMBER")
        basis = Basis.load(path.strip())
        return cls(basis.sha256, "", basis.path, int(number or 0))

    def fit(self, bound: Pca, about: dict[str, Any], shards: int) -> Pca:
        if self.k > about["k"]:
            raise ReduceError(
                f"reduce: pca(..., k={self.k}) of {bound.hook} is more than the {about['k']} that were fitted"
            )
        return replace(bound, k=self.k or about["k"])

    def part(self, file: Basis, layer: int) -> LayerBasis:  # type: ignore[override]
        return file.of(self.hook, layer, self.k)

    def constants(self, part: LayerBasis, mine: slice) -> tuple[np.ndarray, ...]:
        """(-mean' components / std [k], components / std [width, k])."""
        whitened = part.components[mine] / _floor(part.std)
        offset = -(part.mean[mine].astype(np.float64) @ whitened.astype(np.float64)).astype(np.float32)
        return offset, whitened

    def stored_width(self, width: int, dtype: str) -> int:
        return Int8().stored_width(self.k, dtype)

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        return Int8().encode(self.before(values, layer))

    def before(self, values: torch.Tensor, layer: int = 0) -> torch.Tensor:
        import torch

        offset, basis = self.on_device(layer, values.device)
        return torch.addmm(offset, values.float(), basis)

    def before_layers(self, values: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        import torch

        return torch.stack([self.before(values[:, i], layer) for i, layer in enumerate(layers)], 1)

    def scratch(self, width: int, dtype: str) -> int:
        return 4 * (self.k + width)

    def fused(self, dtype: str) -> tuple[str, int]:
        return Int8().fused(dtype)

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        return Int8().decode(stored, self.k, dtype)

    def merge(self, parts: list[np.ndarray]) -> np.ndarray:
        """The sum over the slices: each rank projects its part of the width."""
        return np.asarray(np.sum(parts, axis=0, dtype=np.float32))

    def measures(self, rows: ReducedRows) -> dict[str, float]:
        restored = self.restored(rows)
        spread = ((rows.rows - rows.rows.mean(0)) ** 2).sum()
        variance = 1 - ((rows.rows - restored) ** 2).sum() / spread
        found = {"variance": float(variance), "importance": importance(rows.rows, restored)}
        return {**found, "error": error(rows.rows, restored)}

    def restored(self, rows: ReducedRows) -> np.ndarray:
        return self.restore(rows.decoded, self.own_part(rows.layer))

    def project(self, direction: np.ndarray, basis: LayerBasis | None = None, shards: int = 1) -> np.ndarray:
        """A direction [width] of the hook's space as float32 [k] in the space of the scores.

        decoded rows @ result approximates (rows - mean) @ direction.
        """
        assert basis is not None, "components are in a basis"
        return np.asarray((np.asarray(direction, np.float32) @ basis.components) * _floor(basis.std))

    def restore(self, decoded: np.ndarray, basis: LayerBasis) -> np.ndarray:
        """Decoded rows [..., k] -> float32 [..., width]: the mean plus the kept components."""
        return np.asarray((decoded * _floor(basis.std)) @ basis.components.T + basis.mean)


def _floor(std: np.ndarray) -> np.ndarray:
    """Standard deviations, at least 1e-6 of the largest: a division by less would enlarge rounding errors."""
    return np.asarray(np.maximum(std, np.float32(_LEAST_STD) * max(float(std[0]), _TINY)), np.float32)


def fit(blocks: Iterable[np.ndarray], rank: int) -> tuple[LayerBasis, float]:
    """Principal components of float rows that come in blocks [n, width]. Returns (basis, total variance).

    Memory is 8 width² bytes for any number of rows. Raises ValueError for fewer than `rank` + 1 rows, rows of fewer
    than `rank` values, or values that are not finite.
    """
    count, total, moments = 0, None, None
    for block in blocks:
        rows = np.asarray(block, np.float64)
        if total is None or moments is None:
            if rows.shape[1] < rank:
                raise ValueError(f"rank {rank} is more than the {rows.shape[1]} values of a row; give a smaller one")
            total, moments = np.zeros(rows.shape[1]), np.zeros((rows.shape[1],) * 2)
            origin = rows.mean(0)  # moments about a point near the mean keep their digits
        count += len(rows)
        with np.errstate(invalid="ignore"):  # what is not finite is refused below
            rows = rows - origin
            total += rows.sum(0)
            moments += rows.T @ rows
    if total is None or moments is None or count <= rank:
        raise ValueError(f"{count} rows are too few for rank {rank}; capture more tokens or give a smaller rank")
    mean = total / count
    covariance = (moments - count * np.outer(mean, mean)) / (count - 1)
    with np.errstate(over="ignore"):
        written = np.asarray([*(origin + mean), np.trace(covariance)], np.float32)
    if not (np.isfinite(written).all() and np.isfinite(covariance).all()):
        raise ValueError("the rows hold values that are not finite, or too large for float32; leave those rows out")
    values, vectors = np.linalg.eigh(covariance)
    order = np.argsort(values)[::-1][:rank]
    components = vectors[:, order]
    components = components * np.where(components[np.abs(components).argmax(0), np.arange(rank)] < 0, -1, 1)
    components = np.ascontiguousarray(components, np.float32)  # safetensors writes the memory as it lies
    std = np.sqrt(np.maximum(values[order], 0))
    basis = LayerBasis((origin + mean).astype(np.float32), components, std.astype(np.float32))
    return basis, float(np.maximum(values, 0).sum())
