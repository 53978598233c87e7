# SPDX-License-Identifier: Apache-2.0
"""Files of scales for int8(channel=file). `dmi fit-scales` writes them as safetensors; the SHA-256 identifies a file.

For each hook and layer it holds `HOOK.LAYER.scale`, float32 [width]: the step of each value of a row, above 0.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from dmi_connector.reduce.errors import ReduceError

METADATA = "dmi_scales"
"""Key of our JSON in the metadata of the safetensors file."""
STEPS = 126
"""Steps from 0 to the largest value that a scale is made for. A stored 127 or -127 is a value beyond it."""
_LEAST_SHARE, LEAST = 1e-6, 2.0**-100
"""Least scale, as a share of the largest of its layer, and of any layer, so that no quotient overflows."""


@dataclass(frozen=True)
class ScalesRef:
    """Which scales a reduction was fitted with. sha256, source: hash and path of their file; the path is "" where a
    store names it. hook: in the file.
    """

    sha256: str
    source: str
    hook: str


@dataclass(frozen=True)
class Scales:
    """One file of scales. hooks: {hook: {"width", "layers"}}. tensors: {"HOOK.LAYER.scale": float32 [width]}."""

    path: str
    sha256: str
    hooks: dict[str, dict[str, Any]]
    tensors: dict[str, np.ndarray]

    def of(self, hook: str, layer: int) -> np.ndarray:
        """The scales of one hook and layer, float32 [width]. Raises ReduceError without them."""
        found = self.tensors.get(f"{hook}.{layer}.scale")
        if found is None:
            raise ReduceError(f"reduce: {self.path} holds no scales of {hook} in layer {layer}; fit some there too")
        return found


def load(path: str | os.PathLike[str]) -> Scales:
    """Open a file of scales. Raises ReduceError if it cannot be read, is no such file, or gives a value no step."""
    path = os.fspath(path)
    try:
        found = os.stat(path)
        return _load(path, found.st_mtime_ns, found.st_size)
    except OSError as error:
        raise ReduceError(
            f"reduce: int8(channel={path}) cannot be read ({error.strerror}); give a file that dmi fit-scales made"
        ) from error


@lru_cache(maxsize=16)
def _load(path: str, modified: int, size: int) -> Scales:
    return parse_scales(Path(path).read_bytes(), path)


def parse_scales(content: bytes, path: str) -> Scales:
    """The scales in the content of a file. path: what errors name. Raises ReduceError."""
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        hooks = json.loads(header["__metadata__"][METADATA])["hooks"]
        wanted = {f"{h}.{n}.scale": int(about["width"]) for h, about in hooks.items() for n in about["layers"]}
        tensors = {name: _vector(tensor) for name, tensor in deserialize(content)}
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ReduceError(
            f"reduce: {path} holds no scales ({error!r}); give a file that dmi fit-scales made"
        ) from error
    for name, width in wanted.items():
        found = tensors.get(name)
        if found is None or found.shape != (width,) or not (np.isfinite(found) & (found >= LEAST)).all():
            raise ReduceError(
                f"reduce: {path} is damaged: {name} has to be {width} finite numbers above 0; make it again with dmi"
                " fit-scales"
            )
    return Scales(path, hashlib.sha256(content).hexdigest(), hooks, tensors)


def _vector(tensor: dict[str, Any]) -> np.ndarray:
    """A float32 tensor of a file. Raises ValueError for another dtype."""
    if tensor["dtype"] != "F32":
        raise ValueError(f"a tensor has the dtype {tensor['dtype']}, not F32")
    return np.frombuffer(tensor["data"], "<f4").reshape(tensor["shape"])


def scales_of(largest: np.ndarray, margin: float = 1.0) -> np.ndarray:
    """Scales float32 [width] for rows whose values have at most the magnitudes `largest` [width], times `margin`.

    A value that was always 0 has a scale too: what it becomes later is then seen to lie beyond it.
    """
    scales = np.asarray(largest, np.float64) * margin / STEPS
    return np.maximum(scales, max(scales.max() * _LEAST_SHARE, LEAST)).astype(np.float32)
