# SPDX-License-Identifier: Apache-2.0
"""The running captures of the coordinator process, from their first row to their store.

capture_record.py defines their states. `close` and `abort` end the state OPEN. capture_ends.py handles later states.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dmi_connector.layout import AXES, PayloadLayout
from dmi_connector.store.format import schema
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.write.arrays.row_check import RowCheck
from dmi_connector.store.write.child_process import Child
from dmi_connector.store.write.coordinator.borrowing import Borrowing, OnLost, check_borrow
from dmi_connector.store.write.coordinator.capture_ends import CaptureEnds, rank_0_end
from dmi_connector.store.write.coordinator.capture_record import ENDS, CaptureRecord, End, State
from dmi_connector.store.write.coordinator.writer_pool import Assignment, WriterPool
from dmi_connector.store.write.finish.commit import now
from dmi_connector.store.write.messages import ERRORS_KEPT, Message, pack_array
from dmi_connector.store.write.ring import Extent, RingBase
from dmi_connector.store.write.settings import WriteSettings

logger = logging.getLogger(__name__)

_UNKNOWN_BYTES = 1 << 60
"""Stands for an unknown number of bytes. It is larger than any ring."""
OnDone = Callable[[CaptureRecord], None]


class Captures:
    """Handles captures from their first row to the store. All methods are thread-safe.

    ring: the ring that holds the payloads. pass_fds: file descriptors that writers keep open until they exit. on_done:
    called once per capture, when it has ended. on_lost: called when borrowed rows are missing. Both callbacks run with
    the lock held, so they must not block.
    """

    def __init__(
        self,
        ring: RingBase,
        writers: int,
        settings: WriteSettings,
        on_done: OnDone,
        pass_fds: Sequence[int] = (),
        on_lost: OnLost = lambda _record, _losses: None,
    ) -> None:
        self.ring, self.settings = ring, settings
        self._on_done = on_done
        self._lock = threading.Condition(threading.RLock())
        self._records: dict[int, CaptureRecord] = {}
        self._unwanted: set[int] = set()  # layouts to forget once no open capture uses them
        self._opened = 0
        self._open = 0  # captures that may still get rows
        self._to_come = 0  # payload bytes that may still arrive for open captures
        self._largest = 0  # bytes of the largest payload, which needs contiguous free bytes in the ring
        self._counts = dict.fromkeys((*ENDS, "writers_died"), 0)
        self._errors: deque[str] = deque(maxlen=ERRORS_KEPT)
        self._stopping = False
        self._over = False  # the processes are ending: a dead one is not replaced
        with self._lock:
            self.pool = WriterPool(writers, ring, settings, pass_fds, self._on_message, self._on_death)
            self._ends = CaptureEnds(self.pool, settings)
            self._borrowing = Borrowing(self.pool, self._takers, self._ends, on_lost)

    # ---- requests of the engine -----------------------------------------------------------------------------------

    def register(self, layout: PayloadLayout) -> int:
        """Send a layout to the writers. Returns its number, for `open`."""
        with self._lock:
            return self.pool.register(layout)

    def forget(self, layout: int) -> None:
        """Forget a layout once no open capture uses it. No new capture may be opened with it.

        Raises KeyError for a number that is not known.
        """
        with self._lock:
            self.pool.layout(layout)
            self._unwanted.add(layout)
            self._forget_unused()

    def open(
        self,
        layout: int,
        final: str,
        attrs: Mapping[str, Any],
        request_id: str | None = None,
        key: str | None = None,
        rank: int = 0,
        ranks: int = 1,
        most_rows: int | None = None,
        borrow: Message | None = None,
        client_number: int = 0,
    ) -> CaptureRecord:
        """Begin a capture.

        final: path of the store, NAME.zarr. attrs: root attributes (docs/FORMAT.md, section 5);
        `prompt_len` is required on rank 0, `start` defaults to 0. rank, ranks: rank and number of ranks. most_rows:
        maximum number of rows, None if unknown. borrow: see `check_borrow`. Raises ValueError for invalid arguments,
        KeyError for an unknown layout, and RuntimeError after `shutdown`.
        """
        final = os.path.abspath(final)
        if not final.endswith(".zarr"):
            raise ValueError(f"store path {final!r} must end in .zarr")
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} is outside {ranks} ranks")
        with self._lock:
            if self._stopping:
                raise RuntimeError("the coordinator is shut down: no capture can be opened")
            payload = self.pool.layout(layout)
            check_borrow(borrow, payload)
            # How many payload bytes come for samples is unknown: all requests of a step share one payload.
            known = most_rows is not None and not payload.has_samples
            to_come = (most_rows or 0) * payload.token_bytes if known else _UNKNOWN_BYTES
            assignments, start = self.pool.assign_writers(payload), int(attrs.get("start", 0))
            self._opened += 1
            record = CaptureRecord(
                self._opened,
                final,
                payload,
                layout,
                attrs,
                request_id,
                key,
                rank,
                ranks,
                now(),
                to_come,
                assignments,
                RowCheck(start),
                client_number,
            )
            self._records[record.number] = record
            self._open += 1
            self._to_come += to_come
            record.takers[0] = [assignment for assignment in assignments if assignment.tokens]
            for assignment in assignments:
                self._post_open(record, assignment)
            if rank == 0:
                assignments[0].process.post(record.start_line(self.settings.upload))
            if borrow is not None:
                self._borrowing.begin(record, self._records.values(), borrow)
                self._came(record, int(borrow["rows"]) * payload.token_bytes)
        return record

    def chunk(self, record: CaptureRecord, extent: Extent, first: int, count: int, offset: int = 0) -> None:
        """Write token rows [first, first + count), counted from the start of the store.

        first: a multiple of chunk_tokens. count: chunk_tokens, or fewer in the last chunk. The payload (see
        `PayloadLayout`) begins at byte `offset` of `extent`. The caller releases `extent`.
        """
        with self._lock:
            self._expect_open(record)
            self._borrowing.due(record)
            layout = record.layout
            headers = self.ring.view(extent)[offset + layout.header_base * count :]
            ids = pack_array(record.check.positions(headers, first, count))
            if axes := layout.find(AXES):
                spec, base = axes
                values = self.ring.view(extent)[offset + base * count :][: spec.token_bytes * count]
                record.check.axes(values.view("<i4").reshape(count, -1), first)
            generated = record.start + first + count > record.prompt_len
            message = {"type": "chunk", "id": record.number, "offset": extent.offset + offset, "first": first}
            message |= {"count": count, "generated": generated, "checked": record.check.is_right(first)}
            more: Message = {"token_ids": ids}  # for the first writer's journal
            for assignment in self._takers(record, first // layout.segment_tokens):
                if assignment.open:
                    self.pool.send(assignment.process, extent, message | more)
                more = {}
            self._came(record, count * layout.token_bytes)
            self._largest = max(self._largest, extent.nbytes)
            self._set_pace()

    def rows(
        self, record: CaptureRecord, name: str, extent: Extent, first: int, positions: Sequence[int], offset: int = 0
    ) -> None:
        """Write samples [first, first + len(positions)) of the per-sample array `name`.

        The samples begin at byte `offset` of `extent`, in C order: [samples, local width]. positions: the token
        position of each sample.
        """
        with self._lock:
            self._expect_open(record)
            record.sampled[name] = max(record.sampled.get(name, 0), first + len(positions))
            message = {"type": "rows", "id": record.number, "offset": extent.offset + offset, "generated": True}
            message |= {"name": name, "first": first, "positions": [int(p) for p in positions]}
            for assignment in record.assignments:
                if name in assignment.samples and assignment.open:
                    self.pool.send(assignment.process, extent, message)
            self._largest = max(self._largest, extent.nbytes)
            self._set_pace()

    def close(
        self,
        record: CaptureRecord,
        length: int,
        samples: Mapping[str, int] | None = None,
        token_ids: Sequence[int] | np.ndarray = (),
        attrs: Mapping[str, Any] | None = None,
        losses: Sequence[Loss] = (),
        draft_index: np.ndarray | None = None,
    ) -> None:
        """End a capture, and finish its store.

        length: number of token rows. samples: number of rows of each per-sample array. token_ids: int [length]. A rank
        above 0 may pass none; the token ids of its rows are then not compared. attrs: more root attributes. losses:
        losses that the caller knows. draft_index: uint8 [length], for a request with speculative decoding.

        Raises ValueError if lengths differ or an attribute is missing; the capture then stays open. Raises RuntimeError
        if it is not open.
        """
        with self._lock:
            self._expect_open(record)
            has_rows = any(not array.per_sample for array in record.layout.arrays)
            if absent := record.check.absent(int(length), losses) if has_rows else []:
                losses = [*losses, Loss.of(Cause.NEVER_CAME, absent)]
            ids = np.asarray(token_ids)
            if len(ids) != length and (len(ids) or not record.rank):
                raise ValueError(f"{len(ids)} token_ids were given for length {length}")
            if draft_index is not None and len(draft_index) != length:
                raise ValueError(f"{len(draft_index)} values of draft_index were given for length {length}")
            root = {**record.attrs, **(attrs or {})}
            wrong = [loss.before(int(length)) for loss in record.check.losses(ids, schema.media_positions(root))]
            end = End(int(length), dict(samples or {}), {}, {}, [*losses, *wrong])
            if record.rank == 0:
                end = rank_0_end(record, end, ids, root, draft_index)
            record.end = end
            self._finish(record, {"type": "close", "length": end.length, "samples": end.samples})

    def abort(self, record: CaptureRecord) -> None:
        """End a capture without a store: its partial store is removed."""
        with self._lock:
            self._expect_open(record)
            self._finish(record, {"type": "drop"})

    def abandon(self, record: CaptureRecord, loss: Loss) -> bool:
        """Close a capture with the rows that have arrived, because the engine will not close it.

        With several ranks it does nothing and returns False, because the rows of the other ranks are not known.
        """
        with self._lock:
            if record.ranks > 1:
                return False
            token_ids, came = record.check.rows()
            length = len(token_ids)
            rows = [[int(i), int(i) + 1] for i in np.flatnonzero(~came)]
            if record.start + length < record.prompt_len:
                rows.append([length, record.prompt_len - record.start])
            samples = {a.name: record.sampled.get(a.name, 0) for a in record.layout.arrays if a.per_sample}
            loss = replace(loss, rows=tuple((start, stop) for start, stop in rows))
            self.close(record, length, samples, token_ids, {"finish_reason": None}, [loss])
            return True

    def abandon_all(self, loss: Loss) -> None:
        """Abandon every capture that is still open."""
        with self._lock:
            for record in [r for r in self._records.values() if r.state is State.OPEN]:
                self.abandon(record, loss)

    # ---- all captures ---------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Numbers of captures by state and of dead writers, bytes in the ring, and the latest errors."""
        with self._lock:
            live = [record.state for record in self._records.values()]
            states = {str(state): live.count(state) for state in (State.OPEN, State.CLOSING, State.COMMITTING)}
            counts = {str(name): count for name, count in self._counts.items()}
            return {**states, **counts, "backlog_bytes": self.ring.used, "errors": list(self._errors)}

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every closed capture has ended. Returns False if `timeout` seconds were not enough."""
        with self._lock:
            return self._lock.wait_for(lambda: all(r.state is State.OPEN for r in self._records.values()), timeout)

    def shutdown(self, timeout: float = 60.0) -> bool:
        """Flush, and end the processes. Kill them after `timeout` seconds. Returns whether all was committed."""
        deadline = time.monotonic() + timeout
        with self._lock:
            self._stopping = True
            self._set_pace()
        flushed = self.flush(timeout)
        with self._lock:
            self._over = True
        return self.pool.end(deadline) and flushed

    # ---- from state to state, with the lock held --------------------------------------------------------------------

    def _expect_open(self, record: CaptureRecord) -> None:
        if record.state is not State.OPEN:
            raise RuntimeError(f"capture {record.final} is {record.state}: it takes no more rows and cannot be closed")

    def _post_open(self, record: CaptureRecord, assignment: Assignment) -> None:
        message = {"type": "open", "id": record.number, "partial": record.partial, "layout": record.layout_number}
        message |= {"arrays": assignment.arrays, "leads": assignment.leader is None}
        about = record.about() if assignment is record.assignments[0] else None
        assignment.process.post({**message, "about": about})

    def _takers(self, record: CaptureRecord, segment: int) -> list[Assignment]:
        """The assignments that write the token arrays of a segment."""
        if segment not in record.takers:
            record.takers[segment] = []
            for leader in record.takers[0]:
                taker = self.pool.next_segment(record.layout, leader, record.assignments)
                if taker not in record.assignments:
                    record.assignments.append(taker)
                    self._post_open(record, taker)
                record.takers[segment].append(taker)
        return record.takers[segment]

    def _finish(self, record: CaptureRecord, message: Message) -> None:
        """OPEN -> CLOSING. message: sent to the writers of the capture."""
        self._open -= 1
        self._came(record, record.to_come)
        self._set_pace()
        self._borrowing.end(record, message)
        self._forget_unused()

    def _forget_unused(self) -> None:
        """Forget unwanted layouts that no open capture uses. No later message to a writer names such a layout."""
        if self._unwanted:
            busy = [r for r in self._records.values() if r.state is State.OPEN or self._borrowing.pending(r)]
            used = {r.layout_number for r in busy}
            unused, self._unwanted = self._unwanted - used, self._unwanted & used
            for number in unused:
                self.pool.forget(number)

    def _end(self, record: CaptureRecord) -> None:
        """Forget a capture whose state is one of ENDS, and call `on_done`."""
        del self._records[record.number]
        self._borrowing.ended(record)
        self._counts[record.state] += 1
        if record.state in (State.FAILED, State.INCOMPLETE):
            self._note(f"{record.final} is {record.state}: {record.reason}")
        self._on_done(record)
        self._lock.notify_all()

    # ---- messages of the writers, on the threads that read them -----------------------------------------------------

    def _on_message(self, process: Child, m: Message) -> None:
        with self._lock:
            if "ack" in m:
                self.pool.read(process, m["ack"])
                self._set_pace()
            elif "borrowed" in m or "marked" in m:
                self._borrowing.on_message(process, m)
            elif "closed" in m and (record := self._records.get(m["closed"])):  # else the capture has failed
                self._ends.on_closed(record, process, m)
            elif "ended" in m and (record := self._records.get(m["ended"])):
                self._ends.on_ended(record, process, m)
                if "index_error" in m:
                    self._note(
                        f"the end of {record.final} is not in the index ({m['index_error']}): dmi repair adds it"
                    )
                self._end(record)
            if "note" in m:
                self._note(f"{process.name}: {m['note']}")

    def _on_death(self, process: Child, how: str) -> None:
        with self._lock:
            loss = Loss.of(Cause.PROCESS_DIED, process=process.name, how=how)
            unread = self.pool.bury(process)
            if not self._stopping or unread:
                self._counts["writers_died"] += 1
                self._note(loss.words)
            for record in [] if self._over else list(self._records.values()):  # dmi repair finishes what is left
                self._ends.on_death(record, process, loss)
                if record.state in ENDS:
                    self._end(record)
            self._borrowing.on_death(process)

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _came(self, record: CaptureRecord, nbytes: int) -> None:
        """Subtract bytes that have arrived, or will not arrive, from the payload bytes to come."""
        nbytes = min(nbytes, record.to_come)
        record.to_come -= nbytes
        self._to_come -= nbytes

    def _set_pace(self) -> None:
        self.pool.set_pace(None if self._stopping or not self._open else self._to_come + self._largest)

    def _note(self, text: str) -> None:
        self._errors.append(text)
        logger.error("dmi: %s", text)
