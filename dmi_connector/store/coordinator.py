# SPDX-License-Identifier: Apache-2.0
"""The coordinator process: `python -m dmi_connector.store.coordinator ...`, started by client.py.

It stands between the engine and the writer processes, so that nothing of what opens, checks, spreads, closes and
commits captures runs in the engine's interpreter. The engine only fills the shared ring and sends one short message a
chunk. At the end of input (the engine has shut down, or was killed) captures that were closed are finished, and the
others become incomplete stores with every row that came.

messages   plan, open, chunk, rows, close, lost
answers    ready, free (extents of the ring), done (a capture), note, bye
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import select
import signal
import sys
import threading
from typing import Any

import numpy as np

from dmi_connector.store.capture import CaptureHandle, CaptureSpec
from dmi_connector.store.commit import append_index, now
from dmi_connector.store.paths import UMASKS
from dmi_connector.store.persist import Persistence
from dmi_connector.store.persist_settings import PersistSettings
from dmi_connector.store.retention import Keeper
from dmi_connector.store.ring import Extent, RingBase
from dmi_connector.store.schema import ArraySpec
from dmi_connector.store.wire import Decoder, Message, pack, unpack_array, write_all

logger = logging.getLogger(__name__)
IDLE_S = 1.0


class Outbox:
    """Answers to the engine, written by a thread of their own; freed extents travel together."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue: queue.SimpleQueue[Message | int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dmi-answers", daemon=True)
        self._thread.start()

    def put(self, answer: Message | int) -> None:
        """Queue a message, or the number of an extent that is free."""
        self._queue.put(answer)

    def close(self) -> None:
        """Write what is queued, then stop."""
        self._queue.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        running = True
        while running:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get())
            running = None not in batch
            messages = [m for m in batch if isinstance(m, dict)]
            if free := [n for n in batch if isinstance(n, int)]:
                messages.append({"free": free})
            try:
                write_all(self._fd, b"".join(pack(m) for m in messages))
            except BrokenPipeError:
                return  # the engine is gone: the main thread sees it too


class RemoteRing(RingBase):
    """The ring as the coordinator sees it: space is given out by the engine and goes back by a message."""

    def __init__(self, fd: int, nbytes: int, outbox: Outbox) -> None:
        super().__init__(fd, nbytes)
        self._outbox = outbox
        self._out: dict[Extent, int] = {}  # in the order they came
        self._taken = 0  # bytes of all that came

    @property
    def used(self) -> int:
        """Bytes from the oldest extent that is not free to the latest: the engine takes space back in order."""
        with self._changed:
            oldest = next(iter(self._out), None)
            return 0 if oldest is None else self._taken - oldest.end + oldest.nbytes

    def take(self, number: int, offset: int, nbytes: int) -> Extent:
        """The extent that the engine calls `number`, with one user."""
        with self._changed:
            self._taken += nbytes
            extent = Extent(offset, nbytes, self._taken)
            self._out[extent] = number
        return extent

    def _free(self, extent: Extent) -> None:
        self._outbox.put(self._out.pop(extent))


class Coordinator:
    """Handles the engine's messages one after another."""

    def __init__(self, ring: RemoteRing, outbox: Outbox, writers: int, settings: PersistSettings, life_fd: int) -> None:
        self.ring, self.outbox = ring, outbox
        self.plans: dict[int, Message] = {}
        self.handles: dict[int, CaptureHandle] = {}
        self.broken: dict[int, str] = {}  # captures that could not be opened
        self._numbers: dict[CaptureHandle, int] = {}
        self.persistence = Persistence(0, writers, settings, self._on_done, ring, [life_fd])

    def handle(self, message: Message) -> None:
        """Act on one message. What fails fails for its capture only."""
        try:
            getattr(self, "_" + message.pop("type"))(**message)
        except Exception as error:
            logger.exception("dmi: the message %s failed", {k: message[k] for k in ("id", "first") if k in message})
            self.outbox.put({"note": f"{type(error).__name__}: {error}"})

    def _plan(self, plan: int, arrays: list[dict[str, Any]], header_base: int | None) -> None:
        self.plans[plan] = {"arrays": tuple(ArraySpec(**a) for a in arrays), "header_base": header_base}

    def _open(self, id: int, plan: int, **spec: Any) -> None:
        try:
            handle = self.persistence.open_capture(CaptureSpec(**self.plans[plan], **spec))
        except Exception as error:
            self.broken[id] = f"{type(error).__name__}: {error}"
            raise
        self.handles[id], self._numbers[handle] = handle, id

    def _chunk(self, id: int, extent: int, offset: int, nbytes: int, first: int, count: int) -> None:
        taken = self.ring.take(extent, offset, nbytes)
        try:
            if id not in self.broken:
                self.handles[id].chunk(taken, first, count, keep=True)
        finally:
            self.ring.release(taken)

    def _rows(self, extent: int, offset: int, nbytes: int, rows: list[list[Any]]) -> None:
        taken = self.ring.take(extent, offset, nbytes)
        try:
            for id, name, first, position, at in rows:
                if id not in self.broken:
                    self.handles[id].rows(name, taken, first, 1, [position], at, keep=True)
        finally:
            self.ring.release(taken)

    def _close(self, id: int, length: int, samples: dict[str, int], token_ids: str, attrs: dict[str, Any]) -> None:
        reason = self.broken.pop(id, None)
        if reason is not None:
            self.outbox.put({"done": id, "state": "failed", "errors": [reason], "bytes_raw": 0, "bytes_stored": 0})
            return
        ids, handle = np.frombuffer(unpack_array(token_ids), "<i4"), self.handles.pop(id)
        try:
            handle.close(length, samples, token_ids=ids, attrs=attrs)
        except ValueError as error:  # no capture stays open for ever
            if not handle.abandon(str(error)):
                handle.errors.append(str(error))
                handle.abort()
            raise

    def _lost(self, final: str, request_id: str | None, key: str | None, reason: str) -> None:
        """A capture of a coordinator that died: say so in the index."""
        line = {"event": "finish", "store": os.path.basename(final), "state": "failed", "reason": reason}
        append_index(os.path.dirname(final), {**line, "key": key, "request_id": request_id, "finished": now()})

    def _on_done(self, handle: CaptureHandle, error: str | None) -> None:
        facts = {"bytes_raw": handle.bytes_raw, "bytes_stored": handle.bytes_stored}
        number = self._numbers.pop(handle)
        state = "failed" if handle.state == "aborted" else handle.state  # it could not even be closed
        self.outbox.put({"done": number, "state": state, "errors": list(handle.errors), **facts})


def serve(coordinator: Coordinator, stdin: int, engine: int) -> None:
    """Handle messages until the end of input, or until nothing comes and the engine's process is gone."""
    decoder = Decoder()
    while True:
        if select.select([stdin], [], [], IDLE_S)[0]:
            data = os.read(stdin, 1 << 20)
            if not data:
                return
            for message in decoder.feed(data):
                coordinator.handle(message)
        elif not os.path.exists(f"/proc/{engine}"):
            return  # a forked child of the engine may hold the other end of the pipe open


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process. Its last answer is 0 when every capture that was closed is committed, else 1."""
    parser = argparse.ArgumentParser(prog="dmi-coordinator", description="Started by the engine.")
    parser.add_argument("--ring-fd", type=int, required=True, help="descriptor of the shared memory")
    parser.add_argument("--ring-bytes", type=int, required=True, help="its size")
    parser.add_argument("--life-fd", type=int, required=True, help="descriptor that stays open while a process lives")
    parser.add_argument("--writers", type=int, required=True, help="number of writer processes")
    parser.add_argument("--settings", type=json.loads, required=True, help="PersistSettings as JSON")
    parser.add_argument("--drain-seconds", type=float, required=True, help="time for what is under way at the end")
    parser.add_argument("--engine-pid", type=int, required=True, help="the process it serves")
    parser.add_argument("--cores", required=True, help="where it may run: numbers separated by commas")
    args = parser.parse_args(argv)
    # It leaves the engine's family: who kills the engine with all its descendants would kill what writes its stores.
    if os.fork():
        os._exit(0)
    os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
    # A terminal's or supervisor's signal to all processes must not cut writing short: the end of input does.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with open("/proc/self/comm", "w") as comm:
        comm.write("dmi-coordinator"[:15])
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever prints goes to standard error
    outbox = Outbox(answers)
    ring = RemoteRing(args.ring_fd, args.ring_bytes, outbox)
    settings = PersistSettings(**args.settings)
    os.umask(UMASKS[settings.file_mode])
    coordinator = Coordinator(ring, outbox, args.writers, settings, args.life_fd)
    if settings.keep:
        Keeper(**settings.keep).start()
    outbox.put({"ready": os.getpid()})
    serve(coordinator, 0, args.engine_pid)
    coordinator.persistence.abandon("the engine ended before the request did")
    done = coordinator.persistence.shutdown(args.drain_seconds)
    outbox.put({"bye": 0 if done else 1})
    outbox.close()
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
