# SPDX-License-Identifier: Apache-2.0
"""Writes shard files: encoded inner chunks are appended as they arrive, and the index at the end."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dmi_connector.codecs import CODECS
from dmi_connector.store.format.checksum import crc32c, crc32c_join, crc32c_of_zeros
from dmi_connector.store.format.paths import no_follow
from dmi_connector.store.format.shard_index import EMPTY, empty_index, index_bytes, shard_content

Buffer = bytes | np.ndarray

_WRITE_BYTES = 1 << 22
"""Bytes written at a time. They are few enough to stay in the CPU cache between their checksum and the write."""
_IOV_MAX = 1024
"""Maximum number of buffers of one pwritev on Linux."""
_HOLE_BYTES = 1 << 16
"""Minimum size of a hole. Fewer zeros are written: a hole costs a system call, and file systems store whole pages."""


class _Scratch:
    """Memory in which short chunks are padded with zeros. It is reused, because new memory would cost page faults."""

    def __init__(self, rows: int, columns: int, dtype: str) -> None:
        self._array = np.zeros((rows, columns), dtype)
        self._used = 0

    def filled(self, chunk: np.ndarray) -> np.ndarray:
        """`chunk`, followed by zeros. Valid until the next call."""
        self._array[: len(chunk)] = chunk
        self._array[len(chunk) : self._used] = 0
        self._used = len(chunk)
        return self._array


_scratch = functools.lru_cache(maxsize=16)(_Scratch)


class Encoded(NamedTuple):
    """Parts of an inner chunk in the file: `head`, `body`, `zeros` zero bytes, and `crc`, the crc32c of these three."""

    head: bytes
    body: Buffer
    zeros: int
    crc: int

    @property
    def nbytes(self) -> int:
        """Number of bytes in the file."""
        return len(self.head) + len(self.body) + self.zeros + 4


def encode(chunk: np.ndarray, codec: str, rows: int | None = None, plain: bool = False) -> Encoded:
    """Encode one inner chunk: a C-contiguous array of unsigned integers with the width of the dtype.

    codec: a name in CODECS. rows: number of rows of a full chunk, to which a short one is padded with zeros; None for
    no padding. plain: do not compress, if the codec can mark a chunk as uncompressed. The body of an uncompressed chunk
    is a view of `chunk`, not a copy.
    """
    its = CODECS[codec]
    zeros = 0 if rows is None else (rows - len(chunk)) * chunk[0].nbytes
    if not its.compresses or (plain and its.has_plain):
        body = chunk.reshape(-1).view(np.uint8)
        head = its.plain_head(chunk.itemsize, len(body) + zeros)
        crc = crc32c(body)
        if head:
            crc = crc32c_join(crc32c(head), crc, len(body))
        return Encoded(head, body, zeros, crc32c_join(crc, crc32c_of_zeros(zeros), zeros) if zeros else crc)
    if zeros:
        assert rows is not None
        chunk = _scratch(rows, chunk.shape[1], chunk.dtype.str).filled(chunk)
    packed = its.encode(chunk)
    return Encoded(b"", packed, 0, crc32c(packed))


class FileCache:
    """Open file descriptors, at most `limit`. The least recently used one is closed first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._fds: OrderedDict[str, int] = OrderedDict()

    def get(self, path: str) -> int:
        """A descriptor for writing `path`, which is created if missing (its directory is not)."""
        fd = self._fds.pop(path, None)
        if fd is None:
            while len(self._fds) >= self._limit:
                os.close(self._fds.popitem(last=False)[1])
            fd = no_follow(path, os.O_RDWR | os.O_CREAT)
        self._fds[path] = fd
        return fd

    def close(self, path: str) -> None:
        """Close `path` if it is open. Raises OSError if the file system reports a write error on close."""
        fd = self._fds.pop(path, None)
        if fd is not None:
            os.close(fd)


class ShardWriter:
    """Appends encoded inner chunks to one shard file and writes the index at `close`.

    slots: shape of the shard in inner chunks, (layers, chunks) or (rows,). index: the places of the inner chunks so far
    (shard_index.py). A failed append does not change the index, and the next append overwrites its bytes.
    """

    def __init__(self, path: str, slots: tuple[int, ...], files: FileCache) -> None:
        self.path = path
        self.index = empty_index(slots)
        self._files = files
        self._end = 0
        self._crcs = b""  # of the chunks, in the order of the file
        self._torn = True  # there may be bytes past the end

    @property
    def full(self) -> bool:
        """Whether all inner chunks were appended."""
        return not bool((self.index[..., 0] == EMPTY).any())

    def append(self, slots: Sequence[tuple[int, ...]], chunks: Iterable[Encoded]) -> int:
        """Write encoded chunks for the given slots. Returns the bytes added, holes included. Raises OSError.

        chunks: may be a generator, so that each chunk is written while it is in the CPU cache.
        """
        fd = self._begin()
        entries: list[tuple[int, int]] = []
        buffers: list[Buffer] = []
        start = end = self._end  # offsets of what is in `buffers`
        crcs: list[bytes] = []
        for chunk in chunks:
            tail = chunk.crc.to_bytes(4, "little")
            crcs.append(tail)
            entries.append((end, chunk.nbytes))
            end += chunk.nbytes
            if chunk.zeros >= _HOLE_BYTES:
                _put(fd, [*buffers, chunk.head, chunk.body], start)
                buffers, start = [tail], end - len(tail)
            else:
                buffers += [chunk.head, chunk.body, bytes(chunk.zeros), tail]
            if end - start >= _WRITE_BYTES or len(buffers) > _IOV_MAX - 4:
                _put(fd, buffers, start)
                buffers, start = [], end
        _put(fd, buffers, start)
        self._torn = False
        for slot, entry in zip(slots, entries, strict=True):
            self.index[slot] = entry
        added, self._end = end - self._end, end
        self._crcs += b"".join(crcs)
        return added

    def holds(self, slot: tuple[int, ...]) -> bool:
        """Whether the chunk of a slot was appended."""
        return bool(self.index[slot][0] != EMPTY)

    def take_back(self, slot: tuple[int, ...]) -> None:
        """Remove a chunk and all chunks that were appended after it. The next append overwrites them."""
        at = self.index[slot][0]
        before = self.index[..., 0] < at
        self._crcs = self._crcs[: 4 * int(before.sum())]
        self.index[~before] = EMPTY
        self._end, self._torn = int(at), True

    def close(self, slots: tuple[int, ...] | None = None) -> tuple[int, bytes]:
        """Write the index, cut to the shape `slots`, and close the file.

        Returns the size of the file, and the bytes that its checksum covers. Raises OSError, and ValueError if a chunk
        lies outside `slots`.
        """
        index = self.index
        if slots is not None:
            keep = tuple(slice(0, n) for n in slots)
            if (index[..., 0] != EMPTY).sum() != (index[keep][..., 0] != EMPTY).sum():
                raise ValueError(f"{self.path} holds chunks outside its final shape {slots}")
            index = index[keep]
        tail = index_bytes(index)
        _put(self._begin(), [tail], self._end)
        self._torn = False
        self._files.close(self.path)
        return self._end + len(tail), shard_content(self._crcs, index)

    def release(self) -> None:
        """Close the file without an index."""
        self._files.close(self.path)

    def _begin(self) -> int:
        """Open the file. Bytes of a failed write are cut off, because they would remain in holes of the next write."""
        fd = self._files.get(self.path)
        if self._torn:
            os.ftruncate(fd, self._end)
        self._torn = True
        return fd


def _put(fd: int, buffers: Sequence[Buffer], at: int) -> None:
    """Write all of `buffers` from byte `at` on. Raises OSError."""
    views = [memoryview(b) for b in buffers if len(b)]  # type: ignore[arg-type]
    while views:
        wrote = os.pwritev(fd, views, at)
        at += wrote
        while views and wrote >= len(views[0]):
            wrote -= len(views.pop(0))
        if views and wrote:
            views[0] = views[0][wrote:]
