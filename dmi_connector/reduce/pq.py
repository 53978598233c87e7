# SPDX-License-Identifier: Apache-2.0
"""pq(file): product quantisation (Jegou, Douze, Schmid, 2011).

A row is cut into m sub-vectors. Each is stored as the index of the nearest of its 2^bits - 1 centroids. `dmi fit-pq`
fits the centroids by k-means.

A stored row is m codes of 8 bits or 4 bits, and zeros up to a multiple of 4 bytes. A byte has two 4-bit codes, the
first in its lower half. The centroids stay in their file. The last code, 2^bits - 1, marks a sub-vector that is not
finite.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dmi_connector.reduce.base import pad, unpack
from dmi_connector.reduce.codebooks import BITS, Codebooks, centroids_of
from dmi_connector.reduce.errors import ReduceError
from dmi_connector.reduce.fitted import FittedReduction

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ProductQuantisation(FittedReduction):
    """`decode` returns the codes as float32 [..., m], with NaN for the last code. `read` replaces codes by centroids.

    Distances are compared in float32. If two distances are equal up to rounding, devices may choose different
    centroids.

    bits: bits per code. size: values per sub-vector. `bind` sets both from the file.
    """

    bits: int = 8
    size: int = 0
    kind: ClassVar[str] = "pq"
    forms: ClassVar[tuple[str, ...]] = ("pq(file)",)
    needs_file: ClassVar[bool] = True
    file: ClassVar[type[Codebooks]] = Codebooks

    @classmethod
    def from_text(cls, inside: str) -> ProductQuantisation:
        """Make the reduction from "FILE". Raises ReduceError."""
        path = inside.strip()
        if not path:
            raise ReduceError("reduce: pq names no codebooks; give their file, as in pq(FILE)")
        books = Codebooks.load(path)
        return cls(books.sha256, "", books.path)

    def fit(self, bound: ProductQuantisation, about: dict[str, Any], shards: int) -> ProductQuantisation:
        if about["m"] % shards:
            raise ReduceError(
                f"reduce: pq({self.source}) cuts a row of {bound.hook} into {about['m']} sub-vectors, which {shards}"
                f" tensor-parallel slices cannot share; fit it with --subvectors of a multiple of {shards}"
            )
        return replace(bound, bits=about["bits"], size=about["width"] // about["m"])

    def part(self, file: Codebooks, layer: int) -> np.ndarray:  # type: ignore[override]
        """The centroids, float32 [m, 2^bits - 1, size]."""
        return file.of(self.hook, layer)

    def constants(self, part: np.ndarray, mine: slice) -> tuple[np.ndarray, ...]:
        """(centroids [own m, size, 2^bits - 1], half their squared norms [own m, 1, 2^bits - 1])."""
        own = part[mine.start // self.size : mine.stop // self.size]
        halves = (own.astype(np.float64) ** 2).sum(2)[:, None] / 2
        return own.swapaxes(1, 2), halves.astype(np.float32)

    def stored_width(self, width: int, dtype: str) -> int:
        return pad(-(-self._subvectors(width) * self.bits // 8))

    def _subvectors(self, width: int) -> int:
        """The number of sub-vectors of a slice. Raises ReduceError for the settings of a damaged store."""
        if self.size < 1 or self.bits not in BITS:
            raise ReduceError(
                f"reduction pq has sub-vectors of {self.size} values and codes of {self.bits} bits; the store is"
                " damaged"
            )
        return width // self.size

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        centroids, halves = self.on_device(layer, values.device)
        rows = values.float().unflatten(1, (-1, self.size))
        # |x - c|^2 / 2 without the term |x|^2 / 2, which is the same for all centroids.
        distances = torch.baddbmm(halves, rows.transpose(0, 1), centroids, alpha=-1)
        lost = ~rows.isfinite().all(2)
        codes = distances.argmin(2).T.masked_fill(lost, centroids_of(self.bits)).to(torch.uint8)
        per_byte = 8 // self.bits
        codes = torch.nn.functional.pad(codes, (0, self.stored_width(values.shape[1], "") * per_byte - codes.shape[1]))
        return codes if per_byte == 1 else codes[:, ::2] | codes[:, 1::2] << 4

    def scratch(self, width: int, dtype: str) -> int:
        count = self._subvectors(width)
        return 4 * count * centroids_of(self.bits) + 8 * width + 16 * count  # distances, rows as float32, codes

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        count = self._subvectors(width)
        codes = unpack(stored, 0, stored.shape[-1], "uint8")
        if self.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
        found = codes[..., :count].astype(np.float32)
        found[found == centroids_of(self.bits)] = np.nan
        return found

    def read(self, decoded: np.ndarray, part: np.ndarray) -> np.ndarray:
        """Codes [..., m] -> float32 [..., width]. A sub-vector that is not finite becomes NaN.

        Raises ReduceError for another number of sub-vectors than in `part`.
        """
        if decoded.shape[-1] != len(part):
            raise ReduceError(
                f"reduction pq has {decoded.shape[-1]} sub-vectors, its codebooks {len(part)}; the store is damaged"
            )
        known = np.pad(part, ((0, 0), (0, 1), (0, 0)), constant_values=np.nan)
        values = known[np.arange(len(part)), np.nan_to_num(decoded, nan=part.shape[1]).astype(np.int64)]
        return values.reshape(*decoded.shape[:-1], -1)

    def read_width(self, decoded: int) -> int:
        return decoded * self.size
