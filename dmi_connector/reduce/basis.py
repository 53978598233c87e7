# SPDX-License-Identifier: Apache-2.0
"""Files of PCA bases. `dmi fit-pca` writes them as safetensors; the SHA-256 of a file identifies it.

For each hook and layer it holds, in float32: `HOOK.LAYER.mean` [width], `.components` [width, k] (orthonormal columns
by falling variance), `.std` [k] and `.variance` [1] (of all components together).
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from dmi_connector.reduce.errors import ReduceError

METADATA = "dmi_pca"
"""Key of our JSON in the metadata of the safetensors file."""


@dataclass(frozen=True)
class LayerBasis:
    """The basis of one hook and layer, float32. mean: [width]. components: [width, k]. std: of the scores, [k]."""

    mean: np.ndarray
    components: np.ndarray
    std: np.ndarray


@dataclass(frozen=True)
class BasisRef:
    """Which basis a reduction was fitted with. sha256, source: hash and path of its file; the path is "" where a store
    names it. hook: in the file. k: components that are kept.
    """

    sha256: str
    source: str
    hook: str
    k: int


@dataclass(frozen=True)
class Basis:
    """One file of bases. hooks: {hook: {"width", "k", "layers"}}."""

    path: str
    sha256: str
    hooks: dict[str, dict[str, Any]]

    def of(self, hook: str, layer: int, k: int) -> LayerBasis:
        """The first k components for one hook and layer. Raises OSError if the file is gone."""
        from safetensors import safe_open

        with safe_open(self.path, "numpy") as f:
            get = [f.get_tensor(f"{hook}.{layer}.{what}") for what in ("mean", "components", "std")]
        return LayerBasis(get[0], np.ascontiguousarray(get[1][:, :k]), get[2][:k])


def load(path: str | os.PathLike[str]) -> Basis:
    """Open a file of bases. Raises ReduceError if it cannot be read, is no such file, or holds a NaN or an infinity."""
    path = os.fspath(path)
    try:
        found = os.stat(path)
    except OSError as error:
        raise ReduceError(
            f"reduce: pca({path}) cannot be read ({error.strerror}); give a file that dmi fit-pca made"
        ) from error
    return _load(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=16)
def _load(path: str, modified: int, size: int) -> Basis:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as f:
            hooks = json.loads((f.metadata() or {})[METADATA])["hooks"]
            names = set(f.keys())
            lost = [name for name in sorted(names) if not np.isfinite(f.get_tensor(name)).all()]
        with open(path, "rb") as raw:
            digest = hashlib.file_digest(raw, "sha256").hexdigest()
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ReduceError(f"reduce: {path} is no basis ({error!r}); give a file that dmi fit-pca made") from error
    wanted = {f"{hook}.{layer}.components" for hook, info in hooks.items() for layer in info["layers"]}
    if lacking := sorted(wanted - names):
        raise ReduceError(f"reduce: {path} is damaged: {lacking[0]} is missing; make it again with dmi fit-pca")
    if lost:
        raise ReduceError(
            f"reduce: {path}: {lost[0]} holds values that are not finite, so all scores would be lost; make it again"
            " with dmi fit-pca"
        )
    return Basis(path, digest, hooks)
