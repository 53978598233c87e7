# SPDX-License-Identifier: Apache-2.0
"""Writes Blosc frames with zstd, twice as fast as Blosc does. Every Blosc decoder reads these frames.

Activations rarely repeat. Only the bytes with their exponents compress, because some exponents are more frequent than
others. At every level of zstd, Blosc spends most of its time on the search for matches. With a minimal search (matches
of 7 bytes or more, a table of 64 entries), zstd spends most of its time on entropy coding. The compression ratio even
rises: for normally distributed bfloat16 numbers from 1.43 to 1.50. If rows repeat, such as embeddings of the same
token, zstd searches as at level 1.

A frame has a header of 16 bytes, the offset of its only block (4 bytes), and the block. The block holds one plane for
each byte of an element, the least significant first: plane i has byte i of all elements. A plane is stored as its
length (4 bytes) and a zstd frame, or as its length and its bytes if zstd does not make it smaller.

A plain frame is a header and the uncompressed elements. Writers that are behind write plain frames
(store/write/arrays/plain.py).
"""

from __future__ import annotations

import functools
import struct

import numpy as np

_VERSION, _ZSTD_VERSION = 2, 1
"""Versions of Blosc's frame format and of its zstd format, as in the header."""
_SHUFFLED, _PLAIN, _ZSTD = 0x1, 0x2, 4 << 5
"""Flags in the header: bytes are shuffled into planes; elements are uncompressed; the compressor is zstd."""
_HEADER = struct.Struct("<4B3I")
"""Four bytes: versions of format and compressor, flags, bytes per element. Then three uint32: bytes of all elements, of
one block, of the frame.
"""
_BEGIN = struct.Struct("<i")
"""Offset of the block in the frame, bytes. A plain frame has no such field."""
_LENGTH = struct.Struct("<i")
"""Length of a stored plane in bytes. It precedes the plane."""
LEAST_PLANE = 128
"""Minimum number of bytes of a plane. Blosc decoders expect that smaller blocks are not split into planes."""
_SPLIT_ELEMENTS = 1 << 16
"""Number of elements that are split into planes at a time, so that they stay in the cache of a core."""
_RECURRING = 1 / 16
"""zstd searches for matches as at level 1 if more than this fraction of a chunk's rows repeat."""


def recurs(rows: np.ndarray) -> bool:
    """Whether many rows of a chunk begin with the same 8 bytes as another row. Rows that begin with zeros do not count.

    rows: C-contiguous [rows, ...]. The result is True if a row has fewer than 8 bytes.
    """
    if rows.ndim < 2 or rows[0].nbytes < 8:
        return True
    heads = np.ascontiguousarray(rows.view("u1").reshape(len(rows), -1)[:, :8]).view("<u8")[:, 0].tolist()
    there = [head for head in heads if head]
    return len(there) - len(set(there)) > _RECURRING * len(heads)


class _Planes:
    """Compresses the planes of chunks. All chunks share a buffer: a new buffer per chunk would cause page faults."""

    def __init__(self) -> None:
        import zstandard  # here, because readers of stores do not need it

        self._memory = np.empty(0, "u1")
        params = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, search_log=1, window_log=17
        )
        self._zstd = zstandard.ZstdCompressor(compression_params=params)
        self._searching = zstandard.ZstdCompressor(level=1)

    def compressed(self, chunk: np.ndarray) -> list[bytes | memoryview]:
        """The stored bytes of each plane of `chunk`, the least significant first. Valid until the next call."""
        planes = self._split(chunk.reshape(-1))
        zstd = self._searching if recurs(chunk) else self._zstd
        found: list[bytes | memoryview] = []
        for plane in planes:
            packed = zstd.compress(plane)
            found.append(packed if len(packed) < len(plane) else plane.data)
        return found

    def _split(self, elements: np.ndarray) -> np.ndarray:
        """The planes of `elements`, uint8 [bytes per element, elements], the least significant first."""
        size = elements.itemsize
        if size == 1:
            return elements.view("u1").reshape(1, -1)
        if self._memory.size < elements.nbytes:
            self._memory = np.empty(elements.nbytes, "u1")
        planes = self._memory[: elements.nbytes].reshape(size, -1)
        shifted = np.empty(min(_SPLIT_ELEMENTS, elements.size), elements.dtype)
        for begin in range(0, elements.size, _SPLIT_ELEMENTS):
            some = elements[begin : begin + _SPLIT_ELEMENTS]
            end = begin + some.size
            planes[0, begin:end] = some  # the cast keeps the least significant byte
            for byte in range(1, size):
                planes[byte, begin:end] = np.right_shift(some, 8 * byte, out=shifted[: some.size])
        return planes


_planes = functools.lru_cache(maxsize=1)(_Planes)
"""The `_Planes` of this process. A writer has one thread, so the buffer needs no lock."""


def frame_lengths(frame: np.ndarray) -> tuple[int, int]:
    """(bytes of the elements, bytes of the frame), from the header of a frame; (0, 0) without one. frame: uint8 [n]."""
    if len(frame) < _HEADER.size:
        return 0, 0
    nbytes, _, length = frame[4 : _HEADER.size].view("<u4").tolist()
    return nbytes, length


def plain_header(itemsize: int, nbytes: int) -> bytes:
    """The header of a plain frame with `nbytes` bytes of elements, valid with every compressor in the Zarr metadata."""
    return _HEADER.pack(_VERSION, _ZSTD_VERSION, _ZSTD | _PLAIN, itemsize, nbytes, nbytes, _HEADER.size + nbytes)


def zstd_frame(chunk: np.ndarray) -> bytes:
    """Encode a chunk as a frame. If compression gains nothing, the frame is plain.

    chunk: C-contiguous [rows, columns], unsigned integers, LEAST_PLANE elements or more.
    """
    size, nbytes = chunk.itemsize, chunk.nbytes
    planes = _planes().compressed(chunk)
    begin = _HEADER.size + _BEGIN.size
    length = begin + sum(_LENGTH.size + len(plane) for plane in planes)
    if length >= _HEADER.size + nbytes:
        return b"".join([plain_header(size, nbytes), chunk.reshape(-1).view("u1").data])
    flags = _ZSTD | (_SHUFFLED if size > 1 else 0)
    parts: list[bytes | memoryview] = [
        _HEADER.pack(_VERSION, _ZSTD_VERSION, flags, size, nbytes, nbytes, length),
        _BEGIN.pack(begin),
    ]
    for plane in planes:
        parts += [_LENGTH.pack(len(plane)), plane]
    return b"".join(parts)
