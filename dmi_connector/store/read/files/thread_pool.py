# SPDX-License-Identifier: Apache-2.0
"""The two thread pools of a process: one reads chunks, and one sends requests to object stores.

The pool for chunks has one thread per usable core by default.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from dmi_connector.option_values import whole_number

Item = TypeVar("Item")
Result = TypeVar("Result")
_PREFIX = "dmi-read"
FETCH_THREADS = 32
"""Number of concurrent requests to an object store. Their threads mostly wait, so they may outnumber the cores."""


def _cores() -> int:
    """Number of cores that this process may use; on macOS and Windows, that of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Pool:
    """A thread pool that starts its threads on first use, and again in a forked process."""

    def __init__(self, prefix: str, threads: int | None = None) -> None:
        self.prefix = prefix
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._wanted = threads
        if hasattr(os, "register_at_fork"):  # Windows has no fork
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock, self._executor = threading.Lock(), None  # a forked process does not inherit threads

    @property
    def threads(self) -> int:
        return self._wanted or _cores()

    def resize(self, threads: int | None) -> None:
        if threads is not None and (whole_number(threads) or 0) < 1:
            raise ValueError(f"threads {threads!r} is not valid; use 1 or more, or None for one per core")
        with self._lock:
            # No shutdown: another thread may be submitting work. The old threads end once nothing references them.
            self._wanted, self._executor = threads, None

    def executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.threads, self.prefix)
            return self._executor


_pool, _fetch_pool = _Pool(_PREFIX), _Pool("dmi-fetch", FETCH_THREADS)


def read_threads() -> int:
    """Number of threads that read chunks."""
    return _pool.threads


def set_read_threads(threads: int | None) -> None:
    """Set the number of threads that read chunks. None: one per core of this process, which is the default.

    Raises ValueError for a number below 1.
    """
    _pool.resize(threads)


def in_threads(work: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Call `work` for each of `items` in the pool, and wait. On an error, work that has not begun is cancelled.

    The work runs in the calling thread if there is only one item or one thread, or if the caller is a thread of the
    pool. Raises the first error.
    """
    _share(_pool, work, items)


def each_of(work: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """The results of `work` for `items`, in order, by `threads` threads of their own. Raises the first error."""
    if threads == 1 or len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        return list(pool.map(work, items))


def in_fetch_threads(work: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Like `in_threads`, with FETCH_THREADS threads, for work that waits for a server."""
    _share(_fetch_pool, work, items)


def _share(pool: _Pool, work: Callable[[Item], object], items: Iterable[Item]) -> None:
    listed = list(items)
    inside = threading.current_thread().name.startswith(pool.prefix)
    if len(listed) < 2 or inside or pool.threads == 1:
        for item in listed:
            work(item)
        return
    for _ in pool.executor().map(work, listed):
        pass


class Scratch(threading.local):
    """Buffers of one thread. They are reused for each chunk, because new memory would cost page faults."""

    def __init__(self) -> None:
        self._parts: dict[str, np.ndarray] = {}

    def take(self, name: str, nbytes: int) -> np.ndarray:
        """uint8 [nbytes]. Valid until this thread takes the same name again."""
        part = self._parts.get(name)
        if part is None or len(part) < nbytes:
            part = self._parts[name] = np.empty(nbytes, np.uint8)
        return part[:nbytes]
