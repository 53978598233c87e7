# SPDX-License-Identifier: Apache-2.0
"""rp(k,channel=file): rows projected by rp(k), in 8 bits with one scale per projected value and layer.

`dmi fit-scales --project "rp(k)"` fits the scales offline. A stored row has the layout of int8(channel=file) for the
projected values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dmi_connector.reduce.base import pad
from dmi_connector.reduce.channel import IN_RANGE, decode_steps, encode_steps, in_range
from dmi_connector.reduce.errors import ReduceError
from dmi_connector.reduce.fitted import FittedReduction
from dmi_connector.reduce.measures import ReducedRows
from dmi_connector.reduce.projection import RandomProjection
from dmi_connector.reduce.scales import Scales

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ChannelProjection(FittedReduction, RandomProjection):
    """`decode` returns values in units of the scales. Readers multiply them by the scales (`read`).

    Values beyond the range are clipped.
    """

    kind: ClassVar[str] = "rp_channel"
    measured: ClassVar[Mapping[str, str]] = {**RandomProjection.measured, "in_range": IN_RANGE}
    needs_file: ClassVar[bool] = True
    file: ClassVar[type[Scales]] = Scales

    @classmethod
    def from_text(cls, inside: str) -> ChannelProjection:
        """Make the reduction from "channel=FILE" and settings of `rp`. Raises ReduceError."""
        words = [word.strip() for word in inside.split(",")]
        given = next(word for word in words if word.startswith("channel"))
        path = given.partition("=")[2].strip()
        if not path:
            raise ReduceError("reduce: rp(k,channel) names no scales; give their file, as in rp(k,channel=FILE)")
        scales = Scales.load(path)
        fields = RandomProjection.fields_of(",".join(word for word in words if word != given))
        return cls(**fields, sha256=scales.sha256, source=scales.path)

    def fit(self, bound: ChannelProjection, about: dict[str, Any], shards: int) -> ChannelProjection:
        own, found = self._projection.settings(), about.get("projection")
        if found != own:
            raise ReduceError(
                f"reduce: {self.source} holds scales of {bound.hook} for {_words(found)}, not for"
                f" {_words(own)}; fit it with --project"
            )
        if shards > 1 and not self.group:
            raise ReduceError(
                f"reduce: {self.source} holds scales of rows that were projected whole, but {shards} tensor-parallel"
                f" ranks project slices of {bound.hook}; use rp({self.k}), or fit scales of a group, such as head_dim"
            )
        return bound

    def part(self, file: Scales, layer: int) -> np.ndarray:  # type: ignore[override]
        """The scales, float32 [projected values of the whole row]."""
        return file.of(self.hook, layer)

    def constants(self, part: np.ndarray, mine: slice) -> tuple[np.ndarray, ...]:
        """1 / scales, float32 [projected values of the slice]."""
        own = slice(self.projected(mine.start), self.projected(mine.stop)) if self.group else slice(None)
        return (np.float32(1) / part[own],)

    def stored_width(self, width: int, dtype: str) -> int:
        return pad(self.projected(width))

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        return encode_steps(self.before(values, layer))

    def before(self, values: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Projected values in units of their scales, float32."""
        return self._projection.before(values) * self.on_device(layer, values.device)[0]

    def before_layers(self, values: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        import torch

        steps = torch.stack([self.on_device(layer, values.device)[0] for layer in layers])
        return self._projection.before_layers(values, layers) * steps

    @property
    def _projection(self) -> RandomProjection:
        """The projection as an `rp` reduction, whose `before` applies no scales."""
        return RandomProjection(self.k, self.seed, self.distribution, self.group)

    def scratch(self, width: int, dtype: str) -> int:
        return super().scratch(width, dtype) + 4 * self.projected(width)

    def fused(self, dtype: str) -> tuple[str, int]:
        return "channel", 0

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        return decode_steps(stored, self.projected(width))

    def read(self, decoded: np.ndarray, part: np.ndarray) -> np.ndarray:
        return np.multiply(decoded, part, out=decoded)

    def measures(self, rows: ReducedRows) -> dict[str, float]:
        steps = self.decode(rows.stored, rows.rows.shape[1], rows.dtype)
        return {**super().measures(rows), "in_range": in_range(steps)}


def _words(projection: Mapping[str, Any] | None) -> str:
    """Describe rows by their projection: "rows projected by rp(512, seed 0, orthogonal)"."""
    if projection is None:
        return "rows that were not projected"
    values = [f"{name} {value}" for name, value in projection.items() if name not in ("kind", "k")]
    return f"rows projected by rp({', '.join([str(projection['k']), *values])})"
