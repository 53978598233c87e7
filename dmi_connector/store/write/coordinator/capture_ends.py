# SPDX-License-Identifier: Apache-2.0
"""Ends captures: from the last row to the finished store, including when writers die.

capture_record.py defines the states. `begin` ends the state OPEN. When every writer of the capture has answered or
died, `_advance` ends CLOSING. The answer of the committing writer ends COMMITTING (`on_ended`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from dmi_connector.hooks import HOOKS
from dmi_connector.layout import DRAFT_INDEX
from dmi_connector.store.format import schema
from dmi_connector.store.format.completeness import Loss, losses_from_json, losses_to_json, reason
from dmi_connector.store.write.child_process import Child
from dmi_connector.store.write.coordinator.capture_record import CaptureRecord, End, State
from dmi_connector.store.write.coordinator.writer_pool import WriterPool
from dmi_connector.store.write.messages import Message, pack_array
from dmi_connector.store.write.settings import WriteSettings

_ALL_ROWS = (0, 1 << 60)
"""A range that contains all rows of any capture."""


def rank_0_end(
    record: CaptureRecord,
    end: End,
    token_ids: np.ndarray,
    attrs: dict[str, Any],
    draft_index: np.ndarray | None = None,
) -> End:
    """`end` with the root attributes and token arrays, which rank 0 writes."""
    if "prompt_len" not in attrs:
        raise ValueError("attribute prompt_len is missing: give it to open() or close()")
    layout = record.layout
    grid = schema.effective_grid(end.length, layout.chunk_tokens, layout.segment_tokens)
    positions = np.arange(record.start, record.start + end.length)
    arrays = {
        "token_ids": token_ids.astype("<i4"),
        "positions": positions.astype("<i4"),
        "phase": (positions >= int(attrs["prompt_len"])).astype("u1"),
    }
    if draft_index is not None:
        arrays[DRAFT_INDEX] = draft_index.astype("u1")
    root = {"format_version": schema.FORMAT_VERSION, "start": 0, "complete": True, "reason": None, "missing": []}
    root |= attrs
    specs = [*layout.arrays, *layout.elsewhere]
    if layout.elsewhere:
        known = {name: number for number, name in enumerate(HOOKS)}
        specs.sort(key=lambda spec: known.get(spec.name, len(known)))  # probes last, in their order
    root |= {"hooks": schema.hooks_attribute(specs), "num_tokens": end.length, "tp": record.ranks}
    root |= {"created": record.created, "request_id": record.request_id, "key": record.key}
    root |= {"chunk_tokens": grid.chunk, "segment_tokens": grid.segment, "codec": layout.codec}
    packed = {name: pack_array(values) for name, values in arrays.items()}
    return replace(end, attrs=root, arrays=packed)


class CaptureEnds:
    """Moves captures from OPEN to one of ENDS. Not thread-safe: hold the owner's lock when calling."""

    def __init__(self, pool: WriterPool, settings: WriteSettings) -> None:
        self._pool, self._settings = pool, settings

    def begin(self, record: CaptureRecord, message: Message) -> None:
        """OPEN -> CLOSING. message: sent to the writers of the capture."""
        record.state = State.CLOSING
        for assignment in record.assignments:
            if assignment.open:
                assignment.process.post({**message, "id": record.number})
        self._advance(record)

    def on_closed(self, record: CaptureRecord, process: Child, m: Message) -> None:
        """Handle the answer of a writer that has finished its assignment."""
        for assignment in record.assignments:
            if assignment.process is process and assignment.open:
                self._pool.leave(assignment)
                assignment.bytes_raw = m["bytes_raw"]
        record.files.update(m["files"])
        record.losses += losses_from_json(m["losses"])
        record.bytes_raw += m["bytes_raw"]
        record.bytes_stored += m["bytes_stored"]
        self._advance(record)

    def on_ended(self, record: CaptureRecord, process: Child, m: Message) -> None:
        """Handle the answer of the committing writer: a store, the results of a rank, or a removed partial store."""
        losses = (record.end.losses if record.end else []) + record.losses
        if "error" in m:
            record.reason = "; ".join(filter(None, [reason(losses), m["error"]]))
            for other in {assignment.process for assignment in record.assignments} - {process}:
                other.post({"type": "giveup", "id": record.number})
            record.state = State.FAILED
        elif record.end is None:
            record.state = State.ABORTED
        elif record.rank:
            record.reason = reason(losses)
            record.state = State.INCOMPLETE if losses else State.COMPLETE
        else:
            record.reason, record.label = m["reason"], m["label"]
            record.state = State.COMPLETE if m["complete"] else State.INCOMPLETE

    def on_death(self, record: CaptureRecord, process: Child, loss: Loss) -> None:
        """Handle the death of a writer, which may have no part in this capture. loss: says how it died."""
        mine = [assignment for assignment in record.assignments if assignment.process is process and assignment.open]
        arrays = [record.layout.arrays[i] for a in mine for i in (a.leader or a).arrays]
        record.unfinished |= {array.name for array in arrays}
        for assignment in mine:
            self._pool.leave(assignment)
        if mine:
            # On rank 0, the commit rebuilds arrays whose metadata this rank writes. Other arrays have lost rows.
            lost = record.rank or any(array.rank for array in arrays)
            record.losses.append(replace(loss, rows=(_ALL_ROWS,) if lost else ()))
            self._advance(record)
        elif record.committer is process:
            self._recommit(record, loss)

    def _advance(self, record: CaptureRecord) -> None:
        """CLOSING -> COMMITTING, once no assignment is open."""
        if record.state is not State.CLOSING or any(assignment.open for assignment in record.assignments):
            return
        record.state = State.COMMITTING
        process = record.committer = self._first_process(record)
        message: Message = {"id": record.number, "partial": record.partial}
        end = record.end
        if end is None:
            if record.rank == 0:
                process.post(record.index_line("abort", "aborted"))
            process.post({**message, "type": "remove"})
            return
        losses = end.losses + [loss.before(end.length) for loss in record.losses]
        losses = [replace(loss, rank=record.rank) for loss in losses]
        self._forget_unfinished(record)
        message |= {"files": record.files, "bytes_raw": record.bytes_raw, "losses": losses_to_json(losses)}
        if record.rank:
            process.post({**message, "type": "rankdone", "rank": record.rank})
            return
        message |= {"final": record.final, "attrs": end.attrs, "arrays": end.arrays, "samples": end.samples}
        message |= {"ranks": record.ranks, "rank_timeout": self._settings.rank_timeout, "fsync": self._settings.fsync}
        process.post({**message, "type": "commit", "again": record.recommitted})

    def _forget_unfinished(self, record: CaptureRecord) -> None:
        """Drop files of arrays that a dead writer left unfinished: the commit rebuilds these arrays from journals."""
        if record.rank:
            return  # rank 0 writes the metadata, and gets the losses of this rank
        record.files = {path: f for path, f in record.files.items() if path.split("/")[0] not in record.unfinished}
        for assignment in record.assignments:
            if record.unfinished & {record.layout.arrays[i].name for i in assignment.arrays}:
                record.bytes_raw -= assignment.bytes_raw
                assignment.bytes_raw = 0

    def _recommit(self, record: CaptureRecord, loss: Loss) -> None:
        """Commit again with another writer, after the committing writer died. Its finished steps are not repeated."""
        losses = (record.end.losses if record.end else []) + record.losses
        if os.path.exists(record.final) and (record.rank or record.recommitted):
            record.reason = reason(losses)
            record.state = State.INCOMPLETE if losses else State.COMPLETE
        elif record.recommitted:  # the capture itself may have killed both
            record.reason = reason([*losses, loss])
            record.state = State.FAILED
        else:
            record.recommitted, record.state = True, State.CLOSING
            self._advance(record)

    def _first_process(self, record: CaptureRecord) -> Child:
        process = record.assignments[0].process
        return process if self._pool.alive(process) else self._pool.process(record.number)
