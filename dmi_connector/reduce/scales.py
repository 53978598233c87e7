# SPDX-License-Identifier: Apache-2.0
"""Files of scales for int8(channel=file) and rp(k,channel=file), which `dmi fit-scales` writes.

For each hook and layer: `scale` [width], the step of each value of a row, or of each value that a row is projected to;
above 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dmi_connector.reduce.fitted_file import FittedFile

METADATA = "dmi_scales"
STEPS = 126
"""Steps from 0 to the largest value that a scale is made for. A stored 127 or -127 is a value beyond it."""
_LEAST_SHARE, LEAST = 1e-6, 2.0**-100
"""Least scale, as a share of the largest of its layer, and of any layer, so that no quotient overflows."""


@dataclass(frozen=True)
class Scales(FittedFile):
    """One file of scales. hooks: {hook: {"width", "layers"}}; where rows were projected first, with "projection"
    (settings) and "projected" (values).
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
        """The scales of one hook and layer, float32 [width or projected]. Raises ReduceError without them."""
        return self.tensor(hook, layer, "scale")


def scales_of(largest: np.ndarray, margin: float = 1.0) -> np.ndarray:
    """Scales float32 [width] for rows whose values have at most the magnitudes `largest` [width], times `margin`.

    A value that was always 0 has a scale too: what it becomes later is then seen to lie beyond it.
    """
    scales = np.asarray(largest, np.float64) * margin / STEPS
    return np.maximum(scales, max(scales.max() * _LEAST_SHARE, LEAST)).astype(np.float32)
