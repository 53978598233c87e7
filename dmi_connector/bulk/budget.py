# SPDX-License-Identifier: Apache-2.0
"""Limits the disk space that the stores of a run take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from dmi_connector.store.write.finish.retention import StoreSizes, measure

_LEAST_S, _LEAST_MULTIPLE = 1.0, 10.0
"""Minimum time between measurements by `allows`: in seconds, and as a multiple of the duration of the last one."""
_BASE = 4096
"""Approximate bytes of a store's root `zarr.json`, which the index does not count."""


class Budget:
    """Decides whether the disk has room for the store of one more prompt.

    Each prompt in flight is counted with the size of the largest store so far. Until the first store is finished, one
    prompt is allowed at a time. With `max_bytes`, the stores in `out` are measured again when there is no room, because
    the user may have removed some.

    max_bytes: maximum bytes of the stores in `out`. min_free_bytes: bytes that must stay free on the file system. 0: no
    limit. clock: returns seconds.
    """

    def __init__(
        self, out: Path, max_bytes: int = 0, min_free_bytes: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out, self.max_bytes, self.min_free_bytes = out, max_bytes, min_free_bytes
        self._clock = clock
        self._sizes = StoreSizes()
        self._used, self._largest = 0, 0
        self._next = clock()
        if max_bytes:
            self._measure()

    def stored(self, nbytes: int) -> None:
        """Count a finished store of `nbytes` bytes."""
        self._used += nbytes + _BASE
        self._largest = max(self._largest, nbytes + _BASE)

    def allows(self, in_flight: int) -> bool:
        """Whether one more prompt fits beside `in_flight` others. Raises OSError."""
        if not self.max_bytes and not self.min_free_bytes:
            return True
        if not self._largest and in_flight:
            return False
        needed = (in_flight + 1) * self._largest
        if self._fits(needed):
            return True
        if self.max_bytes and self._clock() >= self._next:
            self._measure()
            return self._fits(needed)
        return False

    def is_full(self) -> bool:
        """Measure the stores. Returns whether there is no room for even one prompt. Raises OSError.

        Call this method while no prompt is in flight. A store that was being written during the last measurement may be
        counted twice: by the measurement and by `stored`. So the stores are measured again.
        """
        if self.max_bytes:
            self._measure()
        return not self._fits(self._largest)

    def _fits(self, needed: int) -> bool:
        if self.max_bytes and self._used + max(needed, 1) > self.max_bytes:
            return False
        if self.min_free_bytes:
            stat = os.statvfs(self._out)
            return stat.f_bavail * stat.f_frsize - needed >= self.min_free_bytes
        return True

    def _measure(self) -> None:
        began = self._clock()
        self._used = measure(str(self._out), sizes=self._sizes).nbytes
        ended = self._clock()
        self._next = ended + max(_LEAST_S, _LEAST_MULTIPLE * (ended - began))
