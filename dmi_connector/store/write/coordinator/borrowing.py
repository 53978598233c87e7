# SPDX-License-Identifier: Apache-2.0
"""Copies the rows that a capture borrows from its source: the store of an earlier capture of the same engine.

The tokens of these rows were in the engine's prefix cache, so the engine did not compute the rows again. If the source
is finished, writers copy the rows at once. If the source is still being written, writers copy the rows when the first
chunk of the capture arrives, or when the capture or the source ends. An engine sends rows in order, so the source has
all borrowed rows by then. Before the copy, the writers of the source confirm that its rows are in files
(`mark`). A source is finished only after its rows are copied, because a reader may remove a finished store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dmi_connector.layout import TOKEN_ARRAYS, PayloadLayout
from dmi_connector.store.format.completeness import Loss, losses_from_json, merge_ranges, missing
from dmi_connector.store.format.locks import hold_source
from dmi_connector.store.read.arrays.shard_reader import decode_plain
from dmi_connector.store.read.files.store_files import LocalFiles
from dmi_connector.store.read.metadata import attrs_of
from dmi_connector.store.write.arrays.array_writer import not_borrowed
from dmi_connector.store.write.child_process import Child
from dmi_connector.store.write.coordinator.capture_ends import CaptureEnds
from dmi_connector.store.write.coordinator.capture_record import CaptureRecord, State
from dmi_connector.store.write.coordinator.writer_pool import Assignment, WriterPool
from dmi_connector.store.write.messages import Message, pack_array, unpack_array

Takers = Callable[[CaptureRecord, int], list[Assignment]]
"""Function (capture, segment) -> the assignments that write the token arrays of the segment."""
OnLost = Callable[[CaptureRecord, list[Loss]], None]


def check_borrow(borrow: Message | None, layout: PayloadLayout) -> None:
    """Check the rows that a capture of this layout borrows. Raises ValueError if they are not whole chunks.

    borrow: `final` and `request_id` of the source, the number of borrowed `rows` from its start, and their `token_ids`
    (int32, packed). None if the capture borrows no rows.
    """
    if borrow is not None:
        rows, ids, chunk = borrow["rows"], len(unpack_array(borrow["token_ids"])) // 4, layout.chunk_tokens
        if rows < 1 or rows % chunk or ids != rows:
            raise ValueError(f"{rows} rows to borrow with {ids} token ids, in chunks of {chunk}")


@dataclass(eq=False)
class Borrowed:
    """The rows [0, rows) of the capture `record`, which it borrows from the store `final`.

    request_id: the request of that store. token_ids: int32 [rows]. source: the capture of that store while it is
    running, else None. fd: file descriptor of the store's directory, open until the rows are copied. error: why there
    is none. due: whether all these rows have arrived at the source. marks: writers of the source that have not
    confirmed the rows yet; None before they are asked. posted: whether the writers of `record` were asked to copy, or
    nothing can be copied. copying: writers of `record` that have not answered yet, one entry per message.
    """

    record: CaptureRecord
    final: str
    request_id: str | None
    rows: int
    token_ids: np.ndarray
    source: CaptureRecord | None
    fd: int | None = None
    error: str = "it is gone"
    due: bool = False
    marks: set[Child] | None = None
    posted: bool = False
    copying: list[Child] = field(default_factory=list)

    @property
    def copied(self) -> bool:
        """Whether the source is no longer needed."""
        return self.posted and not self.copying

    def hold(self) -> None:
        """Open and lock the directory of the source, if it exists."""
        if self.fd is None:
            try:
                self.fd = hold_source(self.final)
            except FileNotFoundError:
                self.fd = None  # if not created yet, `_post` tries again; if removed, the rows are lost
            except OSError as error:
                self.fd, self.error = None, str(error)

    def release(self) -> None:
        """Close the directory of the source."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class Borrowing:
    """All captures that borrow rows. Not thread-safe: `Captures` calls the methods with its lock held.

    takers: see `Takers`. ends: moves captures from OPEN to their end. on_lost: called with a capture and its losses as
    soon as borrowed rows are known to be missing.
    """

    def __init__(self, pool: WriterPool, takers: Takers, ends: CaptureEnds, on_lost: OnLost) -> None:
        self._pool, self._takers, self._ends, self._on_lost = pool, takers, ends, on_lost
        self._open: dict[int, Borrowed] = {}  # by number of the capture that borrows
        self._ending: dict[int, tuple[CaptureRecord, Message]] = {}  # by number: captures whose end waits for copies

    def begin(self, record: CaptureRecord, others: Iterable[CaptureRecord], borrow: Message) -> None:
        """Handle a new capture that borrows rows. borrow: see `check_borrow`. others: the running captures."""
        ids, rows = np.frombuffer(unpack_array(borrow["token_ids"]), "<i4"), int(borrow["rows"])
        record.check.borrowed(ids)
        final = os.path.abspath(borrow["final"])
        source = next(
            (other for other in others if other.final == final and other.rank == record.rank and other is not record),
            None,
        )
        known = Borrowed(record, final, borrow["request_id"], rows, ids, source)
        self._follow(known)
        self._open[record.number] = known
        known.hold()
        if source is None:
            known.due = True
            self._advance()

    def _follow(self, known: Borrowed) -> None:
        """If the source has not copied its own borrowed rows yet, borrow from the source's source instead.

        Otherwise each new capture could wait for the copy of the capture before it, without end.
        """
        while known.source is not None and (its := self._open.get(known.source.number)) is not None:
            if its.copied or its.source is None or its.rows < known.rows:
                return
            known.final, known.request_id, known.source = its.final, its.request_id, its.source

    def due(self, record: CaptureRecord) -> None:
        """Handle a chunk of a capture. The first one shows that the source has the rows that the capture borrows."""
        known = self._open.get(record.number)
        if known is not None and not known.due:
            known.due = True
            self._advance()

    def end(self, record: CaptureRecord, message: Message) -> None:
        """Handle a capture that gets no more rows of its own.

        message: sent to the writers of the capture once two conditions hold. They were asked to copy its borrowed rows
        (unless `message` drops the capture), and other captures have copied the rows that they borrow from it.
        """
        record.state = State.CLOSING
        self._ending[record.number] = record, message
        for known in self._open.values():
            if known.record is record or known.source is record:
                known.due = True
        self._advance()

    def _may_end(self, record: CaptureRecord, message: Message) -> bool:
        mine = self._open.get(record.number)
        if mine is not None and not mine.posted and message["type"] != "drop":
            return False
        return all(known.copied for known in self._open.values() if known.source is record)

    def pending(self, record: CaptureRecord) -> bool:
        """Whether writers must still be asked to copy borrowed rows of a capture. This may need its layout."""
        known = self._open.get(record.number)
        return known is not None and not known.posted

    def ended(self, record: CaptureRecord) -> None:
        """Handle a capture that has ended. Captures that borrow from it lock its store, which may now be removed."""
        for known in self._open.values():
            if known.source is record:
                known.hold()
                known.source, known.marks = None, None
        self._ending.pop(record.number, None)
        if (mine := self._open.pop(record.number, None)) is not None:
            mine.release()
        self._advance()

    def on_message(self, process: Child, m: Message) -> None:
        """Handle an answer of a writer: it has written all rows sent before a mark, or has copied borrowed rows.

        m: the answer. "marked" or "borrowed" is the number of the capture that borrows.
        """
        known = self._open.get(m["marked"] if "marked" in m else m["borrowed"])
        if known is None:
            return
        if "marked" in m:
            if known.marks is not None:
                known.marks.discard(process)
            self._advance()
            return
        if losses := losses_from_json(m["losses"]):
            self._on_lost(known.record, losses)
        if process in known.copying:
            known.copying.remove(process)
        if not known.copying:
            known.release()
        self._advance()

    def on_death(self, process: Child) -> None:
        """Handle the death of a writer, so that no copy waits for it."""
        for known in self._open.values():
            if known.marks is not None:
                known.marks.discard(process)
            known.copying = [other for other in known.copying if other is not process]
        self._advance()

    def _advance(self) -> None:
        """Start each copy whose rows are in files of the source, and end captures whose copies are done."""
        moved = True
        while moved:
            moved = False
            for known in list(self._open.values()):
                if known.due and not known.posted and self._written(known):
                    self._post(known)
                    moved = True
        for record, message in list(self._ending.values()):
            if self._may_end(record, message):
                del self._ending[record.number]
                if record.state is State.CLOSING:  # else its writers have died
                    self._ends.begin(record, message)

    def _written(self, known: Borrowed) -> bool:
        """Whether the source's live writers have confirmed that its rows are in files. The first call asks them."""
        if known.source is None:
            return True
        of_source = self._open.get(known.source.number)
        if of_source is not None and not of_source.posted:
            return False
        if known.marks is None:
            known.marks = {a.process for a in known.source.assignments if self._pool.alive(a.process)}
            for process in known.marks:
                process.post({"type": "mark", "mark": known.record.number})
        return not known.marks

    def _post(self, known: Borrowed) -> None:
        """Ask the writers of a capture to copy its borrowed rows. Rows that the source lacks are recorded as losses."""
        record = known.record
        known.posted = True
        if record.state not in (State.OPEN, State.CLOSING):
            known.release()  # its writers died, so it is committed without these rows
            return
        known.hold()
        losses = self._lacks(known)
        record.losses += losses
        if losses:
            self._on_lost(record, losses)
        if missing(losses) != [[0, known.rows]]:
            segment = record.layout.segment_tokens
            for first in range(0, known.rows, segment):
                self._copy(known, first, min(segment, known.rows - first))
        if not known.copying:
            known.release()

    def _copy(self, known: Borrowed, first: int, count: int) -> None:
        record = known.record
        message: Message = {"type": "borrow", "id": record.number, "final": known.final, "first": first, "count": count}
        more: Message = {"token_ids": pack_array(known.token_ids[first : first + count])}  # for the first journal
        for assignment in self._takers(record, first // record.layout.segment_tokens):
            if assignment.open:
                known.copying.append(assignment.process)
                assignment.process.post(message | more)
            more = {}

    def _lacks(self, known: Borrowed) -> list[Loss]:
        """The losses of borrowed rows: all rows if the source is unusable, else rows that it lacks or found wrong."""

        def lost(error: str, rows: Any = ((0, known.rows),)) -> list[Loss]:
            return [not_borrowed(known.final, error, rows)]

        if known.fd is None:
            return lost(known.error)
        if known.source is not None:
            wrong = known.source.check.wrong_rows()
            ids, came = known.source.check.rows()
        else:
            files = LocalFiles(f"/proc/self/fd/{known.fd}")
            try:
                attrs = attrs_of(files)
            except (OSError, ValueError):  # the writers report what they cannot copy
                return []
            if attrs.get("request_id") != known.request_id:
                return lost("another store has its name")
            wrong = list(attrs["missing"])
            try:
                ids = decode_plain(files, "token_ids", TOKEN_ARRAYS["token_ids"])
            except (OSError, ValueError) as error:
                return lost(str(error))
            came = np.ones(len(ids), bool)
        there = min(len(ids), known.rows)
        if (came[:there] & (ids[:there] != known.token_ids[:there])).any():
            return lost("it has other tokens")
        wrong += [[int(row), int(row) + 1] for row in np.flatnonzero(~came[:there])] + [[there, known.rows]]
        rows = [[start, min(stop, known.rows)] for start, stop in merge_ranges(wrong) if start < known.rows]
        return lost("it lacks these rows", rows) if rows else []
