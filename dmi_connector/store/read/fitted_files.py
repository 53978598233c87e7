# SPDX-License-Identifier: Apache-2.0
"""Finds the fitted files of a store: bases, scales and codebooks (docs/FORMAT.md, section 11)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache

from dmi_connector.reduce.fitted_file import F
from dmi_connector.store.format.kept_files import BASES, check_sha256
from dmi_connector.store.format.remote_path import Given, Place, RemotePath, place_of
from dmi_connector.store.read.files.remote_files import RemoteFiles


def find_fitted(kind: type[F], sha256: str, store: Place, given: Given | None = None) -> F:
    """The file with this hash: `given`, or a copy in `bases/`, next to the store or to a folder that contains it.

    Raises FileNotFoundError, which says where to put the file, and ValueError for a file with another hash.
    """
    check_sha256(sha256, store)
    folder, name = store.absolute().parent, f"{sha256}.safetensors"
    try:
        if given is not None:
            found = _read(kind, place_of(given, kind.argument))
        elif isinstance(folder, RemotePath):
            found = _fetched(kind, folder, name)  # type: ignore[arg-type]  # a class is hashable
        else:
            found = _beside(kind, folder, name)
    except FileNotFoundError as error:
        if given is not None:
            raise FileNotFoundError(f"{given} does not exist; give the file with SHA-256 {sha256}") from error
        or_give = f", or give it as {kind.argument}=" if kind.argument else ""
        raise FileNotFoundError(
            f"the {kind.what} file of {store} is not beside it; copy the file with SHA-256 {sha256} from bases/ of the"
            f" server's store_dir to {folder / BASES / name}{or_give}"
        ) from error
    if found.sha256 != sha256:
        raise ValueError(
            f"{found.path} holds another {kind.what} file: its SHA-256 is {found.sha256}, {store} names {sha256}"
        )
    return found


def _upwards(folder: Place) -> Iterator[Place]:
    """A folder, and those that contain it."""
    yield folder
    while (parent := folder.parent) != folder:
        yield parent
        folder = parent


def _read(kind: type[F], place: Place) -> F:
    """The file at a place. Raises FileNotFoundError."""
    if isinstance(place, RemotePath):
        return kind.parse(RemoteFiles(place.parent).read(place.name), str(place))
    if not place.is_file():
        raise FileNotFoundError(place)
    return kind.load(place)


def _beside(kind: type[F], folder: Place, name: str) -> F:
    """The file in `bases/` of a folder, or of one that contains it. Raises FileNotFoundError."""
    for at in _upwards(folder):
        with contextlib.suppress(FileNotFoundError):
            return _read(kind, at / BASES / name)
    raise FileNotFoundError(name)


@lru_cache(maxsize=16)
def _fetched(kind: type[F], folder: RemotePath, name: str) -> F:
    """As `_beside`. It can be cached, because the name is the hash of the content."""
    return _beside(kind, folder, name)
