# SPDX-License-Identifier: Apache-2.0
"""Defines the interface of a codec, which compresses the inner chunks of shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Codec(ABC):
    """The codec between Zarr's `bytes` and `crc32c` for an inner chunk (docs/FORMAT.md, section 3).

    name: the value of the option `codec`, and of the store's attribute. zarr_name: the Zarr v3 codec; None if chunks
    are stored uncompressed. gb_per_s: GB/s of uncompressed data that one writer process encodes and writes, measured
    on bfloat16 activations. The log uses it for an estimate of the throughput. plain_gb_per_s: the same for chunks that
    a writer stores uncompressed because it is behind. None means that the codec cannot store single chunks
    uncompressed, so a writer that is behind compresses them too.

    Settings import this package, so methods import compression libraries when they are called.
    """

    name: str
    zarr_name: str | None
    gb_per_s: float
    plain_gb_per_s: float | None

    @property
    def compresses(self) -> bool:
        """Whether chunks are compressed."""
        return self.zarr_name is not None

    @property
    def zarr_names(self) -> list[str]:
        """[zarr_name]; [] without a Zarr codec."""
        return [] if self.zarr_name is None else [self.zarr_name]

    @property
    def has_plain(self) -> bool:
        """Whether a single chunk may be stored uncompressed: as `plain_head`, then its bytes."""
        return self.plain_gb_per_s is not None

    @property
    def most_bytes(self) -> int:
        """Maximum bytes of a decoded chunk."""
        return 1 << 62

    def metadata(self, itemsize: int, chunk_bytes: int) -> list[dict[str, Any]]:
        """The codec in Zarr v3 metadata: [{"name": ..., "configuration": {...}}]; [] without a Zarr codec.

        itemsize: bytes per element. chunk_bytes: bytes of a decoded chunk.
        """
        return [{"name": name, "configuration": self.configuration(itemsize, chunk_bytes)} for name in self.zarr_names]

    @abstractmethod
    def configuration(self, itemsize: int, chunk_bytes: int) -> dict[str, Any]:
        """The value of "configuration" in the Zarr v3 metadata. Arguments are those of `metadata`."""

    @abstractmethod
    def encode(self, chunk: np.ndarray) -> bytes | np.ndarray:
        """Compress a chunk. chunk: C-contiguous [rows, columns], unsigned integers of the dtype's item size."""

    @abstractmethod
    def decode(self, body: np.ndarray, out: np.ndarray) -> None:
        """Decode a chunk to `out`.

        body: uint8 [stored bytes], a result of `encode`, or `plain_head` followed by the bytes of the chunk. out: uint8
        [bytes of the chunk]. Both are contiguous. Raises ValueError if `body` does not decode to exactly len(out)
        bytes. `body` may be damaged or forged. Even then an implementation must not write past the end of `out`, or
        allocate more than len(out) bytes.
        """

    def plain_head(self, itemsize: int, nbytes: int) -> bytes:
        """The bytes that precede an uncompressed chunk of `nbytes` bytes. Called only if `has_plain`."""
        raise NotImplementedError(f"codec {self.name!r} has no uncompressed chunks")

    def set_up_writer(self) -> None:  # noqa: B027, most codecs need nothing
        """Prepare a writer process, which has one thread. Called once, before it encodes."""
