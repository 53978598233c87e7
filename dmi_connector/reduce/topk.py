# SPDX-License-Identifier: Apache-2.0
"""topk(k): the k values of each row with the largest magnitudes, their indexes, and a sample of the other values.

A stored row has:
  1. k indexes, ascending: uint16 up to a width of 65,536, else uint32. Of equal magnitudes the lower index is kept.
  2. zeros up to a multiple of 4 bytes.
  3. k values: int8, and at the next multiple of 4 bytes a float32 scale. With `exact` they have the model's dtype.
  4. with a sample of s values: its uint32 start, then s values in the same form. Their scale fits the sampled values
     that are not among the k. Larger values are clipped.

The sample covers neurons that are never among the k. It has every (width // s)-th value from its start on, and wraps
around at the end of the row. The start is a hash of the kept values and of the row's slot, so each value is sampled
with the same probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dmi_connector.dtypes import ITEMSIZE
from dmi_connector.reduce.base import (
    Keeps,
    ReduceError,
    Reduction,
    as_bytes,
    over,
    pad,
    steps_over,
    times_scale,
    unpack,
    unpack_floats,
)
from dmi_connector.reduce.measures import OF_VALUES, ReducedRows, error, spearman
from dmi_connector.reduce.tally import Tally

if TYPE_CHECKING:
    import torch

MOST = (1 << 20) - 1
"""Maximum number of values to keep, and to sample. The kernel gets both numbers in one integer."""
HASH_ROW, HASH_STEP = 40503, 1103515245
"""Constants of the hash for the start of a sample: from Knuth's multiplicative hash, and the LCG in the C standard."""


@dataclass(frozen=True)
class TopK(Reduction):
    """Decoded rows are 0 where no value was kept. `dmi_connector.importance` reads the sample.

    With tensor parallelism each rank keeps k values of its slice, and the reader keeps the k largest of all slices.

    sample: number of values to sample per slice. In the option `reduce` the default is a quarter of k.
    """

    k: int = 64
    exact: bool = False
    sample: int = 0
    kind: ClassVar[str] = "topk"
    forms: ClassVar[tuple[str, ...]] = ("topk(k)", "topk(k,exact)", "topk(k,sample=s)")
    keeps: ClassVar[Keeps] = Keeps.ALL & ~Keeps.EVERY_VALUE
    compared: ClassVar[tuple[str, ...]] = ("topk(64)", "topk(64,sample=0)")
    measured: ClassVar[Mapping[str, str]] = {
        "recall": "share of the k largest values that were kept",
        "importance": OF_VALUES["importance"],
        "error": OF_VALUES["error"],
    }
    at_end: ClassVar[bool] = True
    flags: ClassVar[Mapping[str, tuple[str, Any]]] = {"exact": ("exact", True), "int8": ("exact", False)}
    number: ClassVar[str] = "k"
    named: ClassVar[tuple[str, ...]] = ("sample",)

    @classmethod
    def fields_of(cls, inside: str) -> dict[str, Any]:
        found = super().fields_of(inside)
        return {"sample": found.get("k", cls.k) // 4, **found}

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ReduceError(f"reduce: topk({self.k}) is not valid; keep 1 value or more")
        if max(self.k, self.sample) > MOST:
            raise ReduceError(f"reduce: topk({self.k},sample={self.sample}) is not valid; use at most {MOST} for both")

    def check(self, width: int) -> None:
        if self.k > width:
            raise ReduceError(f"reduce: topk({self.k}) keeps more than the {width} values of a row; give a smaller k")
        if self.sample > width:
            raise ReduceError(
                f"reduce: topk({self.k},sample={self.sample}) samples more than the {width} values of a row; give a "
                "smaller sample"
            )

    @staticmethod
    def _index_bytes(width: int) -> int:
        return 2 if width <= 1 << 16 else 4

    def _value_at(self, width: int) -> int:
        return pad(self.k * self._index_bytes(width))

    def _values_bytes(self, count: int, dtype: str) -> int:
        return pad(count * ITEMSIZE[dtype]) if self.exact else pad(count) + 4

    def _sample_at(self, width: int, dtype: str) -> int:
        return self._value_at(width) + self._values_bytes(self.k, dtype)

    def stored_width(self, width: int, dtype: str) -> int:
        sample = 4 + self._values_bytes(self.sample, dtype) if self.sample else 0
        return self._sample_at(width, dtype) + sample

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        width = values.shape[1]
        # Magnitudes keep their order as integers. Value and index form one int64 key, so no two keys are equal, and the
        # order is the same on every device.
        magnitude = values.float().abs().view(torch.int32).to(torch.int64)
        key = (magnitude << 32) | (0x7FFFFFFF - torch.arange(width, device=values.device))
        kept = (0x7FFFFFFF - (key.topk(self.k, dim=1, sorted=False).values & 0x7FFFFFFF)).sort(dim=1).values
        narrow = torch.uint16 if self._index_bytes(width) == 2 else torch.uint32
        chosen = values.gather(1, kept)
        parts = [_padded(kept.to(narrow).contiguous().view(torch.uint8)), *self._encoded(chosen, chosen)]
        if self.sample:
            slots = torch.arange(len(values), device=values.device) if slots is None else slots
            # The sum of 20 bits of each kept value and its index is the same on every device, in any order of
            # addition.
            mixed = (((magnitude.gather(1, kept) >> 12) * 31 + kept) & 0xFFFFF).sum(1) + slots * HASH_ROW
            start = (((mixed & 0x7FFFFFFF) * HASH_STEP) >> 20) % width
            places = (start[:, None] + torch.arange(self.sample, device=values.device) * (width // self.sample)) % width
            taken = values.gather(1, places)
            least = magnitude.gather(1, kept).amin(1, keepdim=True)
            parts += [start[:, None].to(torch.int32)]
            parts += self._encoded(taken, torch.where(magnitude.gather(1, places) <= least, taken, 0))
        return as_bytes(*parts)

    def _encoded(self, values: torch.Tensor, spanned: torch.Tensor) -> list[torch.Tensor]:
        """Encode values [tokens, count]. Without `exact`, the largest value of `spanned` gives the scale."""
        import torch

        if self.exact:
            return [_padded(values.contiguous().view(torch.uint8))]
        largest = spanned.float().abs().amax(1, keepdim=True)
        quantised = (values.float() * steps_over(127, largest)).round().clamp(-127, 127).to(torch.int8)
        return [_padded(quantised.view(torch.uint8)), over(largest, 127)]

    def fused(self, dtype: str) -> tuple[str, int]:
        return ("exact" if self.exact else "topk"), self.sample * (MOST + 1) + self.k

    def indexes(self, stored: np.ndarray, width: int) -> np.ndarray:
        """The indexes of the kept values, int64 [..., k], ascending. Raises ValueError for damaged rows."""
        found = unpack(stored, 0, self.k, f"uint{8 * self._index_bytes(width)}").astype(np.int64)
        if found.size and found.max() >= width:
            raise ValueError(f"a row of topk({self.k}) has the index {found.max()} of {width} values; it is damaged")
        return found

    def sampled(self, stored: np.ndarray, width: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        """The sample: (indexes int64, values float32), each [..., sample]. It may include kept values."""
        at = self._sample_at(width, dtype)
        start = unpack(stored, at, 1, "uint32").astype(np.int64)
        places = (start + np.arange(self.sample) * (width // max(self.sample, 1))) % width
        return places, self._values(stored, at + 4, self.sample, dtype)

    def values(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        """The kept values, float32 [..., k], in the order of `indexes`."""
        return self._values(stored, self._value_at(width), self.k, dtype)

    def _values(self, stored: np.ndarray, at: int, count: int, dtype: str) -> np.ndarray:
        if self.exact:
            return unpack_floats(stored, at, count, dtype)
        return times_scale(unpack(stored, at, count, "int8"), unpack(stored, at + pad(count), 1, "float32"))

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        rows = np.zeros((*stored.shape[:-1], width), np.float32)
        values = self._values(stored, self._value_at(width), self.k, dtype)
        np.put_along_axis(rows, self.indexes(stored, width), values, axis=-1)
        return rows

    def tally_slices(self, slices: Sequence[np.ndarray], width: int, dtype: str, part: Any = None) -> Tally:
        """See `Reduction`. A row that is not finite in one slice is left out in all slices."""
        finite = np.all([self._finite(rows, width, dtype) for rows in slices], axis=0)
        return Tally.beside([self.tally(rows[finite], width, dtype) for rows in slices])

    def _finite(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        """Whether all kept values of each row are finite, bool [rows]."""
        return np.asarray(np.isfinite(self._values(stored, self._value_at(width), self.k, dtype)).all(axis=1))

    def tally(self, stored: np.ndarray, width: int, dtype: str) -> Tally:
        """Sums of |x| per value over rows [rows, stored width]. Rows with infinities or NaN are left out.

        With int8 values, one massive value may make the other kept values 0. But the magnitude of a kept value is at
        least that of each sampled value that was not kept. So smaller magnitudes are raised to the largest of these
        samples.
        """
        stored = stored[self._finite(stored, width, dtype)]
        kept, values = self.indexes(stored, width), np.abs(self._values(stored, self._value_at(width), self.k, dtype))
        known = np.zeros((len(stored), width), bool)
        np.put_along_axis(known, kept, True, axis=1)
        drawn: list[np.ndarray] = [np.zeros(width)] * 3
        if self.sample:
            places, sampled = self.sampled(stored, width, dtype)
            new = ~np.take_along_axis(known, places, axis=1)
            values = np.maximum(values, np.where(new, np.abs(sampled), 0).max(1, keepdims=True))
            at, found = places[new], np.abs(sampled[new].astype(np.float64))
            drawn = [np.bincount(at, weights, width) for weights in (found, np.ones_like(found), found**2)]
        sums = [np.bincount(kept.ravel(), values.ravel(), width), known.sum(0), *drawn]
        return Tally(len(stored), *(np.asarray(s, np.float64) for s in sums))

    def measures(self, rows: ReducedRows) -> dict[str, float]:
        width = rows.rows.shape[1]
        kept = self.indexes(rows.stored, width)
        true = np.argsort(-np.abs(rows.rows), axis=1, kind="stable")[:, : self.k]
        recall = np.mean([len(np.intersect1d(a, b)) for a, b in zip(kept, true, strict=True)]) / self.k
        mean = self.tally(rows.stored, width, rows.dtype).mean()
        importance = spearman(np.abs(rows.rows).mean(0), mean)
        return {"recall": float(recall), "importance": importance, "error": error(rows.rows, rows.decoded)}

    def merge(self, parts: list[np.ndarray]) -> np.ndarray:
        rows = np.concatenate(parts, axis=-1)
        if len(parts) > 1:
            magnitude = np.abs(rows).view(np.int32)  # integers sort NaN above all values, as in `encode`
            drop = np.argsort(-magnitude, axis=-1, kind="stable")[..., self.k :]
            np.put_along_axis(rows, drop, 0, axis=-1)
        return rows


def _padded(rows: torch.Tensor) -> torch.Tensor:
    import torch

    extra = pad(rows.shape[1]) - rows.shape[1]
    return torch.nn.functional.pad(rows, (0, extra)) if extra else rows
