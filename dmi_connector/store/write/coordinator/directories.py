# SPDX-License-Identifier: Apache-2.0
"""Checks that stores can be written, before an engine starts."""

from __future__ import annotations

import os

from dmi_connector.settings import ServerOptions
from dmi_connector.store.format.object_store import check_installed
from dmi_connector.store.format.paths import make_directory


def check_directories(options: ServerOptions) -> None:
    """Make the store directory, and check all directories.

    Raises ValueError for a directory that cannot be used, and ImportError for an upload without obstore installed.
    """
    if options.sink != "disk":
        return
    if options.upload:
        check_installed("upload", options.upload)
    try:
        make_directory(options.store_dir, options.file_mode)
    except OSError as error:
        raise ValueError(f"store_dir: {options.store_dir!r} cannot be created ({error}); choose another") from error
    if not os.access(options.store_dir, os.W_OK | os.X_OK):
        raise ValueError(f"store_dir: {options.store_dir!r} is not writable by this user; choose another")
    for root in options.save_path_roots:
        if not os.path.isdir(root):
            raise ValueError(f"save_path_roots: {root!r} is not a directory; create it or leave it out")
