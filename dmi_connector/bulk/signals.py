# SPDX-License-Identifier: Apache-2.0
"""Signals that stop a run in order."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """SIGINT and SIGTERM stop a run in order; the second one ends it at once, with KeyboardInterrupt."""

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
