# SPDX-License-Identifier: Apache-2.0
"""Encodes and decodes the index at the end of a shard file, which has the location of each inner chunk.

The index has the offset and the length of every inner chunk of the shard as little-endian uint64, in C order. For an
absent chunk both are 2**64 - 1. The little-endian crc32c of these bytes follows.
"""

from __future__ import annotations

import math

import numpy as np

from dmi_connector.store.format.checksum import crc32c

EMPTY = np.uint64(2**64 - 1)
"""Offset and length of an absent chunk."""


def empty_index(slots: tuple[int, ...]) -> np.ndarray:
    """An index without chunks, uint64 `[*slots, 2]`. slots: shape of the shard in inner chunks."""
    return np.full((*slots, 2), EMPTY, "<u8")


def index_bytes(index: np.ndarray) -> bytes:
    """The end of a shard file: the index and its crc32c."""
    body = np.ascontiguousarray(index).tobytes()
    return body + crc32c(body).to_bytes(4, "little")


def shard_content(crcs: bytes, index: np.ndarray) -> bytes:
    """The bytes that a shard file's checksum covers. crcs: crc32c of each inner chunk, in the order of the file."""
    return crcs + np.ascontiguousarray(index).tobytes()


def read_index(tail: bytes, slots: tuple[int, ...]) -> np.ndarray:
    """Decode the last `16 * prod(slots) + 4` bytes of a shard file.

    Returns offsets and lengths, uint64 `[*slots, 2]`. Raises ValueError for a wrong length or crc32c.
    """
    size = 16 * math.prod(slots)
    if len(tail) != size + 4:
        raise ValueError(f"shard index of {size + 4} bytes expected, {len(tail)} found")
    if crc32c(tail[:size]) != int.from_bytes(tail[size:], "little"):
        raise ValueError("shard index does not match its crc32c")
    return np.frombuffer(tail, "<u8", size // 8).reshape(*slots, 2)
