# SPDX-License-Identifier: Apache-2.0
"""The interface of a codec: how one inner chunk of a shard is compressed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Codec(ABC):
    """The codec between Zarr's `bytes` and `crc32c` for an inner chunk (docs/FORMAT.md, section 3).

    name: the value of the option `codec` and of the store's attribute. zarr_name: the Zarr v3 codec; None if the bytes
    of a chunk are stored as they are. gb_per_s: raw GB/s of one writer process on bfloat16 activations, for the
    throughput estimate in the log. plain_gb_per_s: the same for chunks that a writer stores uncompressed because it is
    behind; None if the codec cannot mark a chunk as uncompressed: its chunks are then compressed even when the writer
    is behind.

    The settings import codecs, so encoding and decoding import their libraries when they are called.
    """

    name: str
    zarr_name: str | None
    gb_per_s: float
    plain_gb_per_s: float | None

    @property
    def compresses(self) -> bool:
        """False if the bytes of a chunk are stored as they are."""
        return self.zarr_name is not None

    @property
    def zarr_names(self) -> list[str]:
        """[zarr_name], [] without a Zarr codec."""
        return [] if self.zarr_name is None else [self.zarr_name]

    @property
    def has_plain(self) -> bool:
        """Whether a chunk may be stored uncompressed, as `plain_head` and its bytes."""
        return self.plain_gb_per_s is not None

    def metadata(self, itemsize: int, chunk_bytes: int) -> list[dict[str, Any]]:
        """Zarr v3 metadata: [{"name": ..., "configuration": {...}}], [] without a Zarr codec.

        itemsize: bytes of an element. chunk_bytes: bytes of a decoded chunk.
        """
        return [{"name": name, "configuration": self.configuration(itemsize, chunk_bytes)} for name in self.zarr_names]

    @abstractmethod
    def configuration(self, itemsize: int, chunk_bytes: int) -> dict[str, Any]:
        """The configuration in the Zarr v3 metadata."""

    @abstractmethod
    def encode(self, chunk: np.ndarray) -> bytes | np.ndarray:
        """Compress a chunk: a C-contiguous array [rows, columns] of unsigned integers with the dtype's item size."""

    @abstractmethod
    def decode(self, body: np.ndarray, out: np.ndarray) -> None:
        """Fill `out` with the bytes of a chunk.

        body: what `encode` returned, or `plain_head` and the bytes of the chunk, uint8. out: uint8 [bytes of the
        chunk]. Both are contiguous. Raises ValueError if `body` does not decode to exactly len(out) bytes. Even a
        damaged or forged `body` must not write past the end of `out`, or use more memory than `out`.
        """

    def plain_head(self, itemsize: int, nbytes: int) -> bytes:
        """The header before the `nbytes` bytes of an uncompressed chunk. Called only if `has_plain`."""
        raise NotImplementedError(f"codec {self.name!r} has no uncompressed chunks")

    def set_up_writer(self) -> None:  # noqa: B027, most codecs need nothing
        """Called once in each writer process before it encodes. A writer has one thread."""
