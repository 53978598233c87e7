# SPDX-License-Identifier: Apache-2.0
"""Finds the scales of int8(channel=file) beside a store (docs/FORMAT.md, section 11)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from dmi_connector.reduce.scales import Scales, load, parse_scales
from dmi_connector.store.format.kept_files import BASES, check_sha256
from dmi_connector.store.format.remote_path import Place, RemotePath
from dmi_connector.store.read.files.remote_files import RemoteFiles


def find_scales(sha256: str, store: Place) -> Scales:
    """The scales with this hash: the copy in `bases/` beside a store, or beside a folder that the store is in.

    Raises FileNotFoundError that names where to put the file, ValueError for a file of another hash.
    """
    check_sha256(sha256, store)
    name = f"{sha256}.safetensors"
    scales = _remote(store.parent, name) if isinstance(store, RemotePath) else _local(store.absolute().parent, name)
    if scales is None:
        raise FileNotFoundError(
            f"the scales of {store} are not beside it; copy the file with SHA-256 {sha256}, which the server put into"
            f" bases/ of its store_dir, to {store.absolute().parent / BASES / name}"
        )
    if scales.sha256 != sha256:
        raise ValueError(f"{scales.path} holds other scales: its SHA-256 is {scales.sha256}, {store} names {sha256}")
    return scales


def _local(folder: Path, name: str) -> Scales | None:
    found = next((path for at in (folder, *folder.parents) if (path := at / BASES / name).is_file()), None)
    return None if found is None else load(found)


@lru_cache(maxsize=16)
def _remote(folder: RemotePath, name: str) -> Scales | None:
    """The name is the hash of the content, so it never changes."""
    while True:
        place = folder / BASES / name
        try:
            return parse_scales(RemoteFiles(folder).read(f"{BASES}/{name}"), str(place))
        except FileNotFoundError:
            if not folder.key:
                return None
        folder = folder.parent
