# SPDX-License-Identifier: Apache-2.0
"""Base class of reductions that were fitted offline.

The fitted values stay in a file. A store names the SHA-256 of the file, and the store directory has a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from dmi_connector.reduce.base import FittedRef, Reduction
from dmi_connector.reduce.errors import ReduceError
from dmi_connector.reduce.fitted_file import FittedFile

if TYPE_CHECKING:
    import torch

_DEVICE: dict[tuple[FittedReduction, int, Any], tuple[torch.Tensor, ...]] = {}
"""(reduction, layer, device) -> tensors that the encoder needs. `prepare` fills it."""


@dataclass(frozen=True)
class FittedReduction(Reduction):
    """A reduction that reads a file. A subclass also defines `file`, `part` and `constants`.

    sha256: hash of the file. hook: the reduced hook, set by `bind`. source: path of the file, which stores do not keep.
    """

    sha256: str = ""
    hook: str = ""
    source: str = field(default="", compare=False)
    file: ClassVar[type[FittedFile]]
    """The class of the file."""

    def settings(self) -> dict[str, Any]:
        values = super().settings()
        del values["source"]
        return values

    def bind(self, hook: str, layers: Sequence[int], width: int, shards: int) -> Self:
        self.check(width)
        about = self.file.load(self.source).check(hook, set(layers), width * shards)
        return self.fit(replace(self, hook=hook), about, shards)

    def fit(self, bound: Self, about: dict[str, Any], shards: int) -> Self:
        """`bound` with the settings of its hook in the file (`about`). Raises ReduceError if the file does not fit.

        shards: number of slices of a row.
        """
        return bound

    def constants(self, part: Any, mine: slice) -> tuple[np.ndarray, ...]:
        """Arrays that the encoder of a layer needs. part: see `part`. mine: the slice of a row on this rank."""
        raise NotImplementedError

    def prepare(self, width: int, device: torch.device, layer: int, shard: int) -> None:
        import torch

        super().prepare(width, device, layer, shard)
        found = self.constants(self.own_part(layer), slice(shard * width, (shard + 1) * width))
        _DEVICE[self, layer, device] = tuple(torch.from_numpy(np.ascontiguousarray(c)).to(device) for c in found)

    def on_device(self, layer: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The `constants` of a layer, on the device."""
        return _DEVICE[self, layer, device]

    def fitted(self) -> FittedRef:
        return FittedRef(self.file, self.sha256, self.source)

    def own_part(self, layer: int) -> Any:
        """The data of a layer in the file at `source`, see `part`. Raises ReduceError if the file was replaced."""
        file = self.file.load(self.source)
        if file.sha256 != self.sha256:
            raise ReduceError(f"reduce: {self.source} has changed since the engine started; start it again")
        return self.part(file, layer)
