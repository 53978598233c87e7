# SPDX-License-Identifier: Apache-2.0
"""The dtypes of captured values, by their names in stores and Zarr. numpy has no bfloat16: ml_dtypes provides it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import torch

FLOATS = ("bfloat16", "float16", "float32", "float64")
_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a name, little-endian as on disk."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name).newbyteorder("<")


ITEMSIZE = {name: numpy_dtype(name).itemsize for name in (*FLOATS, *_INTEGERS)}
"""Bytes of one element, for every dtype that a store can hold."""


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A numpy array with the memory and dtype of a CPU tensor."""
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def as_torch(values: np.ndarray) -> torch.Tensor:
    """A torch tensor with the memory and dtype of a numpy array. Raises ImportError without torch."""
    import torch  # optional, and slow to import

    if values.dtype == numpy_dtype("bfloat16"):
        # torch.from_numpy rejects ml_dtypes' bfloat16, so the bits are passed as int16.
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
