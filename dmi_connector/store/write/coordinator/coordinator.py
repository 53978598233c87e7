# SPDX-License-Identifier: Apache-2.0
"""The coordinator process: `python -m dmi_connector.store.write.coordinator.coordinator ...`, started by client.py.

It runs between the engine and the writer processes. So opening, checking, assigning, closing and committing captures
take no time in the engine's interpreter. The engine fills the shared ring, and sends one short message per extent of
the ring. When the engine has exited, even if it was killed, the coordinator finishes closed captures. With one rank,
open captures become incomplete stores of the rows that have arrived. With several ranks, they are left unfinished, and
`dmi repair` may recover their stores.

messages    layout, open, chunks, rows, close, forget (a layout), lost (a capture of an earlier coordinator)
answers     ready, free (extents of the ring), lost (rows that a capture should borrow), done (a capture), upload
            (counts), note (an error), bye
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dmi_connector.layout import PayloadLayout
from dmi_connector.store.format.completeness import OWN_ENDS, Cause, Loss, losses_from_json, losses_to_json
from dmi_connector.store.format.locks import hold_life_lock
from dmi_connector.store.format.paths import UMASKS
from dmi_connector.store.format.schema import listed_bytes
from dmi_connector.store.write.child_process import allow_open_files
from dmi_connector.store.write.coordinator.capture_record import CaptureRecord, State
from dmi_connector.store.write.coordinator.captures import Captures
from dmi_connector.store.write.finish.commit import append_failed, append_finish, finished_attrs, raw_bytes
from dmi_connector.store.write.finish.retention import Keeper
from dmi_connector.store.write.finish.uploads import Uploads
from dmi_connector.store.write.messages import READ_BYTES, Decoder, Message, pack, unpack_array, write_all
from dmi_connector.store.write.ring import Extent, RingBase
from dmi_connector.store.write.settings import UploadSettings, WriteSettings

logger = logging.getLogger(__name__)

_LAST_ANSWERS_S = 10.0
"""Maximum seconds to write the last answers before the process exits."""
_ENDS_WAIT_S = 0.05
"""Maximum seconds that the answer "done" waits for other answers."""
IDLE_S = 1.0
"""Seconds between two checks of an idle coordinator that the engine is alive."""


class Outbox:
    """A queue of answers to the engine, and the thread that writes them. fd: where the answers are written.

    Each write wakes a thread in the engine's process, so answers are written together. The answer that a capture has
    ended ("done") waits up to _ENDS_WAIT_S for others. The numbers of freed extents are sent in one message.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue: queue.SimpleQueue[Message | int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dmi-answers", daemon=True)
        self._thread.start()

    def put(self, answer: Message | int) -> None:
        """Queue an answer, or the number of a freed extent."""
        self._queue.put(answer)

    def close(self) -> None:
        """Write the queued answers, and stop the thread. Waits up to _LAST_ANSWERS_S."""
        self._queue.put(None)
        self._thread.join(_LAST_ANSWERS_S)

    def _run(self) -> None:
        running = True
        while running:
            batch = [self._queue.get()]
            until = time.monotonic() + _ENDS_WAIT_S
            while not self._queue.empty() or (all(map(_is_end, batch)) and time.monotonic() < until):
                with contextlib.suppress(queue.Empty):
                    batch.append(self._queue.get(timeout=max(0.0, until - time.monotonic())))
            running = None not in batch
            messages = [m for m in batch if isinstance(m, dict)]
            if free := [n for n in batch if isinstance(n, int)]:
                messages.append({"free": free})
            try:
                write_all(self._fd, b"".join(pack(m) for m in messages))
            except BrokenPipeError:
                return  # the engine has exited. `serve` detects that too


def _is_end(answer: Message | int | None) -> bool:
    """Whether an answer says that a capture has ended."""
    return isinstance(answer, dict) and "done" in answer


class RemoteRing(RingBase):
    """The coordinator's view of the ring. The engine allocates extents, and reclaims those that an answer frees."""

    def __init__(self, fd: int, nbytes: int, outbox: Outbox) -> None:
        super().__init__(fd, nbytes)
        self._outbox = outbox
        self._out: dict[Extent, tuple[int, int]] = {}  # in the order of arrival: (its number, `_taken` before it)
        self._taken = 0  # bytes of all extents and gaps at the end of the ring, so far
        self._end = 0  # where the latest extent ends

    @property
    def used(self) -> int:
        with self._changed:
            oldest = next(iter(self._out.values()), None)
            return 0 if oldest is None else self._taken - oldest[1]

    def take(self, number: int, offset: int, nbytes: int) -> Extent:
        """Add the extent that the engine calls `number`. It has one user, the caller."""
        extent = Extent(offset, nbytes)
        with self._changed:
            # The engine continues at the beginning of the ring: the extent did not fit into the gap at the end, or the
            # ring was empty. The gap may end before `nbytes`, because the engine may not use the whole ring yet
            # (`Ring.allow`).
            if offset < self._end:
                self._taken += min(self.nbytes - self._end, extent.size)
            self._out[extent] = number, self._taken
            self._taken += extent.size
            self._end = extent.end
        return extent

    def _free(self, extent: Extent) -> None:
        self._outbox.put(self._out.pop(extent)[0])


class Coordinator:
    """Handles the engine's messages one at a time. They name captures and layouts by numbers that the engine assigns.

    writers: number of writer processes. life_fd: a descriptor that writers keep open until they exit.
    """

    def __init__(self, ring: RemoteRing, outbox: Outbox, writers: int, settings: WriteSettings, life_fd: int) -> None:
        self.ring, self.outbox = ring, outbox
        self.records: dict[int, CaptureRecord] = {}
        self.broken: dict[int, str] = {}  # captures that could not be opened -> why
        self._layouts: dict[int, tuple[int, dict[str, Any]]] = {}  # (number in `captures`, attributes of stores)
        self.uploads: Uploads | None = None
        if settings.upload:
            self.uploads = Uploads(UploadSettings(**settings.upload), settings.file_mode, self._note, self._count)
        self.captures = Captures(ring, writers, settings, self._on_done, [life_fd], self._on_lost)

    def handle(self, message: Message) -> None:
        """Handle one message. An error affects only its capture. It is logged and sent to the engine as a note."""
        try:
            getattr(self, "_" + message.pop("type"))(**message)
        except Exception as error:
            self._report(error, message.get("id"))

    def _note(self, text: str) -> None:
        self.outbox.put({"note": text})

    def _count(self, increase: dict[str, int]) -> None:
        self.outbox.put({"upload": increase})

    def _report(self, error: Exception, id: int | None) -> None:
        logger.exception("dmi: handling a message of capture %s failed", id)
        self.outbox.put({"note": f"{type(error).__name__}: {error}"})

    def _layout(self, number: int, layout: dict[str, Any], attrs: dict[str, Any]) -> None:
        self._layouts[number] = self.captures.register(PayloadLayout.from_json(layout)), attrs

    def _forget(self, layout: int) -> None:
        self.captures.forget(self._layouts.pop(layout)[0])

    def _open(self, id: int, layout: int, attrs: dict[str, Any], **capture: Any) -> None:
        try:
            if layout not in self._layouts:
                raise ValueError(f"layout {layout} is not known: it was forgotten, or never registered")
            number, of_all = self._layouts[layout]
            record = self.captures.open(number, attrs={**of_all, **attrs}, client_number=id, **capture)
        except Exception as error:
            self.broken[id] = f"{type(error).__name__}: {error}"
            raise
        self.records[id] = record

    def _chunks(self, **message: Any) -> None:
        def chunk(record: CaptureRecord, extent: Extent, first: int, count: int, at: int) -> None:
            self.captures.chunk(record, extent, first, count, at)

        self._parts(chunk, **message)

    def _rows(self, **message: Any) -> None:
        def rows(record: CaptureRecord, extent: Extent, name: str, first: int, position: int, at: int) -> None:
            self.captures.rows(record, name, extent, first, [position], at)

        self._parts(rows, **message)

    def _parts(self, take: Callable[..., None], extent: int, offset: int, nbytes: int, parts: list[list[Any]]) -> None:
        """Call `take` for each part of an extent, with the capture, the extent and the fields of the part."""
        taken = self.ring.take(extent, offset, nbytes)
        try:
            for id, *fields in parts:
                if id in self.broken:
                    continue
                try:
                    take(self.records[id], taken, *fields)
                except Exception as error:  # an error affects only its capture
                    self._report(error, id)
        finally:
            self.ring.release(taken)

    def _close(self, id: int, length: int, samples: dict[str, int], token_ids: str, **rest: Any) -> None:
        reason = self.broken.pop(id, None)
        if reason is not None:
            self._done(id, State.FAILED, reason)
            return
        ids, record = np.frombuffer(unpack_array(token_ids), "<i4"), self.records.pop(id)
        attrs, losses = rest["attrs"], losses_from_json(rest["losses"])
        drafts = np.frombuffer(unpack_array(rest["draft_index"]), "u1") if "draft_index" in rest else None
        try:
            self.captures.close(record, length, samples, ids, attrs, losses, drafts)
        except ValueError as error:  # the capture must not stay open forever
            if not self.captures.abandon(record, Loss.of(Cause.CLOSE_REFUSED, error=str(error))):
                record.reason = str(error)
                self.captures.abort(record)
            raise

    def _lost(
        self, id: int | None, final: str, request_id: str | None, key: str | None, rank: int, reason: str
    ) -> None:
        """Record in the index the end of a capture that was lost with an earlier coordinator.

        final: path of the store. The store may exist, because the coordinator may have died before it told the engine.
        reason: why the capture has no store, if there is none. id: number of the capture; None if the engine does not
        wait for an answer.
        """
        state, raw, stored = State.FAILED, 0, 0
        try:
            attrs = finished_attrs(final, request_id, key)
            if attrs is None:
                append_failed(final, reason, {"key": key, "request_id": request_id})
                return
            state, reason = State.COMPLETE if attrs["complete"] else State.INCOMPLETE, attrs["reason"]
            if not rank:
                raw, stored = raw_bytes(final, attrs), listed_bytes(attrs)
                append_finish(final, attrs, raw)
                if self.uploads is not None:
                    self.uploads.add(final, stored, attrs["complete"] and attrs.get("finish_reason") in OWN_ENDS)
        finally:
            if id is not None:
                self._done(id, state, reason, None, raw, stored)

    def _on_lost(self, record: CaptureRecord, losses: list[Loss]) -> None:
        self.outbox.put({"lost": record.client_number, "losses": losses_to_json(losses)})

    def _on_done(self, record: CaptureRecord) -> None:
        # Only a capture that could not be closed is aborted here.
        state = State.FAILED if record.state is State.ABORTED else record.state
        if self.uploads is not None and not record.rank and state in (State.COMPLETE, State.INCOMPLETE):
            ended = record.end is not None and record.end.attrs.get("finish_reason") in OWN_ENDS
            self.uploads.add(record.final, record.bytes_stored * record.ranks, ended and state is State.COMPLETE)
        self._done(record.client_number, state, record.reason, record.label, record.bytes_raw, record.bytes_stored)

    def _done(
        self, number: int, state: State, reason: str | None, label: str | None = None, raw: int = 0, stored: int = 0
    ) -> None:
        answer: Message = {"done": number, "state": state, "reason": reason, "label": label}
        self.outbox.put({**answer, "bytes_raw": raw, "bytes_stored": stored})


def serve(coordinator: Coordinator, stdin: int, engine: int) -> None:
    """Handle messages until the end of input, or until the engine's process has exited.

    stdin: file descriptor of the input. engine: process id of the engine.
    """
    decoder = Decoder()
    while True:
        if select.select([stdin], [], [], IDLE_S)[0]:
            data = os.read(stdin, READ_BYTES)
            if not data:
                return
            for message in decoder.feed(data):
                if coordinator.uploads is not None and message["type"] in ("chunks", "rows"):
                    coordinator.uploads.wait_for_room(lambda: _needs_room(stdin, engine))
                coordinator.handle(message)
        elif not os.path.exists(f"/proc/{engine}"):
            return  # without an end of input: a forked child of the engine may hold the pipe open


def _needs_room(stdin: int, engine: int) -> bool:
    """Whether the engine may send more rows. Once it has exited, rows are written without waiting for uploads."""
    ended = select.poll()
    ended.register(stdin, select.POLLHUP)
    return not ended.poll(0) and os.path.exists(f"/proc/{engine}")


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process. Its last answer is {"bye": status}, and it returns the same status.

    The status is 0 if all closed captures have ended and all writers have exited in time, otherwise 1.
    """
    parser = argparse.ArgumentParser(prog="dmi-coordinator", description="Started by the engine.")
    parser.add_argument("--ring-fd", type=int, required=True, help="file descriptor of the shared memory")
    parser.add_argument("--ring-bytes", type=int, required=True, help="size of the shared memory in bytes")
    parser.add_argument(
        "--life-fd", type=int, required=True, help="file descriptor that this process and its writers keep open"
    )
    parser.add_argument("--writers", type=int, required=True, help="number of writer processes")
    parser.add_argument("--settings", type=json.loads, required=True, help="WriteSettings as JSON")
    parser.add_argument(
        "--drain-seconds", type=float, required=True, help="seconds to finish captures after the engine has exited"
    )
    parser.add_argument("--engine-pid", type=int, required=True, help="process id of the engine")
    parser.add_argument("--cores", required=True, help="CPU cores of its processes, separated by commas")
    args = parser.parse_args(argv)
    # Detach from the engine's process tree: killing the engine and its descendants must not kill the writers.
    if os.fork():
        os._exit(0)
    os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
    # Signals of a terminal or supervisor must not interrupt writing. The process exits at the end of input.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    hold_life_lock()
    allow_open_files()  # each capture that borrows rows holds the directory of its source
    with open("/proc/self/comm", "w") as comm:
        comm.write("dmi-coordinator"[:15])  # the kernel keeps 15 characters
    answers = os.dup(1)
    os.dup2(2, 1)  # other output goes to standard error
    outbox = Outbox(answers)
    ring = RemoteRing(args.ring_fd, args.ring_bytes, outbox)
    settings = WriteSettings(**args.settings)
    os.umask(UMASKS[settings.file_mode])
    coordinator = Coordinator(ring, outbox, args.writers, settings, args.life_fd)
    if settings.keep:
        Keeper(**settings.keep).start()
    outbox.put({"ready": os.getpid()})
    serve(coordinator, 0, args.engine_pid)
    coordinator.captures.abandon_all(Loss.of(Cause.ENGINE_ENDED))
    deadline = time.monotonic() + args.drain_seconds
    done = coordinator.captures.shutdown(args.drain_seconds)
    if coordinator.uploads is not None:
        coordinator.uploads.shutdown(max(0.0, deadline - time.monotonic()))
    outbox.put({"bye": 0 if done else 1})
    outbox.close()
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
