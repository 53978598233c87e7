# SPDX-License-Identifier: Apache-2.0
"""Disks fill up, processes die, requests are aborted: no store may pass for whole that is not."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dmi_connector.store.capture import CaptureHandle, CaptureSpec
from dmi_connector.store.index import find_captures
from dmi_connector.store.persist import Persistence, PersistSettings
from dmi_connector.store.reader import CaptureIncomplete, open_capture
from dmi_connector.store.schema import ArraySpec
from dmi_connector.store.verify import verify_store
from tests import storekit as kit

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
    p.shutdown(20)
    assert p.ring.used == 0


def writer_pid(handle: CaptureHandle) -> int:
    return handle.groups[0].process.process.pid


def test_full_disk(persistence: Persistence, tmp_path: Path, done: list[tuple[str, str | None]]) -> None:
    """A limit on file sizes stands in for a full disk: the second chunk of the first segment fails."""
    handle = persistence.open_capture(spec_at(tmp_path / "a.zarr"))
    pid = writer_pid(handle)
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (CHUNK_BYTES + 1000, limits[1]))
    values = {"q": kit.random_bits(SPEC, 300)}
    kit.feed(persistence, handle, values, 300, 128)
    handle.close(300, token_ids=range(300))
    assert persistence.flush(20)
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
    assert persistence.flush(20)
    assert done[0][0] == "incomplete" and "writer process 1 died (signal 9)" in str(done[0][1])
    with pytest.raises(CaptureIncomplete, match=r"writer process 1 died \(signal 9\)"):
        open_capture(tmp_path / "a.zarr", timeout=0)
    assert open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True).hooks == []
    assert verify_store(tmp_path / "a.zarr") == []
    assert persistence.stats()["backlog_bytes"] == 0 and persistence.stats()["writers_died"] == 1
    kit.store(persistence, tmp_path / "b.zarr", [SPEC], 300)  # on a new process
    assert done[1] == ("complete", None)


def test_writer_killed_before_the_commit(persistence: Persistence, tmp_path: Path) -> None:
    kit.store(persistence, tmp_path / "warm.zarr", [SPEC], 1)  # the process is up
    handle = persistence.open_capture(spec_at(tmp_path / "a.zarr"))
    os.kill(writer_pid(handle), signal.SIGSTOP)
    handle.close(0, token_ids=[])
    os.kill(writer_pid(handle), signal.SIGKILL)
    assert persistence.flush(20) and handle.state == "incomplete"


def test_writer_killed_in_the_commit(
    persistence: Persistence, tmp_path: Path, done: list[tuple[str, str | None]]
) -> None:
    """The rows are safe by then: another process commits the whole store."""
    handle = persistence.open_capture(CaptureSpec(str(tmp_path / "a.zarr"), (SPEC,), {"prompt_len": 1}, ranks=2))
    kit.feed(persistence, handle, {"q": kit.random_bits(SPEC, 40)}, 40, 128)
    handle.close(40, token_ids=range(40))  # and now it waits for rank 1
    deadline = time.monotonic() + 10
    while handle.final_process is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(writer_pid(handle), signal.SIGKILL)
    other = Persistence(1 << 20)
    other.open_capture(CaptureSpec(str(tmp_path / "a.zarr"), (), rank=1, ranks=2)).close(40)
    assert other.shutdown(20) and persistence.flush(20)
    assert done == [("complete", None)] and verify_store(tmp_path / "a.zarr") == []


def test_interrupt_is_ignored(persistence: Persistence, tmp_path: Path, done: list[tuple[str, str | None]]) -> None:
    kit.store(persistence, tmp_path / "a.zarr", [SPEC], 30)
    handle = persistence.open_capture(spec_at(tmp_path / "b.zarr"))
    os.kill(writer_pid(handle), signal.SIGINT)
    kit.feed(persistence, handle, {"q": kit.random_bits(SPEC, 300)}, 300, 128)
    handle.close(300, token_ids=range(300))
    assert persistence.flush(20) and done == [("complete", None)] * 2
    assert Path(f"/proc/{writer_pid(handle)}/comm").read_text() == "dmi-writer\n"


def test_abort(persistence: Persistence, tmp_path: Path) -> None:
    handle = persistence.open_capture(spec_at(tmp_path / "a.zarr"))
    kit.feed(persistence, handle, {"q": kit.random_bits(SPEC, 256)}, 256, 128)
    handle.abort()
    assert persistence.flush(20) and handle.state == "aborted"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.jsonl"]
    assert find_captures(tmp_path) == []
    with pytest.raises(RuntimeError, match="aborted"):
        handle.close(256, token_ids=range(256))


def test_rows_the_caller_knows_are_missing(persistence: Persistence, tmp_path: Path) -> None:
    handle = persistence.open_capture(spec_at(tmp_path / "a.zarr"))
    values = {"q": kit.random_bits(SPEC, 300)}
    kit.feed(persistence, handle, values, 300, 128, skip=[128])
    handle.close(300, token_ids=range(300), attrs={"missing": [[128, 256]], "reason": "dropped: the ring was full"})
    assert persistence.flush(20)
    with pytest.raises(CaptureIncomplete, match="the ring was full"):
        open_capture(tmp_path / "a.zarr", timeout=0)
    assert verify_store(tmp_path / "a.zarr") == []


def test_a_hole_that_nobody_owned_up_to(persistence: Persistence, tmp_path: Path) -> None:
    handle = persistence.open_capture(spec_at(tmp_path / "a.zarr"))
    kit.feed(persistence, handle, {"q": kit.random_bits(SPEC, 300)}, 300, 128, skip=[128])
    handle.close(300, token_ids=range(300))
    assert persistence.flush(20)
    assert "tokens 128 to 255" in " ".join(p.where for p in verify_store(tmp_path / "a.zarr"))


@pytest.mark.parametrize(("first", "count"), [(5, 128), (0, 129), (256, 44)])
def test_rows_off_the_grid(persistence: Persistence, tmp_path: Path, first: int, count: int) -> None:
    handle = persistence.open_capture(spec_at(tmp_path / "a.zarr"))
    kit.put(persistence, np.zeros(count * SPEC.token_bytes, "u1"), handle, first, count)
    handle.close(128, token_ids=range(128))  # shorter than the last chunk says
    assert persistence.flush(20) and handle.state == "incomplete"


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
    deadline = time.monotonic() + 10
    while not (tmp_path / "a.zarr.partial").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(TimeoutError, match="still being written"):
        open_capture(tmp_path / "a.zarr", timeout=0)
    timer = threading.Timer(0.2, lambda: handle.close(0, token_ids=[]))
    timer.start()
    assert open_capture(tmp_path / "a.zarr", timeout=10).numpy("q").shape == (2, 0, 64)
    timer.join()
    (tmp_path / "other.zarr").mkdir()
    with pytest.raises(ValueError, match="is not a capture"):
        open_capture(tmp_path / "other.zarr")


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
        "print(t.writer_pid(h), flush=True)\n"
        "if os.fork() == 0: os.close(1); time.sleep(20); os._exit(0)\n"
        "os._exit(1)\n"
    )
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", script, str(tmp_path / "a.zarr")]
    env = {**os.environ, "PYTHONPATH": str(root)}
    out = subprocess.run(command, env=env, stdout=subprocess.PIPE, timeout=60).stdout
    deadline = time.monotonic() + 10
    while Path(f"/proc/{int(out)}/cmdline").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{int(out)}/cmdline").exists(), "the writer outlived its engine"
    assert (tmp_path / "a.zarr.partial/q/c/0/0/0").stat().st_size >= CHUNK_BYTES
    assert not (tmp_path / "a.zarr").exists()
