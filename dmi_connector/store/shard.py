# SPDX-License-Identifier: Apache-2.0
"""Shard files: encoding inner chunks, appending them, and the index that makes them a Zarr shard.

A shard file is encoded inner chunks in the order they came, then the index: for every inner chunk of the
shard, in C order, its uint64 offset and length (both 2**64 - 1 where there is none), then the crc32c of
the index.
"""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import google_crc32c
import numpy as np

from dmi_connector.store.frame import blosc_frame
from dmi_connector.store.paths import no_follow

EMPTY = np.uint64(2**64 - 1)
# Written at a time. What the checksum has just read is still in a cache then, and a file system in memory that may use
# huge pages does.
_WRITE_BYTES = 1 << 22
# Linux takes at most this many buffers in one pwritev.
_IOV_MAX = 1024
Buffer = bytes | np.ndarray


def crc32c(data: Buffer, start: int = 0) -> int:
    """crc32c of `data` (bytes or a contiguous uint8 array), going on from the crc `start`."""
    return int(google_crc32c.extend(start, data))


# The second checksum of a chunk, as part of its file, is worked out from the first where that is quicker: lengths recur
# without compression (5 us against 1 us for 22 kB).
_JOIN_BYTES = 1 << 18
_POLYNOMIAL = 0x82F63B78


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials modulo crc32c's, both with the highest power in bit 0."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@functools.lru_cache(maxsize=256)
def _shift(nbytes: int) -> int:
    """The polynomial x**(8 * nbytes)."""
    result, power = 0x80000000, 0x00800000  # 1, and x**8
    while nbytes:
        if nbytes & 1:
            result = _multiply(result, power)
        power = _multiply(power, power)
        nbytes >>= 1
    return result


def crc32c_join(first: int, second: int, nbytes: int) -> int:
    """crc32c of two pieces of data after one another, from the crc32c of each and the bytes of the second."""
    return _multiply(first, _shift(nbytes)) ^ second


@functools.lru_cache(maxsize=256)
def _crc_of_zeros(nbytes: int) -> int:
    return crc32c(bytes(nbytes))


class _Scratch:
    """Memory for short chunks that are filled up with zeros. New memory for each would cost as many page faults."""

    def __init__(self, rows: int, columns: int, dtype: str) -> None:
        self._array = np.zeros((rows, columns), dtype)
        self._used = 0

    def filled(self, chunk: np.ndarray) -> np.ndarray:
        """`chunk` and zeros; good until the next call."""
        self._array[: len(chunk)] = chunk
        self._array[len(chunk) : self._used] = 0
        self._used = len(chunk)
        return self._array


_scratch = functools.lru_cache(maxsize=16)(_Scratch)


# Fewer zeros are written: a hole costs a call of its own, and a file system keeps whole pages.
_HOLE_BYTES = 1 << 16


class Encoded(NamedTuple):
    """An inner chunk as its file holds it: the bytes of `body`, `zeros` zero bytes, the crc32c of both."""

    body: Buffer
    zeros: int
    crc: int

    @property
    def nbytes(self) -> int:
        """Bytes it takes in its file."""
        return len(self.body) + self.zeros + 4


def encode(chunk: np.ndarray, codec: str, rows: int | None = None) -> Encoded:
    """Encode one inner chunk, a C-contiguous array of unsigned integers as wide as the dtype.

    rows: of the whole chunk, where `chunk` has fewer (default: as many); zeros follow. With codec "none" the body is
    a view of `chunk`, so that bytes go from the ring to the file without a copy.
    """
    zeros = 0 if rows is None else (rows - len(chunk)) * chunk[0].nbytes
    if codec == "none":
        body = chunk.reshape(-1).view(np.uint8)
        crc = crc32c(body)
        return Encoded(body, zeros, crc32c_join(crc, _crc_of_zeros(zeros), zeros) if zeros else crc)
    if zeros:
        assert rows is not None
        chunk = _scratch(rows, chunk.shape[1], chunk.dtype.str).filled(chunk)
    packed = blosc_frame(chunk, codec)
    return Encoded(packed, 0, crc32c(packed))


class FileCache:
    """Open file descriptors, the least recently used closed first, so that many captures fit one process."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._fds: OrderedDict[str, int] = OrderedDict()

    def get(self, path: str) -> int:
        """A descriptor for writing `path`, which is created when missing (its directory is not)."""
        fd = self._fds.pop(path, None)
        if fd is None:
            while len(self._fds) >= self._limit:
                os.close(self._fds.popitem(last=False)[1])
            fd = no_follow(path, os.O_RDWR | os.O_CREAT)
        self._fds[path] = fd
        return fd

    def close(self, path: str) -> None:
        """Close `path` if it is open. Raises OSError when the file system reports a late write error."""
        fd = self._fds.pop(path, None)
        if fd is not None:
            os.close(fd)


class ShardWriter:
    """Appends encoded inner chunks to one shard file and writes the index at `close`.

    `slots` is the shape of the shard in inner chunks: (layers, chunks) or (rows,). A failed append leaves
    no trace in the index, and the next one cuts its bytes off.
    """

    def __init__(self, path: str, slots: tuple[int, ...], files: FileCache) -> None:
        self.path = path
        self._files = files
        self._index = np.full((*slots, 2), EMPTY, dtype="<u8")
        self._end = 0
        self._crc = 0
        self._torn = True  # there may be bytes past the end

    @property
    def full(self) -> bool:
        """Whether every inner chunk is there, so that nothing can follow but the index."""
        return not bool((self._index[..., 0] == EMPTY).any())

    def append(self, slots: Sequence[tuple[int, ...]], chunks: Iterable[Encoded]) -> int:
        """Write encoded chunks for the given slots; gives the bytes added, holes included. Raises OSError.

        chunks: may be made one by one; they are written in pieces of _WRITE_BYTES or more, while they are in the cache.
        """
        entries, end, file_crc = [], self._end, self._crc

        def pieces() -> Iterator[Buffer | int]:
            nonlocal end, file_crc
            for chunk in chunks:
                size = chunk.nbytes - 4
                if chunk.zeros or (isinstance(chunk.body, np.ndarray) and size >= _JOIN_BYTES):
                    file_crc = crc32c_join(file_crc, chunk.crc, size)
                else:
                    file_crc = crc32c(chunk.body, file_crc)  # it is still in cache
                crc = chunk.crc.to_bytes(4, "little")
                file_crc = crc32c(crc, file_crc)
                entries.append((end, chunk.nbytes))
                end += chunk.nbytes
                yield chunk.body
                yield chunk.zeros if chunk.zeros >= _HOLE_BYTES else bytes(chunk.zeros)
                yield crc

        self._write(pieces())
        for slot, entry in zip(slots, entries, strict=True):
            self._index[slot] = entry
        added, self._end, self._crc = end - self._end, end, file_crc
        return added

    def close(self, slots: tuple[int, ...] | None = None) -> tuple[int, int]:
        """Write the index, narrowed to the shape `slots`, and close the file.

        Returns the size and the crc32c of the whole file. Raises OSError, and ValueError when a chunk
        lies outside `slots`.
        """
        index = self._index
        if slots is not None:
            keep = tuple(slice(0, n) for n in slots)
            if (index[..., 0] != EMPTY).sum() != (index[keep][..., 0] != EMPTY).sum():
                raise ValueError(f"{self.path} holds chunks outside its final shape {slots}")
            index = index[keep]
        body = np.ascontiguousarray(index).tobytes()
        tail = body + crc32c(body).to_bytes(4, "little")
        self._write([tail])  # the last thing in the file: a failed append before it is cut off
        self._files.close(self.path)
        return self._end + len(tail), crc32c(tail, self._crc)

    def release(self) -> None:
        """Close the file without an index."""
        self._files.close(self.path)

    def _write(self, pieces: Iterable[Buffer | int]) -> None:
        """Write `pieces` at the end, where a number stands for a hole of so many bytes (which read as zeros)."""
        fd, at = self._files.get(self.path), self._end
        if self._torn:
            os.ftruncate(fd, self._end)  # else its bytes would show through a hole
        self._torn = True
        buffers: list[Buffer] = []
        nbytes = 0
        for piece in pieces:
            if isinstance(piece, int) or nbytes >= _WRITE_BYTES or len(buffers) == _IOV_MAX:
                at = self._put(fd, buffers, at)
                buffers, nbytes = [], 0
            if isinstance(piece, int):
                at += piece
            else:
                buffers.append(piece)
                nbytes += len(piece)
        self._put(fd, buffers, at)
        self._torn = False

    @staticmethod
    def _put(fd: int, buffers: Sequence[Buffer], at: int) -> int:
        """Write all of `buffers` from byte `at` on; gives the byte after them."""
        views = [memoryview(b) for b in buffers if len(b)]  # type: ignore[arg-type]
        while views:
            wrote = os.pwritev(fd, views, at)
            at += wrote
            while views and wrote >= len(views[0]):
                wrote -= len(views.pop(0))
            if views and wrote:
                views[0] = views[0][wrote:]
        return at

    @property
    def index(self) -> np.ndarray:
        """Where every inner chunk lies so far: uint64 `[*slots, 2]` of offset and length, EMPTY where there is none."""
        return self._index


def read_index(tail: bytes, slots: tuple[int, ...]) -> np.ndarray:
    """Decode the index, the last `16 * prod(slots) + 4` bytes of a shard file.

    Returns uint64 `[*slots, 2]` of offset and length. Raises ValueError for a wrong length or crc32c.
    """
    size = 16 * int(np.prod(slots))
    if len(tail) != size + 4:
        raise ValueError(f"shard index of {size + 4} bytes expected, {len(tail)} found")
    if crc32c(tail[:size]) != int.from_bytes(tail[size:], "little"):
        raise ValueError("shard index does not match its crc32c")
    return np.frombuffer(tail, "<u8", size // 8).reshape(*slots, 2)
