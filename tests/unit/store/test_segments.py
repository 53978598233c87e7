# SPDX-License-Identifier: Apache-2.0
"""Segments of a long capture that several writers share. The store equals that of one writer, even if a writer dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.arrays.array_writer import ArrayWriter
from dmi_connector.store.write.arrays.shard_writer import FileCache
from dmi_connector.store.write.child_process import Child
from dmi_connector.store.write.coordinator.capture_record import CaptureRecord
from dmi_connector.store.write.finish.repair import repair
from tests import storekit as kit
from tests.storekit import PATIENCE, until

SPEC = ArraySpec("q", "float32", (0, 1), 64)
LOGITS = ArraySpec("logits", "float32", (), 32)
ROWS = 1400
"""Number of rows: six segments of 256 rows, the last one short."""


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[kit.Store]:
    monkeypatch.setattr("dmi_connector.store.write.coordinator.writer_pool.SEGMENT_BYTES", 1)
    p = kit.Store(4 << 20, writers=3)
    yield p
    p.shutdown(PATIENCE)
    assert p.ring.used == 0


@pytest.fixture
def values() -> kit.Values:
    return {"q": kit.random_bits(SPEC, ROWS), "logits": kit.random_bits(LOGITS, 3)}


def pid_of(record: CaptureRecord, segment: int) -> int:
    return record.takers[segment][0].process.process.pid


def read(path: Path) -> Capture:
    assert verify_store(path) == []
    return open_capture(path, timeout=0, allow_incomplete=True)


def finish(directory: Path) -> dict[str, Any]:
    """The last line of the index."""
    line: dict[str, Any] = json.loads((directory / "index.jsonl").read_text().splitlines()[-1])
    return line


def test_segments_go_to_the_writers_in_turn(
    stores: kit.Store, tmp_path: Path, values: kit.Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []
    post = Child.post
    monkeypatch.setattr(Child, "post", lambda child, message: (sent.append(message), post(child, message))[1])
    record = stores.open(tmp_path / "a.zarr", SPEC, LOGITS)
    stores.feed(record, values, ROWS)
    stores.put_rows(record, "logits", values["logits"], 0, 9)
    writers = [[a.writer for a in record.takers[segment]] for segment in range(6)]
    assert sorted(writers[:3]) == sorted(writers[3:]) == [[0], [1], [2]]
    assert stores.pool.loads == [SPEC.token_bytes + a.tokens * LOGITS.token_bytes * (a.leader is None) for a in
                                 sorted(record.assignments, key=lambda a: a.writer)]  # fmt: skip
    stores.close(record, ROWS, {"logits": 3})
    assert stores.flush(PATIENCE) and record.state == "complete" and stores.pool.loads == [0, 0, 0]
    capture = read(tmp_path / "a.zarr")
    np.testing.assert_array_equal(kit.bits(capture.numpy("q")), values["q"])
    np.testing.assert_array_equal(kit.bits(capture.numpy("logits")), values["logits"])
    assert not list((tmp_path / "a.zarr").glob(".journal*"))
    assert finish(tmp_path)["bytes_raw"] == record.bytes_raw == ROWS * SPEC.token_bytes + 3 * LOGITS.token_bytes
    opens = [m for m in sent if m["type"] == "open"]
    assert [m["leads"] for m in opens] == [True, False, False] and sum(m["about"] is not None for m in opens) == 1
    assert all(m["token_ids"] for m in sent if m["type"] == "chunk"), (
        "each chunk must be in a journal with its token ids"
    )


def test_small_segments_and_parts_on_several_writers_stay_where_they_are(
    stores: kit.Store, tmp_path: Path, values: kit.Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmi_connector.store.write.coordinator.writer_pool.SPREAD_BYTES", 1)
    arrays = [replace(SPEC, name=name) for name in "qkv"]
    record = stores.open(tmp_path / "a.zarr", *arrays)
    stores.feed(record, dict.fromkeys("qkv", values["q"]), ROWS)
    assert len(record.assignments) == 3, "each writer must have one array"
    monkeypatch.setattr("dmi_connector.store.write.coordinator.writer_pool.SEGMENT_BYTES", 256 * SPEC.token_bytes + 1)
    other = stores.open(tmp_path / "b.zarr", SPEC)
    stores.feed(other, values, ROWS)
    assert len(other.assignments) == 1
    for one in (record, other):
        stores.close(one, ROWS)
    assert stores.flush(PATIENCE) and [record.state, other.state] == ["complete", "complete"]


@pytest.mark.parametrize("segment", [0, 1, 4])
def test_a_writer_that_dies_costs_only_its_unwritten_chunks(
    stores: kit.Store, tmp_path: Path, values: kit.Values, segment: int
) -> None:
    """The commit rebuilds the array from the segments of all writers, with the help of their journals."""
    record = stores.open(tmp_path / "a.zarr", SPEC, LOGITS)
    late = 256 * segment
    stores.feed(record, values, ROWS, skip=[late])
    stores.put_rows(record, "logits", values["logits"], 0, 9)
    until(lambda: stores.ring.used == 0)
    os.kill(pid_of(record, segment), signal.SIGSTOP)
    stores.put(record, values, late, 128)
    os.kill(pid_of(record, segment), signal.SIGKILL)
    stores.close(record, ROWS, {"logits": 3})
    assert stores.flush(PATIENCE) and record.state == "incomplete"
    capture = read(tmp_path / "a.zarr")
    assert capture.missing == [[late, late + 128]] and "died (signal 9)" in str(capture.reason)
    assert capture.hooks == ["q", "logits"] and capture.token_ids.tolist() == list(range(ROWS))
    there = np.setdiff1d(np.arange(ROWS), np.arange(late, late + 128))
    np.testing.assert_array_equal(kit.bits(capture.numpy("q"))[:, there], values["q"][:, there])
    np.testing.assert_array_equal(kit.bits(capture.numpy("logits")), values["logits"])
    assert finish(tmp_path)["bytes_raw"] == len(there) * SPEC.token_bytes + 3 * LOGITS.token_bytes


def test_later_segments_of_a_writer_that_died_go_to_others(
    stores: kit.Store, tmp_path: Path, values: kit.Values
) -> None:
    record = stores.open(tmp_path / "a.zarr", SPEC)
    for first in range(0, 768, 128):
        stores.put(record, values, first, 128)
    until(lambda: stores.ring.used == 0)
    os.kill(pid_of(record, 1), signal.SIGKILL)
    until(lambda: stores.stats()["writers_died"] == 1)
    for first in range(768, ROWS, 128):
        stores.put(record, values, first, min(128, ROWS - first))
    stores.close(record, ROWS)
    assert stores.flush(PATIENCE) and record.state == "incomplete"
    capture = read(tmp_path / "a.zarr")
    assert capture.missing == []
    np.testing.assert_array_equal(kit.bits(capture.numpy("q")), values["q"])


def test_a_repair_joins_the_journals_of_all_writers(stores: kit.Store, tmp_path: Path, values: kit.Values) -> None:
    """All processes were killed."""
    record = stores.open(tmp_path / "a.zarr", SPEC)
    stores.feed(record, values, ROWS)
    until(lambda: stores.ring.used == 0)
    assert len(list((tmp_path / "a.zarr.partial").glob(".journal*"))) == 3
    stores.captures._over = True  # the coordinator has ended too
    for assignment in record.assignments:
        assignment.process.process.kill()
    until(lambda: [outcome.state for outcome in repair(tmp_path / "a.zarr.partial")] != ["written"])
    capture = read(tmp_path / "a.zarr")
    assert capture.missing == [] and not capture.complete
    np.testing.assert_array_equal(kit.bits(capture.numpy("q")), values["q"])
    assert capture.token_ids.tolist() == list(range(ROWS))


def test_two_ranks_share_out_their_segments(stores: kit.Store, tmp_path: Path, values: kit.Values) -> None:
    other = kit.Store(4 << 20, writers=2)
    owners, records = (stores, other), []
    for rank, owner in enumerate(owners):
        records.append(owner.open(tmp_path / "a.zarr", replace(SPEC, shards=2, rank=rank), rank=rank, ranks=2))
        owner.feed(records[rank], values, ROWS)
    assert [len(record.assignments) for record in records] == [3, 2]
    for owner, record in zip(owners, records, strict=True):
        owner.close(record, ROWS)
    assert other.shutdown(PATIENCE) and stores.flush(PATIENCE)
    capture = read(tmp_path / "a.zarr")
    assert capture.complete
    np.testing.assert_array_equal(kit.bits(capture.numpy("q")), values["q"])


def test_an_aborted_capture_of_several_writers_leaves_nothing(
    stores: kit.Store, tmp_path: Path, values: kit.Values
) -> None:
    record = stores.open(tmp_path / "a.zarr", SPEC)
    stores.feed(record, values, ROWS)
    stores.abort(record)
    assert stores.flush(PATIENCE) and record.state == "aborted" and stores.pool.loads == [0, 0, 0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.jsonl"]


@pytest.mark.parametrize("leads", [True, False])
def test_rows_that_a_writer_of_segments_cannot_finish_are_missing(tmp_path: Path, leads: bool) -> None:
    """Without metadata, the array would be missing. With that of the leader, its rows would be read as zeros."""
    writer = ArrayWriter(str(tmp_path), PayloadLayout((SPEC,), 128, 256, "none"), [0], FileCache(8), None, leads)
    writer.chunk(np.zeros(SPEC.token_bytes * 128, "u1"), 256, 128)
    assert writer.close(300, {}) == {}
    assert [loss.rows for loss in writer.losses] == [() if leads else ((0, 300),)]
