# SPDX-License-Identifier: Apache-2.0
"""Reads files of scales for int8(channel=file) and rp(k,channel=file), which `dmi fit-scales` writes.

A file has one tensor per hook and layer: `scale` [width], above 0, with the scale of each value of a row, or of each
projected value of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dmi_connector.reduce.fitted_file import FittedFile

METADATA = "dmi_scales"
STEPS = 126
"""Number of scales from 0 to the largest fitted value. A stored 127 or -127 marks a value beyond that."""
_LEAST_SHARE, LEAST = 1e-6, 2.0**-100
"""Minimum scale relative to the largest scale of the layer, and absolute minimum, so that no division overflows."""


@dataclass(frozen=True)
class Scales(FittedFile):
    """One file of scales.

    hooks: {hook: {"width", "layers"}}. For projected rows, also "projection" (settings of the projection) and
    "projected" (number of projected values).
    """

    metadata: ClassVar[str] = METADATA
    what: ClassVar[str] = "scales"
    command: ClassVar[str] = "dmi fit-scales"
    setting: ClassVar[str] = "int8(channel={})"
    least: ClassVar[float] = LEAST

    @classmethod
    def shapes(cls, about: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"scale": (int(about.get("projected", about["width"])),)}

    def of(self, hook: str, layer: int) -> np.ndarray:
        """The scales of a hook and layer, float32 [width] or [projected]. Raises ReduceError without them."""
        return self.tensor(hook, layer, "scale")


def scales_of(largest: np.ndarray, margin: float = 1.0) -> np.ndarray:
    """Scales for values of at most the magnitudes `largest` x `margin`. largest: [width]. Returns float32 [width].

    A value that was always 0 gets a small scale, so that later values other than 0 are recognized as beyond the range.
    """
    scales = np.asarray(largest, np.float64) * margin / STEPS
    return np.maximum(scales, max(scales.max() * _LEAST_SHARE, LEAST)).astype(np.float32)
