# SPDX-License-Identifier: Apache-2.0
"""Hard links to finished stores from which requests borrow rows. A link exists until the borrower's store is finished.

Users may remove stores at any time. Without links, a store could be removed after the scheduler chose to borrow its
rows, and before writers have copied them.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile

from vllm.logger import init_logger

from dmi_connector.store.format.locks import is_abandoned, share
from dmi_connector.store.format.paths import leaves_store

logger = init_logger("vllm.dmi_connector")

PREFIX = ".dmi-held-"
"""Prefix of directories in a store directory. Each engine that borrows rows has one such directory, and locks it."""


class Holds:
    """Links to stores, in a directory in `store_dir` that exists only while there are links.

    The constructor removes directories that killed engines left behind.
    """

    def __init__(self, store_dir: str) -> None:
        self._store_dir, self._root, self._lock = store_dir, "", -1
        self._count = 0
        self._held: set[str] = set()
        for path in glob.glob(os.path.join(glob.escape(store_dir), PREFIX + "*")):
            if is_abandoned(path):
                _remove(path)

    def hold(self, store: str) -> str:
        """Link all files of a finished store. Returns the path of the new directory, which has the store's name.

        Raises FileNotFoundError if a file of the store is missing, another OSError if hard links are not supported, and
        ValueError if the store's zarr.json is damaged.
        """
        if not self._held:
            self._root = tempfile.mkdtemp(prefix=PREFIX, dir=self._store_dir)
            self._lock = share(self._root) or -1
        self._count += 1
        held = os.path.join(self._root, str(self._count), os.path.basename(store))
        self._held.add(held)
        try:
            for path in ["zarr.json", *_files_of(store)]:  # a directory listing would omit files that were removed
                there = os.path.join(held, path)
                os.makedirs(os.path.dirname(there), exist_ok=True)
                os.link(os.path.join(store, path), there, follow_symlinks=False)
        except (OSError, ValueError):
            self.release(held)
            raise
        return held

    def release(self, held: str) -> None:
        """Remove the links in the directory `held`."""
        self._held.remove(held)
        if self._held:
            _remove(os.path.dirname(held))
            return
        _remove(self._root)
        if self._lock >= 0:
            os.close(self._lock)

    def close(self) -> None:
        """Remove all links."""
        for held in [*self._held]:
            self.release(held)


def _files_of(store: str) -> list[str]:
    with open(os.path.join(store, "zarr.json"), "rb") as file:
        document = json.load(file)
    try:
        paths = list(document["attributes"]["dmi"]["files"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{store}/zarr.json lists no files") from error
    if wrong := [path for path in paths if not isinstance(path, str) or leaves_store(path)]:
        raise ValueError(f"{store}/zarr.json lists {wrong[0]!r}, which is not a file of the store")
    return paths


def _remove(path: str) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return  # no link was made
    except OSError as error:
        logger.warning("dmi_connector: %s, which has links to stores, cannot be removed: %s", path, error)
