# SPDX-License-Identifier: Apache-2.0
"""int8(channel=file): 8 bits with one scale for each dimension of each layer, fitted offline by `dmi fit-scales`.

Stored row: `width` int8, zeros up to a multiple of 4. The scales stay in their file. A store names its SHA-256, and a
copy of the file lies in the store directory. 127 and -127 are values beyond the range that the scales were fitted for;
-128 is a value that is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dmi_connector.reduce.base import Reduction, pad, unpack_floats
from dmi_connector.reduce.errors import ReduceError
from dmi_connector.reduce.measures import OF_VALUES, ReducedRows, of_values
from dmi_connector.reduce.scales import ScalesRef, load
from dmi_connector.reduce.tally import Tally

if TYPE_CHECKING:
    import torch

_DEVICE: dict[tuple[str, str, int, Any], torch.Tensor] = {}
"""1 / scales, float32 [width] of this rank's slice, by file, hook, layer and device. `prepare` fills it."""

BEYOND, LOST = 127, -128
"""Stored magnitude of a value beyond the range, and what is stored for one that is not finite."""


@dataclass(frozen=True)
class ChannelInt8(Reduction):
    """value = int8 * the scale of its dimension: an error of half a scale. Values beyond the range are clipped.

    `decode` gives the integers; readers multiply them by the scales (`scales`).

    sha256, source: hash and path of the file of scales. hook: set by `bind`.
    """

    sha256: str = ""
    hook: str = ""
    source: str = field(default="", compare=False)
    kind: ClassVar[str] = "int8_channel"
    measured: ClassVar[Mapping[str, str]] = {
        **OF_VALUES,
        "in_range": "share of the values within the range that the scales were fitted for; the others are clipped",
    }
    at_end: ClassVar[bool] = True

    @classmethod
    def from_text(cls, inside: str) -> ChannelInt8:
        """The reduction that "channel=FILE" names. Raises ReduceError."""
        path = inside.partition("=")[2].strip()
        if not path:
            raise ReduceError(f"reduce: int8({inside}) names no scales; give their file, as in int8(channel=FILE)")
        scales = load(path)
        return cls(scales.sha256, "", scales.path)

    def settings(self) -> dict[str, Any]:
        values = asdict(self)
        del values["source"]
        return {"kind": self.kind, **values}

    def bind(self, hook: str, layers: Sequence[int], width: int, shards: int) -> ChannelInt8:
        info = load(self.source).hooks.get(hook)
        if info is None:
            raise ReduceError(
                f"reduce: {self.source} holds no scales of {hook}, only of {', '.join(load(self.source).hooks)}; "
                "fit some with dmi fit-scales"
            )
        if lacking := sorted(set(layers) - set(info["layers"])):
            raise ReduceError(
                f"reduce: {self.source} holds no scales of {hook} in layer {lacking[0]}; fit some there too"
            )
        if info["width"] != width * shards:
            raise ReduceError(
                f"reduce: {self.source} is of another model: {hook} has {width * shards} values, not {info['width']}"
            )
        return replace(self, hook=hook)

    def prepare(self, width: int, device: torch.device, layer: int, shard: int) -> None:
        import torch

        mine = load(self.source).of(self.hook, layer)[shard * width : (shard + 1) * width]
        _DEVICE[self.sha256, self.hook, layer, device] = torch.from_numpy(np.float32(1) / mine).to(device)

    def stored_width(self, width: int, dtype: str) -> int:
        return pad(width)

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        steps = self.before(values, layer)
        stored = torch.where(steps.isfinite(), steps.round().clamp(-BEYOND, BEYOND), LOST).to(torch.int8)
        return torch.nn.functional.pad(stored, (0, pad(steps.shape[1]) - steps.shape[1])).view(torch.uint8)

    def before(self, values: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Values in steps of their scales, float32."""
        return values * _DEVICE[self.sha256, self.hook, layer, values.device]

    def before_layers(self, values: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        import torch

        return values * torch.stack([_DEVICE[self.sha256, self.hook, layer, values.device] for layer in layers])

    def scratch(self, width: int, dtype: str) -> int:
        return 4 * width

    def fused(self, dtype: str) -> tuple[str, int]:
        return "channel", 0

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        steps = unpack_floats(stored, 0, width, "int8")
        steps[steps == LOST] = np.nan
        return steps

    def scales(self) -> ScalesRef:
        return ScalesRef(self.sha256, self.source, self.hook)

    def tally_slices(self, slices: Sequence[np.ndarray], width: int, dtype: str) -> Tally:
        """Sums in steps of the scales, with how often each value was clipped."""
        steps = self.merge([self.decode(part, width, dtype) for part in slices])
        return replace(Tally.of(steps), clipped=(np.abs(steps) == BEYOND).sum(0, np.float64))

    def measures(self, rows: ReducedRows) -> dict[str, float]:
        clipped = np.abs(self.decode(rows.stored, rows.rows.shape[1], rows.dtype)) == BEYOND
        return {**of_values(rows), "in_range": float(1 - clipped.mean())}
