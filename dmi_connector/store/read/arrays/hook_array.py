# SPDX-License-Identifier: Apache-2.0
"""Computes the geometry of an array: which chunk of which shard file has which rows, and their places in the result.

zarr-python reads the same arrays. This reader is faster, because threads read, check and decode whole chunks, if
possible directly into the result.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dmi_connector.codecs import Codec, decoder_of
from dmi_connector.dtypes import numpy_dtype
from dmi_connector.store.format.shard_index import read_index
from dmi_connector.store.read.arrays.indexing import row_numbers
from dmi_connector.store.read.files.store_files import StoredFile, StoreFiles

Slot = tuple[int, ...]


class Piece(NamedTuple):
    """Rows of one inner chunk, and their place in the result.

    slot: position of the chunk in the shard's index. rows: rows of the chunk. out: array [any, columns of the shard],
    of dtype `HookArray.bits` or float32. places: rows of `out` that receive the rows.
    """

    slot: Slot
    rows: slice | np.ndarray
    out: np.ndarray
    places: slice | np.ndarray


class ShardPieces(NamedTuple):
    """Pieces of one shard file."""

    array: HookArray
    segment: int
    shard: int
    pieces: list[Piece]


@dataclass(frozen=True, eq=False)
class HookArray:
    """The geometry of an array, from its zarr.json.

    shape: (layers, length, width); for a per-sample array (logits) layers is 1. shards: number of files per segment.
    part_layers: number of layers per file; all layers if shards are slices of the width. codec: decodes the chunks.
    complete: whether the store has all rows. layers: the model's layer numbers. reduce: settings of the reduction, None
    without one.
    """

    files: StoreFiles
    name: str
    dtype: np.dtype
    shape: tuple[int, int, int]
    per_sample: bool
    chunk_rows: int
    segment_rows: int
    shards: int
    part_layers: int
    codec: Codec
    complete: bool
    layers: tuple[int, ...] = ()
    reduce: dict[str, Any] | None = None
    _indexes: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, files: StoreFiles, name: str, document: dict[str, Any], complete: bool) -> HookArray:
        """Make the geometry from a zarr.json. Raises ValueError for chunks that this format does not have."""
        try:
            return cls._parsed(files, name, document, complete)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{files}: the metadata of array {name!r} does not describe shards of this format ({error!r})"
            ) from error

    @classmethod
    def _parsed(cls, files: StoreFiles, name: str, document: dict[str, Any], complete: bool) -> HookArray:
        shape = [int(n) for n in document["shape"]]
        (sharding,) = document["codecs"]
        shard = [int(n) for n in document["chunk_grid"]["configuration"]["chunk_shape"]]
        inner = [int(n) for n in sharding["configuration"]["chunk_shape"]]
        codec = decoder_of([one["name"] for one in sharding["configuration"]["codecs"]])
        per_sample = len(shape) == 2
        if per_sample:
            shape, shard, inner = [1, *shape], [1, *shard], [1, *inner]
        (layers, length, width), (part, segment, columns), (one, chunk, inner_columns) = shape, shard, inner
        fits = (
            sharding["name"] == "sharding_indexed"
            and sharding["configuration"].get("index_location", "end") == "end"
            and (one, inner_columns) == (1, columns)
            and (part == layers or (0 < part < layers and columns == width))
            and min(*shape[::2], chunk, segment, columns) > 0 <= length
            and segment % chunk == 0
            and width % columns == 0
        )
        if not fits or codec is None:
            raise ValueError("its shape, chunks or codecs are not those of this format")
        return cls(
            files,
            name,
            numpy_dtype(document["data_type"]),
            (layers, length, width),
            per_sample,
            chunk,
            segment,
            width // columns if part == layers else -(-layers // part),
            part,
            codec,
            complete,
            tuple(map(operator.index, document.get("attributes", {}).get("layers", ()))),
            document.get("attributes", {}).get("reduce"),
        )

    @functools.cached_property
    def columns(self) -> int:
        """Number of columns of a shard: the width, or the part of one rank."""
        return self.shape[2] if self.by_layers else self.shape[2] // self.shards

    @functools.cached_property
    def by_layers(self) -> bool:
        """Whether shards are divided by layers, not by columns."""
        return self.part_layers < self.shape[0]

    @property
    def segments(self) -> int:
        """Number of shard files along the token axis."""
        return -(-self.shape[1] // self.segment_rows)

    @property
    def slots(self) -> Slot:
        """Shape of a shard in inner chunks: (layers, chunks), or (chunks,) for a per-sample array."""
        chunks = self.segment_rows // self.chunk_rows
        return (chunks,) if self.per_sample else (self.part_layers, chunks)

    def first_layer(self, shard: int) -> int:
        """Index along the layer axis of the first layer of a shard."""
        return shard * self.part_layers if self.by_layers else 0

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of a row of one layer in one shard."""
        return self.columns * self.dtype.itemsize

    @functools.cached_property
    def chunk_bytes(self) -> int:
        """Bytes of a decoded inner chunk."""
        return self.chunk_rows * self.row_bytes

    @functools.cached_property
    def bits(self) -> np.dtype:
        """Unsigned integers of the dtype's width. numpy releases the GIL while it copies these, but not bfloat16."""
        return np.dtype(f"<u{self.dtype.itemsize}")

    @functools.cached_property
    def row(self) -> np.dtype:
        """Dtype of one element that has a whole row of one layer in one shard."""
        return np.dtype((np.void, self.row_bytes))

    def path(self, segment: int, shard: int) -> str:
        """Path of a shard file in the store."""
        if self.by_layers:
            return f"{self.name}/c/{shard}/{segment}/0"
        return f"{self.name}/c/{segment}/{shard}" if self.per_sample else f"{self.name}/c/0/{segment}/{shard}"

    def index(self, file: StoredFile, segment: int, shard: int) -> np.ndarray:
        """The index of a shard file, uint64 [*slots, 2]. Raises ValueError if it is damaged."""
        found = self._indexes.get((segment, shard))
        if found is None:
            found = read_index(file.read_end(16 * math.prod(self.slots) + 4), self.slots)
            self._indexes[segment, shard] = found
        return found

    def knows_index(self, segment: int, shard: int) -> bool:
        """Whether the index of a shard file was read before."""
        return (segment, shard) in self._indexes

    def known_index(self, segment: int, shard: int) -> np.ndarray:
        """The result of an earlier call of `index`. Raises KeyError if there was none."""
        return self._indexes[segment, shard]

    def chunks(self, segment: int, shard: int) -> Iterator[tuple[Slot, int, int]]:
        """Yield (slot, first row, one past the last row) of every inner chunk of a shard file."""
        layers = min(self.part_layers, self.shape[0] - self.first_layer(shard))
        start = segment * self.segment_rows
        stop = min(self.shape[1], start + self.segment_rows)
        for n, first in enumerate(range(start, stop, self.chunk_rows)):
            end = min(stop, first + self.chunk_rows)
            for layer in range(layers):
                yield (n,) if self.per_sample else (layer, n), first, end

    def rows(self, wanted: slice | Sequence[int] | np.ndarray | None) -> slice | np.ndarray:
        """`row_numbers` of `wanted`, or all rows for None. Raises IndexError like `row_numbers`."""
        return slice(0, self.shape[1]) if wanted is None else row_numbers(wanted, self.shape[1], self.name)

    def plan(
        self, layers: Iterable[int], rows: slice | np.ndarray, out: np.ndarray, places: np.ndarray | None = None
    ) -> Iterator[ShardPieces]:
        """Plan the pieces to read into `out`, [layers, n, width].

        layers: indexes along the layer axis. rows: a result of the method `rows`. out: of dtype `bits` or float32.
        places: row of `out` for each of `rows`, by default 0, 1, ...
        """
        layers = list(layers)
        if isinstance(rows, slice) and rows.start >= rows.stop:
            return
        if isinstance(rows, slice) and rows.start // self.chunk_rows == (rows.stop - 1) // self.chunk_rows:
            chunk, start = divmod(rows.start, self.chunk_rows)
            part = slice(start, start + rows.stop - rows.start)
            segment, number = divmod(chunk, self.segment_rows // self.chunk_rows)
            there = slice(0, part.stop - start) if places is None else places
            for shard in self._holding(layers):
                yield self._of_shard(segment, shard, layers, [(number, part, there)], out)
            return
        by_segment: dict[int, list[tuple[int, slice | np.ndarray, slice | np.ndarray]]] = {}
        for chunk, of_chunk, to in self._chunks(rows, places):
            segment, number = divmod(chunk, self.segment_rows // self.chunk_rows)
            by_segment.setdefault(segment, []).append((number, of_chunk, to))
        for segment, chunks in by_segment.items():
            for shard in self._holding(layers):
                yield self._of_shard(segment, shard, layers, chunks, out)

    def _holding(self, layers: list[int]) -> Iterable[int]:
        """Numbers of the shards of a segment that have any of these layers."""
        return sorted({layer // self.part_layers for layer in layers}) if self.by_layers else range(self.shards)

    def _of_shard(
        self,
        segment: int,
        shard: int,
        layers: list[int],
        chunks: list[tuple[int, slice | np.ndarray, slice | np.ndarray]],
        out: np.ndarray,
    ) -> ShardPieces:
        first = self.first_layer(shard)
        if not self.by_layers and self.shards > 1:
            out = out[..., shard * self.columns : (shard + 1) * self.columns]
        pieces = [
            Piece((number,) if self.per_sample else (layer - first, number), of_chunk, out[i], to)
            for number, of_chunk, to in chunks
            for i, layer in enumerate(layers)
            if not self.by_layers or layer // self.part_layers == shard
        ]
        return ShardPieces(self, segment, shard, pieces)

    def _chunks(
        self, rows: slice | np.ndarray, places: np.ndarray | None
    ) -> Iterator[tuple[int, slice | np.ndarray, slice | np.ndarray]]:
        """Yield (number of an inner chunk along the rows, wanted rows of the chunk, their places in the result)."""
        size = self.chunk_rows
        if isinstance(rows, slice):
            for first in range(rows.start // size * size, rows.stop, size):
                start, stop = max(first, rows.start), min(first + size, rows.stop)
                there = slice(start - rows.start, stop - rows.start)
                yield first // size, slice(start - first, stop - first), there if places is None else places[there]
            return
        chunks = rows // size
        order = np.argsort(chunks, kind="stable")
        to = order if places is None else places[order]
        ends = np.flatnonzero(np.diff(chunks[order], append=-1)) + 1
        start = 0
        for end in ends.tolist():
            chunk = int(chunks[order[start]])
            yield chunk, rows[order[start:end]] - chunk * size, to[start:end]
            start = end
