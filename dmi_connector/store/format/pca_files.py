# SPDX-License-Identifier: Apache-2.0
"""Copies of PCA bases beside the stores that were made with them (docs/FORMAT.md, section 11)."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from dmi_connector.reduce.basis import Basis, load
from dmi_connector.store.format.paths import make_directory, umask_of
from dmi_connector.store.format.remote_path import Place, local_path

FOLDER = "bases"
"""Folder in a store directory with a copy of every basis used there, as SHA256.safetensors."""


def keep_copy(basis: Basis, store_dir: str, file_mode: str) -> None:
    """Put a copy of a basis beside the stores of `store_dir`, whole or not at all. Raises OSError."""
    folder = os.path.join(store_dir, FOLDER)
    final = os.path.join(folder, f"{basis.sha256}.safetensors")
    if os.path.exists(final):
        return
    make_directory(folder, file_mode)
    own = os.path.join(folder, f".{basis.sha256}.{os.getpid()}")
    with umask_of(folder):
        shutil.copyfile(basis.path, own)
    os.rename(own, final)


def find_basis(sha256: str, store: Place, given: str | os.PathLike[str] | None = None) -> Basis:
    """The basis with this hash: `given`, or the copy beside the store. Raises FileNotFoundError or ValueError."""
    if re.fullmatch("[0-9a-f]{64}", sha256) is None:
        raise ValueError(f"{store} names the basis {sha256!r}, which is no SHA-256")  # it becomes part of a path
    path = local_path(given) if given is not None else store.absolute().parent / FOLDER / f"{sha256}.safetensors"
    if not isinstance(path, Path):
        raise FileNotFoundError(f"the basis of {store} is read from a file alone; give basis=, with SHA-256 {sha256}")
    if not path.is_file():
        raise FileNotFoundError(f"the basis of {store} is not at {path}; give basis=, the file with SHA-256 {sha256}")
    basis = load(path)
    if basis.sha256 != sha256:
        raise ValueError(f"{path} is another basis: its SHA-256 is {basis.sha256}, {store} was made with {sha256}")
    return basis
