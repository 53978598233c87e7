# SPDX-License-Identifier: Apache-2.0
"""Reads files of PCA bases, which `dmi fit-pca` writes.

A file has these tensors per hook and layer: `mean` [width], `components` [width, k] (orthonormal columns in descending
order of variance), `std` [k], and `variance` [1] (the total variance of the rows). With "group" d, each group of d
dimensions, such as a head, has its own basis. The basis of a group is in the group's rows of `components`, and `std` is
[width / group x k], group by group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dmi_connector.reduce.fitted_file import FittedFile

METADATA = "dmi_pca"


@dataclass(frozen=True)
class LayerBasis:
    """The basis of one hook and layer, float32.

    mean: [width]. components: [width, k]. std: standard deviations of the scores, [groups x k]. groups: number of equal
    parts of a row, each with its own basis.
    """

    mean: np.ndarray
    components: np.ndarray
    std: np.ndarray
    groups: int = 1

    @property
    def of_groups(self) -> tuple[np.ndarray, np.ndarray]:
        """(components [groups, width / groups, k], std [groups, k])."""
        return self.components.reshape(self.groups, -1, self.components.shape[1]), self.std.reshape(self.groups, -1)


@dataclass(frozen=True)
class Basis(FittedFile):
    """One file of bases. hooks: {hook: {"width", "k", "layers"}}, and "group" if groups have their own bases."""

    metadata: ClassVar[str] = METADATA
    what: ClassVar[str] = "basis"
    command: ClassVar[str] = "dmi fit-pca"
    setting: ClassVar[str] = "pca({})"
    argument: ClassVar[str] = "basis"
    cached: ClassVar[int] = 0  # bases are large, and reading rows does not need them

    @classmethod
    def shapes(cls, about: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        width, k = int(about["width"]), int(about["k"])
        group = int(about.get("group") or width)
        if not 0 < k <= group or width % group:
            raise ValueError(f"{k} components of groups of {group} of {width} values")
        return {"mean": (width,), "components": (width, k), "std": (width // group * k,), "variance": (1,)}

    def of(self, hook: str, layer: int, k: int) -> LayerBasis:
        """The first k components of a hook and layer. Raises ReduceError without them, OSError if the file is gone."""
        mean, components, std = (self.tensor(hook, layer, name) for name in ("mean", "components", "std"))
        groups = len(std) // components.shape[1]
        kept = np.ascontiguousarray(components[:, :k]), np.ascontiguousarray(std.reshape(groups, -1)[:, :k])
        return LayerBasis(mean, kept[0], kept[1].ravel(), groups)
