# SPDX-License-Identifier: Apache-2.0
"""Fetches all files of a store in an object store once, for checks that read them several times."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from dmi_connector.store.read.files.store_files import LocalFile, StoreFiles, load_file, read_all
from dmi_connector.store.read.files.thread_pool import in_fetch_threads


class FetchedFiles(StoreFiles):
    """All files of a store, in a temporary directory that is removed with this object.

    The local names are numbers, because the names in the store are not trusted.
    """

    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        # Windows does not remove a file that is still mapped.
        self._directory = tempfile.TemporaryDirectory(prefix="dmi-", ignore_cleanup_errors=True)
        self._paths = {name: Path(self._directory.name, str(i)) for i, name in enumerate(sorted(files.names()))}
        in_fetch_threads(self._fetch, self._paths)

    def _fetch(self, name: str) -> None:
        with open(self._paths[name], "wb") as out:
            for block in self._files.blocks(name):
                out.write(block)

    def open(self, path: str) -> LocalFile:
        if path not in self._paths:
            raise FileNotFoundError(f"{self}/{path} does not exist")
        return LocalFile(str(self._paths[path]))

    def read(self, path: str) -> bytes:
        return read_all(self.open(path))

    def names(self) -> set[str]:
        return set(self._paths)

    def size(self, path: str) -> int | None:
        return self._paths[path].stat().st_size if path in self._paths else None

    def load(self, path: str) -> bytes | np.ndarray | None:
        return load_file(self._paths[path]) if path in self._paths else None

    def __str__(self) -> str:
        return str(self._files)
