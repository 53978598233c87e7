# SPDX-License-Identifier: Apache-2.0
"""The class of the codecs "lz4" and "zstd", which encode a chunk as a Blosc frame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dmi_connector.codecs.base import Codec
from dmi_connector.codecs.blosc_frame import LEAST_PLANE, frame_lengths, plain_header, zstd_frame

_LEVEL = 1
_MOST_BYTES = (1 << 31) - 1 - 16
"""Maximum bytes of the elements of a Blosc frame (BLOSC_MAX_BUFFERSIZE). No Blosc decoder reads a larger one."""


@dataclass(frozen=True)
class Blosc(Codec):
    """Blosc at level 1, with the compressor `name` and one block per chunk. Smaller blocks compress less.

    shuffle: Blosc's filter for elements of several bytes. bfloat16 compresses best with "shuffle" for zstd, and with
    "bitshuffle" for lz4. own_frames: whether `zstd_frame` encodes chunks instead of Blosc, except for chunks with
    fewer than LEAST_PLANE elements.
    """

    shuffle: str
    own_frames: bool = False

    @property
    def most_bytes(self) -> int:
        return _MOST_BYTES

    def configuration(self, itemsize: int, chunk_bytes: int) -> dict[str, Any]:
        return {
            "cname": self.name,
            "clevel": _LEVEL,
            "shuffle": self._shuffle(itemsize),
            "typesize": itemsize,
            "blocksize": chunk_bytes,
        }

    def _shuffle(self, itemsize: int) -> str:
        return "noshuffle" if itemsize == 1 else self.shuffle

    def encode(self, chunk: np.ndarray) -> bytes:
        if chunk.nbytes > _MOST_BYTES:
            raise ValueError(f"a chunk of {chunk.nbytes} bytes is larger than a Blosc frame; reduce chunk_tokens")
        if self.own_frames and chunk.size >= LEAST_PLANE:
            return zstd_frame(chunk)
        from numcodecs import blosc

        shuffles = {"noshuffle": blosc.NOSHUFFLE, "shuffle": blosc.SHUFFLE, "bitshuffle": blosc.BITSHUFFLE}
        shuffle = shuffles[self._shuffle(chunk.itemsize)]
        return bytes(blosc.compress(chunk, self.name.encode(), _LEVEL, shuffle, chunk.nbytes))

    def decode(self, body: np.ndarray, out: np.ndarray) -> None:
        from numcodecs import blosc

        # Blosc trusts the header of a frame. With a forged header it would write past the end of `out`.
        for found, wanted in zip(frame_lengths(body), (len(out), len(body)), strict=True):
            if found != wanted:
                raise ValueError(f"it has {found} bytes, not {wanted}")
        try:
            blosc.decompress(body, out)
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    def plain_head(self, itemsize: int, nbytes: int) -> bytes:
        return plain_header(itemsize, nbytes)

    def set_up_writer(self) -> None:
        from numcodecs import blosc

        blosc.set_nthreads(1)
        blosc.use_threads = False
