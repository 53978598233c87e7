# SPDX-License-Identifier: Apache-2.0
"""Measures several engines in short slices of time: one engine runs, and all processes of the others are stopped.

The speed of a core changes within tenths of a second, and that of a machine within minutes. Rounds of ten seconds would
therefore compare engines at different speeds of the machine. Slices of a second alternate between engines so often that
changes of speed affect all engines alike.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common

_SETTLE_S = 0.03
"""Seconds between two slices, in which the GPU finishes the steps of the engine that was stopped."""
_RESAMPLES = 2000
"""Number of resamples of a bootstrap."""


class ActiveClock:
    """The seconds in which this process was not stopped. path: file in which the parent counts the seconds of stops."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)

    def _stopped(self) -> float:
        return float(struct.unpack_from("d", self._memory)[0])

    def __call__(self) -> float:
        while True:  # again if a stop fell between the two reads of the memory: it would count twice, or not at all
            stopped = self._stopped()
            now = time.perf_counter()
            if self._stopped() == stopped:
                return now - stopped


class Slice:
    """Stops and continues all processes of the session of a child process.

    path: file for `ActiveClock`, which exists until `close`. session: id of the session, which is the process id of the
    child. Set it before `stop`.
    """

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="dmi-stops-")  # noqa: SIM115 - `close` removes it
        self._file.write(bytes(8))
        self._file.flush()
        self.path, self.session = self._file.name, 0
        self._memory = mmap.mmap(self._file.fileno(), 8)
        self._began, self._total = 0.0, 0.0

    def stop(self) -> None:
        """Stop the processes."""
        self._began = time.perf_counter()
        _signal(self.session, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the processes. Does nothing if they run."""
        if self._began:
            self._total += time.perf_counter() - self._began
            self._began = 0.0
            struct.pack_into("d", self._memory, 0, self._total)
            _signal(self.session, signal.SIGCONT)

    def close(self) -> None:
        """Remove the file."""
        self._memory.close()
        self._file.close()


def _signal(session: int, number: int) -> None:
    """Send a signal to all processes of a session."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(ProcessLookupError, FileNotFoundError):  # the process has ended
                if os.getsid(int(entry.name)) == session:
                    os.kill(int(entry.name), number)


def take_slices(
    children: dict[str, common.Child], turns: dict[str, Slice], request: dict[str, Any], seconds: float
) -> dict[str, dict[str, Any]]:
    """Send a request to all children, which then run in turn for `seconds` each. Returns their answers.

    A child that has answered is stopped until all have answered. turns: {name in `children`: `Slice` of this child}.
    """
    for child in children.values():
        child.send(request)
    answers: dict[str, dict[str, Any]] = {}
    try:
        for name in children:
            turns[name].stop()
        while len(answers) < len(children):
            for name in [name for name in children if name not in answers]:
                turns[name].resume()
                answered = children[name].wait(seconds)
                turns[name].stop()
                time.sleep(_SETTLE_S)
                if answered:
                    answers[name] = children[name].answer()
    finally:
        for name in children:
            turns[name].resume()
    return answers


def ratio(mine: Sequence[float], stock: Sequence[float], seed: int = 0) -> dict[str, float]:
    """The ratio of two speeds that were measured in slices, with an interval of 95 %.

    mine, stock: tokens of each second. Seconds with the same index were measured one right after the other. The
    interval is that of a bootstrap over these pairs, as if they were independent.
    """
    pairs = np.array(list(zip(mine, stock, strict=False)), np.float64)
    draws = np.random.default_rng(seed).integers(0, len(pairs), (_RESAMPLES, len(pairs)))
    sums = pairs[draws].sum(axis=1)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5])
    whole = pairs.sum(axis=0)
    return {"ratio": float(whole[0] / whole[1]), "low": float(low), "high": float(high), "seconds": len(pairs)}
