# SPDX-License-Identifier: Apache-2.0
"""Reads the files of a store in a directory. zip_files.py and remote_files.py read other stores."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

Buffer = memoryview
"""A writable, contiguous view of bytes."""
_BLOCK_BYTES = 8 << 20
"""Number of bytes per read of `StoreFiles.blocks`."""
MAPPED_BYTES = 1 << 20
"""`load_file` memory-maps files of this size or larger. Only the pages that are used are read from disk."""
_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0)
"""Flags of `os.open`. Without O_BINARY, Windows translates line ends."""
_seeking = threading.Lock()


def _seek_and_read(fd: int, nbytes: int, offset: int) -> bytes:
    """Replaces `os.pread` on Windows. The lock keeps threads that share a descriptor from moving its offset."""
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, nbytes)


def _read_and_copy(fd: int, parts: Sequence[Buffer], offset: int) -> int:
    """Replaces `os.preadv` on systems that lack it."""
    data, at = memoryview(_pread(fd, sum(map(len, parts)), offset)), 0
    for part in parts:
        piece = data[at : at + len(part)]
        part[: len(piece)] = piece
        at += len(piece)
    return len(data)


_pread = getattr(os, "pread", _seek_and_read)
_preadv = getattr(os, "preadv", _read_and_copy)


class StoredFile(ABC):
    """One open file of a store, for reads of byte ranges. Threads may share it. Use it in a `with` block."""

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> bytes:
        """Read `nbytes` bytes from `offset`, or fewer at the end of the file. Raises FileNotFoundError, OSError."""

    @abstractmethod
    def read_end(self, nbytes: int) -> bytes:
        """Read the last `nbytes` bytes, or the whole file if it is shorter. Raises FileNotFoundError, OSError."""

    @abstractmethod
    def read_into(self, offset: int, parts: Sequence[Buffer]) -> None:
        """Fill `parts` in order with the bytes from `offset`.

        Raises FileNotFoundError, OSError, and ValueError if the file is too short.
        """

    def __enter__(self) -> StoredFile:
        return self

    def __exit__(self, *_: object) -> None:
        return None


_LARGEST = 1 << 62
"""A size that no local file has. A damaged index may have any offset, and `os.preadv` fails for the largest ones."""


class LocalFile(StoredFile):
    """A local file, or a byte range of one.

    base: offset of the range. nbytes: size of the range; None for the rest of the file.
    """

    def __init__(self, path: str, base: int = 0, nbytes: int | None = None) -> None:
        self._fd = os.open(path, _FLAGS)
        self._base, self._nbytes = base, nbytes

    @property
    def size(self) -> int:
        """Number of bytes of the file or range."""
        return os.fstat(self._fd).st_size if self._nbytes is None else self._nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        if self._nbytes is not None:
            nbytes = max(0, min(nbytes, self._nbytes - offset))
        return _pread(self._fd, nbytes, self._base + offset)

    def read_end(self, nbytes: int) -> bytes:
        size = self.size
        nbytes = min(nbytes, size)  # os.pread allocates as many bytes as it is asked for
        return self.read(size - nbytes, nbytes)

    def read_into(self, offset: int, parts: Sequence[Buffer]) -> None:
        wanted = sum(map(len, parts))
        if offset + wanted > (_LARGEST if self._nbytes is None else self._nbytes):
            raise ValueError("the file ends before its chunks do")
        got = _preadv(self._fd, parts, self._base + offset)
        if got != wanted:
            self._read_rest(self._base + offset, parts, got)

    def _read_rest(self, offset: int, parts: Sequence[Buffer], got: int) -> None:
        """Read the rest of `parts` after a short read of `got` bytes."""
        views = list(parts)
        while views:
            offset += got
            while views and got >= len(views[0]):
                got -= len(views.pop(0))
            if views:
                views[0] = views[0][got:]
                got = _preadv(self._fd, views, offset)
                if got == 0:
                    raise ValueError("the file ends before its chunks do")

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def read_all(file: LocalFile) -> bytes:
    """Read all bytes of an open file, and close it."""
    with file:
        return file.read(0, file.size)


class HeldBytes(StoredFile):
    """Bytes of a file that are already in memory. first: the offset of `data` in the file."""

    def __init__(self, data: bytes | memoryview, first: int = 0) -> None:
        self._data, self._first = memoryview(data), first

    def read(self, offset: int, nbytes: int) -> bytes:
        at = offset - self._first
        return bytes(self._data[at : at + nbytes])

    def read_end(self, nbytes: int) -> bytes:
        return bytes(self._data[max(0, len(self._data) - nbytes) :])

    def read_into(self, offset: int, parts: Sequence[Buffer]) -> None:
        at = offset - self._first
        if not 0 <= at <= at + sum(map(len, parts)) <= len(self._data):
            raise ValueError("the file ends before its chunks do")
        for part in parts:
            part[:] = self._data[at : at + len(part)]
            at += len(part)


def load_file(path: Path) -> bytes | np.ndarray | None:
    """The bytes of a file; None if it does not exist. Files of MAPPED_BYTES or more are memory-mapped."""
    if not path.is_file():
        return None
    if path.stat().st_size < MAPPED_BYTES:
        return path.read_bytes()
    return np.memmap(path, np.uint8, "r")


class StoreFiles(ABC):
    """The files of one store.

    remote: whether each read sends a request to a server. Readers then send several requests at once.
    """

    remote = False

    @abstractmethod
    def open(self, path: str) -> StoredFile:
        """Open a file by its path in the store. Raises FileNotFoundError, here or at the first read."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """All bytes of a file. Raises FileNotFoundError."""

    @abstractmethod
    def names(self) -> set[str]:
        """The paths of all files. Raises OSError."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Size of a file in bytes; None if it does not exist."""

    def blocks(self, path: str) -> Iterator[bytes]:
        """Yield the bytes of a file in blocks of at most 8 MiB.

        Raises FileNotFoundError, and ValueError if the file ends early.
        """
        size, at = self.size(path) or 0, 0
        with self.open(path) as file:
            while at < size:
                data = file.read(at, _BLOCK_BYTES)
                if not data:
                    raise ValueError(f"{self}/{path} ends at byte {at} of {size}")
                yield data
                at += len(data)

    def load(self, path: str) -> bytes | np.ndarray | None:
        """All bytes of a file; None if it does not exist. Large local files are memory-mapped."""
        try:
            return self.read(path)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None


class LocalFiles(StoreFiles):
    """The files of a store that is a directory."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)

    def open(self, path: str) -> LocalFile:
        return LocalFile(f"{self.root}/{path}")

    def read(self, path: str) -> bytes:
        return read_all(self.open(path))

    def names(self) -> set[str]:
        root = Path(self.root)
        return {p.relative_to(root).as_posix() for p in root.rglob("*") if not p.is_dir()}

    def size(self, path: str) -> int | None:
        file = Path(self.root, path)
        return file.stat().st_size if file.is_file() else None

    def load(self, path: str) -> bytes | np.ndarray | None:
        return load_file(Path(self.root, path))

    def __str__(self) -> str:
        return self.root
