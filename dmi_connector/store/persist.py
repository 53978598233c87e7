# SPDX-License-Identifier: Apache-2.0
"""The captures under way, from the first row to the store; runs in the coordinator (coordinator.py).

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
from collections.abc import Callable, Sequence
from typing import Any

from dmi_connector.store import schema
from dmi_connector.store.capture import SPREAD_BYTES, CaptureHandle, CaptureSpec, assign
from dmi_connector.store.commit import merge_ranges, now
from dmi_connector.store.persist_settings import PersistSettings
from dmi_connector.store.pool import WriterPool
from dmi_connector.store.process import Child
from dmi_connector.store.ring import Extent, Ring, RingBase
from dmi_connector.store.wire import Message, pack_array

logger = logging.getLogger(__name__)
OnDone = Callable[[CaptureHandle, str | None], None]


class Persistence:
    """Owns the ring and the writer processes (`pool`). All methods may be called from any thread.

    ring: given when another process allocates; else one of `ring_bytes` is made. pass_fds: descriptors that
    writers keep open for as long as they live. on_done(handle, error) is called from a reader thread once a
    capture is committed (error None), committed as incomplete or failed (error says why).
    """

    def __init__(
        self,
        ring_bytes: int,
        writers: int = 1,
        settings: PersistSettings | None = None,
        on_done: OnDone | None = None,
        ring: RingBase | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        if writers < 1:
            raise ValueError(f"writers {writers} is too few: use 1 or more")
        self.settings = settings or PersistSettings()
        self.ring = ring or Ring(ring_bytes)
        self._on_done = on_done
        self._lock = threading.Condition(threading.RLock())
        self._captures: dict[int, CaptureHandle] = {}
        self._done: deque[CaptureHandle] = deque()
        self._calling = 0  # threads that are in on_done
        self._opened = 0  # captures since the start
        self._open = 0  # of these, captures that more rows may come for
        self._to_come = 0  # bytes that they may yet bring
        self._largest = 0  # bytes of a payload so far: the ring may have less room than it seems, in pieces
        self._stats: dict[str, Any] = dict.fromkeys(
            ("complete", "incomplete", "failed", "aborted", "writers_died", "bytes_raw", "bytes_stored"), 0
        )
        self._errors: deque[str] = deque(maxlen=20)
        self._stopping = self._over = False  # over: no process is started any more
        with self._lock:
            self.pool = WriterPool(writers, self.ring, self.settings, pass_fds, self._on_message, self._on_death)

    def alloc(self, nbytes: int, timeout: float | None = None) -> Extent | None:
        """Ring space for a payload; see `Ring.alloc`."""
        assert isinstance(self.ring, Ring)
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
            self._opened += 1
            number = self._opened
            parts = assign(spec.arrays, self.pool.loads, spread=spec.token_bytes * chunk >= SPREAD_BYTES)
            groups = [self.pool.group(spec.arrays, part, writer) for writer, part in parts.items()]
            handle = CaptureHandle(self, number, spec, groups, now())
            self._captures[number] = handle
            self._open += 1
            self._to_come += handle.to_come
            for group in groups:
                message: Message = {
                    "type": "open",
                    "id": number,
                    "partial": spec.partial,
                    "arrays": [spec.arrays[i].to_json() for i in group.arrays],
                    "bases": [spec.bases[i] for i in group.arrays],
                    "chunk_tokens": chunk,
                    "segment_tokens": segment,
                    "codec": codec,
                }
                if group is groups[0]:
                    message["about"] = handle.about()
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
        """Wait until every closed capture is committed and on_done has returned. Returns False when `timeout`
        seconds were not enough.
        """

        def idle() -> bool:
            return not (self._done or self._calling or any(h.state == "closing" for h in self._captures.values()))

        with self._lock:
            return self._lock.wait_for(idle, timeout)

    def abandon(self, reason: str) -> None:
        """Close every capture that is still open with the rows that came (see `CaptureHandle.abandon`)."""
        with self._lock:
            for handle in [h for h in self._captures.values() if h.state == "open"]:
                handle.abandon(reason)

    def shutdown(self, timeout: float = 60.0) -> bool:
        """Flush, then end the processes, by force at the end of `timeout`. Returns whether all was
        committed.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            self._stopping = True
            self._set_pace()
        flushed = self.flush(timeout)
        with self._lock:
            self._over = True
        ended = self.pool.end(deadline)
        if self.ring.fd >= 0:
            os.close(self.ring.fd)
            self.ring.fd = -1
        return flushed and ended

    # ---- messages out, called by CaptureHandle

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
            ids: Message = {}
            # Rows of prompts come while the GPU works through whole prompts: writing them slows the engine less.
            generated = rows is not None or handle.generated(message["first"] + message["count"])
            if rows is None and handle.spec.header_base is not None:
                payload = self.ring.view(extent)[offset:]
                ids = {"token_ids": pack_array(handle.check_positions(payload, message["first"], message["count"]))}
            first = next((g for g in handle.groups if g.takes_chunks), None)
            for group in handle.groups:
                wants = group.takes_chunks if rows is None else rows in group.takes_rows
                if not wants or not group.open:
                    continue
                kind = "chunk" if rows is None else "rows"
                where = {"type": kind, "id": handle.id, "offset": extent.offset + offset, "generated": generated}
                self.pool.send(group.process, extent, where | message | (ids if group is first else {}))
            self._came(handle, 0 if rows is not None else message["count"] * handle.spec.token_bytes)
            self._largest = max(self._largest, extent.nbytes)
            self._set_pace()
        if not keep:
            self.ring.release(extent)

    def _post_close(self, handle: CaptureHandle, message: Message, final: Message) -> None:
        with self._lock:
            if handle.state != "open":
                raise RuntimeError(f"capture {handle.path} is {handle.state}: it cannot be closed")
            handle.final_message = {**message, **final}
            self._closing(handle)
            for group in handle.groups:
                if group.open:
                    group.process.post({"type": "close", "id": handle.id, **message})
            self._finish_if_closed(handle)

    def _post_abort(self, handle: CaptureHandle) -> None:
        with self._lock:
            if handle.state != "open":
                raise RuntimeError(f"capture {handle.path} is {handle.state}: it cannot be aborted")
            handle.final_message = {"type": "abort"}
            self._closing(handle)
            for group in handle.groups:
                if group.open:
                    group.process.post({"type": "abort", "id": handle.id, "partial": "", "remove": False})
            self._finish_if_closed(handle)

    def _closing(self, handle: CaptureHandle) -> None:
        handle.state = "closing"
        self._open -= 1
        self._came(handle, handle.to_come)
        self._set_pace()

    def _came(self, handle: CaptureHandle, nbytes: int) -> None:
        """So many bytes of a capture need not be waited for any more."""
        nbytes = min(nbytes, handle.to_come)
        handle.to_come -= nbytes
        self._to_come -= nbytes

    def _set_pace(self) -> None:
        self.pool.set_pace(None if self._stopping or not self._open else self._to_come + self._largest)

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
        length, s = handle.final_message["length"], self.settings
        failed = [[first, min(stop, length)] for first, stop in handle.failed if first < length]
        if spec.rank:
            done = {"type": "rankdone", "rank": spec.rank, "errors": handle.errors, "failed": failed}
            process.post({**message, **facts, **done})
            return
        attrs = dict(handle.final_message["attrs"])
        grid = schema.effective_grid(
            length, spec.chunk_tokens or s.chunk_tokens, spec.segment_tokens or s.segment_tokens
        )
        attrs |= {"chunk_tokens": grid.chunk, "segment_tokens": grid.segment, "codec": spec.codec or s.codec}
        attrs["missing"] = merge_ranges(list(attrs["missing"]) + failed)
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
            "samples": handle.final_message["samples"],
        }
        process.post({**message, **facts, **commit, "fsync": s.fsync, "rank_timeout": s.rank_timeout})

    # ---- answers in, called on the reader threads

    def _on_message(self, process: Child, m: Message) -> None:
        with self._lock:
            if "ack" in m:
                self.pool.read(process, m["ack"])
                self._set_pace()
                return
            number = next((m[k] for k in ("closed", "committed", "rankdone", "aborted") if k in m), None)
            handle = None if number is None else self._captures.get(number)
            if handle is None:
                if "error" in m:
                    self._note(f"{process.name}: {m['error']}")
                return
            if "closed" in m or ("aborted" in m and handle.final_process is None):
                self._on_closed(handle, process, m)
            else:
                self._on_final(handle, process, m)
        self._call_back()

    def _on_closed(self, handle: CaptureHandle, process: Child, m: Message) -> None:
        for group in handle.groups:
            if group.process is process and group.open:
                self.pool.leave(group)
        handle.files.update(m.get("files", {}))
        handle.failed += m.get("failed", [])
        handle.errors += [e for e in m.get("errors", []) if e not in handle.errors]
        handle.bytes_raw += m.get("bytes_raw", 0)
        handle.bytes_stored += m.get("bytes_stored", 0)
        self._finish_if_closed(handle)

    def _on_final(self, handle: CaptureHandle, process: Child, m: Message) -> None:
        if "error" in m:
            handle.errors += [m["error"]] * (m["error"] not in handle.errors)
            for other in {group.process for group in handle.groups} - {process}:
                other.post({"type": "giveup", "id": handle.id})
            self._end(handle, "failed")
        elif "aborted" in m:
            self._end(handle, "aborted")
        elif "rankdone" in m:
            self._end(handle, "incomplete" if handle.errors else "complete")
        else:
            handle.errors = [] if m["complete"] else [m["reason"]]  # it joins those known before
            self._end(handle, "complete" if m["complete"] else "incomplete")

    def _on_death(self, process: Child, reason: str) -> None:
        with self._lock:
            unread = self.pool.bury(process)
            if not self._stopping or unread:
                self._stats["writers_died"] += 1
                self._note(reason)
            for handle in [] if self._over else list(self._captures.values()):  # else they wait for a repair
                mine = [g for g in handle.groups if g.process is process and g.open]
                if mine:
                    handle.errors.append(reason)
                    if handle.spec.rank:  # rank 0 writes the metadata: these columns would pass for zeros
                        handle.failed.append([0, 1 << 60])
                    for group in mine:
                        self.pool.leave(group)
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
                self._calling += 1
            if self._on_done is not None:
                error = None if handle.state in ("complete", "aborted") else "; ".join(handle.errors)
                try:
                    self._on_done(handle, error)
                except Exception:  # the caller's fault must not stop the answers of the writers
                    logger.exception("dmi: on_done failed for %s", handle.path)
            with self._lock:
                self._calling -= 1
                self._lock.notify_all()

    def _first_process(self, handle: CaptureHandle) -> Child:
        process = handle.groups[0].process
        return process if self.pool.alive(process) else self.pool.process(handle.id)

    def _note(self, text: str) -> None:
        self._errors.append(text)
        logger.error("dmi: %s", text)
