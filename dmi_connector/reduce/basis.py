# SPDX-License-Identifier: Apache-2.0
"""Bases of principal components: a safetensors file made by `dmi fit-pca`, known by its SHA-256.

For each hook and layer: `HOOK.LAYER.mean` [width], `.components` [width, k] (orthonormal columns by falling variance),
`.std` [k] and `.variance` [1] (of all components together), float32.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from dmi_connector.reduce.base import ReduceError

METADATA = "dmi_pca"


@dataclass(frozen=True)
class Part:
    """Basis of one hook and layer, float32: mean [width], components [width, k], std [k] of the scores."""

    mean: np.ndarray
    components: np.ndarray
    std: np.ndarray


@dataclass(frozen=True)
class Basis:
    """One file. hooks: {hook: {"width", "k", "layers"}}."""

    path: str
    sha256: str
    hooks: dict[str, dict[str, Any]]

    def part(self, hook: str, layer: int, k: int) -> Part:
        """The first k components. Raises OSError when the file has gone."""
        from safetensors import safe_open

        with safe_open(self.path, "numpy") as f:
            get = [f.get_tensor(f"{hook}.{layer}.{what}") for what in ("mean", "components", "std")]
        return Part(get[0], np.ascontiguousarray(get[1][:, :k]), get[2][:k])


def load(path: str | os.PathLike[str]) -> Basis:
    """Raises ReduceError when it is no such file or cannot be read."""
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
        with open(path, "rb") as raw:
            digest = hashlib.file_digest(raw, "sha256").hexdigest()
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ReduceError(f"reduce: {path} is no basis ({error!r}); give a file that dmi fit-pca made") from error
    wanted = {f"{hook}.{layer}.components" for hook, info in hooks.items() for layer in info["layers"]}
    if lacking := sorted(wanted - names):
        raise ReduceError(f"reduce: {path} is damaged: {lacking[0]} is missing; make it again with dmi fit-pca")
    return Basis(path, digest, hooks)
