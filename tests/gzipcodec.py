# SPDX-License-Identifier: Apache-2.0
"""A codec that is not in the package: Zarr's "gzip". It is not Blosc, so it cannot mark a chunk as uncompressed."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmi_connector.codecs import Codec


@dataclass(frozen=True)
class Gzip(Codec):
    def configuration(self, itemsize: int, chunk_bytes: int) -> dict[str, Any]:
        return {"level": 1}

    def encode(self, chunk: np.ndarray) -> bytes:
        return gzip.compress(chunk.tobytes(), 1, mtime=0)

    def decode(self, body: np.ndarray, out: np.ndarray) -> None:
        try:
            data = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(body.data, len(out) + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if len(data) != len(out):
            raise ValueError(f"it has {len(data)} bytes, not {len(out)}")
        out[:] = np.frombuffer(data, np.uint8)


GZIP = Gzip("gzip", "gzip", gb_per_s=0.1, plain_gb_per_s=None)
