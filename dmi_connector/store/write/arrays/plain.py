# SPDX-License-Identifier: Apache-2.0
"""Decides whether a writer that is behind leaves chunks uncompressed.

Compression takes most of a writer's time. Without compression a writer is several times faster. But if the disk is the
bottleneck, the writer is slower, because it writes more bytes. So each writer measures the time for compression and for
writing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_REMEMBERED_BYTES = 1 << 28
"""Number of bytes after which the weight of a measurement halves."""
_LEAST_BYTES = 4 << 20
"""Bytes that must be compressed before the first decision, because the first small arrays take longer."""
_PROBE = 32
"""One chunk in this number is always compressed, to keep the measurement of compression up to date."""


@dataclass
class _Cost:
    """Seconds, input bytes and output bytes of a stage."""

    seconds: float = 0.0
    took: float = 0.0
    gave: float = 0.0

    def fade(self, nbytes: int) -> None:
        keep = 0.5 ** (nbytes / _REMEMBERED_BYTES)
        self.seconds, self.took, self.gave = self.seconds * keep, self.took * keep, self.gave * keep

    def add(self, seconds: float, took: int, gave: int) -> None:
        self.seconds, self.took, self.gave = self.seconds + seconds, self.took + took, self.gave + gave


@dataclass
class Costs:
    """The time that a writer spends on compression and on writing."""

    _compression: _Cost = field(default_factory=_Cost)
    _writing: _Cost = field(default_factory=_Cost)
    _compressed: int = 0  # bytes since the start
    _plain: int = 0  # chunks since the last compressed one

    def add(self, plain: bool, raw: int, stored: int, encoding_s: float, writing_s: float) -> None:
        """Add the time to encode `raw` bytes, and the time to write the resulting `stored` bytes."""
        self._compression.fade(raw)
        self._writing.fade(stored)
        self._writing.add(writing_s, stored, stored)
        if not plain:
            self._compression.add(encoding_s, raw, stored)
            self._compressed += raw

    def add_writing(self, seconds: float) -> None:
        """Add the time to finish a file, because some file systems write only then."""
        self._writing.add(seconds, 0, 0)

    def plain_next(self) -> bool:
        """Whether to leave the next chunk uncompressed. Called while the writer is behind.

        True if compression takes longer than writing the bytes that it saves, except for each 32nd chunk and the first
        4 MiB. The time for the checksum of an uncompressed chunk is ignored: it is 0.04 s per GB, where compression
        takes 0.9 s (two cores of a CPU).
        """
        packed, writing = self._compression, self._writing
        if self._compressed < _LEAST_BYTES:
            return False
        saved = 1 - packed.gave / packed.took
        quicker = packed.seconds / packed.took > saved * writing.seconds / writing.took
        self._plain = self._plain + 1 if quicker and self._plain < _PROBE - 1 else 0
        return self._plain > 0
