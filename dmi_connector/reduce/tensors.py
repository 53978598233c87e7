# SPDX-License-Identifier: Apache-2.0
"""Reads float tensors of files with weights (safetensors or numpy's .npz) as float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from safetensors import SafetensorError, deserialize

from dmi_connector.dtypes import numpy_dtype

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class FloatTensors:
    """The tensors of a file. Raises OSError, and ValueError for a file of another format.

    names: names of all tensors.
    """

    def __init__(self, path: Path) -> None:
        self._found: Mapping[str, Any]
        try:
            if path.suffix == ".npz":
                self._found = np.load(path)  # without pickle, so reading runs no code
            else:
                self._found = dict(deserialize(path.read_bytes()))
        except (SafetensorError, BadZipFile, ValueError) as error:
            raise ValueError(
                f"{path} holds no tensors ({error}); give a file of safetensors, or numpy's .npz"
            ) from error
        self.names = sorted(self._found)

    def get(self, name: str) -> np.ndarray | None:
        """A tensor as float32; None if it is missing or holds no floats."""
        if name not in self.names:
            return None
        found = self._found[name]
        if isinstance(found, np.ndarray):
            return found.astype(np.float32) if found.dtype.kind == "f" else None
        if found["dtype"] not in _DTYPES:
            return None
        values = np.frombuffer(found["data"], numpy_dtype(_DTYPES[found["dtype"]]))
        return values.reshape(found["shape"]).astype(np.float32)
