# SPDX-License-Identifier: Apache-2.0
"""Whether a writer that falls behind stores chunks as they are, in plain frames of the codec.

Compression takes most of a writer's time. Without it a writer is several times as fast, unless the disk is the limit:
then it would be slower. So each writer measures what compression costs it, and what writing does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_REMEMBERED_BYTES = 1 << 28
"""What was measured counts half after so many more bytes."""
_LEAST_BYTES = 4 << 20
"""As many must have been compressed: the first small arrays take longer."""
_PROBE = 32
"""One chunk in so many is compressed nevertheless, so that what is known of compression stays true."""


@dataclass
class _Cost:
    """Seconds that bytes took, how many these were, and how many came of them."""

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
    """What compression and writing take of a writer's time."""

    _compression: _Cost = field(default_factory=_Cost)
    _writing: _Cost = field(default_factory=_Cost)
    _compressed: int = 0  # bytes since the start
    _plain: int = 0  # chunks since the last that was compressed

    def add(self, plain: bool, raw: int, stored: int, encoding_s: float, writing_s: float) -> None:
        """Note how long it took to encode `raw` bytes and to write the `stored` bytes they became."""
        self._compression.fade(raw)
        self._writing.fade(stored)
        self._writing.add(writing_s, stored, stored)
        if not plain:
            self._compression.add(encoding_s, raw, stored)
            self._compressed += raw

    def add_writing(self, seconds: float) -> None:
        """Note what finishing a file took: some file systems write then."""
        self._writing.add(seconds, 0, 0)

    def plain_next(self) -> bool:
        """Whether a chunk that comes while the writer is behind is to be plain.

        It is where compression takes longer than writing what it saves. The checksum of a plain chunk counts for
        nothing: it takes 0.04 s a GB, compression 0.9 (two cores of a CPU).
        """
        packed, writing = self._compression, self._writing
        if self._compressed < _LEAST_BYTES:
            return False
        saved = 1 - packed.gave / packed.took
        quicker = packed.seconds / packed.took > saved * writing.seconds / writing.took
        self._plain = self._plain + 1 if quicker and self._plain < _PROBE - 1 else 0
        return self._plain > 0
