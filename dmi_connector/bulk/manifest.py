# SPDX-License-Identifier: Apache-2.0
"""The manifest: one JSON line for each prompt whose store is complete.

Lines are appended, and whole lines never change. A torn last line is removed when the file is opened.

If a run was killed, the line of a complete store may be missing. recovery.py then finds the store.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_TAIL = 1 << 16
"""Bytes per read in the search for the end of the last whole line."""
_LINES, _SECONDS = 256, 1.0
"""A flush is due after this many buffered lines, or this many seconds after the first buffered line."""


class Positions:
    """A set of prompts, each given by its index in the order of the run (order.py). It is a bitmap."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def add(self, position: int) -> bool:
        """Add a position. Returns whether it is new."""
        at, bit = position >> 3, 1 << (position & 7)
        if at >= len(self._bits):
            self._bits.extend(bytes(at + 1 - len(self._bits) + len(self._bits) // 8))
        if self._bits[at] & bit:
            return False
        self._bits[at] |= bit
        self._count += 1
        return True

    def discard(self, position: int) -> None:
        """Remove a position, if it is in the set."""
        if position in self:
            self._bits[position >> 3] &= ~(1 << (position & 7))
            self._count -= 1

    def below(self, limit: int | None) -> int:
        """The number of positions below `limit`. None: the number of all positions."""
        if limit is None:
            return self._count
        at, bits = limit >> 3, (1 << (limit & 7)) - 1
        last = self._bits[at] & bits if at < len(self._bits) else 0
        return int.from_bytes(self._bits[:at], "little").bit_count() + last.bit_count()

    def __contains__(self, position: int) -> bool:
        at = position >> 3
        return at < len(self._bits) and bool(self._bits[at] & 1 << (position & 7))

    def __iter__(self) -> Iterator[int]:
        for at, byte in enumerate(self._bits):
            if byte:
                yield from (at << 3 | bit for bit in range(8) if byte & 1 << bit)

    def __len__(self) -> int:
        return self._count


def cannot_write(path: Path, error: OSError) -> OSError:
    """The error for a file in a run's directory that cannot be written. Its message names the file and the fix."""
    return OSError(
        f"--out {path.parent}: {path.name} cannot be written ({error.strerror or error}); make room there, or change"
        " its mode, and start the same command again"
    )


class Manifest:
    """Appends lines to the manifest in batches, and calls fsync after each batch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._lines: list[bytes] = []
        self._since = 0.0
        self._cut_torn_line()

    def _cut_torn_line(self) -> None:
        """Remove a last line without a newline, which a killed process or a failed write left."""
        end = os.fstat(self._fd).st_size
        while end:
            begin = max(0, end - _TAIL)
            found = os.pread(self._fd, end - begin, begin).rfind(b"\n")
            if found >= 0:
                end = begin + found + 1
                break
            end = begin
        os.ftruncate(self._fd, end)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Buffer a line. `flush` writes it."""
        if not self._lines:
            self._since = time.monotonic()
        self._lines.append(json.dumps(entry, separators=(",", ":")).encode() + b"\n")

    def flush(self, now: bool = True) -> None:
        """Write the buffered lines. now: False writes them only if a flush is due. Raises OSError."""
        due = len(self._lines) >= _LINES or time.monotonic() - self._since > _SECONDS
        if not self._lines or not (now or due):
            return
        data = memoryview(b"".join(self._lines))
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            self._lines = []
            os.fsync(self._fd)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None:
        """Close the file. It does not write buffered lines: call `flush` first."""
        os.close(self._fd)
