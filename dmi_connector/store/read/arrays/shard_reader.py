# SPDX-License-Identifier: Apache-2.0
"""Reads shard files without zarr-python: checks every checksum, and can name every chunk. For verify and repair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numcodecs import blosc

from dmi_connector.dtypes import numpy_dtype
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format import schema
from dmi_connector.store.format.checksum import crc32c
from dmi_connector.store.format.schema import Grid
from dmi_connector.store.format.shard_index import EMPTY, read_index, shard_content
from dmi_connector.store.read.files.store_files import StoreFiles
from dmi_connector.store.read.metadata import read_array


def decode_plain(files: StoreFiles, name: str, dtype: str) -> np.ndarray:
    """A 1-D array of a store. Raises ValueError when its chunk is gone, or does not match its crc32c or dtype."""
    data = files.load(f"{name}/c/0")
    if data is None:
        if read_array(files, name)["shape"] != [0]:
            raise ValueError("the file of its values is gone; dmi verify says what else is")
        return np.zeros(0, numpy_dtype(dtype))
    body = data[:-4]
    if crc32c(body) != int.from_bytes(bytes(data[-4:]), "little"):
        raise ValueError("the values do not match their crc32c")
    return np.frombuffer(body, numpy_dtype(dtype))


@dataclass(frozen=True)
class ShardReader:
    """One shard file whose index was checked. chunk_shape: rows and columns of an inner chunk."""

    data: bytes | np.ndarray
    index: np.ndarray
    dtype: np.dtype
    chunk_shape: tuple[int, int]
    codec: str

    def content(self) -> bytes:
        """What the checksum of the file covers. Raises ValueError when a chunk lies outside the file."""
        places = self.index.reshape(-1, 2)
        ends = np.sort(places[places[:, 0] != EMPTY].sum(axis=1).astype(np.int64))
        if len(ends) and not 4 <= ends[0] <= ends[-1] <= len(self.data):
            raise ValueError("a chunk lies outside the file")
        crcs = np.frombuffer(self.data, np.uint8)[ends[:, None] + np.arange(-4, 0)]
        return shard_content(crcs.tobytes(), self.index)

    def chunk(self, slot: tuple[int, ...]) -> np.ndarray:
        """Decode one inner chunk, [rows, columns]. Raises ValueError when its bytes are not what was written."""
        offset, size = (int(x) for x in self.index[slot])
        if size < 4 or offset + size > len(self.data):
            raise ValueError(f"the chunk at byte {offset} with {size} bytes lies outside the file")
        body = self.data[offset : offset + size - 4]
        if crc32c(body) != int.from_bytes(bytes(self.data[offset + size - 4 : offset + size]), "little"):
            raise ValueError("the chunk does not match its crc32c")
        try:
            raw = body if self.codec == "none" else blosc.decompress(body)
        except RuntimeError as error:
            raise ValueError(f"the chunk cannot be decompressed ({error})") from error
        rows, columns = self.chunk_shape
        if len(raw) != rows * columns * self.dtype.itemsize:
            raise ValueError(f"the chunk has {len(raw)} bytes, not {rows} x {columns} values")
        return np.frombuffer(raw, self.dtype).reshape(rows, columns)


@dataclass(frozen=True)
class StoredArray:
    """A hook array of a store. length: its tokens; for a per-sample array its samples."""

    files: StoreFiles
    spec: ArraySpec
    length: int
    grid: Grid
    codec: str

    @property
    def rows_per_segment(self) -> int:
        """Rows of one shard file."""
        return schema.SAMPLES_PER_SHARD if self.spec.per_sample else self.grid.segment

    @property
    def rows_per_chunk(self) -> int:
        """Rows of one inner chunk."""
        return 1 if self.spec.per_sample else self.grid.chunk

    @property
    def segments(self) -> int:
        """Shard files along the token axis."""
        return -(-self.length // self.rows_per_segment)

    def path(self, segment: int, shard: int) -> str:
        """Path of a shard file inside the store."""
        return schema.shard_path(replace(self.spec, rank=shard), segment)

    def shard(self, segment: int, shard: int) -> ShardReader:
        """Open a shard. Raises ValueError for a bad index."""
        data = self.files.load(self.path(segment, shard))
        if data is None:
            raise ValueError("the file is missing")
        chunks = self.rows_per_segment // self.rows_per_chunk
        slots = (chunks,) if self.spec.per_sample else (self.spec.shard_layers, chunks)
        index = read_index(bytes(data[-(16 * int(np.prod(slots)) + 4) :]), slots)
        shape = (self.rows_per_chunk, self.spec.local_width)
        return ShardReader(data, index, numpy_dtype(self.spec.dtype), shape, self.codec)

    def chunks(self, segment: int, shard: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Every inner chunk that a shard should hold: index slot, first row, one past the last row."""
        layers = replace(self.spec, rank=shard).local_layers
        start = segment * self.rows_per_segment
        stop = min(self.length, start + self.rows_per_segment)
        for n, first in enumerate(range(start, stop, self.rows_per_chunk)):
            end = min(stop, first + self.rows_per_chunk)
            if self.spec.per_sample:
                yield (n,), first, end
            else:
                yield from (((layer, n), first, end) for layer in range(layers))
