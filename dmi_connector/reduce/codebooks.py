# SPDX-License-Identifier: Apache-2.0
"""Files of codebooks for pq(file), which `dmi fit-pq` writes.

For each hook and layer: `centroids` [m, 2^bits - 1, size], of the m sub-vectors that a row is cut into.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dmi_connector.reduce.fitted_file import FittedFile

METADATA = "dmi_codebooks"
BITS = (4, 8)
"""Bits that a code can have."""


def centroids_of(bits: int) -> int:
    """Centroids of a sub-vector. The last code stands for a sub-vector that is not finite."""
    return (1 << bits) - 1


@dataclass(frozen=True)
class Codebooks(FittedFile):
    """One file of codebooks. hooks: {hook: {"width", "m", "bits", "layers"}}."""

    metadata: ClassVar[str] = METADATA
    what: ClassVar[str] = "codebooks"
    command: ClassVar[str] = "dmi fit-pq"
    setting: ClassVar[str] = "pq({})"

    @classmethod
    def shapes(cls, about: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        width, m, bits = (int(about[name]) for name in ("width", "m", "bits"))
        if bits not in BITS or m < 1 or width % m:
            raise ValueError(f"{m} sub-vectors of {bits} bits of {width} values")
        return {"centroids": (m, centroids_of(bits), width // m)}

    def of(self, hook: str, layer: int) -> np.ndarray:
        """The centroids of one hook and layer, float32 [m, 2^bits - 1, size]. Raises ReduceError without them."""
        return self.tensor(hook, layer, "centroids")
