# SPDX-License-Identifier: Apache-2.0
"""The codec "none", which stores chunks uncompressed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dmi_connector.codecs.base import Codec


@dataclass(frozen=True)
class Uncompressed(Codec):
    """Stores the bytes of a chunk. Zarr metadata name no codec for it."""

    def configuration(self, itemsize: int, chunk_bytes: int) -> dict[str, Any]:
        return {}

    def encode(self, chunk: np.ndarray) -> np.ndarray:
        return chunk.reshape(-1).view(np.uint8)

    def decode(self, body: np.ndarray, out: np.ndarray) -> None:
        if len(body) != len(out):
            raise ValueError(f"it has {len(body)} bytes, not {len(out)}")
        out[:] = body

    def plain_head(self, itemsize: int, nbytes: int) -> bytes:
        return b""
