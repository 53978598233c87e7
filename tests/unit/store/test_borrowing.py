# SPDX-License-Identifier: Apache-2.0
"""Rows that a store copies from an earlier store. The result equals a store without borrowed rows."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from dmi_connector import open_capture
from dmi_connector.codecs import CODECS
from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.client import OpenCapture, StoreClient
from dmi_connector.store.write.coordinator import borrowing, writer_pool
from dmi_connector.store.write.coordinator.capture_record import CaptureRecord, State
from dmi_connector.store.write.finish.repair import repair
from dmi_connector.store.write.finish.retention import prune, remove_store
from dmi_connector.store.write.messages import pack_array
from tests import storekit as kit

CHUNK, SEGMENT = 8, 16
ROWS = 24
"""Number of borrowed rows: one and a half shards."""
ARRAYS = (ArraySpec("q", "bfloat16", (0, 1, 2), 32), ArraySpec("embed", "float32", (), 16))
NARROW = (ArraySpec("q", "bfloat16", (0, 2), 32),)
GRID = {"chunk": CHUNK, "segment": SEGMENT}
LONG = {spec.name: kit.random_bits(spec, 60) for spec in ARRAYS}
IDS = np.arange(60) % 97


class Lost:
    """Records the missing borrowed rows that a coordinator reports."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def __call__(self, record: CaptureRecord, losses: list[Loss]) -> None:
        self.rows += [list(rows) for loss in losses for rows in loss.rows]


@pytest.fixture(scope="module", params=[1, 3])
def stores(request: pytest.FixtureRequest) -> Iterator[kit.Store]:
    """Stores with this number of writers. Arrays and segments are distributed over them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_pool, "SPREAD_BYTES", 1)
        patch.setattr(writer_pool, "SEGMENT_BYTES", 1)
        made = kit.Store(writers=request.param)
        yield made
        assert made.shutdown()


def open_source(stores: kit.Store, tmp_path: Path, **options: Any) -> CaptureRecord:
    return stores.open(tmp_path / "a.zarr", *ARRAYS, request_id="a", **GRID, **options)


def borrow_of(tmp_path: Path, rows: int = ROWS, ids: np.ndarray = IDS) -> dict[str, Any]:
    packed = pack_array(ids[:rows].astype("<i4"))
    return {"final": str(tmp_path / "a.zarr"), "request_id": "a", "rows": rows, "token_ids": packed}


def open_borrower(
    stores: kit.Store, tmp_path: Path, arrays: tuple[ArraySpec, ...] = ARRAYS, name: str = "b", **options: Any
) -> CaptureRecord:
    borrow = options.pop("borrow", None) or borrow_of(tmp_path)
    return stores.open(tmp_path / f"{name}.zarr", *arrays, request_id=name, borrow=borrow, **GRID, **options)


def values_of(arrays: tuple[ArraySpec, ...]) -> kit.Values:
    """The values of LONG for the layers of these arrays."""
    whole = {spec.name: spec for spec in ARRAYS}
    return {
        s.name: LONG[s.name][[whole[s.name].layers.index(layer) for layer in s.layers]] if s.layers else LONG[s.name]
        for s in arrays
    }


def finish(stores: kit.Store, record: CaptureRecord, length: int, first: int = 0) -> None:
    """Send the rows starting at `first`, and close the capture."""
    values = values_of(tuple(replace(spec, rank=0) for spec in record.layout.arrays))
    for at in range(first, length, CHUNK):
        stores.put(record, values, at, min(CHUNK, length - at), IDS)
    stores.close(record, length, ids=IDS[:length])


def computed(stores: kit.Store, tmp_path: Path, length: int, arrays: tuple[ArraySpec, ...], codec: str) -> Path:
    """Write the same store without borrowed rows."""
    record = stores.open(tmp_path / "computed.zarr", *arrays, codec=codec, request_id="c", **GRID)
    finish(stores, record, length)
    assert stores.flush(kit.PATIENCE)
    return tmp_path / "computed.zarr"


def check_equal(found: Path, expected: Path) -> None:
    """Check that both stores are valid and complete, and have equal file sizes and values in any chunk order."""
    assert verify_store(found) == []
    ours, theirs = read_attrs(found), read_attrs(expected)
    assert ours["complete"] and {p: n for p, (n, _) in ours["files"].items()} == {
        p: n for p, (n, _) in theirs["files"].items()
    }
    left, right = open_capture(found), open_capture(expected)
    for name in left:
        assert np.array_equal(kit.bits(left.numpy(name)), kit.bits(right.numpy(name))), name
    for name in ("token_ids", "positions", "phase"):
        assert np.array_equal(getattr(left, name), getattr(right, name)), name


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("live", [True, False], ids=["live", "finished"])
@pytest.mark.parametrize("arrays", [ARRAYS, NARROW], ids=["all", "narrow"])
def test_a_store_with_borrowed_rows_equals_a_computed_one(
    stores: kit.Store, tmp_path: Path, codec: str, live: bool, arrays: tuple[ArraySpec, ...]
) -> None:
    source = open_source(stores, tmp_path, codec=codec)
    if not live:
        finish(stores, source, 50)
        assert stores.flush(kit.PATIENCE)
    record = open_borrower(stores, tmp_path, arrays, codec=codec, attrs={"borrowed_tokens": ROWS})
    if live:  # the source's rows come after the opening, as from a GPU
        for at in range(0, ROWS, CHUNK):
            stores.put(source, LONG, at, CHUNK, IDS)
    finish(stores, record, 45, ROWS)
    if live:
        finish(stores, source, 50, ROWS)
    assert stores.flush(kit.PATIENCE)
    check_equal(tmp_path / "b.zarr", computed(stores, tmp_path, 45, arrays, codec))
    check_equal(tmp_path / "a.zarr", tmp_path / "a.zarr")
    assert read_attrs(tmp_path / "b.zarr")["borrowed_tokens"] == ROWS
    assert not os.path.exists(tmp_path / "b.zarr.partial")


def test_borrowers_of_borrowers_and_a_store_of_borrowed_rows_alone(stores: kit.Store, tmp_path: Path) -> None:
    source = open_source(stores, tmp_path)
    first = open_borrower(stores, tmp_path, name="b")
    second = stores.open(
        tmp_path / "d.zarr",
        *ARRAYS,
        request_id="d",
        borrow={**borrow_of(tmp_path, 40), "final": str(tmp_path / "b.zarr"), "request_id": "b"},
        **GRID,
    )
    for at in range(0, ROWS, CHUNK):
        stores.put(source, LONG, at, CHUNK, IDS)
    finish(stores, first, 45, ROWS)
    stores.close(second, 40, ids=IDS[:40])
    stores.captures.abandon(source, Loss.of(Cause.ENGINE_ENDED))
    assert stores.flush(kit.PATIENCE)
    check_equal(tmp_path / "d.zarr", computed(stores, tmp_path, 40, ARRAYS, "none"))


def test_the_source_stays_until_its_rows_are_copied(stores: kit.Store, tmp_path: Path) -> None:
    finish(stores, open_source(stores, tmp_path), 50)
    assert stores.flush(kit.PATIENCE)
    with standing(stores):
        record = open_borrower(stores, tmp_path)
        assert prune(tmp_path, keep_bytes=0) == [] and not remove_store(tmp_path / "a.zarr")
    kit.until(lambda: remove_store(tmp_path / "a.zarr"))
    stores.put(record, LONG, ROWS, CHUNK, IDS)
    stores.close(record, ROWS + CHUNK, ids=IDS[: ROWS + CHUNK])
    assert stores.flush(kit.PATIENCE)
    check_equal(tmp_path / "b.zarr", computed(stores, tmp_path, ROWS + CHUNK, ARRAYS, "none"))


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_source_is_not_finished_before_its_rows_are_copied(stores: kit.Store, tmp_path: Path, end: str) -> None:
    """A reader may remove the store at once. No row of the borrowers has arrived yet."""
    source = open_source(stores, tmp_path)
    for at in range(0, 50, CHUNK):
        stores.put(source, LONG, at, min(CHUNK, 50 - at), IDS)
    records = [open_borrower(stores, tmp_path, name=name) for name in "bd"]
    if end == "abort":
        stores.abort(source)
        kit.until(lambda: not (tmp_path / "a.zarr.partial").exists())
    else:
        stores.close(source, 50, ids=IDS[:50])
        kit.until((tmp_path / "a.zarr").exists)
        shutil.rmtree(tmp_path / "a.zarr")
    for record in records:
        finish(stores, record, 50, ROWS)
    assert stores.flush(kit.PATIENCE) and not stores.captures._borrowing._ending
    for name in "bd":
        check_equal(tmp_path / f"{name}.zarr", computed(stores, tmp_path / name, 50, ARRAYS, "none"))


def test_rows_are_taken_from_where_the_source_takes_them(stores: kit.Store, tmp_path: Path) -> None:
    """Otherwise each copy would wait for that of the source, longer with each borrower if writing is behind."""
    source = open_source(stores, tmp_path)
    first = open_borrower(stores, tmp_path, name="b")
    of_first = {"final": str(tmp_path / "b.zarr"), "request_id": "b"}
    second = open_borrower(stores, tmp_path, name="d", borrow={**borrow_of(tmp_path), **of_first})
    longer = open_borrower(stores, tmp_path, name="e", borrow={**borrow_of(tmp_path, 32), **of_first})
    known = stores.captures._borrowing._open
    assert known[second.number].source is source and known[longer.number].source is first
    for at in range(0, 50, CHUNK):
        stores.put(source, LONG, at, min(CHUNK, 50 - at), IDS)
    finish(stores, first, 50, ROWS)
    finish(stores, longer, 50, 32)
    for name in "be":
        kit.until((tmp_path / f"{name}.zarr").exists)
    shutil.rmtree(tmp_path / "b.zarr")
    assert not (tmp_path / "a.zarr").exists()
    stores.close(source, 50, ids=IDS[:50])
    kit.until((tmp_path / "a.zarr").exists)
    shutil.rmtree(tmp_path / "a.zarr")
    finish(stores, second, 50, ROWS)
    assert stores.flush(kit.PATIENCE)
    for name in "de":
        check_equal(tmp_path / f"{name}.zarr", computed(stores, tmp_path / name, 50, ARRAYS, "none"))


@contextmanager
def standing(stores: kit.Store) -> Iterator[None]:
    """Stop the writers (SIGSTOP) during the `with` block."""
    for process in stores.pool.processes:
        os.kill(process.pid, signal.SIGSTOP)
    yield
    for process in stores.pool.processes:
        os.kill(process.pid, signal.SIGCONT)


def damage(tmp_path: Path, how: str) -> None:
    """Damage the finished source."""
    shard = tmp_path / "a.zarr" / "q" / "c" / "0" / "0" / "0"
    if how == "gone":
        shutil.rmtree(tmp_path / "a.zarr")
    elif how == "file":
        shard.unlink()
    else:
        data = bytearray(shard.read_bytes())
        data[5] ^= 1
        shard.write_bytes(data)


def test_the_reason_is_that_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def hold(error: OSError) -> str:
        monkeypatch.setattr(borrowing, "hold_source", Mock(side_effect=error))
        known = borrowing.Borrowed(Mock(), "a.zarr", "r", 16, np.zeros(16, "<i4"), None)
        known.hold()
        return known.error

    assert hold(FileNotFoundError(2, "No such file")) == "it is gone"
    assert "Too many open files" in hold(OSError(24, "Too many open files"))


@pytest.mark.parametrize(
    ("how", "missing", "reason"),
    [
        ("gone", [[0, ROWS]], "could not be copied from a.zarr (it is gone)"),
        ("file", [[0, SEGMENT]], "could not be copied from a.zarr ("),
        ("bit", [[0, CHUNK]], "could not be copied from a.zarr (q/c/0/0/0: the chunk of row 0 is damaged)"),
        ("other", [[0, ROWS]], "could not be copied from a.zarr (another store has its name)"),
        ("tokens", [[0, ROWS]], "could not be copied from a.zarr (it has other tokens)"),
        ("lacking", [[8, 16]], "could not be copied from a.zarr (it lacks these rows)"),
    ],
)
@pytest.mark.parametrize("opened", [False, True], ids=["before", "after"])
def test_rows_that_the_source_does_not_have_are_missing(
    tmp_path: Path, how: str, missing: list[list[int]], reason: str, opened: bool
) -> None:
    """The test ids "before" and "after" say when the borrower is opened. No lock prevents manual removal of files."""
    lost = Lost()
    stores = kit.Store()
    stores.captures._borrowing._on_lost = lost
    source = open_source(stores, tmp_path)
    skip = [8] if how == "lacking" else []
    stores.feed(source, LONG, 50, skip, IDS)
    stores.close(source, 50, ids=IDS[:50])
    assert stores.flush(kit.PATIENCE)
    borrow = borrow_of(tmp_path, ids=IDS + 1 if how == "tokens" else IDS)
    borrow["request_id"] = "else" if how == "other" else "a"
    by_hand = how in ("gone", "file", "bit")
    if by_hand and not opened:
        damage(tmp_path, how)
    with standing(stores):
        record = open_borrower(stores, tmp_path, borrow=borrow)
        if by_hand and opened:
            damage(tmp_path, how)
    ids = np.concatenate([(IDS + 1)[:ROWS], IDS[ROWS:45]]) if how == "tokens" else IDS[:45]
    for at in range(ROWS, 45, CHUNK):
        stores.put(record, LONG, at, min(CHUNK, 45 - at), IDS)
    stores.close(record, 45, ids=ids)
    assert stores.flush(kit.PATIENCE)
    attrs = read_attrs(tmp_path / "b.zarr")
    if how == "gone" and opened:
        assert "could not be copied from a.zarr (" in attrs["reason"]
    else:
        assert reason in attrs["reason"]
    assert attrs["missing"] == missing and not attrs["complete"]
    assert sorted(map(tuple, lost.rows))[0][0] == missing[0][0] and max(stop for _, stop in lost.rows) == missing[-1][1]
    assert record.state is State.INCOMPLETE
    there = open_capture(tmp_path / "b.zarr", allow_incomplete=True)
    rows = np.ones(45, bool)
    for start, stop in missing:
        rows[start:stop] = False
    assert np.array_equal(there.numpy("q")[:, rows], kit.to_float(LONG["q"], "bfloat16")[:, :45][:, rows])
    if how in ("other", "tokens"):
        assert not there.numpy("q")[:, ~rows].any(), "rows of another request must not be copied"
    assert verify_store(tmp_path / "b.zarr") == []
    assert stores.shutdown()


def test_rows_that_a_running_source_lacks_are_missing(stores: kit.Store, tmp_path: Path) -> None:
    source = open_source(stores, tmp_path)
    stores.feed(source, LONG, ROWS, [8], IDS)
    record = open_borrower(stores, tmp_path)
    finish(stores, record, 45, ROWS)
    finish(stores, source, 50, ROWS)
    assert stores.flush(kit.PATIENCE)
    attrs = read_attrs(tmp_path / "b.zarr")
    assert attrs["missing"] == [[8, 16]] and "could not be copied from a.zarr" in attrs["reason"]
    assert read_attrs(tmp_path / "a.zarr")["missing"] == [[8, 16]]


@pytest.mark.parametrize("dies", ["", "source", "borrower"])
def test_rows_are_copied_once_the_writer_of_the_source_has_written_them(
    tmp_path: Path, dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SPREAD_BYTES", "SEGMENT_BYTES"):
        monkeypatch.setattr(writer_pool, name, 1 << 20)  # each capture has one writer
    stores = kit.Store(writers=2)
    source = open_source(stores, tmp_path)
    record = open_borrower(stores, tmp_path)
    [one], [other] = source.assignments, record.assignments
    assert one.process is not other.process
    kit.until((tmp_path / "a.zarr.partial").exists)
    os.kill(one.process.pid, signal.SIGSTOP)
    for at in range(0, ROWS, CHUNK):
        stores.put(source, LONG, at, CHUNK, IDS)
    finish(stores, record, 45, ROWS)
    known = stores.captures._borrowing._open[record.number]
    assert record.state is State.CLOSING and known.marks == {one.process} and not known.posted
    with pytest.raises(RuntimeError, match="it takes no more rows and cannot be closed"):
        stores.close(record, 45, ids=IDS[:45])
    if dies == "borrower":
        os.kill(other.process.pid, signal.SIGKILL)
        kit.until(lambda: record.state is State.COMMITTING)
    os.kill(one.process.pid, signal.SIGKILL if dies == "source" else signal.SIGCONT)
    kit.until(lambda: record.state in (State.COMPLETE, State.INCOMPLETE))
    if dies == "borrower":
        attrs = read_attrs(tmp_path / "b.zarr")
        rows = (attrs["missing"] or [[0, 45]])[0]
        assert "writer process 2 died" in attrs["reason"] and rows[0] == 0 and rows[1] >= ROWS
    elif dies:
        attrs = read_attrs(tmp_path / "b.zarr")
        assert attrs["missing"] == [[0, ROWS]] and "could not be copied from a.zarr (" in attrs["reason"]
    else:
        check_equal(tmp_path / "b.zarr", computed(stores, tmp_path, 45, ARRAYS, "none"))
    stores.close(source, ROWS, ids=IDS[:ROWS])
    assert stores.shutdown() and stores.stats()["complete"] + stores.stats()["incomplete"] >= 2
    lines = [json.loads(line) for line in (tmp_path / "index.jsonl").read_text().splitlines()]
    assert sum((line["event"], line["store"]) == ("finish", "b.zarr") for line in lines) == 1


def test_an_aborted_borrower_leaves_nothing_and_lets_its_source_go(stores: kit.Store, tmp_path: Path) -> None:
    finish(stores, open_source(stores, tmp_path), 50)
    assert stores.flush(kit.PATIENCE)
    with standing(stores):
        record = open_borrower(stores, tmp_path)
        assert not remove_store(tmp_path / "a.zarr")
        stores.abort(record)
    assert stores.flush(kit.PATIENCE)
    assert not (tmp_path / "b.zarr").exists() and remove_store(tmp_path / "a.zarr")


def test_a_repair_finds_borrowed_rows(tmp_path: Path) -> None:
    stores = kit.Store()
    finish(stores, open_source(stores, tmp_path), 50)
    assert stores.flush(kit.PATIENCE)
    record = open_borrower(stores, tmp_path, attrs={"borrowed_tokens": ROWS})
    stores.put(record, LONG, ROWS, CHUNK, IDS)
    kit.until(lambda: stores.captures._borrowing._open[record.number].copied)
    kit.until(lambda: not stores.ring.used)
    for process in stores.pool.processes:
        process.process.kill()
    stores.shutdown(1)
    repair(tmp_path)
    attrs = read_attrs(tmp_path / "b.zarr")
    assert attrs["missing"] == [] and attrs["borrowed_tokens"] == ROWS and attrs["num_tokens"] == ROWS + CHUNK
    found = open_capture(tmp_path / "b.zarr", allow_incomplete=True)
    assert np.array_equal(found.token_ids, IDS[: ROWS + CHUNK])
    assert np.array_equal(found.numpy("q"), kit.to_float(LONG["q"], "bfloat16")[:, : ROWS + CHUNK])


def test_ranks_copy_their_own_files(stores: kit.Store, tmp_path: Path) -> None:
    """The arrays are slices of the width, and layers that ranks divide."""
    whole = (
        ArraySpec("q", "bfloat16", (0, 1, 2), 32, 2),
        ArraySpec("ln1", "bfloat16", (0, 1, 2), 32, 2, part_layers=2),
    )
    values = {spec.name: LONG["q"][:, :50] for spec in whole}
    for name in ("a", "b"):
        records = []
        for rank in range(2):
            mine = tuple(replace(spec, rank=rank) for spec in whole)
            borrow = borrow_of(tmp_path) if name == "b" else None
            records.append(
                stores.open(
                    tmp_path / f"{name}.zarr", *mine, request_id=name, rank=rank, ranks=2, borrow=borrow, **GRID
                )
            )
        for record in records:
            for at in range(0 if name == "a" else ROWS, 50, CHUNK):
                stores.put(record, values, at, min(CHUNK, 50 - at), IDS)
            stores.close(record, 50, ids=IDS[:50])
    assert stores.flush(kit.PATIENCE)
    check_equal(tmp_path / "b.zarr", tmp_path / "a.zarr")


def test_rows_that_are_not_whole_chunks_are_refused(stores: kit.Store, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="20 rows to borrow with 20 token ids, in chunks of 8"):
        open_borrower(stores, tmp_path, borrow=borrow_of(tmp_path, 20))
    assert stores.stats()["open"] == 0


def test_the_engine_hears_of_stores_that_end_and_of_rows_that_cannot_be_borrowed(tmp_path: Path) -> None:
    client = StoreClient(1 << 20)
    layout = client.register(PayloadLayout((kit.Q,), segment_tokens=256, codec="none"))
    attrs = {"prompt_len": 250, "model": "tiny"}
    borrow = {"final": str(tmp_path / "a.zarr"), "request_id": "a", "rows": 128, "token_ids": pack_array(kit.IDS[:128])}

    def opened(name: str, borrow: dict[str, Any] | None = borrow) -> OpenCapture:
        return client.open_capture(layout, str(tmp_path / f"{name}.zarr"), attrs, name, borrow=borrow)

    source, borrower = opened("a", None), opened("b")
    for first in (0, 128, 256):
        kit.send(client, source, first)
    for first in (128, 256):
        kit.send(client, borrower, first)
    for capture in (source, borrower):
        capture.close(300, token_ids=kit.IDS)
    assert client.flush(kit.PATIENCE)
    ended, lost = client.take_news()
    assert ended == {source.path: True, borrower.path: True} and lost == {}
    assert np.array_equal(open_capture(tmp_path / "b.zarr").numpy("q"), kit.VALUES.view("f4"))
    shutil.rmtree(tmp_path / "a.zarr")
    late = opened("c")
    kit.send(client, late, 128)
    found: dict[str, list[Loss]] = {}
    kit.until(lambda: found.update(client.take_news()[1]) or found)
    assert {row for loss in found[late.path] for row in loss.rows} == {(0, 128)}
    kit.send(client, late, 256)
    late.close(300, token_ids=kit.IDS)
    assert client.flush(kit.PATIENCE) and client.take_news()[0] == {late.path: False}
    assert read_attrs(tmp_path / "c.zarr")["missing"] == [[0, 128]]
    assert client.shutdown(kit.PATIENCE)
