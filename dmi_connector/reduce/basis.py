# SPDX-License-Identifier: Apache-2.0
"""Files of PCA bases, which `dmi fit-pca` writes.

For each hook and layer: `mean` [width], `components` [width, k] (orthonormal columns by falling variance), `std` [k]
and `variance` [1] (of all components together).
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
    """The basis of one hook and layer, float32. mean: [width]. components: [width, k]. std: of the scores, [k]."""

    mean: np.ndarray
    components: np.ndarray
    std: np.ndarray


@dataclass(frozen=True)
class Basis(FittedFile):
    """One file of bases. hooks: {hook: {"width", "k", "layers"}}."""

    metadata: ClassVar[str] = METADATA
    what: ClassVar[str] = "basis"
    command: ClassVar[str] = "dmi fit-pca"
    setting: ClassVar[str] = "pca({})"
    cached: ClassVar[int] = 0  # bases are large, and rows are read without

    @classmethod
    def shapes(cls, about: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        width, k = int(about["width"]), int(about["k"])
        return {"mean": (width,), "components": (width, k), "std": (k,)}

    def of(self, hook: str, layer: int, k: int) -> LayerBasis:
        """The first k components for one hook and layer. Raises ReduceError without them; OSError without the file."""
        mean, components, std = (self.tensor(hook, layer, name) for name in ("mean", "components", "std"))
        return LayerBasis(mean, np.ascontiguousarray(components[:, :k]), std[:k])
