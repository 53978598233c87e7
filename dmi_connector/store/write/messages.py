# SPDX-License-Identifier: Apache-2.0
"""Messages between the engine, the coordinator and the writers: a 4-byte little-endian length, then a JSON object."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

Message = dict[str, Any]

READ_BYTES = 1 << 20
"""Bytes that a process reads from its pipe at a time."""
ERRORS_KEPT = 20
"""Errors that `stats` keeps."""


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
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Add bytes; yield every message that is now whole."""
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
    """The bytes `pack_array` was given."""
    return base64.b64decode(text)
