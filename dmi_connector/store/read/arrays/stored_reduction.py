# SPDX-License-Identifier: Apache-2.0
"""Decodes the rows of a hook that was reduced before it was stored."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmi_connector.dtypes import numpy_dtype
from dmi_connector.reduce import Reduction, from_settings

_OF_VALUES = ("dtype", "width")
"""Entries of a `reduce` attribute that describe the values before reduction."""


@dataclass(frozen=True)
class StoredReduction:
    """The reduction of an array.

    width: of the values of one slice, before reduction. dtype: theirs. shards: tensor-parallel slices, which were
    reduced apart. stored_width, stored_dtype: of a whole stored row.
    """

    reduction: Reduction
    width: int
    dtype: str
    shards: int
    stored_width: int
    stored_dtype: str

    @classmethod
    def of(cls, hook: Mapping[str, Any]) -> StoredReduction | None:
        """That of an entry of the attribute `hooks`; None without one. Raises ReduceError for an unknown one."""
        settings = hook.get("reduce")
        if settings is None:
            return None
        reduction = from_settings({k: v for k, v in settings.items() if k not in _OF_VALUES})
        shards = int(hook["shards"])
        return cls(
            reduction,
            int(settings["width"]) // shards,
            str(settings["dtype"]),
            shards,
            int(hook["width"]),
            str(hook["dtype"]),
        )

    def slices(self, rows: np.ndarray) -> list[np.ndarray]:
        """What each tensor-parallel rank stored of rows [..., stored width]."""
        return np.split(rows, self.shards, axis=-1)

    def decode(self, rows: np.ndarray) -> np.ndarray:
        """Stored rows [..., stored width] -> float32 [..., decoded width]."""
        parts = [self.reduction.decode(part, self.width, self.dtype) for part in self.slices(rows)]
        return self.reduction.merge(parts).astype(np.float32, copy=False)

    @functools.cached_property
    def decoded_width(self) -> int:
        """Values of a decoded row: those of a projection or a summary are not as many as the hook's."""
        return int(self.decode(np.zeros((1, self.stored_width), numpy_dtype(self.stored_dtype))).shape[-1])
