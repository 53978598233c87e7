# SPDX-License-Identifier: Apache-2.0
"""Manages the uploads of a coordinator: the uploader process, a bounded backlog, and the results."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dmi_connector.store.write.child_process import Child
from dmi_connector.store.write.finish.upload import leave_upload
from dmi_connector.store.write.messages import Message
from dmi_connector.store.write.settings import UploadSettings

logger = logging.getLogger(__name__)

UPLOADER = "dmi_connector.store.write.finish.uploader"
_DEATHS = 3
"""All waiting uploads fail when the uploader process has died this often with no finished upload in between."""
_LOOK_S = 0.5
"""Interval at which `wait_for_room` calls `needed`."""


class Uploads:
    """Passes finished stores to the uploader process, which starts with the first store. All methods are thread-safe.

    note: called with a sentence for each error. count: called with {counter: increase}. The counters are "uploaded",
    "upload_failed", "bytes_queued" and "bytes_uploaded".
    """

    def __init__(
        self,
        settings: UploadSettings,
        file_mode: str,
        note: Callable[[str], None],
        count: Callable[[dict[str, int]], None],
    ) -> None:
        self.settings, self._file_mode, self._note, self._count = settings, file_mode, note, count
        self._changed = threading.Condition(threading.RLock())
        self._waiting: dict[str, int] = {}  # by path: bytes of stores that are not uploaded yet, in order of arrival
        self._child: Child | None = None
        self._deaths = 0
        self._stopping = False

    @property
    def backlog(self) -> int:
        """Bytes of finished stores that are not uploaded yet."""
        with self._changed:
            return sum(self._waiting.values())

    def add(self, store: str, nbytes: int, whole: bool = True) -> None:
        """Add a finished store. whole: it lacks no rows, and its request was not aborted. Never blocks."""
        limit = self.settings.backlog_bytes
        if self.settings.only_complete and not whole:
            self._leave(Path(store))
            return
        with self._changed:
            if self.settings.drop and self._waiting and self.backlog + nbytes > limit:
                reason = f"upload_backlog_bytes: {limit} bytes wait already (policy drop); dmi repair uploads it later"
                self._process().post({"type": "skip", "store": store, "reason": reason})
                self._failed(store, reason)
                return
            self._waiting[store] = nbytes
            self._count({"bytes_queued": nbytes})
            self._process().post({"type": "upload", "store": store})

    def _leave(self, store: Path) -> None:
        """Record in the index that a store will not be uploaded."""
        try:
            leave_upload(store)
        except OSError as error:  # dmi repair may then upload it
            self._note(f"{store}: {error}")

    def wait_for_room(self, needed: Callable[[], bool]) -> None:
        """With policy block, wait while the backlog is over its limit and `needed` returns True."""
        if self.settings.drop:
            return
        with self._changed:
            while self.backlog > self.settings.backlog_bytes and not self._stopping and needed():
                self._changed.wait(_LOOK_S)

    def shutdown(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the uploads, then stop. Returns whether all have succeeded or failed."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout)
            self._stopping = True
            child, left = self._child, len(self._waiting)
            self._changed.notify_all()
        if child is not None:
            child.finish()
            child.join(max(1.0, deadline - time.monotonic()))
        if left:
            self._note(f"{left} stores are not uploaded yet: dmi repair finishes that")
        return not left

    def _process(self) -> Child:
        if self._child is None:
            s = self.settings
            arguments = ["--url", s.url, "--retry-seconds", str(s.retry_seconds), "--file-mode", self._file_mode]
            arguments += ["--remove-local"] if s.remove_local else []
            self._child = Child("the uploader process", UPLOADER, arguments, [], self._on_message, self._on_death)
        return self._child

    def _on_message(self, _child: Child, m: Message) -> None:
        with self._changed:
            if "uploaded" in m:
                self._deaths = 0
                if self._waiting.pop(m["uploaded"], None) is not None:
                    self._count({"uploaded": 1, "bytes_uploaded": m["bytes"]})
            elif "failed" in m and self._waiting.pop(m["failed"], None) is not None:
                self._failed(m["failed"], m["reason"])
            if "note" in m:
                self._note(m["note"])
            self._changed.notify_all()

    def _failed(self, store: str, reason: str) -> None:
        self._count({"upload_failed": 1})
        self._note(f"{store} is not uploaded, its local copy stays: {reason}")

    def _on_death(self, child: Child, how: str) -> None:
        """Start a new process for the waiting uploads."""
        with self._changed:
            if self._stopping or child is not self._child:
                return
            self._note(f"{child.name} died ({how})")
            self._child, self._deaths = None, self._deaths + 1
            if self._deaths >= _DEATHS:
                for store in self._waiting:
                    self._failed(store, f"{child.name} died {_DEATHS} times; dmi repair uploads it later")
                self._waiting.clear()
                self._deaths = 0
            for store in self._waiting:
                self._process().post({"type": "upload", "store": store})
            self._changed.notify_all()
