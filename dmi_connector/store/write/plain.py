# SPDX-License-Identifier: Apache-2.0
"""Whether a writer that falls behind stores chunks as they are, in plain frames of the codec.

Compression takes most of a writer's time. Without it a writer is several times as fast, unless the disk is the limit:
then it would be slower. So each writer measures what compression costs it, and what writing does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_REMEMBERED_BYTES = 1 << 28
"""What was measured counts half after so many more bytes."""


@dataclass
class _Cost:
    """Seconds that bytes took, how many these were, and how many came of them."""

    seconds: float = 0.0
    took: float = 0.0
    gave: float = 0.0

    def add(self, seconds: float, took: int, gave: int) -> None:
        keep = 0.5 ** (took / _REMEMBERED_BYTES)
        self.seconds = self.seconds * keep + seconds
        self.took = self.took * keep + took
        self.gave = self.gave * keep + gave


@dataclass
class Costs:
    """What compression and writing take of a writer's time."""

    _compression: _Cost = field(default_factory=_Cost)
    _writing: _Cost = field(default_factory=_Cost)

    def add(self, plain: bool, raw: int, stored: int, encoding_s: float, writing_s: float) -> None:
        """Note how long it took to encode `raw` bytes and to write the `stored` bytes they became."""
        if not plain:
            self._compression.add(encoding_s, raw, stored)
        self._writing.add(writing_s, stored, stored)

    def plain_is_quicker(self) -> bool:
        """Whether compression takes longer than writing what it saves. False until it was measured.

        The checksum of a plain chunk counts for nothing. Measured, one bad moment of a writer that gives way to the
        engine would rule plain chunks out for ever.
        """
        packed, writing = self._compression, self._writing
        if not packed.took:
            return False
        saved = 1 - packed.gave / packed.took
        return packed.seconds / packed.took > saved * writing.seconds / writing.took
