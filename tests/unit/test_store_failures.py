# SPDX-License-Identifier: Apache-2.0
"""Disks fill up, processes die, requests are aborted: no store may pass for whole that is not."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dmi_connector.store.capture import CaptureHandle, CaptureSpec
from dmi_connector.store.index import find_captures
from dmi_connector.store.persist import Persistence
from dmi_connector.store.persist_settings import PersistSettings
from dmi_connector.store.reader import CaptureIncomplete, open_capture
from dmi_connector.store.repair import repair
from dmi_connector.store.schema import ArraySpec
from dmi_connector.store.verify import verify_store
from tests import storekit as kit
from tests.storekit import PATIENCE, until

SPEC = ArraySpec("q", "float32", (0, 1), 64)
CHUNK_BYTES = SPEC.token_bytes * 128


def spec_at(path: Path, *arrays: ArraySpec) -> CaptureSpec:
    return CaptureSpec(str(path), arrays or (SPEC,), {"prompt_len": 10}, request_id="r", codec="none")


@pytest.fixture
def done() -> list[tuple[str, str | None]]:
    return []


@pytest.fixture
def persistence(done: list[tuple[str, str | None]]) -> Iterator[Persistence]:
    def on_done(handle: CaptureHandle, error: str | None) -> None:
        done.append((handle.state, error))

    p = Persistence(1 << 20, settings=PersistSettings(segment_tokens=256), on_done=on_done)
    yield p
    p.shutdown(PATIENCE)
    assert p.ring.used == 0


def writer_pid(handle: CaptureHandle) -> int:
    return handle.groups[0].process.process.pid


def held(pid: int, folder: Path) -> list[str]:
    """What a process has open below `folder`."""
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was just closed
            links.append(os.readlink(path))
    return [link for link in links if link.startswith(str(folder))]


def test_full_disk(persistence: Persistence, tmp_path: Path, done: list[tuple[str, str | None]]) -> None:
    """A limit on file sizes stands in for a full disk: the second chunk of the first segment fails."""
    handle = persistence.open_capture(spec_at(tmp_path / "a.zarr"))
    pid = writer_pid(handle)
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (CHUNK_BYTES + 1000, limits[1]))
    values = {"q": kit.random_bits(SPEC, 300)}
    kit.feed(persistence, handle, values, 300, 128)
    handle.close(300, token_ids=range(300))
    assert persistence.flush(PATIENCE)
    assert done == [("incomplete", handle.error)] and "File too large" in str(handle.error)
    with pytest.raises(CaptureIncomplete, match="File too large") as caught:
        open_capture(tmp_path / "a.zarr", timeout=0)
    assert caught.value.missing == [[128, 256]]
    cap = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    kept = np.r_[0:128, 256:300]
    np.testing.assert_array_equal(kit.bits(cap.numpy("q", tokens=kept)), values["q"][:, kept])
    assert verify_store(tmp_path / "a.zarr") == []
    # The process goes on, and so do later captures once there is room.
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    kit.store(persistence, tmp_path / "b.zarr", [SPEC], 300)
    assert done[1] == ("complete", None) and verify_store(tmp_path / "b.zarr") == []
    assert persistence.stats()["incomplete"] == 1 and persistence.stats()["complete"] == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB of its own."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_disk_without_a_byte_left(
    small_disk: Path, persistence: Persistence, done: list[tuple[str, str | None]]
) -> None:
    """Not even the metadata fits: what holds rows waits for a repair, what holds none goes, later captures work."""
    kit.store(persistence, small_disk / "before.zarr", [SPEC], 10)
    pid = persistence.pool.processes[0].process.pid
    handle = persistence.open_capture(spec_at(small_disk / "rows.zarr"))
    values = {"q": kit.random_bits(SPEC, 300)}
    kit.feed(persistence, handle, values, 300, 128, skip=[256])
    until(lambda: persistence.ring.used == 0)
    with open(small_disk / "ballast", "wb", buffering=0) as ballast, pytest.raises(OSError, match="No space left"):
        while True:
            ballast.write(bytes(4096))
    handle.close(300, token_ids=range(300))
    for i in range(3):
        kit.store(persistence, small_disk / f"none{i}.zarr", [SPEC], 300)
    assert [state for state, _ in done[1:]] == ["failed"] * 4 and all("No space left" in str(e) for _, e in done[1:])
    assert {p.name for p in small_disk.glob("*.zarr*")} == {"before.zarr", "rows.zarr.partial"}
    until(lambda: not held(pid, small_disk))
    (small_disk / "ballast").unlink()
    [outcome] = repair(small_disk)
    assert (outcome.state, outcome.missing, outcome.num_tokens) == ("salvaged", [[256, 300]], 300)
    cap = open_capture(small_disk / "rows.zarr", timeout=0, allow_incomplete=True)
    np.testing.assert_array_equal(kit.bits(cap.numpy("q"))[:, :256], values["q"][:, :256])
    kit.store(persistence, small_disk / "after.zarr", [SPEC], 300)
    assert done[-1] == ("complete", None) and verify_store(small_disk / "after.zarr") == []


@pytest.mark.parametrize("spare", [0, 2])
def test_no_descriptor_left(
    persistence: Persistence, tmp_path: Path, done: list[tuple[str, str | None]], spare: int
) -> None:
    """With two left there is one for the lock and one for the journal; and the failure can be noted."""
    kit.store(persistence, tmp_path / "warm.zarr", [SPEC], 1)
    pid = persistence.pool.processes[0].process.pid
    until(lambda: not held(pid, tmp_path))
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    free = [number for number in range(1000) if not os.path.lexists(f"/proc/{pid}/fd/{number}")]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[spare], limits[1]))
    kit.store(persistence, tmp_path / "a.zarr", [SPEC], 300)
    assert done[1][0] == "failed" and "Too many open files" in str(done[1][1])
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    if spare:
        assert [c.state for c in find_captures(tmp_path)] == ["complete", "failed"]
    assert [outcome.state for outcome in repair(tmp_path, remove_empty=True)] == ["removed"] * (not spare)
    kit.store(persistence, tmp_path / "b.zarr", [SPEC], 300)
    assert done[2] == ("complete", None)


@pytest.mark.parametrize("what", ["q", "."])
def test_files_that_somebody_removed(persistence: Persistence, tmp_path: Path, what: str) -> None:
    """A file that is open can still be written to: the store must not pass for whole."""
    handle = persistence.open_capture(spec_at(tmp_path / "dir/a.zarr", SPEC, replace(SPEC, name="k")))
    values = {name: kit.random_bits(replace(SPEC, name=name), 300) for name in "qk"}
    kit.feed(persistence, handle, values, 300, 128)
    until(lambda: persistence.ring.used == 0)
    shutil.rmtree(tmp_path / "dir/a.zarr.partial" / what)
    handle.close(300, token_ids=range(300))
    assert persistence.flush(PATIENCE) and handle.state == "incomplete"
    with pytest.raises(CaptureIncomplete, match="gone from the partial store") as caught:
        open_capture(tmp_path / "dir/a.zarr", timeout=0)
    assert caught.value.missing == [[0, 300]] and verify_store(tmp_path / "dir/a.zarr") == []
    if what == "q":
        cap = open_capture(tmp_path / "dir/a.zarr", timeout=0, allow_incomplete=True)
        np.testing.assert_array_equal(kit.bits(cap.numpy("k")), values["k"])


def test_nothing_can_be_written(persistence: Persistence, tmp_path: Path, done: list[tuple[str, str | None]]) -> None:
    (tmp_path / "file").write_text("not a directory")
    kit.store(persistence, tmp_path / "file" / "a.zarr", [SPEC], 300)
    state, error = done[0]
    assert state == "failed" and "NotADirectoryError" in str(error)
    assert any("NotADirectoryError" in e for e in persistence.stats()["errors"])


def test_a_name_that_is_taken(persistence: Persistence, tmp_path: Path, done: list[tuple[str, str | None]]) -> None:
    kit.store(persistence, tmp_path / "a.zarr", [SPEC], 40)
    before = (tmp_path / "a.zarr/zarr.json").read_bytes()
    kit.store(persistence, tmp_path / "a.zarr", [SPEC], 50)
    assert done[1][0] == "failed" and "exists already" in str(done[1][1])
    assert (tmp_path / "a.zarr/zarr.json").read_bytes() == before


def test_writer_killed(persistence: Persistence, tmp_path: Path, done: list[tuple[str, str | None]]) -> None:
    handle = persistence.open_capture(spec_at(tmp_path / "a.zarr"))
    pid = writer_pid(handle)
    os.kill(pid, signal.SIGSTOP)  # so that chunks are still in the ring when it dies
    kit.feed(persistence, handle, {"q": kit.random_bits(SPEC, 300)}, 300, 128)
    assert persistence.stats()["backlog_bytes"] > 0
    os.kill(pid, signal.SIGKILL)
    handle.close(300, token_ids=range(300))
    assert persistence.flush(PATIENCE)
    assert done[0][0] == "incomplete" and "writer process 1 died (signal 9)" in str(done[0][1])
    with pytest.raises(CaptureIncomplete, match=r"writer process 1 died \(signal 9\)"):
        open_capture(tmp_path / "a.zarr", timeout=0)
    assert open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True).hooks == []
    assert verify_store(tmp_path / "a.zarr") == []
    assert persistence.stats()["backlog_bytes"] == 0 and persistence.stats()["writers_died"] == 1
    kit.store(persistence, tmp_path / "b.zarr", [SPEC], 300)  # on a new process
    assert done[1] == ("complete", None)


def test_writer_killed_after_some_chunks(
    persistence: Persistence, tmp_path: Path, done: list[tuple[str, str | None]]
) -> None:
    """What it had written stays in the store, beside what other writers hold."""
    logits = ArraySpec("logits", "float32", (), 32)
    handle = persistence.open_capture(spec_at(tmp_path / "a.zarr", SPEC, logits))
    values = {"q": kit.random_bits(SPEC, 300), "logits": kit.random_bits(logits, 3)}
    kit.feed(persistence, handle, values, 300, 128, skip=[256])
    kit.put_rows(persistence, handle, "logits", values["logits"][:2], 0, 9)
    until(lambda: persistence.ring.used == 0)
    os.kill(writer_pid(handle), signal.SIGSTOP)
    kit.feed(persistence, handle, values, 300, 128, skip=[0, 128])
    os.kill(writer_pid(handle), signal.SIGKILL)
    handle.close(300, {"logits": 3}, token_ids=range(300))
    assert persistence.flush(PATIENCE) and handle.state == "incomplete" and verify_store(tmp_path / "a.zarr") == []
    cap = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    assert (cap.hooks, cap.missing) == (["q", "logits"], [[256, 300]])
    assert "died (signal 9)" in cap.reason and "1 of 3 samples are lost" in cap.reason
    np.testing.assert_array_equal(kit.bits(cap.numpy("q"))[:, :256], values["q"][:, :256])
    np.testing.assert_array_equal(kit.bits(cap.numpy("logits"))[:2], values["logits"][:2])
    assert cap.logits_positions.tolist() == [9, 10, -1] and cap.token_ids.tolist() == list(range(300))


def test_writer_of_another_rank_killed(persistence: Persistence, tmp_path: Path) -> None:
    """Rank 0 writes the metadata, so columns of rank 1 would read as zeros: all rows are missing."""
    wide = [replace(SPEC, shards=2, rank=rank) for rank in range(2)]
    values = {"q": kit.random_bits(SPEC, 300)}
    other = Persistence(1 << 20, settings=PersistSettings(segment_tokens=256))
    handles = []
    for rank, owner in enumerate((persistence, other)):
        spec = CaptureSpec(str(tmp_path / "a.zarr"), (wide[rank],), {"prompt_len": 1}, rank=rank, ranks=2)
        handles.append(owner.open_capture(spec))
        kit.feed(owner, handles[rank], values, 300, 128)
    os.kill(writer_pid(handles[1]), signal.SIGKILL)
    for handle in handles:
        handle.close(300, token_ids=range(300))
    assert other.shutdown(PATIENCE) and persistence.flush(PATIENCE)
    with pytest.raises(CaptureIncomplete, match=r"rank 1: writer process 1 died \(signal 9\)") as caught:
        open_capture(tmp_path / "a.zarr", timeout=0)
    assert caught.value.missing == [[0, 300]] and verify_store(tmp_path / "a.zarr") == []


def test_a_sample_that_never_came(persistence: Persistence, tmp_path: Path) -> None:
    logits = ArraySpec("logits", "float32", (), 32)
    rows = kit.random_bits(logits, 3)
    handle = persistence.open_capture(spec_at(tmp_path / "a.zarr", logits))
    for i in (0, 2):
        kit.put_rows(persistence, handle, "logits", rows[i : i + 1], i, 9 + i)
    handle.close(0, {"logits": 3}, token_ids=[], attrs={"missing": [], "reason": "dropped"})
    assert persistence.flush(PATIENCE) and handle.state == "incomplete" and verify_store(tmp_path / "a.zarr") == []
    cap = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    assert cap.reason == "dropped; logits: 1 of 3 samples are lost, their position is -1"
    rows[1] = 0
    np.testing.assert_array_equal(kit.bits(cap.numpy("logits")), rows)
    assert cap.logits_positions.tolist() == [9, -1, 11]


def test_writer_killed_before_the_commit(persistence: Persistence, tmp_path: Path) -> None:
    kit.store(persistence, tmp_path / "warm.zarr", [SPEC], 1)  # the process is up
    handle = persistence.open_capture(spec_at(tmp_path / "a.zarr"))
    os.kill(writer_pid(handle), signal.SIGSTOP)
    handle.close(0, token_ids=[])
    os.kill(writer_pid(handle), signal.SIGKILL)
    assert persistence.flush(PATIENCE) and handle.state == "incomplete"


def test_writer_killed_in_the_commit(
    persistence: Persistence, tmp_path: Path, done: list[tuple[str, str | None]]
) -> None:
    """The rows are safe by then: another process commits the whole store."""
    handle = persistence.open_capture(CaptureSpec(str(tmp_path / "a.zarr"), (SPEC,), {"prompt_len": 1}, ranks=2))
    kit.feed(persistence, handle, {"q": kit.random_bits(SPEC, 40)}, 40, 128)
    handle.close(40, token_ids=range(40))  # and now it waits for rank 1
    until(lambda: handle.final_process is not None)
    os.kill(writer_pid(handle), signal.SIGKILL)
    other = Persistence(1 << 20)
    other.open_capture(CaptureSpec(str(tmp_path / "a.zarr"), (), rank=1, ranks=2)).close(40)
    assert other.shutdown(PATIENCE) and persistence.flush(PATIENCE)
    assert done == [("complete", None)] and verify_store(tmp_path / "a.zarr") == []


def test_interrupt_is_ignored(persistence: Persistence, tmp_path: Path, done: list[tuple[str, str | None]]) -> None:
    kit.store(persistence, tmp_path / "a.zarr", [SPEC], 30)
    handle = persistence.open_capture(spec_at(tmp_path / "b.zarr"))
    os.kill(writer_pid(handle), signal.SIGINT)
    kit.feed(persistence, handle, {"q": kit.random_bits(SPEC, 300)}, 300, 128)
    handle.close(300, token_ids=range(300))
    assert persistence.flush(PATIENCE) and done == [("complete", None)] * 2
    assert Path(f"/proc/{writer_pid(handle)}/comm").read_text() == "dmi-writer\n"


def test_abort(persistence: Persistence, tmp_path: Path) -> None:
    handle = persistence.open_capture(spec_at(tmp_path / "a.zarr"))
    kit.feed(persistence, handle, {"q": kit.random_bits(SPEC, 256)}, 256, 128)
    handle.abort()
    assert persistence.flush(PATIENCE) and handle.state == "aborted"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.jsonl"]
    assert find_captures(tmp_path) == []
    with pytest.raises(RuntimeError, match="aborted"):
        handle.close(256, token_ids=range(256))


def test_rows_the_caller_knows_are_missing(persistence: Persistence, tmp_path: Path) -> None:
    handle = persistence.open_capture(spec_at(tmp_path / "a.zarr"))
    values = {"q": kit.random_bits(SPEC, 300)}
    kit.feed(persistence, handle, values, 300, 128, skip=[128])
    handle.close(300, token_ids=range(300), attrs={"missing": [[128, 256]], "reason": "dropped: the ring was full"})
    assert persistence.flush(PATIENCE)
    with pytest.raises(CaptureIncomplete, match="the ring was full"):
        open_capture(tmp_path / "a.zarr", timeout=0)
    assert verify_store(tmp_path / "a.zarr") == []


def test_a_hole_that_nobody_owned_up_to(persistence: Persistence, tmp_path: Path) -> None:
    handle = persistence.open_capture(spec_at(tmp_path / "a.zarr"))
    kit.feed(persistence, handle, {"q": kit.random_bits(SPEC, 300)}, 300, 128, skip=[128])
    handle.close(300, token_ids=range(300))
    assert persistence.flush(PATIENCE)
    assert "tokens 128 to 255" in " ".join(p.where for p in verify_store(tmp_path / "a.zarr"))


@pytest.mark.parametrize(("first", "count"), [(5, 128), (0, 129), (256, 44)])
def test_rows_off_the_grid(persistence: Persistence, tmp_path: Path, first: int, count: int) -> None:
    handle = persistence.open_capture(spec_at(tmp_path / "a.zarr"))
    kit.put(persistence, np.zeros(count * SPEC.token_bytes, "u1"), handle, first, count)
    handle.close(128, token_ids=range(128))  # shorter than the last chunk says
    assert persistence.flush(PATIENCE) and handle.state == "incomplete"


def test_wrong_arguments(persistence: Persistence, tmp_path: Path) -> None:
    handle = persistence.open_capture(spec_at(tmp_path / "a.zarr"))
    with pytest.raises(ValueError, match="2 token_ids and 3 positions were given for length 3"):
        handle.close(3, token_ids=[1, 2])
    handle.abort()
    with pytest.raises(ValueError, match=r"must end in \.zarr"):
        CaptureSpec(str(tmp_path / "a"), (SPEC,))
    with pytest.raises(ValueError, match="multiple of chunk_tokens"):
        PersistSettings(chunk_tokens=100)
    with pytest.raises(ValueError, match="codec 'gzip' is unknown: use one of none, lz4, zstd"):
        PersistSettings(codec="gzip")
    with pytest.raises(ValueError, match="ring_bytes"):
        persistence.alloc(2 << 20)


def test_timeouts_say_what_was_seen(persistence: Persistence, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="nothing of it exists"):
        open_capture(tmp_path / "a.zarr", timeout=0.05)
    handle = persistence.open_capture(spec_at(tmp_path / "a.zarr"))
    until((tmp_path / "a.zarr.partial").exists)
    with pytest.raises(TimeoutError, match="still being written"):
        open_capture(tmp_path / "a.zarr", timeout=0)
    timer = threading.Timer(0.2, lambda: handle.close(0, token_ids=[]))
    timer.start()
    assert open_capture(tmp_path / "a.zarr", timeout=PATIENCE).numpy("q").shape == (2, 0, 64)
    timer.join()
    (tmp_path / "other.zarr").mkdir()
    with pytest.raises(ValueError, match="is not a capture"):
        open_capture(tmp_path / "other.zarr")


def test_a_directory_made_just_now_is_not_taken_for_an_abandoned_one(tmp_path: Path) -> None:
    partial = tmp_path / "a.zarr.partial"
    partial.mkdir()  # a writer that has yet to lock it
    with pytest.raises(TimeoutError, match="still being written"):
        open_capture(tmp_path / "a.zarr", timeout=0)
    os.utime(partial, (time.time() - 60, time.time() - 60))
    with pytest.raises(TimeoutError, match="its writers ended"):
        open_capture(tmp_path / "a.zarr", timeout=0)


def test_engine_dies(tmp_path: Path) -> None:
    """The writer ends with its engine and leaves the partial directory, even if a fork holds the pipe."""
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from tests import storekit as kit\n"
        "from tests.unit import test_store_failures as t\n"
        "p = t.Persistence(1 << 20)\n"
        "h = p.open_capture(t.spec_at(Path(sys.argv[1])))\n"
        "kit.feed(p, h, {'q': kit.random_bits(t.SPEC, 128)}, 128, 128)\n"
        "while p.ring.used: time.sleep(0.01)\n"
        "fork = os.fork()\n"
        "if fork == 0: os.close(1); time.sleep(10 * kit.PATIENCE); os._exit(0)\n"
        "print(t.writer_pid(h), fork, flush=True)\n"
        "os._exit(1)\n"
    )
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", script, str(tmp_path / "a.zarr")]
    env = {**os.environ, "PYTHONPATH": str(root)}
    out = subprocess.run(command, env=env, stdout=subprocess.PIPE, timeout=PATIENCE).stdout
    pid, fork = map(int, out.split())
    try:
        until(lambda: not Path(f"/proc/{pid}/cmdline").exists())
    finally:
        os.kill(fork, signal.SIGKILL)
    assert (tmp_path / "a.zarr.partial/q/c/0/0/0").stat().st_size >= CHUNK_BYTES
    with pytest.raises(TimeoutError, match="dmi repair makes a store"):
        open_capture(tmp_path / "a.zarr", timeout=0)
    [found] = find_captures(tmp_path)
    assert found.state == "unfinished" and "run dmi repair" in str(found.reason)
    assert [outcome.state for outcome in repair(tmp_path)] == ["salvaged"]
    assert [c.state for c in find_captures(tmp_path)] == ["incomplete"]
