# SPDX-License-Identifier: Apache-2.0
"""Whether a writer that falls behind stores chunks as they are, in plain frames of the codec.

Compression takes most of a writer's time. Without it a writer is several times as fast, unless the disk is the limit:
then it would be slower. So each writer measures what a byte costs it either way.
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
        self.seconds, self.took, self.gave = (
            self.seconds * keep + seconds,
            self.took * keep + took,
            self.gave * keep + gave,
        )

    def a_byte(self) -> float:
        return self.seconds / self.took if self.took else 0.0


@dataclass
class Costs:
    """What encoding and writing take of a writer's time."""

    _encoding: dict[bool, _Cost] = field(default_factory=lambda: {plain: _Cost() for plain in (False, True)})
    _writing: _Cost = field(default_factory=_Cost)

    def add(self, plain: bool, raw: int, stored: int, encoding_s: float, writing_s: float) -> None:
        """Note how long it took to encode `raw` bytes and to write the `stored` bytes they became."""
        self._encoding[plain].add(encoding_s, raw, stored)
        self._writing.add(writing_s, stored, stored)

    def plain_is_quicker(self) -> bool:
        """Whether chunks are written sooner as they are. False until compression was measured."""
        packed = self._encoding[False]
        if not packed.took:
            return False
        write = self._writing.a_byte()
        return self._encoding[True].a_byte() + write < packed.a_byte() + write * packed.gave / packed.took
