# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a store come from. All reads of shards go through here, so another source needs these two classes
alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

Buffer = memoryview
"""A writable, contiguous view of bytes."""


class StoredFile:
    """One file of a store, open for reads of byte ranges. Threads may share it. Use it in a `with` block."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._fd).st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        """`nbytes` bytes from `offset` on; fewer at the end of the file."""
        return os.pread(self._fd, nbytes, offset)

    def read_into(self, offset: int, parts: Sequence[Buffer]) -> None:
        """Fill `parts`, one after the other, with the bytes from `offset` on. Raises ValueError behind the end."""
        wanted = sum(map(len, parts))
        got = os.preadv(self._fd, parts, offset)
        if got != wanted:
            self._read_rest(offset, parts, got)

    def _read_rest(self, offset: int, parts: Sequence[Buffer], got: int) -> None:
        """Go on after `got` bytes."""
        views = list(parts)
        while views:
            offset += got
            while views and got >= len(views[0]):
                got -= len(views.pop(0))
            if views:
                views[0] = views[0][got:]
                got = os.preadv(self._fd, views, offset)
                if got == 0:
                    raise ValueError("the file ends before its chunks do")

    def __enter__(self) -> StoredFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


class StoreFiles:
    """The files of one store on a local file system."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)

    def open(self, path: str) -> StoredFile:
        """Open a file by its path in the store. Raises FileNotFoundError."""
        return StoredFile(f"{self.root}/{path}")

    def read(self, path: str) -> bytes:
        """All bytes of a file. Raises FileNotFoundError."""
        with self.open(path) as file:
            return file.read(0, file.size)

    def __str__(self) -> str:
        return self.root
