# SPDX-License-Identifier: Apache-2.0
"""The engine's side of persistence: the shared ring, and short messages to the coordinator process.

client = PersistenceClient(ring_bytes=1 << 30, writers=4)
plan = client.register(arrays, header_base=None)
capture = client.open_capture(plan, "/captures/a.zarr", attrs={"prompt_len": 5})
extent = client.ring.alloc(nbytes)            # copy the payload to client.ring.view(extent)
capture.chunk(extent, first=0, count=128)
capture.close(length, token_ids=ids)
client.shutdown(60)
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from dmi_connector.store.persist_settings import PersistSettings
from dmi_connector.store.process import Child
from dmi_connector.store.ring import Extent, Ring
from dmi_connector.store.schema import ArraySpec
from dmi_connector.store.wire import Message, pack_array

logger = logging.getLogger(__name__)
MODULE = "dmi_connector.store.coordinator"
_GRACE_S = 5.0
SHORT_LIFE_S = 10.0
"""A coordinator that died younger than this is not started again."""
REASONS = ("dropped", "aborted", "quota", "write_error", "shutdown", "other")
"""Why a capture is incomplete, for counting."""
_WRITE_ERROR = re.compile(r"\[Errno |OSError: |died \(|are gone from the partial store")


class RemoteCapture:
    """Feeds one capture. No method blocks on I/O. state: "open", "closing", then "complete", "incomplete" or "failed";
    for ranks above 0 "complete" means that this rank's part is. cause: which of REASONS applies should it be closed
    with rows lacking.
    """

    def __init__(self, client: PersistenceClient, number: int, final: str, names: Message) -> None:
        self.path, self.number, self.state = final, number, "open"
        self.errors: list[str] = []
        self.cause, self.reason = "other", ""
        self._client, self._names = client, names

    def chunk(self, extent: Extent, first: int, count: int) -> None:
        """Write token rows [first, first + count); see `CaptureHandle.chunk`. The extent is released when the writers
        are done with it.
        """
        self._client._post_extent(extent, [self], {"type": "chunk", "id": self.number, "first": first, "count": count})

    def close(
        self,
        length: int,
        samples: Mapping[str, int] | None = None,
        token_ids: Sequence[int] | np.ndarray = (),
        attrs: Mapping[str, Any] | None = None,
    ) -> None:
        """Finish the capture: see `CaptureHandle.close`. token_ids: `length` ids."""
        self.reason = (attrs or {}).get("reason") or ""
        ids = pack_array(np.asarray(token_ids, "<i4"))
        message: Message = {"type": "close", "id": self.number, "length": length, "samples": dict(samples or {})}
        self._client._post_close(self, {**message, "token_ids": ids, "attrs": dict(attrs or {})})


class PersistenceClient:
    """Owns the ring and the coordinator process. All methods may be called from any thread.

    `ring.memory` is the whole ring as one uint8 array, for registering it as pinned memory. Should the coordinator die,
    the captures under way are lost: that is logged and written to the index, and another coordinator serves later ones.
    """

    def __init__(self, ring_bytes: int, writers: int = 1, settings: PersistSettings | None = None) -> None:
        self.settings, self.writers = settings or PersistSettings(), writers
        self.ring = Ring(ring_bytes)
        self._lock = threading.Condition()
        self._plans: list[Message] = []
        self._captures: dict[int, RemoteCapture] = {}
        self._out: dict[int, Extent] = {}
        self._count = 0
        self._stats: dict[str, int] = dict.fromkeys(
            ("started", "complete", *(f"incomplete.{r}" for r in REASONS), "failed", "bytes_raw", "bytes_stored"), 0
        )
        self._errors: deque[str] = deque(maxlen=20)
        self._stopping = False
        self._broken: str | None = None
        self._child = self._spawn()

    def register(self, arrays: Sequence[ArraySpec], header_base: int | None) -> int:
        """Make known what captures consist of (see `CaptureSpec`); gives the number for `open_capture`."""
        with self._lock:
            plan: Message = {"type": "plan", "plan": len(self._plans), "header_base": header_base}
            self._plans.append({**plan, "arrays": [a.to_json() for a in arrays]})
            self._child.post(self._plans[-1])
            return len(self._plans) - 1

    def open_capture(
        self,
        plan: int,
        final: str,
        attrs: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        key: str | None = None,
        rank: int = 0,
        ranks: int = 1,
        most_rows: int | None = None,
    ) -> RemoteCapture:
        """Begin a capture; see `CaptureSpec`. What is wrong with it shows when it is closed."""
        with self._lock:
            self._count += 1
            self._stats["started"] += 1
            names: Message = {"final": final, "request_id": request_id, "key": key}
            capture = RemoteCapture(self, self._count, final, names)
            message = {"type": "open", "id": self._count, "plan": plan, "attrs": dict(attrs or {})}
            if self._broken:
                capture.errors, capture.state = [self._broken], "failed"
                self._stats["failed"] += 1
                return capture
            self._captures[self._count] = capture
            self._child.post({**message, **names, "rank": rank, "ranks": ranks, "most_rows": most_rows})
            return capture

    def rows(self, extent: Extent, rows: Sequence[tuple[RemoteCapture, str, int, int, int]]) -> None:
        """Write per-sample rows that lie in one extent: (capture, array, sample, position, byte offset) of each."""
        items = [[c.number, *rest] for c, *rest in rows]
        self._post_extent(extent, [c for c, *_ in rows], {"type": "rows", "rows": items})

    @property
    def group(self) -> int:
        """Process group of the coordinator and the writers."""
        return self._child.group

    def stats(self) -> dict[str, Any]:
        """Counts of captures by state, bytes raw and stored, bytes waiting in the ring, the latest errors."""
        with self._lock:
            states = [c.state for c in self._captures.values()]
            counts = {"open": states.count("open"), "closing": states.count("closing")}
            counts["incomplete"] = sum(self._stats[f"incomplete.{r}"] for r in REASONS)
            return {**counts, **self._stats, "backlog_bytes": self.ring.used, "errors": list(self._errors)}

    def counts(self) -> dict[str, int]:
        """Those numbers of `stats` that only grow; takes no lock, so that every step may ask."""
        return dict(self._stats)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every closed capture is committed. Returns False when `timeout` seconds were not enough."""
        with self._lock:
            return self._lock.wait_for(lambda: not any(c.state == "closing" for c in self._captures.values()), timeout)

    def shutdown(self, timeout: float | None = None) -> bool:
        """Finish closed captures and end the processes. The coordinator takes `shutdown_seconds` at most; it is ended
        by force `timeout` seconds (None: as many) and a few more after the call. Returns whether all was committed;
        what was not stays behind as partial stores, for a repair.
        """
        timeout = (self.settings.shutdown_seconds if timeout is None else timeout) + _GRACE_S
        with self._lock:
            self._stopping = True
        self._child.finish()
        ended = self._child.join(timeout)
        if not ended:
            self._note(f"writing did not end within {timeout:g} s of the shutdown: dmi repair takes what is there")
            _end_group(self._child.group)
        return ended and self._child.status == 0

    # ---- messages out -----------------------------------------------------------------------------------------------

    def _post_extent(self, extent: Extent, captures: Sequence[RemoteCapture], message: Message) -> None:
        with self._lock:
            if all(c.state != "open" for c in captures):
                self.ring.release(extent)  # lost with its coordinator
                return
            self._count += 1
            self._out[self._count] = extent
            where = {"extent": self._count, "offset": extent.offset, "nbytes": extent.nbytes}
            self._child.post({**message, **where})

    def _post_close(self, capture: RemoteCapture, message: Message) -> None:
        with self._lock:
            if capture.state == "open":
                capture.state = "closing"
                self._child.post(message)

    # ---- answers in, on the reader thread ---------------------------------------------------------------------------

    def _on_message(self, child: Child, m: Message) -> None:
        with self._lock:
            for number in m.get("free", ()):
                self.ring.release(self._out.pop(number))
            if "done" in m:
                self._end(self._captures[m["done"]], m["state"], m["errors"], m["bytes_raw"], m["bytes_stored"])
            if "note" in m:
                self._note(m["note"])

    def _end(self, capture: RemoteCapture, state: str, errors: list[str], raw: int = 0, stored: int = 0) -> None:
        outcome = f"incomplete.{_why(capture, errors)}" if state == "incomplete" else state
        capture.state, capture.errors = state, errors
        self._captures.pop(capture.number, None)
        for name, value in ((outcome, 1), ("bytes_raw", raw), ("bytes_stored", stored)):
            self._stats[name] += value
        if state != "complete":
            self._note(f"{capture.path} is {state}: {'; '.join(errors)}")
        self._lock.notify_all()

    def _note(self, text: str) -> None:
        self._errors.append(text)
        logger.error("dmi: %s", text)

    # ---- the process ------------------------------------------------------------------------------------------------

    def _spawn(self) -> Child:
        self._life, life = os.pipe()
        self._born = time.monotonic()
        arguments = ["--ring-fd", str(self.ring.fd), "--ring-bytes", str(self.ring.nbytes), "--life-fd", str(life)]
        arguments += ["--writers", str(self.writers), "--settings", json.dumps(asdict(self.settings))]
        # vLLM ties the threads of a CPU worker to single cores, but not the process that started it.
        cores = os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid())
        arguments += ["--cores", ",".join(map(str, sorted(cores))), "--engine-pid", str(os.getpid())]
        arguments += ["--drain-seconds", str(self.settings.shutdown_seconds)]
        fds = [self.ring.fd, life]
        child = Child("the coordinator", MODULE, arguments, fds, self._on_message, self._on_death, apart=True)
        os.close(life)
        for plan in self._plans:
            child.post(plan)
        return child

    def _on_death(self, child: Child, reason: str) -> None:
        """End what it left behind, give its part of the ring back, and start another."""
        with self._lock:
            if self._stopping and not self._captures:
                os.close(self._life)
                return
        if not select.select([self._life], [], [], 0)[0]:
            _end_group(child.group)
        os.read(self._life, 1)  # the end of the file: no writer reads the ring any more
        os.close(self._life)
        with self._lock:
            for extent in self._out.values():
                self.ring.release(extent)
            self._out.clear()
            lost = list(self._captures.values())
            for capture in lost:
                self._end(capture, "failed", [reason])
            if self._stopping:
                return
            self._note(reason)
            if time.monotonic() - self._born < SHORT_LIFE_S:
                self._broken = f"{reason}, soon after its start: nothing is captured until the engine is started again"
                self._note(self._broken)
                return
            self._child = self._spawn()
            for capture in lost:
                self._child.post({"type": "lost", "reason": reason, **capture._names})


def _why(capture: RemoteCapture, errors: list[str]) -> str:
    """Which of REASONS a capture is incomplete for; what the store ran into counts before what it was closed with."""
    if capture.state == "open":
        return "shutdown"  # the engine ended before it closed it
    found = "; ".join(errors).removeprefix(capture.reason)
    return "write_error" if _WRITE_ERROR.search(found) else capture.cause


def _end_group(pid: int) -> None:
    """Kill what is left of a coordinator's process group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all have ended
