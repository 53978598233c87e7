# SPDX-License-Identifier: Apache-2.0
"""The writer process: `python -m dmi_connector.store.writer --ring-fd N --ring-bytes B`.

It maps the ring it shares with the engine, reads messages on standard input and answers on standard
output (see wire.py). Every chunk and rows message is answered, whatever happens: the engine reuses ring
memory on that answer. At the end of input it stops and leaves partial directories as they are.

messages   open, chunk, rows, close, commit, rankdone, started, abort, giveup
answers    ready, ack (of a seq), closed, committed, rankdone, aborted

For a salvage (journal.py) one open message of a capture may carry `about`: request_id, key, created, rank, ranks, all
`arrays` of the rank, and `attrs` for the root attribute, prompt_len and start among them. The chunk messages to one of
its groups may carry `token_ids` (int32, see wire.pack_array).
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable

import numpy as np
from numcodecs import blosc

from dmi_connector.store.commit import Commit, append_index, give_up, remove_partial, write_rank_done
from dmi_connector.store.group import GroupWriter
from dmi_connector.store.journal import Hold
from dmi_connector.store.pace import Pace
from dmi_connector.store.paths import UMASKS
from dmi_connector.store.persist_settings import PersistSettings
from dmi_connector.store.repair import rebuild
from dmi_connector.store.schema import ArraySpec
from dmi_connector.store.shard import FileCache
from dmi_connector.store.wire import Decoder, Message, pack, unpack_array, write_all

POLL_S = 0.02
IDLE_S = 1.0


_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module has no name for it


def _map_pages(memory: mmap.mmap) -> None:
    """Fill this process's page table now: two million page faults for 8 GiB would otherwise slow the first pass."""
    try:
        memory.madvise(_MADV_POPULATE_READ)
    except OSError:
        return  # an older kernel: pages are mapped when first read


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def _keep_memory() -> None:
    """Let the allocator keep what is freed: else each encoded chunk is new pages of the system, a quarter of
    a writer's time (docs/PERFORMANCE.md).
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # other C libraries have their own ways
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 256 << 20)


class Writer:
    """Handles messages one after another, in the order they came."""

    def __init__(self, ring: np.ndarray, reply: Callable[[Message], None], cache: FileCache, pace: Pace) -> None:
        self._ring, self._reply, self._cache, self._pace = ring, reply, cache, pace
        self._groups: dict[int, GroupWriter] = {}
        self._broken: dict[int, str] = {}  # captures whose open failed
        self._holds: dict[int, Hold] = {}
        # Of captures (by number) that are closed here, until they have their final name.
        self._closed: list[tuple[int, Hold]] = []
        self._worked = 0.0  # seconds on the latest payload, as the next one will take
        self.commits: list[Commit] = []

    def handle(self, message: Message) -> None:
        """Act on one message and answer it. Errors go into the answer."""
        getattr(self, "_" + message["type"])(message)

    def _open(self, m: Message) -> None:
        try:
            self._holds[m["id"]] = Hold(m["partial"])
            self._groups[m["id"]] = GroupWriter(
                m["partial"],
                [ArraySpec(**a) for a in m["arrays"]],
                m["bases"],
                m["chunk_tokens"],
                m["segment_tokens"],
                m["codec"],
                self._cache,
                m.get("about"),
            )
        except Exception as error:
            self._broken[m["id"]] = f"{type(error).__name__}: {error}"

    def _data(self, m: Message, write: Callable[[GroupWriter, np.ndarray], None]) -> None:
        answer: Message = {"ack": m["seq"]}
        # Before, not after: the writers do not all begin at once when rows come.
        self._pace.rest(self._worked, m["generated"], m["sent"])
        began = time.process_time()
        group = self._groups.get(m["id"])
        if group is None:
            answer["error"] = self._broken.get(m["id"], "the capture is not open")
        else:
            try:
                write(group, self._ring[m["offset"] :])
            except Exception as error:
                answer["error"] = group.stats.note(error)
        self._worked = time.process_time() - began
        self._reply(answer)

    def _chunk(self, m: Message) -> None:
        def write(group: GroupWriter, data: np.ndarray) -> None:
            group.chunk(data, m["first"], m["count"], unpack_array(m.get("token_ids", "")))

        self._data(m, write)

    def _rows(self, m: Message) -> None:
        self._data(m, lambda group, data: group.rows(data, m["name"], m["first"], m["count"], m["positions"]))

    def _close(self, m: Message) -> None:
        group = self._forget(m["id"])
        answer: Message = {"closed": m["id"], "files": {}, "bytes_raw": 0, "bytes_stored": 0, "failed": []}
        if group is None:
            answer["errors"] = [self._broken.pop(m["id"], "the capture is not open")]
        else:
            answer["files"] = group.close(m["length"], m["samples"])
            stats = group.stats
            answer |= {"bytes_raw": stats.bytes_raw, "bytes_stored": stats.bytes_stored}
            answer |= {"failed": stats.failed, "errors": stats.errors}
        self._reply(answer)

    def _forget(self, number: int) -> GroupWriter | None:
        hold = self._holds.pop(number, None)
        if hold is not None:
            self._closed.append((number, hold))
        return self._groups.pop(number, None)

    def _abort(self, m: Message) -> None:
        group = self._forget(m["id"])
        self._broken.pop(m["id"], None)
        if group is not None:
            group.release()
        self._answer({"aborted": m["id"]}, lambda: remove_partial(m["partial"]) if m["remove"] else None)

    def _rankdone(self, m: Message) -> None:
        self._answer({"rankdone": m["id"]}, lambda: write_rank_done(m))

    def _started(self, m: Message) -> None:
        def write() -> None:
            os.makedirs(m["directory"], exist_ok=True)
            append_index(m["directory"], m["line"])

        self._answer({"started": m["id"]}, write)

    def _commit(self, m: Message) -> None:
        try:
            self._closed.append((m["id"], Hold(m["partial"])))
        except OSError as error:
            self._reply({"committed": m["id"], "error": self._fail(m, error)})
            return
        self.commits.append(Commit.start(m))
        self.poll()

    def poll(self) -> None:
        """Run the commits whose ranks are all there, and let go of directories that are stores by now."""
        for commit in list(self.commits):
            if commit.ready():
                self.commits.remove(commit)
                answer: Message = {"committed": commit.message["id"]}
                try:
                    answer |= commit.run(rebuild)
                except Exception as error:
                    answer["error"] = self._fail(commit.message, error)
                self._reply(answer)
        self._closed = [(number, hold) for number, hold in self._closed if not hold.over()]

    def _fail(self, m: Message, error: Exception) -> str:
        """A capture cannot be committed: say so in the index and leave what there is of it to a repair."""
        text = f"{type(error).__name__}: {error}"
        self._giveup(m)
        try:
            give_up(m, "; ".join(filter(None, [text, m["attrs"].get("reason")])))
        except OSError as second:
            text += f"; then, on cleaning up: {second}"
        return text

    def _giveup(self, m: Message) -> None:
        for number, hold in self._closed:
            if number == m["id"] and not hold.over():
                hold.release()
        self._closed = [(number, hold) for number, hold in self._closed if number != m["id"]]

    def _answer(self, answer: Message, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        self._reply(answer)


def serve(writer: Writer, stdin: int) -> None:
    """Read and handle messages until the end of input, or until the parent process is gone."""
    decoder, parent = Decoder(), os.getppid()
    while True:
        wait = POLL_S if writer.commits else IDLE_S
        if select.select([stdin], [], [], wait)[0]:
            data = os.read(stdin, 1 << 20)
            if not data:
                break
            for message in decoder.feed(data):
                writer.handle(message)
        elif os.getppid() != parent:
            # A forked child of the engine may hold the other end of the pipe open, and then no end of
            # input comes.
            break
        writer.poll()
    while writer.commits:  # captures that are whole but for other ranks
        time.sleep(POLL_S)
        writer.poll()


def _only_idle_time() -> None:
    """A nice level decides who has more of a core, not who is first: a thread that wakes up may wait out a slice of
    some milliseconds. For this class nobody waits.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError as error:  # a sandbox may forbid it; the nice level stays
        print(f"dmi-writer: not in the scheduling class for idle time: {error}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="dmi-writer", description="Writes captures; started by the engine.")
    parser.add_argument("--ring-fd", type=int, required=True, help="descriptor of the shared memory")
    parser.add_argument("--ring-bytes", type=int, required=True, help="its size")
    parser.add_argument("--pace-fd", type=int, required=True, help="descriptor of what says how fast to work")
    parser.add_argument("--file-mode", choices=UMASKS, default="private", help="who may read the stores")
    parser.add_argument("--nice", type=int, default=PersistSettings.nice, help="nice level: the engine goes first")
    parser.add_argument("--idle", action="store_true", help="only run where nothing else wants to")
    args = parser.parse_args(argv)
    os.umask(UMASKS[args.file_mode])
    # Ctrl-C reaches the whole process group; what is in the ring must still be written. The pipe ends the
    # process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open("/proc/self/comm", "w") as comm:
        comm.write("dmi-writer")
    blosc.set_nthreads(1)
    blosc.use_threads = False
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    soft = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # Only answers may reach the pipe: whatever else prints goes to standard error.
    answers = os.dup(1)
    os.dup2(2, 1)
    os.nice(args.nice)
    if args.idle:
        _only_idle_time()
    _keep_memory()
    memory = mmap.mmap(args.ring_fd, args.ring_bytes)
    _map_pages(memory)
    ring = np.frombuffer(memory, np.uint8)

    def reply(message: Message) -> None:
        write_all(answers, pack(message))

    writer = Writer(ring, reply, FileCache(limit=max(16, soft // 2)), Pace(args.pace_fd))
    reply({"ready": os.getpid()})
    try:
        serve(writer, 0)
    except BrokenPipeError:
        return 0  # the engine is gone; partial directories stay for a repair
    return 0


if __name__ == "__main__":
    sys.exit(main())
