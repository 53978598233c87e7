# SPDX-License-Identifier: Apache-2.0
"""Parses arguments of commands that name stores and directories."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dmi_connector.store.format.remote_path import Place, RemotePath, place_of
from dmi_connector.store.read.index import check_not_above, is_store
from dmi_connector.urls import is_url, parse_url


def place(path: str, kind: str) -> Place:
    """Parse an argument that may be a URL, a directory, or the zip file of a store.

    kind: what the command takes, in words, for the error message. Raises ValueError for anything else.
    """
    found = place_of(path)
    if isinstance(found, RemotePath) or (found.suffix == ".zip" and found.is_file()):
        return found
    return directory(path, kind)


def directory(path: str, kind: str) -> Path:
    """Parse an argument that must be a local directory. kind: as in `place`. Raises ValueError for anything else."""
    if is_url(path):
        parse_url("path", path)
        raise ValueError(f"{path} is a URL, which this command does not take; give {kind} on this machine")
    if not os.path.isdir(path):
        raise ValueError(f"{path} {'is a file' if os.path.exists(path) else 'does not exist'}; give {kind}")
    return Path(path)


def store_directory(path: str, kind: str = "a store directory") -> Path:
    """Parse an argument that must be a local store directory. kind: as in `place`.

    Raises ValueError for anything else, and if only subdirectories hold stores.
    """
    found = directory(path, kind)
    check_not_above(found)
    return found


def refuse_many(found: Place) -> None:
    """Raise ValueError if `found` or a subdirectory is a directory of stores. Commands that take one store call it."""
    if not isinstance(found, Path) or is_store(found):
        return
    inside = sorted(found.glob("*.zarr"))
    if inside:
        raise ValueError(f"{found} is a directory of stores; give one of them, as {inside[0]}")
    check_not_above(found)


def stores(paths: Sequence[str], complete: bool = False) -> list[Place]:
    """The stores that `paths` name, and all stores in the directories that they name, each once.

    complete: leave out incomplete stores of directories, and print how many. Stores that `paths` name are kept.

    Raises ValueError for a path that is neither a store nor a directory, and for a directory without a finished store.
    """
    from dmi_connector.store.read.metadata import read_attrs
    from dmi_connector.store.read.verify import stores_of

    found: list[Place] = []
    for path in paths:
        one = place(path, "a store (*.zarr, *.zip) or a directory of stores")
        if is_store(one):
            found.append(one)
            continue
        inside = stores_of(one)
        kept = [store for store in inside if not complete or read_attrs(store)["complete"]]
        if len(kept) < len(inside):
            print(
                f"{one}: {len(inside) - len(kept)} left out, because they are incomplete (dmi ls lists them)",
                file=sys.stderr,
            )
        found += kept
    return once(found)


def once(found: Sequence[Place]) -> list[Place]:
    """The stores in their order, each once."""
    return list({str(store.absolute()): store for store in found}.values())
