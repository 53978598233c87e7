# SPDX-License-Identifier: Apache-2.0
"""Packs messages between the processes that write stores: a 4-byte little-endian length, then a JSON object."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

Message = dict[str, Any]

READ_BYTES = 1 << 20
"""Maximum number of bytes that a process reads from its pipe at a time."""
ERRORS_KEPT = 20
"""Number of latest errors that `stats` returns."""


def pack(message: Message) -> bytes:
    """The bytes of one message."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return len(body).to_bytes(4, "little") + body


def write_all(fd: int, data: bytes | bytearray) -> None:
    """Write all of `data` to a blocking descriptor. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Decoder:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Add bytes. Yields each message that is now complete."""
        self._buffer += data
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "little")
            if len(self._buffer) < 4 + size:
                return
            body = bytes(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            yield json.loads(body)


def pack_array(values: np.ndarray) -> str:
    """The bytes of an array as base64 text."""
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


def unpack_array(text: str) -> bytes:
    """The bytes of an array that `pack_array` packed."""
    return base64.b64decode(text)
