# SPDX-License-Identifier: Apache-2.0
"""Faults during 20 captures. All requests are answered, and stores list their missing rows.

`make test` kills a writer, a coordinator, an engine and all processes, and drops rows. `make soak` has all faults. In
`make test`, tests/unit/store/test_failures.py has faults of the disk.

Tests may run alone or in any order. After a test that kills the engine, the next test starts another one.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dmi_connector import Capture, CaptureFailed, capture_args, find_captures, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.cli.main import main
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.finish.repair import repair
from tests.engine import faults
from tests.engine.faults import (
    MANY,
    PATIENCE,
    TOKENS,
    Disk,
    Live,
    check_rows,
    finished,
    kill,
    many,
    processes,
    stopped,
    until,
)
from tests.engine.harness import CHUNK, SEGMENT, Run, engine

HOOKS = "hidden-states,q,mlp_post,logits"
BUFFER = 3 << 20
"""Bytes of the host buffer: about 20 chunks, so that stopped writers soon block the engine."""


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    disk = Disk(tmp_path_factory.mktemp("faults"), megabytes=400)
    yield disk
    disk.unmount()


class Engines:
    """One engine at a time. All engines use one directory. After a test that kills the engine, the next test starts
    another.
    """

    def __init__(self, disk: Disk, model: Path, oracle: Oracle) -> None:
        self._disk, self._model, self._oracle = disk, model, oracle
        self._started, self._options, self._stack = 0, {}, ExitStack()
        self._live: Live | None = None

    def get(self, **options: object) -> Live:
        """The running engine if it has these options, otherwise a new one. A new engine must work in the directory as
        it is.
        """
        if self._live is None or not processes("EngineCore") or not options.items() <= self._options.items():
            self.stop()
            self._live = self._stack.enter_context(self._start(**options))
            self._options, self._started = {"policy": "block", **options}, self._started + 1
            self._live.works(f"start-{self._started}")
        return self._live

    @contextmanager
    def _start(self, tensor_parallel_size: int = 1, **options: object) -> Iterator[Live]:
        """An engine in a process of its own, with a worker process of its own."""
        sizes = {"chunk_tokens": CHUNK, "segment_tokens": SEGMENT, "host_buffer_bytes": BUFFER}
        args: dict[str, Any] = capture_args(HOOKS, self._disk.path, **sizes, **options)
        args |= {"enforce_eager": True, "max_num_seqs": 32, "tensor_parallel_size": tensor_parallel_size}
        with engine(self._model, in_process=False, fork=True, distributed_executor_backend="mp", **args) as llm:
            yield Live(llm, Run(self._disk.path), self._oracle)

    def stop(self) -> None:
        """Stop the running engine, if there is one."""
        self._stack.close()
        self._live = None


@pytest.fixture(scope="module")
def engines(disk: Disk, tiny_model: Callable[..., Path], oracle: Callable[..., Oracle]) -> Iterator[Engines]:
    found = Engines(disk, tiny_model("qwen3"), oracle("qwen3"))
    yield found
    found.stop()


@pytest.fixture
def live(engines: Engines) -> Live:
    """An engine with policy "block", which loses only what a fault destroys."""
    return engines.get(policy="block")


def removed(path: Path) -> bool:
    """Remove a file or directory. Returns False if a writer created a file in it meanwhile."""
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def engine_ended() -> None:
    """Wait until all processes have ended, at most a minute."""
    until(lambda: not any(map(processes, ("EngineCore", "Worker", "dmi-"))), "processes are left")


def closed_by_the_coordinator(folder: Path, tag: str, oracle: Oracle) -> None:
    """Check that the stores of requests whose engine was killed hold all rows that arrived, and give the reason."""
    found = finished(folder, tag)
    for info in found:
        assert info.state == "incomplete" and "the engine ended before the request did" in str(info.reason)
        capture = open_capture(info.store, timeout=0, allow_incomplete=True)
        rows = check_rows(capture, oracle)
        assert rows % CHUNK == 0, f"{rows} rows: all whole chunks that were sent"
    assert sum(info.num_tokens or 0 for info in found) > MANY * CHUNK / 2


def at_rest() -> bool:
    """Whether the coordinator and the writers used no CPU time for three seconds, so that all work is done."""

    def used() -> list[float]:
        times = [process.cpu_times() for kind in ("dmi-coordinator", "dmi-writer") for process in processes(kind)]
        return [spent.user + spent.system for spent in times]

    before = used()
    for _ in range(3):
        time.sleep(1)
        if used() != before:
            return False
    return True


def test_a_killed_writer_loses_only_unwritten_chunks(live: Live) -> None:
    asks = many("writer")
    future = live.begin(asks)
    [writer] = processes("dmi-writer")
    kill([writer])
    live.answered(asks, future)
    states = [info.state for info in finished(live.run.store_dir, "writer")]
    assert "incomplete" in states and set(states) <= {"complete", "incomplete"}
    kept = 0
    for name in asks:
        capture = open_capture(live.run.store(name), timeout=0, allow_incomplete=True)
        kept += check_rows(capture, live.oracle, live.run.tokens(name))
        assert capture.complete or "died (signal 9)" in str(capture.reason)
    assert kept > CHUNK, "chunks that were written before are kept"
    assert [p.pid for p in processes("dmi-writer")] != [writer.pid]
    live.works("after-writer")


def test_a_killed_coordinator_leaves_captures_to_a_repair(live: Live) -> None:
    [coordinator] = processes("dmi-coordinator")
    until(lambda: time.time() - coordinator.create_time() > 11, "it is young")
    asks = many("coordinator")
    future = live.begin(asks)
    kill([coordinator])
    live.answered(asks, future)
    live.works("after-coordinator")
    found = finished(live.run.store_dir, "coordinator")
    failed = {info.store for info in found if info.state == "failed"}
    assert failed and all("the coordinator died (killed)" in str(i.reason) for i in found if i.state == "failed")
    with pytest.raises(CaptureFailed, match=r"the coordinator died .*dmi repair recovers"):
        open_capture(min(failed), timeout=60)
    outcomes = repair(live.run.store_dir, remove_empty=True)
    assert {o.state for o in outcomes} <= {"salvaged", "removed", "published"} and not live.partials("")
    rows = 0
    for outcome in outcomes:
        if outcome.store:
            capture = open_capture(outcome.store, timeout=0, allow_incomplete=True)
            rows += check_rows(capture, live.oracle, live.run.tokens(capture.attrs["key"]))
    assert rows > MANY * CHUNK / 2


@pytest.mark.soak
def test_a_slow_disk_loses_nothing(live: Live) -> None:
    asks = many("slow")
    future = live.begin(asks)
    [worker] = processes("Worker")
    before = faults.memory(worker.pid, "RssAnon", "RssShmem")
    with stopped(processes("dmi-writer")):
        time.sleep(3)
        assert not future.done(), "the engine waits for room"
        assert faults.memory(worker.pid, "RssAnon", "RssShmem") - before < BUFFER + (16 << 20)
    live.answered(asks, future)
    assert [info.state for info in finished(live.run.store_dir, "slow")] == ["complete"] * MANY
    for name in list(asks)[::7]:
        check_rows(open_capture(live.run.store(name)), live.oracle, live.run.tokens(name))


@pytest.mark.soak
def test_a_full_disk_fails_captures_but_no_request(live: Live, disk: Disk) -> None:
    asks = many("full")
    future = live.begin(asks)
    with disk.full(processes("dmi-writer")):
        live.answered(asks, future)
        more = many("none", 40, tokens=8)
        live.ask(more)
        live.ask(many("last", 1, tokens=8))  # all earlier stores have been handled by then
        until(lambda: len(list(disk.path.glob("none-*.partial"))) < 5, "directories without a row pile up")
    live.works("after-full")
    for outcome in repair(disk.path, remove_empty=True):
        assert outcome.state in ("salvaged", "removed"), outcome
    for name in asks:
        [info] = find_captures(disk.path, key=name)
        if info.state == "incomplete":
            capture = open_capture(info.store, timeout=0, allow_incomplete=True)
            assert capture.reason
            check_rows(capture, live.oracle, live.run.tokens(name))
    assert "complete" not in [info.state for info in find_captures(disk.path, key="none-39")]


@pytest.mark.soak
def test_writers_without_descriptors_fail_captures_but_no_request(live: Live, disk: Disk) -> None:
    writers = processes("dmi-writer")
    limits = [process.rlimit(psutil.RLIMIT_NOFILE) for process in writers]
    for process, (_, hard) in zip(writers, limits, strict=True):
        process.rlimit(psutil.RLIMIT_NOFILE, (faults.descriptors(process.pid) + 8, hard))
    asks = many("open", tokens=40)
    live.ask(asks)

    def states() -> list[str]:
        """Captures without a line in the index count as started."""
        found = {capture.key: capture.state for capture in find_captures(disk.path)}
        return [found.get(key, "started") for key in asks]

    until(lambda: "started" not in states(), "they have no end")
    assert set(states()) & {"failed", "incomplete", "unfinished"}
    for process, limit in zip(writers, limits, strict=True):
        process.rlimit(psutil.RLIMIT_NOFILE, limit)
    live.works("after-open")
    repair(disk.path, remove_empty=True)
    assert verify_all(disk.path) > 0


@pytest.mark.soak
def test_a_removed_directory_leaves_no_store_that_counts_as_complete(live: Live, disk: Disk) -> None:
    """The directory is removed during captures."""
    for path in disk.path.iterdir():  # of earlier tests, so that fewer files must be removed during the captures
        until(lambda path=path: removed(path), "somebody puts back what was removed")
    asks = many("removed")
    future = live.begin(asks)
    for path in sorted(disk.path.iterdir(), key=lambda path: path.suffix == ".partial"):
        until(lambda path=path: removed(path), "writers put back what was removed")
    live.answered(asks, future)
    live.works("after-removed")
    for info in finished(disk.path, "removed"):
        assert info.state == "incomplete", "a store whose files were removed must not pass for whole"
    assert verify_all(disk.path) > 0


@pytest.mark.soak
def test_a_read_only_directory_fails_captures_but_no_request(live: Live, disk: Disk) -> None:
    """The directory becomes read-only before captures begin, because that is impossible while files are open."""
    if not disk.mounted and os.geteuid() == 0:
        pytest.skip("root writes wherever it cannot mount, and nothing is mounted here")
    asks = many("read-only")
    live.works("quiet")
    read_only(disk, True)
    try:
        live.ask(asks)
        until(at_rest, "writers are still at work")
    finally:
        read_only(disk, False)
    assert all(len(live.run.tokens(name)) == len(asks[name].prompt) + TOKENS for name in asks)
    assert not live.partials("read-only") and not list(disk.path.glob("read-only-*"))
    live.works("after-read-only")
    assert verify_all(disk.path) > 0


def test_captures_of_killed_processes_are_unfinished_until_a_repair(engines: Engines, disk: Disk) -> None:
    """All processes are killed, as when memory runs out. The partial stores stay, with the state "unfinished"."""
    live = engines.get()
    live.begin(many("all"))
    kill(processes("dmi-coordinator") + processes("dmi-writer") + processes("EngineCore") + processes("Worker"))
    engine_ended()

    def found() -> dict[Path, str]:
        return {c.store: c.state for c in find_captures(disk.path) if (c.key or "").startswith("all-")}

    until(lambda: "started" not in found().values(), "a killed process still holds its locks")
    states = found()
    assert list(states.values()) == ["unfinished"] * MANY
    with pytest.raises(TimeoutError, match="its writers ended and left"):
        open_capture(min(states), timeout=0)
    assert main(["repair", str(disk.path), "--remove-empty"]) == 0 and not live.partials("")
    stores = [store for store in states if store.exists()]
    assert len(stores) > MANY / 2
    captures = [open_capture(store, timeout=0, allow_incomplete=True) for store in stores]
    assert sum(check_rows(capture, live.oracle) for capture in captures) > MANY * CHUNK / 2


def test_dropped_rows_are_listed_one_by_one(engines: Engines) -> None:
    live = engines.get(policy="drop")
    asks = many("drop")
    future = live.begin(asks)
    with stopped(processes("dmi-writer")):
        live.answered(asks, future)  # policy drop waits neither for rows nor for logits
    assert "incomplete" in [info.state for info in finished(live.run.store_dir, "drop")]
    told = 0
    for name in asks:
        capture = open_capture(live.run.store(name), timeout=0, allow_incomplete=True)
        check_rows(capture, live.oracle, live.run.tokens(name))
        missing = {row for start, stop in capture.missing for row in range(start, stop)}
        assert missing == lost_rows(capture), name
        assert capture.complete or "writing fell behind (policy drop)" in str(capture.reason)
        response = live.run.replies[name].kv_transfer_params.get("dmi_missing", [])
        told += len(response)
        assert {row for start, stop in response for row in range(start, stop)} <= missing
    assert told, "responses tell what was lost before they left"
    live.works("after-drop")


def test_a_killed_engine_core_leaves_stores_of_the_rows_that_arrived(engines: Engines, disk: Disk) -> None:
    live = engines.get()
    live.begin(many("core"))
    kill(processes("EngineCore"))
    engine_ended()
    closed_by_the_coordinator(disk.path, "core", live.oracle)


@pytest.mark.soak
def test_a_killed_worker_leaves_stores_of_the_rows_that_arrived(engines: Engines, disk: Disk) -> None:
    live = engines.get()
    future = live.begin(many("worker"))
    kill(processes("Worker"))
    with pytest.raises(Exception, match="EngineCore"):
        future.result(PATIENCE)
    engine_ended()
    closed_by_the_coordinator(disk.path, "worker", live.oracle)
    assert not live.partials("worker") and repair(disk.path, remove_empty=True) == []
    assert verify_all(disk.path) > 0


@pytest.mark.soak  # two ranks take long to start
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="each rank needs a core")
def test_a_killed_worker_of_two_ranks_leaves_captures_to_a_repair(
    engines: Engines, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither rank knows which rows the other one wrote, so the partial stores wait for a repair."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    live = engines.get(tensor_parallel_size=2)
    future = live.begin(many("ranks"))
    kill(processes("Worker")[:1])
    with pytest.raises(Exception, match="EngineCore"):
        future.result(PATIENCE)
    engine_ended()
    states = [c.state for c in find_captures(disk.path) if (c.key or "").startswith("ranks-")]
    assert states == ["unfinished"] * MANY
    stores = [Path(outcome.store) for outcome in repair(disk.path, remove_empty=True) if outcome.store]
    assert len(stores) > MANY / 2
    captures = [open_capture(store, timeout=0, allow_incomplete=True) for store in stores]
    assert {capture.attrs["tp"] for capture in captures} == {2}
    assert sum(check_rows(capture, live.oracle) for capture in captures) > MANY * CHUNK / 2


def read_only(disk: Disk, on: bool) -> None:
    if disk.mounted:
        command = f"mount -o remount,{'ro' if on else 'rw'} '{disk.path}'"
        until(lambda: os.system(command) == 0, "a file is still open for writing")
    else:
        disk.path.chmod(0o555 if on else 0o755)


def verify_all(folder: Path) -> int:
    """Check that all finished stores are valid. Returns their number."""
    stores = list(folder.glob("*.zarr"))
    assert [str(problem) for store in stores for problem in verify_store(store)] == []
    return len(stores)


def lost_rows(capture: Capture) -> set[int]:
    """Rows that read as zeros, and rows whose sample was lost."""
    empty = np.flatnonzero(~capture.numpy("resid_final").any(-1))
    samples = np.flatnonzero(capture.logits_positions < 0) + capture.prompt_len - 1
    return set(empty.tolist()) | set(samples.tolist())
