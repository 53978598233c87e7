# SPDX-License-Identifier: Apache-2.0
"""pca(file): scores of principal components that were fitted offline, each divided by its standard deviation.

The scores are stored as int8 with a row scale (see int8.py). The basis stays in its file. If the file has one basis per
group of dimensions, such as a head, the scores of the groups are concatenated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dmi_connector.reduce.base import MOST_DIGITS, Keeps
from dmi_connector.reduce.basis import Basis, LayerBasis
from dmi_connector.reduce.errors import ReduceError
from dmi_connector.reduce.fitted import FittedReduction
from dmi_connector.reduce.int8 import Int8
from dmi_connector.reduce.measures import OF_VALUES, ReducedRows, error, importance

if TYPE_CHECKING:
    import torch

_LEAST_STD, _TINY = 1e-6, 1e-30
"""Smallest standard deviation to divide by, relative to the largest of its group; lower bound of the largest."""


@dataclass(frozen=True)
class Pca(FittedReduction):
    """Decoded rows are the k scores. They have unit variance over the rows that the basis was fitted to.

    k: number of components to keep, 0 for all. group: number of dimensions per basis, 0 for whole rows; set by `bind`.
    """

    k: int = 0
    group: int = 0
    kind: ClassVar[str] = "pca"
    forms: ClassVar[tuple[str, ...]] = ("pca(file)", "pca(file,k=n)")
    keeps: ClassVar[Keeps] = Keeps.DIRECTIONS
    projects: ClassVar[bool] = True
    measured: ClassVar[Mapping[str, str]] = {
        "variance": "share of the variance about the mean that decoded rows keep",
        "importance": OF_VALUES["importance"],
        "error": OF_VALUES["error"],
    }
    at_end: ClassVar[bool] = True
    file: ClassVar[type[Basis]] = Basis

    @classmethod
    def from_text(cls, inside: str) -> Pca:
        """Make the reduction from "FILE" or "FILE, k=64". Raises ReduceError."""
        path, _, rest = inside.partition(",")
        name, _, number = rest.replace(" ", "").partition("=")
        if rest and not (name == "k" and number.isdecimal() and len(number) <= MOST_DIGITS and int(number) > 0):
            raise ReduceError(f"reduce: {rest.strip()!r} in 'pca({inside})' is unknown; pca takes a file and k=NUMBER")
        basis = Basis.load(path.strip())
        return cls(basis.sha256, "", basis.path, int(number or 0))

    def fit(self, bound: Pca, about: dict[str, Any], shards: int) -> Pca:
        if self.k > about["k"]:
            raise ReduceError(
                f"reduce: pca(..., k={self.k}) of {bound.hook}: only {about['k']} components were fitted;"
                " give a smaller k"
            )
        group = about.get("group", 0)
        if group and about["width"] // shards % group:
            raise ReduceError(
                f"reduce: {self.source} has a basis for each {group} values of {bound.hook}, which"
                f" {shards} tensor-parallel slices would cut; fit it with another --group"
            )
        return replace(bound, k=self.k or about["k"], group=group)

    def settings(self) -> dict[str, Any]:
        values = super().settings()
        if not self.group:  # older readers do not know this setting
            del values["group"]
        return values

    def _groups(self, width: int) -> int:
        return width // self.group if self.group else 1

    def part(self, file: Basis, layer: int) -> LayerBasis:  # type: ignore[override]
        return file.of(self.hook, layer, self.k)

    def constants(self, part: LayerBasis, mine: slice) -> tuple[np.ndarray, ...]:
        """(-mean' components / std [groups, 1, k], components / std [groups, group, k]) of the slice."""
        components, std = part.of_groups
        if self.group:
            own = slice(mine.start // self.group, mine.stop // self.group)
            components, std = components[own], std[own]
        else:
            components = components[:, mine]
        whitened = components / _floor(std)[:, None]
        mean = part.mean[mine].astype(np.float64).reshape(len(whitened), 1, -1)
        return -(mean @ whitened.astype(np.float64)).astype(np.float32), whitened

    def stored_width(self, width: int, dtype: str) -> int:
        return Int8().stored_width(self.k * self._groups(width), dtype)

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        return Int8().encode(self.before(values, layer))

    def before(self, values: torch.Tensor, layer: int = 0) -> torch.Tensor:
        import torch

        offset, basis = self.on_device(layer, values.device)
        if not self.group:
            return torch.addmm(offset[0], values.float(), basis[0])
        groups = values.float().unflatten(1, (len(basis), self.group)).transpose(0, 1)
        return torch.baddbmm(offset, groups, basis).transpose(0, 1).flatten(1)

    def before_layers(self, values: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        import torch

        return torch.stack([self.before(values[:, i], layer) for i, layer in enumerate(layers)], 1)

    def scratch(self, width: int, dtype: str) -> int:
        scores = self.k * self._groups(width)
        return 4 * ((2 if self.group else 1) * scores + width)

    def fused(self, dtype: str) -> tuple[str, int]:
        return Int8().fused(dtype)

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        return Int8().decode(stored, self.k * self._groups(width), dtype)

    def merge(self, parts: list[np.ndarray]) -> np.ndarray:
        """Add the scores of the slices, because each rank projects its part. Scores of groups are concatenated."""
        if self.group:
            return np.concatenate(parts, axis=-1)
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
        """Project a direction [width] in the hook's space to scores, float32 [k], with groups [groups * k].

        `decoded rows @ result` approximates `(rows - mean) @ direction`.
        """
        assert basis is not None, "components are in a basis"
        components, std = basis.of_groups
        parts = np.asarray(direction, np.float32).reshape(len(std), 1, -1)
        return np.asarray((parts @ components)[:, 0] * _floor(std)).ravel()

    def restore(self, decoded: np.ndarray, basis: LayerBasis) -> np.ndarray:
        """Map decoded rows [..., k] or [..., groups * k] to float32 [..., width]: the mean plus the kept components."""
        components, std = basis.of_groups
        scores = decoded.reshape(-1, *std.shape) * _floor(std)
        rows = (scores.swapaxes(0, 1) @ components.swapaxes(1, 2)).swapaxes(0, 1)
        return np.asarray(rows.reshape(*decoded.shape[:-1], len(basis.mean)) + basis.mean)


def _floor(std: np.ndarray) -> np.ndarray:
    """Clip standard deviations [groups, k] from below, to 1e-6 of the largest one of their group.

    A division by smaller values would amplify rounding errors.
    """
    return np.asarray(np.maximum(std, np.float32(_LEAST_STD) * np.maximum(std[:, :1], _TINY)), np.float32)


def fit(blocks: Iterable[np.ndarray], rank: int, group: int = 0) -> tuple[LayerBasis, float]:
    """Fit principal components to float rows in blocks [n, width]. Returns (basis, total variance).

    rank: number of components per basis. group: number of dimensions per basis, 0 for one basis of all. Takes about 48
    x width x group bytes of memory (48 x width^2 without groups) for any number of rows.

    Raises ValueError for fewer than `rank` + 1 rows, for a group that is smaller than `rank` or does not divide the
    width, and for values that are not finite.
    """
    count, total, moments = 0, None, None
    for block in blocks:
        rows = np.asarray(block, np.float64)
        width = rows.shape[1]
        if group and width % group:
            raise ValueError(f"--group {group} does not divide the {width} values of a row; give head_dim")
        rows = rows.reshape(len(rows), -1, group or width).swapaxes(0, 1)
        if total is None or moments is None:
            if rows.shape[2] < rank:
                of = "a group" if group else "a row"
                raise ValueError(f"rank {rank} is more than the {rows.shape[2]} values of {of}; give a smaller one")
            total, moments = np.zeros((len(rows), rows.shape[2])), np.zeros((len(rows), rows.shape[2], rows.shape[2]))
            origin = rows.mean(1, keepdims=True)  # moments about a point near the mean avoid cancellation
        count += rows.shape[1]
        with np.errstate(invalid="ignore"):  # values that are not finite are refused below
            rows = rows - origin
            total += rows.sum(1)
            moments += rows.swapaxes(1, 2) @ rows
    if total is None or moments is None or count <= rank:
        raise ValueError(f"{count} rows are too few for rank {rank}; capture more tokens or give a smaller rank")
    mean = total / count
    covariance = (moments - count * mean[:, :, None] * mean[:, None]) / (count - 1)
    mean += origin[:, 0]
    with np.errstate(over="ignore"):
        written = np.asarray([*mean.ravel(), np.trace(covariance, axis1=1, axis2=2).sum()], np.float32)
    if not (np.isfinite(written).all() and np.isfinite(covariance).all()):
        raise ValueError("the rows hold values that are not finite, or too large for float32; leave those rows out")
    values, vectors = np.linalg.eigh(covariance)  # ascending
    components, variances = vectors[:, :, ::-1][:, :, :rank], np.maximum(values[:, ::-1], 0)
    largest = np.take_along_axis(components, np.abs(components).argmax(1)[:, None], 1)
    components = (components * np.where(largest < 0, -1, 1)).reshape(-1, rank)
    std = np.sqrt(variances[:, :rank]).ravel()
    floats = [np.ascontiguousarray(array, np.float32) for array in (mean.ravel(), components, std)]
    return LayerBasis(floats[0], floats[1], floats[2], len(mean)), float(variances.sum())
