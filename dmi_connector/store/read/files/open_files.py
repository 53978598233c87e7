# SPDX-License-Identifier: Apache-2.0
"""Opens the files of a store, by the kind of its location."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dmi_connector.store.format.remote_path import Place
from dmi_connector.store.read.files.remote_files import RemoteFiles
from dmi_connector.store.read.files.store_files import LocalFiles, StoreFiles
from dmi_connector.store.read.files.zip_files import open_zip


def files_of(place: Place) -> StoreFiles:
    """The files of the store at a place. Raises FileNotFoundError, and ValueError for a zip file without a store."""
    if place.suffix == ".zip" and not (isinstance(place, Path) and place.is_dir()):
        return open_zip(place)
    return LocalFiles(place) if isinstance(place, Path) else RemoteFiles(place)


def zarr_store_of(place: Place) -> Any:
    """The store at a place, as an argument for zarr-python. Raises ValueError for a zip file in an object store."""
    if isinstance(place, Path) and place.is_dir():
        return place
    if isinstance(place, Path):
        from zarr.storage import ZipStore

        return ZipStore(place, mode="r")
    if place.suffix == ".zip":
        raise ValueError(f"{place}: zarr-python reads no zip file of an object store; use numpy()")
    from dmi_connector.store.format.object_store import zarr_store

    return zarr_store(place)
