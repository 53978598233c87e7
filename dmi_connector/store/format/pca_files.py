# SPDX-License-Identifier: Apache-2.0
"""Finds the PCA basis of a store, next to the store or at a given path (docs/FORMAT.md, section 11)."""

from __future__ import annotations

import os
from pathlib import Path

from dmi_connector.reduce.basis import Basis
from dmi_connector.store.format.kept_files import BASES, check_sha256
from dmi_connector.store.format.remote_path import Place, local_path


def find_basis(sha256: str, store: Place, given: str | os.PathLike[str] | None = None) -> Basis:
    """The basis with this hash: `given`, or the copy next to the store. Raises FileNotFoundError and ValueError."""
    check_sha256(sha256, store)
    path = local_path(given) if given is not None else store.absolute().parent / BASES / f"{sha256}.safetensors"
    if not isinstance(path, Path):
        raise FileNotFoundError(f"the basis of {store} needs a local file; give basis=, with SHA-256 {sha256}")
    if not path.is_file():
        raise FileNotFoundError(f"the basis of {store} is not at {path}; give basis=, the file with SHA-256 {sha256}")
    basis = Basis.load(path)
    if basis.sha256 != sha256:
        raise ValueError(f"{path} is another basis: its SHA-256 is {basis.sha256}, {store} was made with {sha256}")
    return basis
