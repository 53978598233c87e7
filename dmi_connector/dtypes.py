# SPDX-License-Identifier: Apache-2.0
"""The dtypes of captured values, under the names that stores and Zarr use. bfloat16 is the one of ml_dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import torch

FLOATS = ("bfloat16", "float16", "float32", "float64")
_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype that `name` stands for, little-endian as on disk."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name).newbyteorder("<")


ITEMSIZE = {name: numpy_dtype(name).itemsize for name in (*FLOATS, *_INTEGERS)}
"""Bytes of one element, for every dtype that a store can hold."""


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A numpy array of the same memory and dtype as a tensor of a CPU."""
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def as_torch(values: np.ndarray) -> torch.Tensor:
    """A torch tensor of the same memory and dtype. Raises ImportError without torch."""
    import torch  # optional, and slow to import

    if values.dtype == numpy_dtype("bfloat16"):
        # torch takes no array of ml_dtypes' bfloat16. The bits are the same.
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
