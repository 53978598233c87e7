# SPDX-License-Identifier: Apache-2.0
"""Keeps copies of fitted files and probes next to the stores that used them (docs/FORMAT.md, section 11)."""

from __future__ import annotations

import os
import re
import shutil

from dmi_connector.store.format.paths import make_directory, umask_of
from dmi_connector.store.format.remote_path import Place

BASES, PROBES = "bases", "probes"
"""Folders in a store directory with copies of the fitted files (PCA bases, scales, codebooks) and of the probes that
its stores used. A copy is named SHA256.safetensors.
"""


def check_sha256(sha256: str, store: Place) -> None:
    """Raise ValueError if a hash in a store is not a SHA-256 hash, because the hash becomes part of a path."""
    if re.fullmatch("[0-9a-f]{64}", sha256) is None:
        raise ValueError(f"{store} names the file {sha256!r}, which is not a SHA-256")


def keep_copy(source: str, sha256: str, folder: str, store_dir: str, file_mode: str) -> None:
    """Copy a file next to the stores of `store_dir`, atomically. folder: BASES or PROBES. Raises OSError.

    An existing copy is kept, unless its size differs, as after a power failure.
    """
    folder = os.path.join(store_dir, folder)
    final = os.path.join(folder, f"{sha256}.safetensors")
    if os.path.exists(final) and os.path.getsize(final) == os.path.getsize(source):
        return
    make_directory(folder, file_mode)
    own = os.path.join(folder, f".{sha256}.{os.getpid()}")
    with umask_of(folder):
        shutil.copyfile(source, own)
    os.rename(own, final)
