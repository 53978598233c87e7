# SPDX-License-Identifier: Apache-2.0
"""Copies beside the stores of files that these were made with (docs/FORMAT.md, section 11)."""

from __future__ import annotations

import os
import re
import shutil

from dmi_connector.store.format.paths import make_directory, umask_of
from dmi_connector.store.format.remote_path import Place

BASES, PROBES = "bases", "probes"
"""Folders in a store directory with a copy of every fitted file (PCA bases, scales) and of every probe used there, as
SHA256.safetensors.
"""


def check_sha256(sha256: str, store: Place) -> None:
    """Raise ValueError for what a store names and is no SHA-256: it becomes part of a path."""
    if re.fullmatch("[0-9a-f]{64}", sha256) is None:
        raise ValueError(f"{store} names the file {sha256!r}, which is no SHA-256")


def keep_copy(source: str, sha256: str, folder: str, store_dir: str, file_mode: str) -> None:
    """Put a copy of a file beside the stores of `store_dir`, whole or not at all. folder: see above. Raises OSError."""
    folder = os.path.join(store_dir, folder)
    final = os.path.join(folder, f"{sha256}.safetensors")
    if os.path.exists(final):
        return
    make_directory(folder, file_mode)
    own = os.path.join(folder, f".{sha256}.{os.getpid()}")
    with umask_of(folder):
        shutil.copyfile(source, own)
    os.rename(own, final)
