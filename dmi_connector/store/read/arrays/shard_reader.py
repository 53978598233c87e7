# SPDX-License-Identifier: Apache-2.0
"""Reads whole shard files chunk by chunk, for verify and repair, and 1-D arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dmi_connector.dtypes import numpy_dtype
from dmi_connector.store.format.checksum import crc32c
from dmi_connector.store.format.shard_index import EMPTY, shard_content
from dmi_connector.store.read.arrays.chunk import outside, read_piece
from dmi_connector.store.read.arrays.hook_array import HookArray, Piece
from dmi_connector.store.read.files.store_files import HeldBytes, StoreFiles
from dmi_connector.store.read.metadata import read_array


def decode_plain(files: StoreFiles, name: str, dtype: str) -> np.ndarray:
    """Read a 1-D array of a store. Raises ValueError if its chunk is missing, or does not match its crc32c or dtype."""
    data = files.load(f"{name}/c/0")
    if data is None:
        if read_array(files, name).get("shape") != [0]:
            raise ValueError("its chunk is missing; dmi verify lists all damage")
        return np.zeros(0, numpy_dtype(dtype))
    body = data[:-4]
    if not len(body):  # an array without values has no file, and the crc32c of nothing is 0
        raise ValueError("its chunk is cut short; dmi verify lists all damage")
    if crc32c(body) != int.from_bytes(bytes(data[-4:]), "little"):
        raise ValueError("the values do not match their crc32c")
    return np.frombuffer(body, numpy_dtype(dtype))


@dataclass(frozen=True)
class ShardReader:
    """One shard file in memory, for reading all its chunks. chunk_reader.py reads chosen rows of many files.

    data: the bytes of the file. index: uint64 [*slots, 2].
    """

    array: HookArray
    data: bytes | np.ndarray
    index: np.ndarray

    @classmethod
    def open(cls, array: HookArray, segment: int, shard: int) -> ShardReader:
        """Load a shard file. Raises OSError, and ValueError for a missing file or a damaged index."""
        data = array.files.load(array.path(segment, shard))
        if data is None:
            raise ValueError("the file is missing")
        return cls(array, data, array.index(_held(data), segment, shard))

    def content(self) -> bytes:
        """The bytes that the checksum of the file covers. Raises ValueError if a chunk lies outside the file."""
        places = self.index.reshape(-1, 2)
        ends = np.sort(places[places[:, 0] != EMPTY].sum(axis=1).astype(np.int64))
        if len(ends) and not 4 <= ends[0] <= ends[-1] <= len(self.data):
            raise ValueError("a chunk lies outside the file")
        crcs = np.frombuffer(self.data, np.uint8)[ends[:, None] + np.arange(-4, 0)]
        return shard_content(crcs.tobytes(), self.index)

    def chunk(self, slot: tuple[int, ...]) -> np.ndarray:
        """One inner chunk, [rows, columns]. Raises ValueError if it is damaged."""
        array = self.array
        offset, size = self.index[slot].tolist()
        if offset + size > len(self.data):
            raise outside(offset, size)
        out = np.empty((array.chunk_rows, array.columns), array.bits)
        every = slice(0, array.chunk_rows)
        read_piece(array, _held(self.data), offset, size, Piece(slot, every, out, every))
        return out.view(array.dtype)


def _held(data: bytes | np.ndarray) -> HeldBytes:
    return HeldBytes(data if isinstance(data, bytes) else data.data)
