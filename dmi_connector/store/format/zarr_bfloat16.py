# SPDX-License-Identifier: Apache-2.0
"""Registers the Zarr data type `bfloat16` with zarr-python, which does not have it yet.

Importing this module registers the data type. zarr-python imports the module when it first opens a group, through an
entry point in the group `zarr.buffer`. The entry point is not in the group `zarr.data_type`, because zarr-python 3.1
collects the entry points of that group but never loads them. It loads every buffer class before it reads the metadata
of a group's member. The buffer class of the entry point is not used unless the zarr setting `buffer` names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import ml_dtypes
import numpy as np
from zarr.core.buffer import cpu
from zarr.core.dtype import DataTypeValidationError, data_type_registry
from zarr.core.dtype.npy.float import BaseFloat

_NATIVE: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, kw_only=True)
class BFloat16(BaseFloat):
    """bfloat16 as in the zarr-extensions registry: two bytes, little-endian on disk by the codec `bytes`."""

    dtype_cls = type(_NATIVE)
    endianness: Any = "little"
    _zarr_v3_name: ClassVar[str] = "bfloat16"
    _zarr_v2_names: ClassVar[tuple[str, ...]] = ()

    @property
    def item_size(self) -> int:
        """Number of bytes of a scalar."""
        return 2

    @classmethod
    def _check_native_dtype(cls, dtype: Any) -> bool:  # type: ignore[override]
        return bool(dtype == _NATIVE)

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """Wrap `ml_dtypes.bfloat16`. Raises DataTypeValidationError for any other dtype."""
        if cls._check_native_dtype(dtype):
            return cls()
        raise DataTypeValidationError(f"Invalid data type: {dtype}. Expected bfloat16")

    def to_native_dtype(self) -> Any:
        """The numpy dtype `ml_dtypes.bfloat16`, which exists only in native byte order."""
        return _NATIVE


class RegisteredBuffer(cpu.Buffer):
    """A CPU buffer like zarr's. The entry point for it makes zarr import this module."""


data_type_registry.register("bfloat16", BFloat16)
