# SPDX-License-Identifier: Apache-2.0
"""topk(k): the k values of largest magnitude of each row, with their indexes.

Row: the k indexes (uint16 up to a width of 65,536, else uint32), ascending; of equal magnitudes the lower index is
kept; zeros up to a multiple of 4; then k values: int8 and, at the next multiple of 4, a float32 scale, or with `exact`
the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dmi_connector.reduce.base import ITEMSIZE, ReduceError, Reduction, as_bytes, field, floats, pad

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TopK(Reduction):
    """Decoded rows are zero where nothing was kept. Under tensor parallelism each rank keeps k of its slice, and the
    k largest of all of them remain on reading.
    """

    k: int = 64
    exact: bool = False
    kind: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ReduceError(f"reduce: topk({self.k}) is not valid; keep 1 value or more")

    def check(self, width: int) -> None:
        if self.k > width:
            raise ReduceError(f"reduce: topk({self.k}) keeps more than the {width} values of a row; give a smaller k")

    @staticmethod
    def _index_bytes(width: int) -> int:
        return 2 if width <= 1 << 16 else 4

    def _value_at(self, width: int) -> int:
        return pad(self.k * self._index_bytes(width))

    def stored_width(self, width: int, dtype: str) -> int:
        return self._value_at(width) + (pad(self.k * ITEMSIZE[dtype]) if self.exact else pad(self.k) + 4)

    def encode(self, values: torch.Tensor, layer: int = 0) -> torch.Tensor:
        import torch

        width = values.shape[1]
        # Magnitudes as integers keep their order, so value and index fit one int64 key and no two keys are equal: the
        # order is total, on every device.
        magnitude = values.float().abs().view(torch.int32).to(torch.int64)
        key = (magnitude << 32) | (0x7FFFFFFF - torch.arange(width, device=values.device))
        kept = (0x7FFFFFFF - (key.topk(self.k, dim=1, sorted=False).values & 0x7FFFFFFF)).sort(dim=1).values
        narrow = torch.uint16 if self._index_bytes(width) == 2 else torch.uint32
        parts = [_padded(kept.to(narrow).contiguous().view(torch.uint8))]
        chosen = values.gather(1, kept)
        if self.exact:
            parts.append(_padded(chosen.contiguous().view(torch.uint8)))
        else:
            x = chosen.float()
            scale = x.abs().amax(1, keepdim=True) / 127
            quantised = torch.where(scale > 0, x / scale, 0).round().to(torch.int8)
            parts += [_padded(quantised.view(torch.uint8)), scale]
        return as_bytes(*parts)

    def fused(self, dtype: str) -> tuple[str, int]:
        return ("exact" if self.exact else "topk"), self.k

    def indexes(self, stored: np.ndarray, width: int) -> np.ndarray:
        """int64 [..., k], ascending."""
        return field(stored, 0, self.k, f"<u{self._index_bytes(width)}").astype(np.int64)

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        at = self._value_at(width)
        if self.exact:
            values = floats(stored, at, self.k, dtype)
        else:
            values = field(stored, at, self.k, "i1") * field(stored, at + pad(self.k), 1, "<f4")
        rows = np.zeros((*stored.shape[:-1], width), np.float32)
        np.put_along_axis(rows, self.indexes(stored, width), values, axis=-1)
        return rows

    def merge(self, parts: list[np.ndarray]) -> np.ndarray:
        rows = np.concatenate(parts, axis=-1)
        if len(parts) > 1:
            drop = np.argsort(-np.abs(rows), axis=-1, kind="stable")[..., self.k :]
            np.put_along_axis(rows, drop, 0, axis=-1)
        return rows


def _padded(rows: torch.Tensor) -> torch.Tensor:
    import torch

    extra = pad(rows.shape[1]) - rows.shape[1]
    return torch.nn.functional.pad(rows, (0, extra)) if extra else rows
