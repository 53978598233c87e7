# SPDX-License-Identifier: Apache-2.0
"""The engine's side of writing: it fills the shared ring, and sends short messages to the coordinator process.

client = StoreClient(ring_bytes=1 << 30, writers=4)
layout = client.register(PayloadLayout(arrays))
capture = client.open_capture(layout, "/captures/a.zarr", attrs={"prompt_len": 5})
extent = client.ring.alloc(nbytes)            # copy the payload to client.ring.view(extent)
capture.chunk(extent, first=0, count=128)
capture.close(length, token_ids=ids)
client.shutdown(60)
"""

from __future__ import annotations

import json
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from dmi_connector.layout import PayloadLayout
from dmi_connector.store.format.completeness import LABELS, Loss, losses_from_json, losses_to_json
from dmi_connector.store.write.child_process import Child
from dmi_connector.store.write.finish.commit import append_failed, finished_attrs
from dmi_connector.store.write.messages import ERRORS_KEPT, Message, pack_array
from dmi_connector.store.write.ring import Extent, Ring
from dmi_connector.store.write.settings import WriteSettings

logger = logging.getLogger(__name__)

COORDINATOR = "dmi_connector.store.write.coordinator.coordinator"
_GRACE_S = 5.0
"""Additional time after the limit of a shutdown before processes are killed."""
SHORT_LIFE_S = 10.0
"""A coordinator that dies within this time after its start is not replaced."""


class OpenCapture:
    """One capture that takes rows. No method blocks on I/O.

    state: "open", "closing", and then "complete", "incomplete" or "failed". On ranks above 0, "complete" means that the
    part of this rank is complete. reason: why the capture is not complete, None otherwise.
    """

    def __init__(self, client: StoreClient, number: int, final: str, names: Message) -> None:
        self.path, self.number, self.state = final, number, "open"
        self.reason: str | None = None
        self.names = names
        self._client = client

    def chunk(self, extent: Extent, first: int, count: int) -> None:
        """Write token rows [first, first + count); see `Captures.chunk`. The client releases the extent."""
        self.parcel(extent, [(self, first, count, 0)])

    def parcel(self, extent: Extent, parts: Sequence[tuple[OpenCapture, int, int, int]]) -> None:
        """Write chunks in one extent, also of other captures. parts: (capture, first, count, byte offset) of each."""
        self._client.post_extent(extent, "chunks", parts)

    def close(
        self,
        length: int,
        samples: Mapping[str, int] | None = None,
        token_ids: Sequence[int] | np.ndarray = (),
        attrs: Mapping[str, Any] | None = None,
        losses: Sequence[Loss] = (),
        draft_index: np.ndarray | None = None,
    ) -> None:
        """Finish the capture; see `Captures.close`."""
        message: Message = {"type": "close", "id": self.number, "length": length, "samples": dict(samples or {})}
        message |= {"token_ids": pack_array(np.asarray(token_ids, "<i4")), "attrs": dict(attrs or {})}
        if draft_index is not None:
            message["draft_index"] = pack_array(draft_index.astype("u1"))
        self._client.post_close(self, {**message, "losses": losses_to_json(losses)})


class StoreClient:
    """Owns the ring and the coordinator process. All methods are thread-safe.

    `ring.memory` is the whole ring as one uint8 array, to be registered as pinned memory. If the coordinator dies,
    captures whose store does not exist yet are lost. The loss is logged and recorded in the index. A new coordinator
    serves later captures.
    """

    def __init__(self, ring_bytes: int, writers: int = 1, settings: WriteSettings | None = None) -> None:
        self.settings, self.writers = settings or WriteSettings(), writers
        self.ring = Ring(ring_bytes)
        self._lock = threading.Condition()
        self._layouts: dict[int, Message] = {}  # by number: layout messages, sent again to a new coordinator
        self._registered = 0
        self._captures: dict[int, OpenCapture] = {}
        self._out: dict[int, Extent] = {}  # by number: extents that the coordinator uses
        self._count = 0
        names = (
            "started",
            "complete",
            *(f"incomplete.{name}" for name in LABELS),
            "failed",
            "bytes_raw",
            "bytes_stored",
            "uploaded",
            "upload_failed",
            "bytes_queued",
            "bytes_uploaded",
        )
        self._stats: dict[str, int] = dict.fromkeys(names, 0)
        self._errors: deque[str] = deque(maxlen=ERRORS_KEPT)
        self._ended: deque[tuple[str, bool]] = deque()
        self._unborrowed: deque[tuple[str, list[Loss]]] = deque()
        self._stopping = False
        self._broken: str | None = None
        self._child = self._spawn()

    def register(self, layout: PayloadLayout, attrs: Mapping[str, Any] | None = None) -> int:
        """Send a layout, and root attributes of all its stores. Returns the layout's number, for `open_capture`."""
        with self._lock:
            self._registered += 1
            message = {"type": "layout", "number": self._registered, "layout": layout.to_json()}
            self._layouts[self._registered] = {**message, "attrs": dict(attrs or {})}
            self._child.post(self._layouts[self._registered])
            return self._registered

    def forget(self, layout: int) -> None:
        """Forget a layout once no open capture uses it. No new capture may be opened with it.

        Raises KeyError for an unknown layout.
        """
        with self._lock:
            del self._layouts[layout]
            self._child.post({"type": "forget", "layout": layout})

    def open_capture(
        self,
        layout: int,
        final: str,
        attrs: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        key: str | None = None,
        rank: int = 0,
        ranks: int = 1,
        most_rows: int | None = None,
        borrow: Message | None = None,
    ) -> OpenCapture:
        """Begin a capture; see `Captures.open`. Errors are reported when it is closed."""
        with self._lock:
            self._count += 1
            self._stats["started"] += 1
            names: Message = {"final": final, "request_id": request_id, "key": key, "rank": rank}
            capture = OpenCapture(self, self._count, final, names)
            if self._broken:
                capture.reason, capture.state = self._broken, "failed"
                self._stats["failed"] += 1
                self._ended.append((final, False))
                self._write_failed(capture)
                return capture
            self._captures[self._count] = capture
            message = {"type": "open", "id": self._count, "layout": layout, "attrs": dict(attrs or {}), **names}
            self._child.post({**message, "ranks": ranks, "most_rows": most_rows, "borrow": borrow})
            return capture

    def rows(self, extent: Extent, rows: Sequence[tuple[OpenCapture, str, int, int, int]]) -> None:
        """Write per-sample rows in one extent. rows: (capture, array, sample, position, byte offset) of each."""
        self.post_extent(extent, "rows", rows)

    @property
    def group(self) -> int:
        """Process group of the coordinator and the writers."""
        return self._child.group

    def stats(self) -> dict[str, Any]:
        """Numbers of captures by state, raw and stored bytes, bytes in the ring, and the latest errors."""
        with self._lock:
            states = [c.state for c in self._captures.values()]
            counts = {"open": states.count("open"), "closing": states.count("closing")}
            counts["incomplete"] = sum(self._stats[f"incomplete.{name}"] for name in LABELS)
            return {**counts, **self._stats, "backlog_bytes": self.ring.used, "errors": list(self._errors)}

    def counts(self) -> dict[str, int]:
        """The counters of `stats`. It takes no lock, so it is cheap enough for every step."""
        return dict(self._stats)

    def take_news(self) -> tuple[dict[str, bool], dict[str, list[Loss]]]:
        """The news since the last call: (ended captures, losses of borrowed rows).

        The first maps the path of a store to whether the store has all rows. The second maps the path of a store to the
        losses of rows that it could not borrow.
        """
        ended: dict[str, bool] = {}
        while self._ended:
            path, whole = self._ended.popleft()
            ended[path] = whole
        lost: dict[str, list[Loss]] = {}
        while self._unborrowed:
            path, losses = self._unborrowed.popleft()
            lost.setdefault(path, []).extend(losses)
        return ended, lost

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every closed capture is committed. Returns False if `timeout` seconds were not enough."""
        with self._lock:
            return self._lock.wait_for(lambda: not any(c.state == "closing" for c in self._captures.values()), timeout)

    def shutdown(self, timeout: float | None = None) -> bool:
        """Finish closed captures and end the processes. Returns whether all captures were committed.

        The coordinator finishes within `shutdown_seconds`. It is killed `timeout` + _GRACE_S seconds after the call;
        timeout defaults to `shutdown_seconds`. Unfinished captures stay as partial stores, for a repair.
        """
        timeout = (self.settings.shutdown_seconds if timeout is None else timeout) + _GRACE_S
        with self._lock:
            self._stopping = True
        self._child.finish()
        ended = self._child.join(timeout)
        if not ended:
            self._note(
                f"writing did not end within {timeout:g} s of the shutdown: dmi repair recovers what was written"
            )
        self.ring.close()
        return ended and self._child.status == 0

    # ---- messages out, for OpenCapture ------------------------------------------------------------------------------

    def post_extent(self, extent: Extent, kind: str, parts: Sequence[tuple[Any, ...]]) -> None:
        """Send the parts of an extent. The extent is released when the writers have read it.

        parts: (capture, *fields of the message) of each part.
        """
        with self._lock:
            # Captures in other states were lost with their coordinator.
            known = [[capture.number, *fields] for capture, *fields in parts if capture.state == "open"]
            if not known:
                self.ring.release(extent)
                return
            self._count += 1
            self._out[self._count] = extent
            where = {"extent": self._count, "offset": extent.offset, "nbytes": extent.nbytes}
            self._child.post({"type": kind, "parts": known, **where})

    def post_close(self, capture: OpenCapture, message: Message) -> None:
        """Send the end of a capture."""
        with self._lock:
            if capture.state == "open":
                capture.state = "closing"
                self._child.post(message)

    # ---- answers in, on the reader thread ---------------------------------------------------------------------------

    def _on_message(self, child: Child, m: Message) -> None:
        with self._lock:
            for number in m.get("free", ()):
                self.ring.release(self._out.pop(number))
            if "lost" in m and m["lost"] in self._captures:
                self._unborrowed.append((self._captures[m["lost"]].path, losses_from_json(m["losses"])))
            if "done" in m:
                capture, label = self._captures[m["done"]], m["label"]
                self._end(capture, m["state"], m["reason"], label, m["bytes_raw"], m["bytes_stored"])
            for name, increase in m.get("upload", {}).items():
                self._stats[name] += increase
            if "note" in m:
                self._note(m["note"])

    def _end(
        self,
        capture: OpenCapture,
        state: str,
        reason: str | None,
        label: str | None = None,
        raw: int = 0,
        stored: int = 0,
    ) -> None:
        capture.state, capture.reason = state, reason
        self._captures.pop(capture.number, None)
        outcome = f"incomplete.{label or 'other'}" if state == "incomplete" else state
        for name, value in ((outcome, 1), ("bytes_raw", raw), ("bytes_stored", stored)):
            self._stats[name] += value
        self._ended.append((capture.path, state == "complete"))
        if state != "complete":
            self._note(f"{capture.path} is {state}: {reason}")
        self._lock.notify_all()

    def _write_failed(self, capture: OpenCapture) -> None:
        """Record in the index that a capture failed, because its coordinator is gone. Only rank 0 writes the line."""
        names = capture.names
        if names["rank"]:
            return
        try:
            if finished_attrs(capture.path, names["request_id"], names["key"]) is None:
                append_failed(capture.path, str(capture.reason), names)
        except OSError as error:
            self._note(f"{capture.path} failed, and the index does not record it: {error}")

    def _note(self, text: str) -> None:
        self._errors.append(text)
        logger.error("dmi: %s", text)

    # ---- the process ------------------------------------------------------------------------------------------------

    def _spawn(self) -> Child:
        self._life, life = os.pipe()  # the write end stays open while the coordinator or a writer is alive
        self._born = time.monotonic()
        arguments = ["--ring-fd", str(self.ring.fd), "--ring-bytes", str(self.ring.nbytes), "--life-fd", str(life)]
        arguments += ["--writers", str(self.writers), "--settings", json.dumps(asdict(self.settings))]
        # vLLM binds the threads of a CPU worker to single cores, but not the process that started it.
        cores = os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid())
        arguments += ["--cores", ",".join(map(str, sorted(cores))), "--engine-pid", str(os.getpid())]
        arguments += ["--drain-seconds", str(self.settings.shutdown_seconds)]
        fds = [self.ring.fd, life]
        try:
            child = Child("the coordinator", COORDINATOR, arguments, fds, self._on_message, self._on_death, apart=True)
        except OSError:
            os.close(self._life)
            raise
        finally:
            os.close(life)
        for layout in self._layouts.values():
            child.post(layout)
        return child

    def _stop_capturing(self, reason: str, lost: Iterable[OpenCapture]) -> None:
        """End capture for good, because there is no coordinator. lost: captures that ended with it."""
        self._broken = f"{reason}: nothing is captured until the engine is started again"
        self._note(self._broken)
        for capture in lost:
            self._write_failed(capture)

    def _on_death(self, child: Child, how: str) -> None:
        """Kill the writers of the dead coordinator, reclaim its ring memory, and start a new coordinator."""
        reason = f"{child.name} died ({how})"
        with self._lock:
            if self._stopping and not self._captures:
                os.close(self._life)
                return
        if not select.select([self._life], [], [], 0)[0]:
            child.kill()  # its writers
        os.read(self._life, 1)  # returns when no process reads the ring any more
        os.close(self._life)
        with self._lock:
            for extent in self._out.values():
                self.ring.release(extent)
            self._out.clear()
            lost = list(self._captures.values())
            short = time.monotonic() - self._born < SHORT_LIFE_S
            closing = [] if self._stopping or short else [c for c in lost if c.state == "closing"]
            for capture in lost:
                if capture not in closing:
                    self._end(capture, "failed", reason)
            if self._stopping:
                return
            self._note(reason)
            if short:
                self._stop_capturing(f"{reason}, soon after its start", lost)
                return
            try:
                self._child = self._spawn()
            except OSError as error:  # for example, no more processes or file descriptors are allowed
                for capture in closing:
                    self._end(capture, "failed", reason)
                self._stop_capturing(f"{reason}, and a new one cannot be started: {error}", lost)
                return
            for capture in lost:  # a closed capture may have a store, then its answer says so
                number = capture.number if capture in closing else None
                self._child.post({"type": "lost", "id": number, "reason": reason, **capture.names})
