# SPDX-License-Identifier: Apache-2.0
"""Which kind of files a store at some place has."""

from __future__ import annotations

from pathlib import Path

from dmi_connector.store.format.remote_path import Place
from dmi_connector.store.read.remote_files import RemoteFiles
from dmi_connector.store.read.store_files import LocalFiles, StoreFiles
from dmi_connector.store.read.zip_files import open_zip


def files_of(place: Place) -> StoreFiles:
    """The files of the store at a place. Raises FileNotFoundError, and ValueError for a zip file that holds none."""
    if place.suffix == ".zip" and not (isinstance(place, Path) and place.is_dir()):
        return open_zip(place)
    return LocalFiles(place) if isinstance(place, Path) else RemoteFiles(place)
