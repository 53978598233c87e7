# SPDX-License-Identifier: Apache-2.0
"""The engine's side of persistence: a shared ring, writer processes, and the captures that go through them.

persistence = Persistence(ring_bytes=1 << 30, writers=4)
handle = persistence.open_capture(CaptureSpec(...))
extent = persistence.alloc(nbytes)            # copy the payload to persistence.ring.view(extent)
handle.chunk(extent, first=0, count=128)
handle.close(length, token_ids=ids)
persistence.flush(60)
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dmi_connector.store import schema
from dmi_connector.store.capture import SPREAD_BYTES, CaptureHandle, CaptureSpec, Group, balance
from dmi_connector.store.commit import merge_ranges, now
from dmi_connector.store.process import WriterProcess
from dmi_connector.store.ring import Extent, Ring
from dmi_connector.store.wire import Message, pack_array

logger = logging.getLogger(__name__)
OnDone = Callable[[CaptureHandle, str | None], None]


@dataclass(frozen=True)
class PersistSettings:
    """How captures are written unless their spec says otherwise. `rank_timeout` is in seconds."""

    codec: str = "zstd"
    chunk_tokens: int = 128
    segment_tokens: int = 1024
    fsync: bool = False
    rank_timeout: float = 60.0

    def __post_init__(self) -> None:
        schema.check_chunking(self.chunk_tokens, self.segment_tokens, self.codec)


class Persistence:
    """Owns the ring and the writer processes. All methods may be called from any thread.

    `ring.memory` is the whole ring as one uint8 array, for registering it as pinned memory.
    on_done(handle, error) is called from a reader thread once a capture is committed (error None),
    committed as incomplete or failed (error says why).
    """

    def __init__(
        self,
        ring_bytes: int,
        writers: int = 1,
        settings: PersistSettings | None = None,
        on_done: OnDone | None = None,
    ) -> None:
        if writers < 1:
            raise ValueError(f"writers {writers} is too few: use 1 or more")
        self.settings = settings or PersistSettings()
        self.ring = Ring(ring_bytes)
        self._on_done = on_done
        self._lock = threading.Condition(threading.RLock())
        self._pending: dict[WriterProcess, dict[int, Extent]] = {}
        self._captures: dict[int, CaptureHandle] = {}
        self._done: deque[CaptureHandle] = deque()
        self._numbers = {"capture": 0, "seq": 0, "writer": 0}
        self._stats: dict[str, Any] = dict.fromkeys(
            ("complete", "incomplete", "failed", "aborted", "writers_died", "bytes_raw", "bytes_stored"), 0
        )
        self._errors: deque[str] = deque(maxlen=20)
        self._stopping = False
        self._writers = [self._spawn() for _ in range(writers)]

    def alloc(self, nbytes: int, timeout: float | None = None) -> Extent | None:
        """Ring space for a payload; see `Ring.alloc`."""
        return self.ring.alloc(nbytes, timeout)

    def open_capture(self, spec: CaptureSpec) -> CaptureHandle:
        """Begin a capture. Raises ValueError for settings that cannot be stored."""
        s = self.settings
        chunk, segment = spec.chunk_tokens or s.chunk_tokens, spec.segment_tokens or s.segment_tokens
        codec = spec.codec or s.codec
        schema.check_chunking(chunk, segment, codec)
        assert spec.bases is not None
        with self._lock:
            if self._stopping:
                raise RuntimeError("persistence is shut down: no capture can be opened")
            number = self._next("capture")
            spread = len(self._writers) if spec.token_bytes * chunk >= SPREAD_BYTES else 1
            groups = [self._group(spec, part, number + i) for i, part in enumerate(balance(spec.arrays, spread))]
            handle = CaptureHandle(self, number, spec, groups, now())
            self._captures[number] = handle
            for group in groups:
                message = {
                    "type": "open",
                    "id": number,
                    "partial": spec.partial,
                    "arrays": [spec.arrays[i].to_json() for i in group.arrays],
                    "bases": [spec.bases[i] for i in group.arrays],
                    "chunk_tokens": chunk,
                    "segment_tokens": segment,
                    "codec": codec,
                }
                group.process.post(message)
            if spec.rank == 0:
                self._post_line(handle, "start", "started")
        return handle

    def stats(self) -> dict[str, Any]:
        """Counts of captures by outcome, bytes raw and stored, bytes waiting in the ring, the latest
        errors.
        """
        with self._lock:
            live = [h.state for h in self._captures.values()]
            counts = {"open": live.count("open"), "closing": live.count("closing")}
            return {**counts, **self._stats, "backlog_bytes": self.ring.used, "errors": list(self._errors)}

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every closed capture is committed. Returns False when `timeout` seconds were not
        enough.
        """
        with self._lock:
            return self._lock.wait_for(lambda: not any(h.state == "closing" for h in self._captures.values()), timeout)

    def shutdown(self, timeout: float = 60.0) -> bool:
        """Flush, then end the processes, by force at the end of `timeout`. Returns whether all was
        committed.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            self._stopping = True
        flushed = self.flush(timeout)
        for process in self._writers:
            process.finish()
        ended = [process.join(max(0.5, deadline - time.monotonic())) for process in self._writers]
        if self.ring.fd >= 0:
            os.close(self.ring.fd)
            self.ring.fd = -1
        return flushed and all(ended)

    # ---- messages out, called by CaptureHandle
    # -------------------------------------------------------------------

    def _post_chunk(
        self,
        handle: CaptureHandle,
        extent: Extent,
        message: Message,
        offset: int,
        keep: bool,
        rows: str | None,
    ) -> None:
        with self._lock:
            if handle.state != "open":
                raise RuntimeError(f"capture {handle.path} is {handle.state}: no rows can be added")
            for group in handle.groups:
                wants = group.takes_chunks if rows is None else rows in group.takes_rows
                if not wants or not group.open:
                    continue
                seq = self._next("seq")
                self.ring.hold(extent)
                self._pending[group.process][seq] = extent
                kind = "chunk" if rows is None else "rows"
                where = {"type": kind, "id": handle.id, "seq": seq, "offset": extent.offset + offset}
                group.process.post(where | message)
        if not keep:
            self.ring.release(extent)

    def _post_close(self, handle: CaptureHandle, message: Message, final: Message) -> None:
        with self._lock:
            if handle.state != "open":
                raise RuntimeError(f"capture {handle.path} is {handle.state}: it cannot be closed")
            handle.state, handle.final_message = "closing", {**message, **final}
            for group in handle.groups:
                if group.open:
                    group.process.post({"type": "close", "id": handle.id, **message})
            self._finish_if_closed(handle)

    def _post_abort(self, handle: CaptureHandle) -> None:
        with self._lock:
            if handle.state != "open":
                raise RuntimeError(f"capture {handle.path} is {handle.state}: it cannot be aborted")
            handle.state = "closing"
            handle.final_message = {"type": "abort"}
            for group in handle.groups:
                if group.open:
                    group.process.post({"type": "abort", "id": handle.id, "partial": "", "remove": False})
            self._finish_if_closed(handle)

    def _post_line(self, handle: CaptureHandle, event: str, state: str) -> None:
        spec, process = handle.spec, self._first_process(handle)
        line: Message = {"event": event, "store": os.path.basename(spec.final), "state": state}
        line |= {"key": spec.key, "request_id": spec.request_id, "created": handle.created}
        directory = os.path.dirname(spec.final)
        process.post({"type": "started", "id": handle.id, "directory": directory, "line": line})

    def _finish_if_closed(self, handle: CaptureHandle) -> None:
        """Once no group is open any more: commit on rank 0, say so to rank 0 on the others."""
        if handle.state != "closing" or any(group.open for group in handle.groups) or handle.final_process:
            return
        spec = handle.spec
        process = handle.final_process = self._first_process(handle)
        message: Message = {"id": handle.id, "partial": spec.partial}
        if handle.final_message.get("type") == "abort":
            if spec.rank == 0:
                self._post_line(handle, "abort", "aborted")
            process.post({**message, "type": "abort", "remove": True})
            return
        facts: Message = {"files": handle.files, "bytes_raw": handle.bytes_raw}
        if spec.rank:
            done = {"type": "rankdone", "rank": spec.rank, "errors": handle.errors, "failed": handle.failed}
            process.post({**message, **facts, **done})
            return
        attrs = dict(handle.final_message["attrs"])
        length, s = attrs["num_tokens"], self.settings
        grid = schema.effective_grid(
            length, spec.chunk_tokens or s.chunk_tokens, spec.segment_tokens or s.segment_tokens
        )
        attrs |= {"chunk_tokens": grid.chunk, "segment_tokens": grid.segment, "codec": spec.codec or s.codec}
        attrs["missing"] = merge_ranges(list(attrs["missing"]) + handle.failed)
        if handle.errors:
            reasons = [attrs["reason"], *handle.errors] if attrs["reason"] else handle.errors
            attrs |= {"complete": False, "reason": "; ".join(dict.fromkeys(reasons))}
        arrays = {name: pack_array(a) for name, a in handle.final_message["arrays"].items()}
        commit = {
            "type": "commit",
            "final": spec.final,
            "attrs": attrs,
            "arrays": arrays,
            "ranks": spec.ranks,
        }
        process.post({**message, **facts, **commit, "fsync": s.fsync, "rank_timeout": s.rank_timeout})

    # ---- answers in, called on the reader threads
    # ------------------------------------------------------------------

    def _on_message(self, process: WriterProcess, m: Message) -> None:
        with self._lock:
            if "ack" in m:
                self.ring.release(self._pending[process].pop(m["ack"]))
                return
            number = next((m[k] for k in ("closed", "committed", "rankdone", "aborted") if k in m), None)
            handle = None if number is None else self._captures.get(number)
            if handle is None:
                if "error" in m:
                    self._note(f"writer process {process.number}: {m['error']}")
                return
            if "closed" in m or ("aborted" in m and handle.final_process is None):
                self._on_closed(handle, process, m)
            else:
                self._on_final(handle, m)
        self._call_back()

    def _on_closed(self, handle: CaptureHandle, process: WriterProcess, m: Message) -> None:
        for group in handle.groups:
            if group.process is process:
                group.open = False
        handle.files.update(m.get("files", {}))
        handle.failed += m.get("failed", [])
        handle.errors += [e for e in m.get("errors", []) if e not in handle.errors]
        handle.bytes_raw += m.get("bytes_raw", 0)
        handle.bytes_stored += m.get("bytes_stored", 0)
        self._finish_if_closed(handle)

    def _on_final(self, handle: CaptureHandle, m: Message) -> None:
        if "error" in m:
            handle.errors.append(m["error"])
            self._end(handle, "failed")
        elif "aborted" in m:
            self._end(handle, "aborted")
        elif "rankdone" in m:
            self._end(handle, "incomplete" if handle.errors else "complete")
        else:
            handle.errors = [] if m["complete"] else [m["reason"]]  # it joins those known before
            self._end(handle, "complete" if m["complete"] else "incomplete")

    def _on_death(self, process: WriterProcess, reason: str) -> None:
        with self._lock:
            extents = self._pending.pop(process, {})
            for extent in extents.values():
                self.ring.release(extent)
            if not self._stopping or extents:
                self._stats["writers_died"] += 1
                self._note(reason)
            for handle in list(self._captures.values()):
                mine = [g for g in handle.groups if g.process is process and g.open]
                if mine:
                    handle.errors.append(reason)
                    for group in mine:
                        group.open = False
                    self._finish_if_closed(handle)
                elif handle.final_process is process:
                    self._refinish(handle, reason)
        self._call_back()

    def _refinish(self, handle: CaptureHandle, reason: str) -> None:
        """The process died on the last step: do that again elsewhere, unless the store got its name
        already.
        """
        if os.path.exists(handle.spec.final):
            self._end(handle, "complete" if not handle.errors else "incomplete")
            return
        if handle.retried:  # this capture may be what kills it
            handle.errors.append(reason)
            self._end(handle, "failed")
            return
        handle.retried, handle.final_process = True, None
        self._finish_if_closed(handle)

    def _end(self, handle: CaptureHandle, state: str) -> None:
        handle.state = state
        del self._captures[handle.id]
        self._stats[state] += 1
        self._stats["bytes_raw"] += handle.bytes_raw
        self._stats["bytes_stored"] += handle.bytes_stored
        if state in ("failed", "incomplete"):
            self._note(f"{handle.path} is {state}: {'; '.join(handle.errors)}")
        self._done.append(handle)
        self._lock.notify_all()

    def _call_back(self) -> None:
        """Call on_done outside the lock, so that it may call back into anything."""
        while True:
            with self._lock:
                if not self._done:
                    return
                handle = self._done.popleft()
            if self._on_done is not None:
                error = None if handle.state in ("complete", "aborted") else "; ".join(handle.errors)
                try:
                    self._on_done(handle, error)
                except Exception:  # the caller's fault must not stop the answers of the writers
                    logger.exception("dmi: on_done failed for %s", handle.path)

    # ---- processes
    # ---------------------------------------------------------------------------------------------------

    def _spawn(self) -> WriterProcess:
        process = WriterProcess(self._next("writer"), self.ring.fd, self.ring.nbytes, self._on_message, self._on_death)
        self._pending[process] = {}
        return process

    def _live(self, i: int) -> WriterProcess:
        i %= len(self._writers)
        # `_pending` loses a process the moment its death is known here.
        if self._writers[i] not in self._pending:
            self._writers[i] = self._spawn()
        return self._writers[i]

    def _first_process(self, handle: CaptureHandle) -> WriterProcess:
        process = handle.groups[0].process
        return process if process in self._pending else self._live(handle.id)

    def _group(self, spec: CaptureSpec, part: list[int], writer: int) -> Group:
        arrays = [spec.arrays[i] for i in part]
        rows = frozenset(a.name for a in arrays if a.per_sample)
        return Group(self._live(writer), part, any(not a.per_sample for a in arrays), rows)

    def _next(self, what: str) -> int:
        self._numbers[what] += 1
        return self._numbers[what]

    def _note(self, text: str) -> None:
        self._errors.append(text)
        logger.error("dmi: %s", text)
