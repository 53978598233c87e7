# SPDX-License-Identifier: Apache-2.0
"""Disks fill up, processes die, requests are aborted: no incomplete store may count as complete."""

from __future__ import annotations

import json
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

from dmi_connector.captures.capture import open_capture
from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.store.format import completeness, schema
from dmi_connector.store.format.checksum import crc32c
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.read import index_lines
from dmi_connector.store.read.index import find_captures
from dmi_connector.store.read.index_lines import read_index
from dmi_connector.store.read.reader import CaptureIncomplete
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.read.waiting import CaptureFailed
from dmi_connector.store.write.arrays.row_check import RowCheck
from dmi_connector.store.write.coordinator.capture_record import CaptureRecord, State
from dmi_connector.store.write.finish.commit import append_index
from dmi_connector.store.write.finish.repair import repair
from tests import storekit as kit
from tests.storekit import PATIENCE, until

SPEC = ArraySpec("q", "float32", (0, 1), 64)
CHUNK_BYTES = SPEC.token_bytes * 128


@pytest.fixture
def done() -> list[tuple[str, str | None]]:
    return []


@pytest.fixture
def stores(done: list[tuple[str, str | None]]) -> Iterator[kit.Store]:
    p = kit.Store(on_done=lambda record: done.append((record.state, record.reason)))
    yield p
    p.shutdown(PATIENCE)
    assert p.ring.used == 0


def writer_pid(record: CaptureRecord) -> int:
    return record.assignments[0].process.process.pid


def held(pid: int, folder: Path) -> list[str]:
    """Files below `folder` that a process has open."""
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the file was just closed
            links.append(os.readlink(path))
    return [link for link in links if link.startswith(str(folder))]


def test_a_full_disk_costs_only_the_chunk_that_did_not_fit(
    stores: kit.Store, tmp_path: Path, done: list[tuple[str, str | None]]
) -> None:
    """A limit of the file size simulates a full disk: the second chunk of the first shard fails."""
    record = stores.open(tmp_path / "a.zarr", SPEC)
    pid = writer_pid(record)
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (CHUNK_BYTES + 1000, limits[1]))
    values = {"q": kit.random_bits(SPEC, 300)}
    stores.feed(record, values, 300)
    stores.close(record, 300)
    assert stores.flush(PATIENCE)
    assert done == [("incomplete", record.reason)] and "File too large" in str(record.reason)
    with pytest.raises(CaptureIncomplete, match="File too large") as caught:
        open_capture(tmp_path / "a.zarr", timeout=0)
    assert caught.value.missing == [[128, 256]]
    cap = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    kept = np.r_[0:128, 256:300]
    np.testing.assert_array_equal(kit.bits(cap.numpy("q", tokens=kept)), values["q"][:, kept])
    assert verify_store(tmp_path / "a.zarr") == []
    # The process keeps running, and later captures are complete once there is space.
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    stores.write(tmp_path / "b.zarr", [SPEC], 300)
    assert done[1] == ("complete", None) and verify_store(tmp_path / "b.zarr") == []
    assert stores.stats()["incomplete"] == 1 and stores.stats()["complete"] == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 1 MiB."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_rows_on_a_disk_without_a_byte_left_wait_for_a_repair(
    small_disk: Path, stores: kit.Store, done: list[tuple[str, str | None]]
) -> None:
    """There is no space for metadata either. Partial stores without rows are removed, and later captures work."""
    stores.write(small_disk / "before.zarr", [SPEC], 10)
    pid = stores.pool.processes[0].process.pid
    record = stores.open(small_disk / "rows.zarr", SPEC)
    values = {"q": kit.random_bits(SPEC, 300)}
    stores.feed(record, values, 300, skip=[256])
    until(lambda: stores.ring.used == 0)
    with open(small_disk / "ballast", "wb", buffering=0) as ballast, pytest.raises(OSError, match="No space left"):
        while True:
            ballast.write(bytes(4096))
    stores.close(record, 300)
    with pytest.raises(CaptureFailed, match=r"No space left on device.*; fix the cause, then dmi repair"):
        open_capture(small_disk / "rows.zarr", timeout=PATIENCE)
    for i in range(3):
        stores.write(small_disk / f"none{i}.zarr", [SPEC], 300)
    assert [state for state, _ in done[1:]] == ["failed"] * 4 and all("No space left" in str(e) for _, e in done[1:])
    assert {p.name for p in small_disk.glob("*.zarr*")} == {"before.zarr", "rows.zarr.partial"}
    until(lambda: not held(pid, small_disk))
    (small_disk / "ballast").unlink()
    [outcome] = repair(small_disk)
    assert (outcome.state, outcome.missing, outcome.num_tokens) == ("salvaged", [[256, 300]], 300)
    cap = open_capture(small_disk / "rows.zarr", timeout=0, allow_incomplete=True)
    np.testing.assert_array_equal(kit.bits(cap.numpy("q"))[:, :256], values["q"][:, :256])
    stores.write(small_disk / "after.zarr", [SPEC], 300)
    assert done[-1] == ("complete", None) and verify_store(small_disk / "after.zarr") == []


@pytest.mark.parametrize("spare", [0, 2])
def test_a_capture_without_descriptors_fails_and_the_next_one_works(
    stores: kit.Store, tmp_path: Path, done: list[tuple[str, str | None]], spare: int
) -> None:
    """Two descriptors are left: one for the lock, one for the journal. The index records the failure."""
    stores.write(tmp_path / "warm.zarr", [SPEC], 1)
    pid = stores.pool.processes[0].process.pid
    until(lambda: not held(pid, tmp_path))
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    free = [number for number in range(1000) if not os.path.lexists(f"/proc/{pid}/fd/{number}")]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[spare], limits[1]))
    stores.write(tmp_path / "a.zarr", [SPEC], 300)
    assert done[1][0] == "failed" and "Too many open files" in str(done[1][1])
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    if spare:
        assert [c.state for c in find_captures(tmp_path)] == ["complete", "failed"]
    assert [outcome.state for outcome in repair(tmp_path, remove_empty=True)] == ["removed"] * (not spare)
    stores.write(tmp_path / "b.zarr", [SPEC], 300)
    assert done[2] == ("complete", None)


@pytest.mark.parametrize("what", ["q", "."])
def test_a_store_whose_files_were_removed_is_incomplete(stores: kit.Store, tmp_path: Path, what: str) -> None:
    """A removed file that is open can still be written, so no write fails."""
    record = stores.open(tmp_path / "dir/a.zarr", SPEC, replace(SPEC, name="k"))
    values = {name: kit.random_bits(replace(SPEC, name=name), 300) for name in "qk"}
    stores.feed(record, values, 300)
    until(lambda: stores.ring.used == 0)
    shutil.rmtree(tmp_path / "dir/a.zarr.partial" / what)
    stores.close(record, 300)
    assert stores.flush(PATIENCE) and record.state == "incomplete"
    with pytest.raises(CaptureIncomplete, match="gone from the partial store") as caught:
        open_capture(tmp_path / "dir/a.zarr", timeout=0)
    assert caught.value.missing == [[0, 300]] and verify_store(tmp_path / "dir/a.zarr") == []
    if what == "q":
        cap = open_capture(tmp_path / "dir/a.zarr", timeout=0, allow_incomplete=True)
        np.testing.assert_array_equal(kit.bits(cap.numpy("k")), values["k"])


def test_a_capture_fails_where_nothing_can_be_written(
    stores: kit.Store, tmp_path: Path, done: list[tuple[str, str | None]]
) -> None:
    (tmp_path / "file").write_text("not a directory")
    stores.write(tmp_path / "file" / "a.zarr", [SPEC], 300)
    state, error = done[0]
    assert state == "failed" and "NotADirectoryError" in str(error)
    assert any("NotADirectoryError" in e for e in stores.stats()["errors"])


def test_a_capture_whose_name_is_taken_fails_and_changes_nothing(
    stores: kit.Store, tmp_path: Path, done: list[tuple[str, str | None]]
) -> None:
    stores.write(tmp_path / "a.zarr", [SPEC], 40)
    before = (tmp_path / "a.zarr/zarr.json").read_bytes()
    stores.write(tmp_path / "a.zarr", [SPEC], 50, key="k", request_id="r")
    assert done[1][0] == "failed" and "exists already" in str(done[1][1])
    *_, line = read_index(tmp_path)
    assert line.pop("finished") >= line.pop("created")
    reason = f"FileExistsError: store {tmp_path}/a.zarr exists already: use another name"
    told = {"state": "failed", "reason": reason, "key": "k", "request_id": "r"}
    assert line == {"event": "finish", "store": "a.zarr", **told}
    assert (tmp_path / "a.zarr/zarr.json").read_bytes() == before


def test_a_killed_writer_makes_the_capture_incomplete_and_is_replaced(
    stores: kit.Store, tmp_path: Path, done: list[tuple[str, str | None]]
) -> None:
    record = stores.open(tmp_path / "a.zarr", SPEC)
    pid = writer_pid(record)
    os.kill(pid, signal.SIGSTOP)  # so that chunks are still in the ring when it dies
    stores.feed(record, {"q": kit.random_bits(SPEC, 300)}, 300)
    assert stores.stats()["backlog_bytes"] > 0
    os.kill(pid, signal.SIGKILL)
    stores.close(record, 300)
    assert stores.flush(PATIENCE)
    assert done[0][0] == "incomplete" and "writer process 1 died (signal 9)" in str(done[0][1])
    with pytest.raises(CaptureIncomplete, match=r"writer process 1 died \(signal 9\)"):
        open_capture(tmp_path / "a.zarr", timeout=0)
    assert open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True).hooks == []
    assert verify_store(tmp_path / "a.zarr") == []
    assert stores.stats()["backlog_bytes"] == 0 and stores.stats()["writers_died"] == 1
    stores.write(tmp_path / "b.zarr", [SPEC], 300)  # by a new process
    assert done[1] == ("complete", None)


def test_a_killed_writer_costs_only_its_unwritten_chunks(
    stores: kit.Store, tmp_path: Path, done: list[tuple[str, str | None]]
) -> None:
    logits = ArraySpec("logits", "float32", (), 32)
    record = stores.open(tmp_path / "a.zarr", SPEC, logits)
    values = {"q": kit.random_bits(SPEC, 300), "logits": kit.random_bits(logits, 3)}
    stores.feed(record, values, 300, skip=[256])
    stores.put_rows(record, "logits", values["logits"][:2], 0, 9)
    until(lambda: stores.ring.used == 0)
    os.kill(writer_pid(record), signal.SIGSTOP)
    stores.feed(record, values, 300, skip=[0, 128])
    os.kill(writer_pid(record), signal.SIGKILL)
    stores.close(record, 300, {"logits": 3})
    assert stores.flush(PATIENCE) and record.state == "incomplete" and verify_store(tmp_path / "a.zarr") == []
    cap = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    assert (cap.hooks, cap.missing) == (["q", "logits"], [[256, 300]])
    assert "died (signal 9)" in cap.reason and "1 of 3 samples are lost" in cap.reason
    np.testing.assert_array_equal(kit.bits(cap.numpy("q"))[:, :256], values["q"][:, :256])
    np.testing.assert_array_equal(kit.bits(cap.numpy("logits"))[:2], values["logits"][:2])
    assert cap.logits_positions.tolist() == [9, 10, -1] and cap.token_ids.tolist() == list(range(300))


@pytest.mark.parametrize(
    ("part_layers", "files", "dies"),
    [(0, (0, 1), 1), (1, (0, 1), 1), (1, (1, 0), 0)],
    ids=["columns", "layers", "layers, the first on rank 1"],
)
def test_a_killed_writer_makes_all_rows_missing_where_another_rank_writes_the_metadata(
    stores: kit.Store, tmp_path: Path, part_layers: int, files: tuple[int, int], dies: int
) -> None:
    """The rank with the first file writes the metadata, so the data of the other one would be read as zeros."""
    wide = [replace(SPEC, shards=2, rank=file, part_layers=part_layers) for file in files]
    values = {"q": kit.random_bits(SPEC, 300)}
    other = kit.Store()
    owners, records = (stores, other), []
    for rank, owner in enumerate(owners):
        records.append(owner.open(tmp_path / "a.zarr", wide[rank], rank=rank, ranks=2))
        owner.feed(records[rank], values, 300)
    os.kill(writer_pid(records[dies]), signal.SIGKILL)
    for owner, record in zip(owners, records, strict=True):
        owner.close(record, 300)
    assert other.shutdown(PATIENCE) and stores.flush(PATIENCE)
    who = f"rank {dies}: " if dies else ""
    with pytest.raises(CaptureIncomplete, match=rf"^[^;]*{who}writer process 1 died \(signal 9\)") as caught:
        open_capture(tmp_path / "a.zarr", timeout=0)
    assert caught.value.missing == [[0, 300]] and verify_store(tmp_path / "a.zarr") == []


def test_wrong_rows_after_the_end_are_not_missing(stores: kit.Store, tmp_path: Path) -> None:
    """The engine may compute one row more than the request has tokens."""
    record = stores.open(tmp_path / "a.zarr", SPEC)
    stores.put(record, {"q": kit.random_bits(SPEC, 44)}, 0, 44, positions=np.arange(44) + 5)
    stores.close(record, 43)
    assert stores.flush(PATIENCE)
    cap = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    assert cap.missing == [[0, 43]] and "carry other positions" in str(cap.reason)


@pytest.mark.parametrize("what", ["positions", "token ids"])
def test_rows_of_another_request_are_found_on_any_rank(stores: kit.Store, tmp_path: Path, what: str) -> None:
    specs = [replace(SPEC, shards=2, rank=rank, part_layers=1) for rank in range(2)]
    other = kit.Store()
    values, ids = {"q": kit.random_bits(SPEC, 128)}, np.arange(128)
    for rank, owner in enumerate((stores, other)):
        record = owner.open(tmp_path / "a.zarr", specs[rank], rank=rank, ranks=2)
        shift = {"ids": ids + 5} if what == "token ids" else {"positions": ids + 5}
        owner.put(record, values, 0, 128, **(shift if rank else {}))
        owner.close(record, 128)
    assert other.shutdown(PATIENCE) and stores.flush(PATIENCE)
    with pytest.raises(CaptureIncomplete, match="rank 1: the row") as caught:
        open_capture(tmp_path / "a.zarr", timeout=0)
    assert caught.value.missing == [[0, 128]]


@pytest.mark.parametrize(("files", "broken"), [((0, 1), 1), ((1, 0), 0)], ids=["rank 1", "rank 0"])
def test_a_writer_that_cannot_begin_makes_all_rows_missing_where_another_rank_writes_the_metadata(
    stores: kit.Store, tmp_path: Path, files: tuple[int, int], broken: int
) -> None:
    """A limit of open files prevents its directory and its journal."""
    wide = [replace(SPEC, shards=2, rank=file, part_layers=1) for file in files]
    other = kit.Store()
    owners = (stores, other)
    warm = owners[broken].open(tmp_path / "warm.zarr", SPEC, attrs={"prompt_len": 3})
    limits = resource.prlimit(writer_pid(warm), resource.RLIMIT_NOFILE)
    until(lambda: (tmp_path / "warm.zarr.partial").is_dir())
    owners[broken].close(warm, 0)
    assert owners[broken].flush(PATIENCE)
    resource.prlimit(writer_pid(warm), resource.RLIMIT_NOFILE, (3, limits[1]))
    records = [
        owner.open(tmp_path / "a.zarr", spec, rank=rank, ranks=2)
        for rank, (owner, spec) in enumerate(zip(owners, wide, strict=True))
    ]
    for owner, record in zip(owners, records, strict=True):
        owner.feed(record, {"q": kit.random_bits(SPEC, 300)}, 300)
    until(lambda: not any(owner.ring.used for owner in owners))
    resource.prlimit(writer_pid(warm), resource.RLIMIT_NOFILE, limits)
    for owner, record in zip(owners, records, strict=True):
        owner.close(record, 300)
    assert other.shutdown(PATIENCE) and stores.flush(PATIENCE)
    with pytest.raises(CaptureIncomplete, match="Too many open files") as caught:
        open_capture(tmp_path / "a.zarr", timeout=0)
    assert caught.value.missing == [[0, 300]] and verify_store(tmp_path / "a.zarr") == []


def test_a_shard_of_another_rank_that_cannot_be_closed_makes_all_rows_missing(
    stores: kit.Store, tmp_path: Path
) -> None:
    """A limit of the file size admits the chunk of rank 1, but not the shard index after it."""
    wide = [replace(SPEC, shards=2, rank=rank) for rank in range(2)]
    values = {"q": kit.random_bits(SPEC, 128)}
    other = kit.Store()
    owners, records = (stores, other), []
    for rank, owner in enumerate(owners):
        records.append(owner.open(tmp_path / "a.zarr", wide[rank], rank=rank, ranks=2))
    pid, chunk = writer_pid(records[1]), wide[1].token_bytes * 128 + 2 * 4
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (chunk, resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]))
    for owner, record in zip(owners, records, strict=True):
        owner.feed(record, values, 128)
    until(lambda: other.ring.used == 0)
    assert (tmp_path / "a.zarr.partial/q/c/0/0/1").stat().st_size == chunk
    for owner, record in zip(owners, records, strict=True):
        owner.close(record, 128)
    assert other.shutdown(PATIENCE) and stores.flush(PATIENCE)
    assert [record.state for record in records] == ["incomplete", "incomplete"]
    with pytest.raises(CaptureIncomplete, match=r"rank 1: OSError: \[Errno 27\] File too large") as caught:
        open_capture(tmp_path / "a.zarr", timeout=0)
    assert caught.value.missing == [[0, 128]] and verify_store(tmp_path / "a.zarr") == []


@pytest.mark.parametrize(
    ("start", "came", "missing"),
    [
        (0, [0], [[128, 250]]),
        (0, [0, 128], []),
        (0, [128], [[0, 128]]),
        (0, [], [[0, 250]]),
        (50, [0], [[128, 200]]),
        (200, [0], []),
    ],
)
def test_rows_of_the_prompt_are_missing_where_the_engine_ends_inside_it(
    stores: kit.Store, tmp_path: Path, start: int, came: list[int], missing: list[list[int]]
) -> None:
    """The prompt has 250 tokens. The number of tokens that would have followed is unknown."""
    record = stores.open(tmp_path / "a.zarr", SPEC, attrs={"prompt_len": 250, "start": start})
    values = {"q": kit.random_bits(SPEC, 256)}
    stores.feed(record, values, 256, skip=[first for first in (0, 128) if first not in came])
    stores.captures.abandon_all(Loss.of(Cause.ENGINE_ENDED))
    assert stores.flush(PATIENCE) and record.state == "incomplete"
    cap = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    assert (cap.missing, cap.reason) == (missing, "the engine ended before the request did")
    assert cap.attrs["num_tokens"] == max((first + 128 for first in came), default=0)
    assert verify_store(tmp_path / "a.zarr") == []


def test_samples_that_came_before_the_engine_ended_are_kept(stores: kit.Store, tmp_path: Path) -> None:
    logits = ArraySpec("logits", "float32", (), 32)
    values = {"q": kit.random_bits(SPEC, 128), "logits": kit.random_bits(logits, 5)}
    record = stores.open(tmp_path / "a.zarr", SPEC, logits)
    stores.feed(record, values, 128)
    for i in (0, 1, 4, 2, 3):
        stores.put_rows(record, "logits", values["logits"][i : i + 1], i, 9 + i)
    stores.captures.abandon_all(Loss.of(Cause.ENGINE_ENDED))
    assert stores.flush(PATIENCE) and verify_store(tmp_path / "a.zarr") == []
    cap = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    assert cap.logits_positions.tolist() == [9, 10, 11, 12, 13] and cap.missing == []
    np.testing.assert_array_equal(kit.bits(cap.numpy("logits")), values["logits"])


def test_a_sample_that_never_came_reads_as_zeros_at_position_minus_1(stores: kit.Store, tmp_path: Path) -> None:
    logits = ArraySpec("logits", "float32", (), 32)
    rows = kit.random_bits(logits, 3)
    record = stores.open(tmp_path / "a.zarr", logits)
    for i in (0, 2):
        stores.put_rows(record, "logits", rows[i : i + 1], i, 9 + i)
    stores.close(record, 0, {"logits": 3}, losses=[Loss.of(Cause.FELL_BEHIND)])
    assert stores.flush(PATIENCE) and record.state == "incomplete" and verify_store(tmp_path / "a.zarr") == []
    cap = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    assert cap.reason == f"{Loss(Cause.FELL_BEHIND).words}; logits: 1 of 3 samples are lost, their position is -1"
    rows[1] = 0
    np.testing.assert_array_equal(kit.bits(cap.numpy("logits")), rows)
    assert cap.logits_positions.tolist() == [9, -1, 11]


def test_a_capture_whose_writer_dies_before_the_commit_is_incomplete(stores: kit.Store, tmp_path: Path) -> None:
    stores.write(tmp_path / "warm.zarr", [SPEC], 1)  # start the process
    record = stores.open(tmp_path / "a.zarr", SPEC)
    os.kill(writer_pid(record), signal.SIGSTOP)
    stores.close(record, 0)
    os.kill(writer_pid(record), signal.SIGKILL)
    assert stores.flush(PATIENCE) and record.state == "incomplete"


def test_a_capture_whose_writer_dies_in_the_commit_is_still_complete(
    stores: kit.Store, tmp_path: Path, done: list[tuple[str, str | None]]
) -> None:
    """Its rows are written by then, and another process commits the store."""
    record = stores.open(tmp_path / "a.zarr", SPEC, ranks=2)
    stores.feed(record, {"q": kit.random_bits(SPEC, 40)}, 40)
    stores.close(record, 40)  # it now waits for rank 1
    until(lambda: record.state is State.COMMITTING)
    os.kill(writer_pid(record), signal.SIGKILL)
    other = kit.Store()
    other.close(other.open(tmp_path / "a.zarr", rank=1, ranks=2), 40)
    assert other.shutdown(PATIENCE) and stores.flush(PATIENCE)
    assert done == [("complete", None)] and verify_store(tmp_path / "a.zarr") == []


def plant_document(record: CaptureRecord) -> None:
    """Write the root document of a capture that is about to be committed, without arrays."""
    assert record.end is not None
    losses = record.end.losses
    attrs = {**record.end.attrs, "hooks": {}, "files": {}, "finished": record.created, "complete": not losses}
    attrs |= {"reason": completeness.reason(losses), "missing": completeness.missing(losses)}
    attrs["checksum"] = crc32c(schema.canonical(attrs))
    Path(record.partial, "zarr.json").write_bytes(schema.dump(schema.root_document(attrs)))


@pytest.mark.parametrize("lost", [False, True])
def test_a_store_that_lacks_only_its_name_gets_it_when_its_writer_dies(
    stores: kit.Store, tmp_path: Path, done: list[tuple[str, str | None]], lost: bool
) -> None:
    """The files of other ranks are already removed, so waiting for them would be futile."""
    record = stores.open(tmp_path / "a.zarr", SPEC, ranks=2)
    stores.close(record, 40 if lost else 0, losses=[Loss.of(Cause.FELL_BEHIND, [[0, 40]])] if lost else [])
    until(lambda: record.state is State.COMMITTING)
    plant_document(record)
    os.kill(writer_pid(record), signal.SIGKILL)
    until(lambda: done)
    state = "incomplete" if lost else "complete"
    assert done == [(state, "writing fell behind (policy drop)" if lost else None)]
    assert [info.state for info in find_captures(tmp_path)] == [state] and (tmp_path / "a.zarr").exists()


@pytest.mark.parametrize("lost", [False, True])
def test_a_store_that_has_its_name_is_not_committed_again(
    stores: kit.Store, tmp_path: Path, done: list[tuple[str, str | None]], lost: bool
) -> None:
    """The writer died after renaming the store and before writing the line of the index."""
    record = stores.open(tmp_path / "a.zarr", SPEC, ranks=2)
    losses = [Loss.of(Cause.FELL_BEHIND, [[0, 40]])] if lost else []
    stores.close(record, 40, losses=losses) if lost else stores.close(record, 0)
    until(lambda: record.state is State.COMMITTING)
    os.kill(writer_pid(record), signal.SIGSTOP)  # otherwise it may see the document and commit the store itself
    plant_document(record)
    Path(record.partial).rename(tmp_path / "a.zarr")
    os.kill(writer_pid(record), signal.SIGKILL)
    assert stores.flush(PATIENCE)
    assert done == [("incomplete", "writing fell behind (policy drop)") if lost else ("complete", None)]
    assert [line["state"] for line in read_index(tmp_path)] == ["started", done[0][0]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zarr", "index.jsonl"]


def test_a_capture_whose_commit_kills_two_writers_fails(
    stores: kit.Store, tmp_path: Path, done: list[tuple[str, str | None]]
) -> None:
    """The capture may be the cause of the deaths. Its rows stay for a repair."""
    record = stores.open(tmp_path / "a.zarr", SPEC, ranks=2)
    stores.feed(record, {"q": kit.random_bits(SPEC, 40)}, 40)
    stores.close(record, 40)  # it now waits for rank 1
    until(lambda: record.state is State.COMMITTING)
    for number in (1, 2):
        committer = record.committer
        assert committer is not None and committer.name == f"writer process {number}"
        os.kill(committer.process.pid, signal.SIGKILL)
        until(lambda committer=committer: done or record.committer is not committer)
    assert done == [("failed", "writer process 2 died (signal 9)")]
    assert [outcome.state for outcome in repair(tmp_path)] == ["salvaged"]


def test_no_writer_holds_a_capture_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: list[tuple[str, str | None]]
) -> None:
    """Both of its writers release it, so that a repair can take it."""
    monkeypatch.setattr("dmi_connector.store.write.coordinator.writer_pool.SPREAD_BYTES", 1)
    p = kit.Store(writers=2, on_done=lambda record: done.append((record.state, record.reason)))
    try:
        both = [SPEC, replace(SPEC, name="k")]
        p.write(tmp_path / "a.zarr", both, 40)
        p.write(tmp_path / "a.zarr", both, 50)  # the name is taken
        assert [state for state, _ in done] == ["complete", "failed"]
        (tmp_path / "a.zarr").rename(tmp_path / "b.zarr")
        until(lambda: [outcome.state for outcome in repair(tmp_path / "a.zarr.partial")] != ["written"])
        assert (tmp_path / "a.zarr").exists()
    finally:
        p.shutdown()


def test_writers_ignore_an_interrupt(stores: kit.Store, tmp_path: Path, done: list[tuple[str, str | None]]) -> None:
    stores.write(tmp_path / "a.zarr", [SPEC], 30)
    record = stores.open(tmp_path / "b.zarr", SPEC)
    os.kill(writer_pid(record), signal.SIGINT)
    stores.feed(record, {"q": kit.random_bits(SPEC, 300)}, 300)
    stores.close(record, 300)
    assert stores.flush(PATIENCE) and done == [("complete", None)] * 2
    assert Path(f"/proc/{writer_pid(record)}/comm").read_text() == "dmi-writer\n"


def test_an_aborted_capture_leaves_no_store(stores: kit.Store, tmp_path: Path) -> None:
    record = stores.open(tmp_path / "a.zarr", SPEC)
    stores.feed(record, {"q": kit.random_bits(SPEC, 256)}, 256)
    stores.abort(record)
    assert stores.flush(PATIENCE) and record.state == "aborted"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.jsonl"]
    assert find_captures(tmp_path) == []
    with pytest.raises(RuntimeError, match="is aborted"):
        stores.close(record, 256)


def test_a_loss_named_at_close_makes_an_undamaged_incomplete_store(stores: kit.Store, tmp_path: Path) -> None:
    record = stores.open(tmp_path / "a.zarr", SPEC)
    values = {"q": kit.random_bits(SPEC, 300)}
    stores.feed(record, values, 300, skip=[128])
    stores.close(record, 300, losses=[Loss.of(Cause.FELL_BEHIND, [[128, 256]])])
    assert stores.flush(PATIENCE)
    with pytest.raises(CaptureIncomplete, match="writing fell behind"):
        open_capture(tmp_path / "a.zarr", timeout=0)
    assert verify_store(tmp_path / "a.zarr") == []


def test_rows_that_never_came_are_missing(stores: kit.Store, tmp_path: Path) -> None:
    """No loss is reported. The rows that arrived are compared with the length in the end message."""
    record = stores.open(tmp_path / "a.zarr", SPEC)
    stores.feed(record, {"q": kit.random_bits(SPEC, 300)}, 300, skip=[128])
    stores.close(record, 300)
    assert stores.flush(PATIENCE) and record.state == "incomplete"
    capture = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    assert capture.missing == [[128, 256]]
    assert capture.reason == "rows never came from the engine"


@pytest.mark.parametrize("named", [[], [[0, 128]], [[256, 300]], [[0, 128], [256, 300]]])
def test_verify_finds_missing_rows_that_no_loss_names(
    stores: kit.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: list[list[int]]
) -> None:
    """This also holds if adjacent rows are reported."""
    monkeypatch.setattr(RowCheck, "absent", lambda *_: [])
    record = stores.open(tmp_path / "a.zarr", SPEC)
    stores.feed(record, {"q": kit.random_bits(SPEC, 300)}, 300, skip=[128])
    stores.close(record, 300, losses=[Loss.of(Cause.FELL_BEHIND, named)] if named else [])
    assert stores.flush(PATIENCE)
    where = [f"q layer {layer} tokens 128 to 255" for layer in (0, 1)]
    assert [p.where for p in verify_store(tmp_path / "a.zarr")] == where


@pytest.mark.parametrize(("first", "count"), [(5, 128), (0, 129), (256, 44)])
def test_a_chunk_that_is_not_aligned_makes_the_capture_incomplete(
    stores: kit.Store, tmp_path: Path, first: int, count: int
) -> None:
    record = stores.open(tmp_path / "a.zarr", SPEC)
    stores.put(record, {"q": kit.random_bits(SPEC, first + count)}, first, count)
    stores.close(record, 128)  # shorter than the last chunk implies
    assert stores.flush(PATIENCE) and record.state == "incomplete"


def test_wrong_arguments_are_refused(stores: kit.Store, tmp_path: Path) -> None:
    record = stores.open(tmp_path / "a.zarr", SPEC)
    with pytest.raises(ValueError, match="2 token_ids were given for length 3"):
        stores.close(record, 3, ids=[1, 2])
    stores.abort(record)
    with pytest.raises(ValueError, match=r"must end in \.zarr"):
        stores.open(tmp_path / "a", SPEC)
    with pytest.raises(ValueError, match="multiple of chunk_tokens"):
        PayloadLayout((SPEC,), chunk_tokens=100)
    with pytest.raises(ValueError, match="codec 'gzip' is unknown: use one of none, lz4, zstd"):
        PayloadLayout((SPEC,), codec="gzip")
    with pytest.raises(ValueError, match="array names repeat"):
        PayloadLayout((SPEC, SPEC))
    with pytest.raises(ValueError, match="writers 0 is too few"):
        kit.Store(writers=0)


def test_open_capture_says_at_a_timeout_what_it_found(stores: kit.Store, tmp_path: Path) -> None:
    for seconds in (0.05, float("nan")):
        with pytest.raises(TimeoutError, match="it does not exist yet"):
            open_capture(tmp_path / "a.zarr", timeout=seconds)
    record = stores.open(tmp_path / "a.zarr", SPEC)
    until((tmp_path / "a.zarr.partial").exists)
    with pytest.raises(TimeoutError, match="still being written"):
        open_capture(tmp_path / "a.zarr", timeout=0)
    timer = threading.Timer(0.2, lambda: stores.close(record, 0))
    timer.start()
    assert open_capture(tmp_path / "a.zarr", timeout=PATIENCE).numpy("q").shape == (2, 0, 64)
    timer.join()
    (tmp_path / "other.zarr").mkdir()
    with pytest.raises(ValueError, match="is not a capture"):
        open_capture(tmp_path / "other.zarr")


def test_a_new_partial_directory_without_a_lock_counts_as_being_written(tmp_path: Path) -> None:
    partial = tmp_path / "a.zarr.partial"
    partial.mkdir()  # its writer has not locked it yet
    with pytest.raises(TimeoutError, match="still being written"):
        open_capture(tmp_path / "a.zarr", timeout=0)
    os.utime(partial, (time.time() - 60, time.time() - 60))
    with pytest.raises(TimeoutError, match="its writers ended"):
        open_capture(tmp_path / "a.zarr", timeout=0)


def test_a_writer_ends_with_its_engine_and_leaves_a_partial_store(tmp_path: Path) -> None:
    """It ends even if a fork of the engine still holds the pipe."""
    script = (
        "import os, sys, time\n"
        "from tests import storekit as kit\n"
        "from tests.unit.store import test_failures as t\n"
        "p = kit.Store(1 << 20)\n"
        "h = p.open(sys.argv[1], t.SPEC)\n"
        "p.feed(h, {'q': kit.random_bits(t.SPEC, 128)}, 128)\n"
        "while p.ring.used: time.sleep(0.01)\n"
        "fork = os.fork()\n"
        "if fork == 0: os.close(1); time.sleep(10 * kit.PATIENCE); os._exit(0)\n"
        "print(t.writer_pid(h), fork, flush=True)\n"
        "os._exit(1)\n"
    )
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", script, str(tmp_path / "a.zarr")]
    env = {**os.environ, "PYTHONPATH": str(root)}
    out = subprocess.run(command, env=env, stdout=subprocess.PIPE, timeout=PATIENCE).stdout
    pid, fork = map(int, out.split())
    try:
        until(lambda: not Path(f"/proc/{pid}/cmdline").exists())
    finally:
        os.kill(fork, signal.SIGKILL)
    assert (tmp_path / "a.zarr.partial/q/c/0/0/0").stat().st_size >= CHUNK_BYTES
    with pytest.raises(TimeoutError, match="dmi repair recovers"):
        open_capture(tmp_path / "a.zarr", timeout=0)
    [found] = find_captures(tmp_path)
    assert found.state == "unfinished" and "run dmi repair" in str(found.reason)
    assert [outcome.state for outcome in repair(tmp_path)] == ["salvaged"]
    assert [c.state for c in find_captures(tmp_path)] == ["incomplete"]


def test_open_capture_does_not_wait_for_a_capture_that_failed(tmp_path: Path) -> None:
    """The index reports the failure before the call or during it."""
    final = tmp_path / "a.zarr"

    def line(event: str, **more: object) -> None:
        append_index(str(tmp_path), {"event": event, "store": "a.zarr", **more})

    line("start", state="started")
    reason = "OSError: [Errno 28] No space left on device"
    timer = threading.Timer(0.3, lambda: line("finish", state="failed", reason=reason))
    began = time.monotonic()
    timer.start()
    with pytest.raises(CaptureFailed, match=r"a\.zarr failed: OSError.*; no rows are left: fix the cause") as caught:
        open_capture(final, timeout=PATIENCE)
    timer.join()
    assert time.monotonic() - began < PATIENCE / 2
    assert (caught.value.state, caught.value.reason, caught.value.path) == ("failed", reason, str(final))
    (tmp_path / "a.zarr.partial").mkdir()
    with pytest.raises(CaptureFailed, match=r"dmi repair recovers the rows in a\.zarr\.partial"):
        open_capture(final, timeout=PATIENCE)
    line("start", state="started")  # the latest line counts
    with pytest.raises(TimeoutError):
        open_capture(final, timeout=0)
    line("abort", state="aborted")
    with pytest.raises(CaptureFailed, match="was aborted"):
        open_capture(final, timeout=PATIENCE)
    line("remove", state="removed")
    with pytest.raises(CaptureFailed, match="was removed by dmi prune or retention"):
        open_capture(final, timeout=PATIENCE)
    line("upload", upload="done", url="s3://bucket/a.zarr", state="complete")
    line("remove", state="removed")
    with pytest.raises(CaptureFailed, match=r"after its upload; open s3://bucket/a\.zarr"):
        open_capture(final, timeout=PATIENCE)


def test_open_capture_does_not_wait_where_no_writer_is_left(tmp_path: Path) -> None:
    (tmp_path / "a.zarr.partial/q").mkdir(parents=True)
    began = time.monotonic()
    with pytest.raises(CaptureFailed, match="its writers ended and left") as caught:
        open_capture(tmp_path / "a.zarr", timeout=PATIENCE)
    assert caught.value.state == "unfinished" and time.monotonic() - began < PATIENCE / 2


def test_another_writer_may_take_over(stores: kit.Store, tmp_path: Path) -> None:
    """A writer that died leaves the partial store without a lock for a moment."""
    (tmp_path / "a.zarr.partial/q").mkdir(parents=True)
    timer = threading.Timer(0.5, lambda: stores.write(tmp_path / "a.zarr", [SPEC], 3))
    timer.start()
    assert open_capture(tmp_path / "a.zarr", timeout=PATIENCE).complete
    timer.join()


def test_a_long_index_is_read_once_while_a_store_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(50):
        append_index(str(tmp_path), {"event": "finish", "store": f"b{i}.zarr", "state": "failed"})
    append_index(str(tmp_path), {"event": "start", "store": "a.zarr", "state": "started"})
    parsed: list[bytes] = []
    loads = json.loads

    def counted(raw: bytes) -> object:
        parsed.append(raw)
        return loads(raw)

    monkeypatch.setattr(index_lines.json, "loads", counted)
    with pytest.raises(TimeoutError):
        open_capture(tmp_path / "a.zarr", timeout=0.3)
    assert len(parsed) == 1
