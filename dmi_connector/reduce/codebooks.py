# SPDX-License-Identifier: Apache-2.0
"""Reads files of codebooks for pq(file), which `dmi fit-pq` writes.

A file has one tensor per hook and layer: `centroids` [m, 2^bits - 1, size], for the m sub-vectors of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dmi_connector.reduce.fitted_file import FittedFile

METADATA = "dmi_codebooks"
BITS = (4, 8)
"""Possible numbers of bits per code."""


def centroids_of(bits: int) -> int:
    """Number of centroids per sub-vector. The last code is not a centroid: it marks a sub-vector that is not finite."""
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
