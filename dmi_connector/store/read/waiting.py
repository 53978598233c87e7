# SPDX-License-Identifier: Apache-2.0
"""Waits until a store has its final name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dmi_connector.store.format import schema
from dmi_connector.store.format.locks import is_abandoned
from dmi_connector.store.format.remote_path import Place, RemotePath
from dmi_connector.store.read.files.remote_files import check_bucket, look
from dmi_connector.store.read.index_lines import LineTail, merge_line

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.1
"""First and longest pause between checks. Each pause is 1.5 times as long as the previous one."""
_LOCK_PAUSE_S = 1.0
"""Seconds between checks of the lock of a partial store. Each check holds the lock for a moment."""
_ABANDONED_LOOKS = 3
"""Consecutive checks without a lock until a capture counts as abandoned. After a writer's death, another one soon
locks the store.
"""


class CaptureFailed(FileNotFoundError):
    """Raised for a capture that gives no store, unless `dmi repair` recovers one. The message says why, and what to do.

    state: a state of `CaptureInfo`, "aborted", or "removed". reason: why it failed, as far as it is known.
    """

    def __init__(self, text: str, path: Place, state: str, reason: str | None) -> None:
        super().__init__(text)
        self.path, self.state, self.reason = str(path), state, reason


def wait_for(final: Place, seconds: float, there: Callable[[Place], bool] | None = None) -> None:
    """Wait until a store exists. there: another condition to wait for.

    Raises CaptureFailed as soon as it is known that there will be no store: the directory's index says that the capture
    failed, was aborted or removed, or its writers are gone. Raises FileNotFoundError for a bucket or a directory that
    does not exist. Raises TimeoutError after `seconds`, with a message about what exists.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE_S
    if isinstance(final, Path) and not final.absolute().parent.is_dir():
        raise FileNotFoundError(f"capture {final} does not exist, and neither does its directory; correct the path")
    watch = None if isinstance(final, RemotePath) else Watch(final)
    if isinstance(final, RemotePath) and not _exists(final):
        check_bucket(final)
    there = there or _exists
    while not there(final):
        if watch is not None:
            watch.check()
        left = deadline - time.monotonic()
        if not left > 0:  # also for NaN
            raise TimeoutError(f"capture {final} was not found after {seconds:g} s: {_seen(final)}")
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, _LONGEST_PAUSE_S)


def _exists(final: Place) -> bool:
    """Whether a store exists. In an object store its root `zarr.json` must exist, which is uploaded last."""
    if isinstance(final, Path):
        return final.exists()
    try:
        look(final if final.suffix == ".zip" else final / "zarr.json")
    except FileNotFoundError:
        return False
    return True


def _partial(final: Path) -> Path:
    return final.with_name(final.name + schema.PARTIAL_SUFFIX)


def _seen(final: Place) -> str:
    if not isinstance(final, Path):
        return "it is not in the bucket, or not uploaded in full"
    partial = _partial(final)
    if not partial.exists():
        return "it does not exist yet"
    if is_abandoned(partial):
        return f"its writers ended and left {partial.name}; dmi repair recovers what they wrote"
    return f"it is still being written as {partial.name}"


def _how_it_ended(final: Path, line: Mapping[str, Any]) -> str:
    """Why a capture gives no store, and what to do. line: its merged index line."""
    state, reason, partial = line.get("state"), line.get("reason"), _partial(final)
    if state == "failed" and partial.exists():
        return f"failed: {reason}; fix the cause, then dmi repair recovers the rows in {partial.name}"
    if state == "failed":
        return f"failed: {reason}; no rows are left: fix the cause, and capture it again"
    if state == "aborted":
        return "was aborted, and no rows were kept; capture it again"
    if state == "removed":
        return "was removed by dmi prune or retention; capture it again"
    if state == "unfinished":
        return f"does not exist: its writers ended and left {partial.name}; dmi repair recovers what they wrote"
    return f"was removed from this machine after its upload; open {line.get('url')}"


class Watch:
    """Watches one capture, by its directory's index and by the lock on its partial store."""

    def __init__(self, final: Path) -> None:
        self.final = final
        self._tail = LineTail(final.parent)
        self._line: dict[str, Any] = {}
        self._looks, self._next_look = 0, 0.0

    def check(self) -> None:
        """Raise CaptureFailed if there will be no store."""
        end = self._end()
        if end is not None and not self.final.exists():  # a repair may have created it meanwhile
            text = f"capture {self.final} {_how_it_ended(self.final, end)}"
            raise CaptureFailed(text, self.final, end["state"], end.get("reason"))

    def _end(self) -> dict[str, Any] | None:
        """The index line of a capture that will give no store; None if it may still give one."""
        for line in self._tail.read(of=self.final.name):
            self._line = merge_line(self._line, line)
        if self._line.get("state") in ("failed", "aborted", "removed"):
            return self._line
        if self._line.get("local") is False and self._line.get("url"):
            return self._line
        return {**self._line, "state": "unfinished"} if self._is_abandoned() else None

    def _is_abandoned(self) -> bool:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOCK_PAUSE_S
            self._looks = self._looks + 1 if is_abandoned(_partial(self.final)) else 0
        return self._looks >= _ABANDONED_LOOKS
