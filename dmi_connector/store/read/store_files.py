# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a store come from. All reads of shards go through here, so another source needs these two classes
alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

Buffer = memoryview
"""A writable, contiguous view of bytes."""


class StoredFile:
    """One file of a store, open for reads of byte ranges. Threads may share it. Use it in a `with` block."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        """`nbytes` bytes from `offset` on; fewer at the end of the file."""
        return os.pread(self._fd, nbytes, offset)

    def read_into(self, offset: int, parts: Sequence[Buffer]) -> None:
        """Fill `parts`, one after the other, with the bytes from `offset` on. Raises ValueError behind the end."""
        views = list(parts)
        while views:
            got = os.preadv(self._fd, views, offset)
            if got == 0 and any(len(view) for view in views):
                raise ValueError("the file ends before its chunks do")
            offset += got
            while views and got >= len(views[0]):
                got -= len(views.pop(0))
            if views:
                views[0] = views[0][got:]

    def __enter__(self) -> StoredFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


class StoreFiles:
    """The files of one store on a local file system."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def open(self, path: str) -> StoredFile:
        """Open a file by its path in the store. Raises FileNotFoundError."""
        return StoredFile(f"{self.root}/{path}")

    def read(self, path: str) -> bytes:
        """All bytes of a file. Raises FileNotFoundError."""
        with self.open(path) as file:
            return file.read(0, file.size)

    def __str__(self) -> str:
        return str(self.root)
