# SPDX-License-Identifier: Apache-2.0
"""Stops a run on SIGINT and SIGTERM."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """In the block, the first SIGINT or SIGTERM calls `stop("signal")`. A second signal raises KeyboardInterrupt."""

    def on_signal(number: int, _frame: Any) -> None:
        stop("signal")
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, signal.default_int_handler)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
