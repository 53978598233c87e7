# SPDX-License-Identifier: Apache-2.0
"""Finds the files next to a store that its rows need for decoding (docs/FORMAT.md, section 11)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from dmi_connector.reduce.fitted_file import F
from dmi_connector.store.format.kept_files import BASES, check_sha256
from dmi_connector.store.format.remote_path import Place, RemotePath
from dmi_connector.store.read.files.remote_files import RemoteFiles


def find_fitted(kind: type[F], sha256: str, store: Place) -> F:
    """The file with this hash: a copy in `bases/`, next to a store or next to one of the folders that contain it.

    Raises FileNotFoundError, which says where to put the file, and ValueError for a file with another hash.
    """
    check_sha256(sha256, store)
    name = f"{sha256}.safetensors"
    if isinstance(store, RemotePath):
        found = _remote(kind, store.parent, name)  # type: ignore[arg-type]  # a class is hashable
    else:
        found = _local(kind, store.absolute().parent, name)
    if found is None:
        raise FileNotFoundError(
            f"the {kind.what} of {store} are not beside it; copy the file with SHA-256 {sha256}, which the server put"
            f" into bases/ of its store_dir, to {store.absolute().parent / BASES / name}"
        )
    if found.sha256 != sha256:
        raise ValueError(f"{found.path} holds other {kind.what}: its SHA-256 is {found.sha256}, {store} names {sha256}")
    return found


def _local(kind: type[F], folder: Path, name: str) -> F | None:
    found = next((path for at in (folder, *folder.parents) if (path := at / BASES / name).is_file()), None)
    return None if found is None else kind.load(found)


@lru_cache(maxsize=16)
def _remote(kind: type[F], folder: RemotePath, name: str) -> F | None:
    """Fetch a file. It can be cached, because its name is the hash of its content."""
    while True:
        place = folder / BASES / name
        try:
            return kind.parse(RemoteFiles(folder).read(f"{BASES}/{name}"), str(place))
        except FileNotFoundError:
            if not folder.key:
                return None
        folder = folder.parent
