# SPDX-License-Identifier: Apache-2.0
"""The `bfloat16` Zarr data type for zarr-python, which has none of its own yet.

Importing this module registers it. zarr-python imports it by itself when it first opens a group, through an entry point
in the group `zarr.buffer`: zarr-python 3.1 collects entry points of the group `zarr.data_type` but never loads them,
and loads every buffer class before it reads the metadata of a group's member. The buffer class that the entry point
names is not used unless the zarr setting `buffer` names it.
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
    """bfloat16 as in the zarr-extensions registry: two bytes, little-endian on disk by the `bytes` codec."""

    dtype_cls = type(_NATIVE)
    endianness: Any = "little"
    _zarr_v3_name: ClassVar[str] = "bfloat16"
    _zarr_v2_names: ClassVar[tuple[str, ...]] = ()

    @property
    def item_size(self) -> int:
        """Bytes of one scalar."""
        return 2

    @classmethod
    def _check_native_dtype(cls, dtype: Any) -> bool:  # type: ignore[override]
        return bool(dtype == _NATIVE)

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """Wrap `ml_dtypes.bfloat16`; raises DataTypeValidationError for any other dtype."""
        if cls._check_native_dtype(dtype):
            return cls()
        raise DataTypeValidationError(f"Invalid data type: {dtype}. Expected bfloat16")

    def to_native_dtype(self) -> Any:
        """The numpy dtype `ml_dtypes.bfloat16` (native byte order: there is no swapped one)."""
        return _NATIVE


class RegisteredBuffer(cpu.Buffer):
    """zarr's own CPU buffer. Its entry point makes zarr import this module."""


data_type_registry.register("bfloat16", BFloat16)
