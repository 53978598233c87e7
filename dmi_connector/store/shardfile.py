# SPDX-License-Identifier: Apache-2.0
"""Reading shards without zarr-python, for verify: every checksum is checked and every chunk can be named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
from numcodecs import blosc

from dmi_connector.store import schema
from dmi_connector.store.schema import ArraySpec, Grid
from dmi_connector.store.shard import crc32c, read_index


def read_file(path: Path) -> bytes | np.ndarray | None:
    """The bytes of a file (mapped when it is large), or None when there is no such file."""
    if not path.is_file():
        return None
    if path.stat().st_size < 1 << 20:
        return path.read_bytes()
    return np.memmap(path, np.uint8, "r")


def numpy_dtype(name: str) -> np.dtype:
    """The little-endian numpy dtype of a stored dtype name."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name).newbyteorder("<")


def decode_plain(store: Path, name: str, dtype: str) -> np.ndarray:
    """A 1-D array of a store. Raises ValueError when its chunk does not match its crc32c or dtype."""
    data = read_file(store / name / "c" / "0")
    if data is None:
        return np.zeros(0, numpy_dtype(dtype))
    body = data[:-4]
    if crc32c(body) != int.from_bytes(bytes(data[-4:]), "little"):
        raise ValueError("the values do not match their crc32c")
    return np.frombuffer(body, numpy_dtype(dtype))


@dataclass(frozen=True)
class ShardReader:
    """One shard file with its index checked. chunk_shape: rows and columns of an inner chunk."""

    data: bytes | np.ndarray
    index: np.ndarray
    dtype: np.dtype
    chunk_shape: tuple[int, int]
    codec: str

    def chunk(self, slot: tuple[int, ...]) -> np.ndarray:
        """Decode one inner chunk, [rows, columns]. Raises ValueError when its bytes are not what was
        written.
        """
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
    """A hook array of a store: `length` tokens, or samples for a per-sample array."""

    store: Path
    spec: ArraySpec
    length: int
    grid: Grid
    codec: str

    @property
    def rows_per_segment(self) -> int:
        return schema.SAMPLES_PER_SHARD if self.spec.per_sample else self.grid.segment

    @property
    def rows_per_chunk(self) -> int:
        return 1 if self.spec.per_sample else self.grid.chunk

    @property
    def segments(self) -> int:
        return -(-self.length // self.rows_per_segment)

    def path(self, segment: int, shard: int) -> str:
        """Path of a shard file inside the store."""
        return schema.shard_path(replace(self.spec, rank=shard), segment)

    def shard(self, segment: int, shard: int) -> ShardReader:
        """Open a shard. Raises ValueError for a bad index."""
        data = read_file(self.store / self.path(segment, shard))
        if data is None:
            raise ValueError("the file is missing")
        chunks = self.rows_per_segment // self.rows_per_chunk
        slots = (chunks,) if self.spec.per_sample else (self.spec.n_layers, chunks)
        index = read_index(bytes(data[-(16 * int(np.prod(slots)) + 4) :]), slots)
        shape = (self.rows_per_chunk, self.spec.local_width)
        return ShardReader(data, index, numpy_dtype(self.spec.dtype), shape, self.codec)

    def chunks(self, segment: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Every inner chunk that a segment should hold: index slot, first row, one past the last row."""
        start = segment * self.rows_per_segment
        stop = min(self.length, start + self.rows_per_segment)
        for n, first in enumerate(range(start, stop, self.rows_per_chunk)):
            end = min(stop, first + self.rows_per_chunk)
            if self.spec.per_sample:
                yield (n,), first, end
            else:
                yield from (((layer, n), first, end) for layer in range(self.spec.n_layers))
