# SPDX-License-Identifier: Apache-2.0
"""The writer process: `python -m dmi_connector.store.write.writer ...`, started by the coordinator.

It maps the ring of the engine, reads messages on standard input and answers on standard output (see messages.py). It
answers every `chunk` and `rows` message, even after an error, because ring memory is reused only after the answer. At
the end of input it finishes the commits that wait for other ranks, and leaves other partial directories as they are.

messages    layout, forget (a layout); open, chunk, borrow, rows, close, drop (of a capture's arrays); commit, rankdone,
            remove (of a capture); line (for the index), giveup, mark
answers     ready, ack (of a payload), borrowed, closed (a capture's arrays), ended (a capture), marked, note

For each capture, one open message has `about`, the facts that a salvage needs. Chunk messages to that writer have
`token_ids` (journal.py).
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dmi_connector.codecs import CODECS
from dmi_connector.layout import PayloadLayout
from dmi_connector.store.format.completeness import Cause, Loss, losses_from_json, losses_to_json, reason
from dmi_connector.store.format.locks import PartialLock, hold_life_lock
from dmi_connector.store.format.paths import UMASKS
from dmi_connector.store.write.arrays.array_writer import ArrayWriter, metadata_elsewhere, write_loss
from dmi_connector.store.write.arrays.plain import Costs
from dmi_connector.store.write.arrays.shard_writer import FileCache
from dmi_connector.store.write.child_process import allow_open_files
from dmi_connector.store.write.finish.commit import (
    Commit,
    append_index,
    finished_attrs,
    give_up,
    raw_bytes,
    record_end,
    remove_partial,
    write_rank_done,
)
from dmi_connector.store.write.finish.salvage import rebuild
from dmi_connector.store.write.messages import READ_BYTES, Decoder, Message, pack, unpack_array, write_all
from dmi_connector.store.write.pace import Pace
from dmi_connector.store.write.settings import WriteSettings

POLL_S = 0.02
"""Interval at which commits check whether other ranks are done."""
IDLE_S = 1.0
"""Interval at which an idle writer checks that its parent is alive."""
_OPEN_FILES = 4096
"""Maximum number of files that a writer keeps open."""
_MMAP_THRESHOLD_BYTES, _TRIM_THRESHOLD_BYTES = 32 << 20, 256 << 20
"""Block size from which the allocator uses mmap, and bytes of freed memory that it keeps."""

_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module has no name for it
_MAPPED_BYTES = 16 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


class Writer:
    """Handles messages one at a time, in the order of arrival.

    ring: the shared memory, uint8. reply: sends an answer.
    """

    def __init__(self, ring: np.ndarray, reply: Callable[[Message], None], cache: FileCache, pace: Pace) -> None:
        self._ring, self._reply, self._cache, self._pace = ring, reply, cache, pace
        self._layouts: dict[int, PayloadLayout] = {}
        self._writers: dict[int, ArrayWriter] = {}
        self._broken: dict[int, tuple[Loss, bool]] = {}  # not opened: (loss, whether all rows are lost)
        self._locks: dict[int, PartialLock] = {}
        self._closed_locks: list[tuple[int, PartialLock]] = []  # locks of closed captures, until the store is renamed
        self._costs = Costs()
        self._worked = 0.0  # CPU seconds for the last payload, an estimate for the next one
        self.commits: list[Commit] = []

    def handle(self, message: Message) -> None:
        """Act on one message and answer it. Errors go into the answer."""
        getattr(self, "_" + message["type"])(message)

    # ---- a capture's arrays -----------------------------------------------------------------------------------------

    def _layout(self, m: Message) -> None:
        self._layouts[m["number"]] = PayloadLayout.from_json(m["layout"])

    def _forget(self, m: Message) -> None:
        self._layouts.pop(m["number"], None)  # open captures keep a reference to it

    def _open(self, m: Message) -> None:
        try:
            self._locks[m["id"]] = PartialLock(m["partial"])
            layout = self._layouts[m["layout"]]
            arrays = ArrayWriter(m["partial"], layout, m["arrays"], self._cache, m["about"], m["leads"], self._costs)
            self._writers[m["id"]] = arrays
        except Exception as error:
            specs = [self._layouts[m["layout"]].arrays[i] for i in m["arrays"]]
            lost = any(metadata_elsewhere(spec, m["leads"]) for spec in specs)
            self._broken[m["id"]] = write_loss(error), lost

    def _chunk(self, m: Message) -> None:
        rows = m["first"], m["first"] + m["count"]

        def write(arrays: ArrayWriter, data: np.ndarray) -> None:
            ids, checked = unpack_array(m.get("token_ids", "")), m.get("checked", True)
            arrays.chunk(data, m["first"], m["count"], ids, self._pace.behind, checked)

        self._data(m, write, rows)

    def _borrow(self, m: Message) -> None:
        """Copy rows of another store. The answer to `close` repeats the losses."""
        arrays, losses = self._writers.get(m["id"]), []
        if arrays is not None:
            losses = arrays.borrow(m["final"], m["first"], m["count"], unpack_array(m.get("token_ids", "")))
        self._reply({"borrowed": m["id"], "losses": losses_to_json(losses)})

    def _mark(self, m: Message) -> None:
        """Answer that all earlier messages were handled."""
        self._reply({"marked": m["mark"]})

    def _rows(self, m: Message) -> None:
        self._data(
            m, lambda arrays, data: arrays.rows(data, m["name"], m["first"], m["positions"], self._pace.behind), None
        )

    def _data(self, m: Message, write: Callable[[ArrayWriter, np.ndarray], None], rows: tuple[int, int] | None) -> None:
        """Write a payload, then answer so that its memory is freed. rows: the rows that are lost if the write fails."""
        # Rest before the write, not after it. Otherwise all writers would start at once when payloads arrive.
        self._pace.rest(self._worked, m["generated"], m["sent"])
        began = time.process_time()
        arrays = self._writers.get(m["id"])
        if arrays is not None:
            try:
                write(arrays, self._ring[m["offset"] :])
            except Exception as error:
                arrays.failed(error, rows)
        self._worked = time.process_time() - began
        self._reply({"ack": m["seq"]})

    def _close(self, m: Message) -> None:
        arrays = self._take(m["id"])
        if arrays is None:
            not_open = Loss.of(Cause.WRITE_REFUSED, error="the capture is not open")
            loss, lost = self._broken.pop(m["id"], (not_open, True))
            self._closed(m["id"], [replace(loss, rows=((0, m["length"]),)) if lost else loss])
        else:
            files = arrays.close(m["length"], m["samples"])
            self._closed(m["id"], arrays.losses, files, arrays.bytes_raw, arrays.bytes_stored)

    def _drop(self, m: Message) -> None:
        """Discard the arrays of an aborted capture."""
        arrays = self._take(m["id"])
        self._broken.pop(m["id"], None)
        if arrays is not None:
            arrays.release()
        self._closed(m["id"], [])

    def _closed(
        self,
        number: int,
        losses: list[Loss],
        files: dict[str, list[int]] | None = None,
        bytes_raw: int = 0,
        bytes_stored: int = 0,
    ) -> None:
        answer: Message = {"closed": number, "losses": losses_to_json(losses), "files": files or {}}
        self._reply({**answer, "bytes_raw": bytes_raw, "bytes_stored": bytes_stored})

    def _take(self, number: int) -> ArrayWriter | None:
        lock = self._locks.pop(number, None)
        if lock is not None:
            self._closed_locks.append((number, lock))
        return self._writers.pop(number, None)

    # ---- a capture as a whole ---------------------------------------------------------------------------------------

    def _commit(self, m: Message) -> None:
        try:
            if m.get("again") and (attrs := finished_attrs(m["final"], m["attrs"]["request_id"], m["attrs"]["key"])):
                losses = losses_from_json(m["losses"])  # the writer that died had already renamed the store
                self._reply({"ended": m["id"], **record_end(m["final"], attrs, raw_bytes(m["final"], attrs), losses)})
                return
            self._closed_locks.append((m["id"], PartialLock(m["partial"])))
        except OSError as error:
            self._reply({"ended": m["id"], "error": self._fail(m, error)})
            return
        self.commits.append(Commit.start(m))
        self.poll()

    def poll(self) -> None:
        """Run the commits whose ranks are all done, and release the locks of finished stores."""
        for commit in list(self.commits):
            if commit.ready():
                self.commits.remove(commit)
                answer: Message = {"ended": commit.message["id"]}
                try:
                    answer |= commit.run(rebuild)
                except Exception as error:
                    answer["error"] = self._fail(commit.message, error)
                self._reply(answer)
        self._closed_locks = [(n, lock) for n, lock in self._closed_locks if not lock.release_if_renamed()]

    def _fail(self, m: Message, error: Exception) -> str:
        """Record in the index that a commit failed. The rows stay for a repair. Returns the reason."""
        text = f"{type(error).__name__}: {error}"
        self._giveup(m)
        try:
            give_up(m, "; ".join(filter(None, [text, reason(losses_from_json(m["losses"]))])))
        except OSError as second:
            text += f"; then, on cleaning up: {second}"
        return text

    def _giveup(self, m: Message) -> None:
        """Release the locks of a capture that failed, so that a repair can take it."""
        for number, lock in self._closed_locks:
            if number == m["id"] and not lock.release_if_renamed():
                lock.release()
        self._closed_locks = [(number, lock) for number, lock in self._closed_locks if number != m["id"]]

    def _rankdone(self, m: Message) -> None:
        self._end(m, lambda: write_rank_done(m))

    def _remove(self, m: Message) -> None:
        self._end(m, lambda: remove_partial(m["partial"]))

    def _end(self, m: Message, act: Callable[[], None]) -> None:
        answer: Message = {"ended": m["id"]}
        try:
            act()
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        self._reply(answer)

    def _line(self, m: Message) -> None:
        try:
            os.makedirs(m["directory"], exist_ok=True)
            append_index(m["directory"], m["line"])
        except Exception as error:
            self._reply({"note": f"{type(error).__name__}: {error}"})


# ---- the process --------------------------------------------------------------------------------------------------


class RingPages:
    """Fills the page table of this process. Otherwise the first pass over 8 GiB takes two million page faults.

    memory: the ring. left: bytes that are not mapped yet. They are mapped in small pieces, because no signal interrupts
    the system call. Mapping all pages of a large ring may take a minute with many writers.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self.left = memory, len(memory)

    def map_some(self) -> None:
        """Map one more piece."""
        nbytes = min(_MAPPED_BYTES, self.left)
        try:
            self._memory.madvise(_MADV_POPULATE_READ, len(self._memory) - self.left, nbytes)
        except OSError:
            self.left = 0  # an older kernel maps pages when they are first read
            return
        self.left -= nbytes


def serve(writer: Writer, stdin: int, pages: RingPages) -> None:
    """Handle messages until the end of input, or until the parent process is gone. Map pages while idle."""
    decoder, parent = Decoder(), os.getppid()
    while True:
        wait = 0 if pages.left else POLL_S if writer.commits else IDLE_S
        if select.select([stdin], [], [], wait)[0]:
            data = os.read(stdin, READ_BYTES)
            if not data:
                break
            for message in decoder.feed(data):
                writer.handle(message)
        elif os.getppid() != parent:
            break  # a forked child of the engine may keep the pipe open, so the end of input may never come
        elif pages.left:
            pages.map_some()
        writer.poll()
    while writer.commits:  # commits that wait for other ranks
        time.sleep(POLL_S)
        writer.poll()


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="dmi-writer", description="Writes captures; started by the coordinator.")
    parser.add_argument("--ring-fd", type=int, required=True, help="descriptor of the shared memory")
    parser.add_argument("--ring-bytes", type=int, required=True, help="its size")
    parser.add_argument("--pace-fd", type=int, required=True, help="descriptor of the memory that holds the pace")
    parser.add_argument("--file-mode", choices=UMASKS, default="private", help="who may read the stores")
    parser.add_argument("--nice", type=int, default=WriteSettings.nice, help="nice level: the engine goes first")
    parser.add_argument("--idle", action="store_true", help="run in the scheduling class SCHED_IDLE")
    args = parser.parse_args(argv)
    os.umask(UMASKS[args.file_mode])
    # Ctrl-C reaches the whole process group, but payloads in the ring must still be written. The end of the pipe ends
    # the process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hold_life_lock()
    with open("/proc/self/comm", "w") as comm:
        comm.write("dmi-writer")
    for codec in CODECS.values():
        codec.set_up_writer()
    open_files = allow_open_files(_OPEN_FILES)
    # Only answers may be written to the pipe. All other output goes to standard error.
    answers = os.dup(1)
    os.dup2(2, 1)
    os.nice(args.nice)
    if args.idle:
        _only_idle_time()
    _keep_memory()
    memory = mmap.mmap(args.ring_fd, args.ring_bytes)

    def reply(message: Message) -> None:
        write_all(answers, pack(message))

    cache = FileCache(limit=max(16, open_files // 2))
    writer = Writer(np.frombuffer(memory, np.uint8), reply, cache, Pace(args.pace_fd))
    reply({"ready": os.getpid()})
    try:
        serve(writer, 0, RingPages(memory))
    except BrokenPipeError:
        return 0  # the coordinator is gone; partial directories stay for a repair
    return 0


def _only_idle_time() -> None:
    """Enter the scheduling class SCHED_IDLE, in which any other thread that wakes up preempts this process at once.

    With only a nice level, such a thread may have to wait some milliseconds for the end of a time slice.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError as error:  # a sandbox may forbid it; the nice level still applies
        print(f"dmi-writer: the scheduling class SCHED_IDLE cannot be set: {error}", file=sys.stderr, flush=True)


def _keep_memory() -> None:
    """Make the allocator keep freed memory. Otherwise page faults take a quarter of a writer's time."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc only
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


if __name__ == "__main__":
    sys.exit(main())
