# SPDX-License-Identifier: Apache-2.0
"""int8(channel=file): 8 bits with one scale per dimension and layer, fitted offline by `dmi fit-scales`.

A stored row is `width` int8 values, with zeros up to a multiple of 4 bytes. The scales stay in their file. 127 and -127
stand for values beyond the fitted range, and -128 for a value that is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dmi_connector.reduce.base import pad, unpack_floats
from dmi_connector.reduce.errors import ReduceError
from dmi_connector.reduce.fitted import FittedReduction
from dmi_connector.reduce.measures import OF_VALUES, ReducedRows, of_values
from dmi_connector.reduce.scales import Scales
from dmi_connector.reduce.tally import Tally

if TYPE_CHECKING:
    import torch

BEYOND, LOST = 127, -128
"""Stored magnitude of a value beyond the range, and stored value for a value that is not finite."""


IN_RANGE = "share of the values within the range that the scales were fitted for; the others are clipped"
"""Meaning of the measure `in_range`."""


def encode_steps(steps: torch.Tensor) -> torch.Tensor:
    """Encode values in units of their scales, float32 [tokens, width], to stored rows."""
    import torch

    stored = torch.where(steps.isfinite(), steps.round().clamp(-BEYOND, BEYOND), LOST).to(torch.int8)
    return torch.nn.functional.pad(stored, (0, pad(steps.shape[1]) - steps.shape[1])).view(torch.uint8)


def decode_steps(stored: np.ndarray, width: int) -> np.ndarray:
    """Decode stored rows to float32 [..., width] in units of the scales, with NaN for values that are not finite."""
    steps = unpack_floats(stored, 0, width, "int8")
    steps[steps == LOST] = np.nan
    return steps


def in_range(steps: np.ndarray) -> float:
    """Share of the values that were not clipped."""
    return float(1 - (np.abs(steps) == BEYOND).mean())


@dataclass(frozen=True)
class ChannelInt8(FittedReduction):
    """value = int8 * scale of the dimension. The error is at most half a scale. Values beyond the range are clipped.

    `decode` returns the integers. Readers multiply them by the scales (`read`).
    """

    kind: ClassVar[str] = "int8_channel"
    measured: ClassVar[Mapping[str, str]] = {
        **OF_VALUES,
        "in_range": IN_RANGE,
    }
    needs_file: ClassVar[bool] = True
    at_end: ClassVar[bool] = True
    file: ClassVar[type[Scales]] = Scales

    def fit(self, bound: ChannelInt8, about: dict[str, Any], shards: int) -> ChannelInt8:
        if projection := about.get("projection"):
            raise ReduceError(
                f"reduce: {self.source} holds scales of {bound.hook} for rows projected by {projection['kind']}"
                f"({projection['k']}); use rp({projection['k']},channel=FILE), or fit it without --project"
            )
        return bound

    @classmethod
    def from_text(cls, inside: str) -> ChannelInt8:
        """Make the reduction from "channel=FILE". Raises ReduceError."""
        path = inside.partition("=")[2].strip()
        if not path:
            raise ReduceError(f"reduce: int8({inside}) names no scales; give their file, as in int8(channel=FILE)")
        scales = Scales.load(path)
        return cls(scales.sha256, "", scales.path)

    def part(self, file: Scales, layer: int) -> np.ndarray:  # type: ignore[override]
        """The scales, float32 [width of the hook]."""
        return file.of(self.hook, layer)

    def constants(self, part: np.ndarray, mine: slice) -> tuple[np.ndarray, ...]:
        """1 / scales, float32 [width]."""
        return (np.float32(1) / part[mine],)

    def stored_width(self, width: int, dtype: str) -> int:
        return pad(width)

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        return encode_steps(self.before(values, layer))

    def before(self, values: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Values in units of their scales, float32."""
        return values * self.on_device(layer, values.device)[0]

    def before_layers(self, values: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        import torch

        return values * torch.stack([self.on_device(layer, values.device)[0] for layer in layers])

    def scratch(self, width: int, dtype: str) -> int:
        return 4 * width

    def fused(self, dtype: str) -> tuple[str, int]:
        return "channel", 0

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        return decode_steps(stored, width)

    def read(self, decoded: np.ndarray, part: np.ndarray) -> np.ndarray:
        return np.multiply(decoded, part, out=decoded)

    def tally_slices(
        self, slices: Sequence[np.ndarray], width: int, dtype: str, part: np.ndarray | None = None
    ) -> Tally:
        """The tally, with the number of rows in which each value was clipped."""
        assert part is not None, "scales are in a file"
        steps = self.merge([self.decode(rows, width, dtype) for rows in slices])
        clipped = (np.abs(steps) == BEYOND).sum(0, np.float64)
        return replace(Tally.of(self.read(steps, part)), clipped=clipped)

    def measures(self, rows: ReducedRows) -> dict[str, float]:
        return {**of_values(rows), "in_range": in_range(self.decode(rows.stored, rows.rows.shape[1], rows.dtype))}
