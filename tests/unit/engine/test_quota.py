# SPDX-License-Identifier: Apache-2.0
"""Limits refuse captures with a reason while requests continue. Retention removes old stores that are not in use."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmi_connector.captures.capture import open_capture
from dmi_connector.cli.main import main
from dmi_connector.engine.scheduler import quota as quota_module
from dmi_connector.engine.scheduler.quota import FORGET_S, Quota, RequestBytes
from dmi_connector.engine.sizing import write_settings
from dmi_connector.layout import ArraySpec
from dmi_connector.option_values import OptionError
from dmi_connector.settings import ServerOptions
from dmi_connector.store.format import completeness
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.format.locks import PartialLock, claim, share
from dmi_connector.store.format.paths import make_directory
from dmi_connector.store.read.index import find_captures
from dmi_connector.store.read.index_lines import read_index
from dmi_connector.store.write.client import StoreClient
from dmi_connector.store.write.finish.commit import append_index
from dmi_connector.store.write.finish.retention import (
    RECENT_S,
    REMOVING_SUFFIX,
    USAGE_NAME,
    Keeper,
    StoreSizes,
    Usage,
    finished_stores,
    measure,
    prune,
    read_usage,
    remove_store,
    write_usage,
)
from dmi_connector.store.write.settings import WriteSettings
from tests import storekit as kit
from tests.probekit import save_probe
from tests.trackerkit import DIMS, ask, generate, make_tracker

Q = ArraySpec("q", "float32", (0, 1), 16)
ROOT = '{"attributes": {"dmi": {}}}'

# ---- one request ------------------------------------------------------------------------------------------------

counts = st.integers(0, 200)


@given(counts, counts, st.integers(1, 50), counts, counts)
def test_end_within_a_limit_is_the_last_position_that_fits(
    start: int, prompt: int, row: int, sample: int, limit: int
) -> None:
    size = RequestBytes(start, max(prompt - 1, start), row, sample)
    end = size.end_within(limit)
    assert size.until(end) <= limit < size.until(end + 1)


def run(tracker: Any, kv: object, prompt: int, count: int) -> tuple[list[Any], dict[str, Any]]:
    request = ask(kv, prompt)
    tracker.on_new_request(request)
    steps, response = generate(tracker, request, count)
    assert response is not None
    return steps, response


ROW = 2 * 3 * 64 * 4 + 9  # bytes per row: 2 hooks, 3 layers, width 64, float32, and the token arrays
LOGITS = 512 * 4


def test_a_prompt_beyond_max_request_bytes_is_refused(tmp_path: Path) -> None:
    tracker = make_tracker(tmp_path, max_request_bytes=40 * ROW + LOGITS - 1)
    _, response = run(tracker, {}, 40, 3)
    assert response.keys() == {"dmi_error"}
    for word in ("max_request_bytes", str(40 * ROW + LOGITS), str(40 * ROW + LOGITS - 1), "fewer"):
        assert word in response["dmi_error"]
    for narrowed in ({"tokens": [1, None]}, {"layers": [0]}, {"hooks": "resid_pre"}, {"tokens": [0, 39]}):
        assert "dmi_store" in run(tracker, {"dmi": narrowed}, 40, 3)[1], narrowed
    assert "dmi_store" in run(tracker, {}, 39, 3)[1]
    just = make_tracker(tmp_path, max_request_bytes=40 * ROW + LOGITS)
    assert "dmi_store" in run(just, {}, 40, 1)[1], "a request of exactly the limit must be captured"


def test_generated_tokens_beyond_max_request_bytes_are_missing_rows(tmp_path: Path) -> None:
    """Rows up to the limit are captured, the others are missing, in the store and in the response."""
    tracker = make_tracker(tmp_path, max_request_bytes=50 * ROW + 11 * LOGITS + ROW)
    steps, response = run(tracker, {"include_output_tokens": True}, 40, 30)  # 40 + 30 tokens, 69 rows
    close = tracker.pending_closes[0]
    rows = [c for step in steps for c in step.chunks] + close.rows
    assert sorted(r for c in rows for r in range(c.first, c.first + len(c.slots))) == list(range(50))
    assert [s.position for step in steps for s in step.samples] == list(range(39, 50))
    assert (close.length, close.samples, len(close.token_ids)) == (50, 11, 50)
    assert [loss.cause for loss in close.losses] == [Cause.QUOTA]
    assert completeness.missing(close.losses) == response["dmi_missing"] == [[50, 69]]
    assert completeness.reason(close.losses) == response["dmi_reason"]
    assert response["dmi_reason"].startswith("max_request_bytes: ") and "50 of 69" in response["dmi_reason"]
    _, whole = run(tracker, {"include_output_tokens": True}, 40, 10)
    assert "dmi_missing" not in whole and tracker.pending_closes[-1].losses == []


# ---- all requests -----------------------------------------------------------------------------------------------


def test_a_request_that_is_refused_for_another_reason_takes_no_bytes(tmp_path: Path) -> None:
    risk = str(save_probe(tmp_path / "risk.safetensors", "mlp_out", (1,), DIMS.hidden, 1))
    hooks = "resid_pre,mlp_out,logits,probe.risk"
    tracker = make_tracker(tmp_path / "stores", hooks, probes={"risk": risk}, max_total_bytes=60 * ROW + LOGITS)
    for _ in range(5):
        assert "logits" in run(tracker, {"dmi": {"keep_if": "max(risk) > 1"}}, 40, 3)[1]["dmi_error"]
    assert "dmi_store" in run(tracker, {}, 40, 3)[1]
    assert "max_total_bytes" in run(tracker, {}, 40, 3)[1]["dmi_error"], "the limit must allow exactly one capture"


def test_a_capture_beyond_max_total_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts stores from before the start, captures admitted since then, and the coordinator's measurements."""
    monkeypatch.setattr("dmi_connector.engine.scheduler.quota.REFRESH_S", 3600)
    stores = tmp_path / "stores"
    (stores / "old.zarr").mkdir(parents=True)
    (stores / "old.zarr" / "data").write_bytes(b"x" * 5000)
    (stores / "new.zarr.partial").mkdir()
    (stores / "new.zarr.partial" / "data").write_bytes(b"x" * 3000)
    (tmp_path / "root" / "deep" / "c.zarr").mkdir(parents=True)
    (tmp_path / "root" / "deep" / "c.zarr" / "data").write_bytes(b"x" * 1000)
    options = {"store_dir": str(stores), "max_total_bytes": 12_000, "save_path_roots": [str(tmp_path / "root")]}
    quota = Quota(ServerOptions.parse(options))
    quota.admit(str(stores / "1.zarr"), 2000)
    with pytest.raises(OptionError, match=r"^max_total_bytes: stores take 11000 bytes, 1001 more .* 12000; remove"):
        quota.admit(str(stores / "2.zarr"), 1001)
    quota.admit(str(stores / "2.zarr"), 1000)
    write_usage(str(stores), Usage(4000, {}, [str(stores / "1.zarr")], time.time()))
    with pytest.raises(OptionError):
        quota.admit(str(stores / "3.zarr"), 1)  # the file is only read at intervals
    quota._read_at -= 3601
    with pytest.raises(OptionError, match="stores take 5000 bytes, 7001 more"):
        quota.admit(str(stores / "3.zarr"), 7001)
    quota.admit(str(stores / "3.zarr"), 7000)
    with pytest.raises(OptionError, match="12000 bytes, 1 more"):
        quota.admit(str(stores / "4.zarr"), 1)


def test_a_capture_that_is_being_written_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts with the bytes of its prompt, or of its files if these are larger, until it is measured as finished."""
    monkeypatch.setattr("dmi_connector.engine.scheduler.quota.REFRESH_S", 0)
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    directory = tmp_path / "link"
    options = ServerOptions.parse({"store_dir": str(directory), "max_total_bytes": 10_000})
    quota, store, partial = Quota(options), directory / "a.zarr", directory / "a.zarr.partial"
    keeper, clock = Keeper(str(directory), measure=True), {"ahead": 0.0}
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + clock["ahead"])

    def room() -> int:
        """The bytes that can still be admitted, after the coordinator has measured."""
        time.sleep(0.002)
        keeper.round()
        with pytest.raises(OptionError) as refused:
            quota.admit(str(directory / "big.zarr"), 10_001)
        return 10_000 - int(re.search(r"take (\d+) bytes", str(refused.value))[1])  # type: ignore[index]

    assert room() == 10_000
    quota.admit(str(store), 4000)
    assert [room(), room()] == [6000, 6000], "no file of the capture exists yet"
    lock = PartialLock(str(partial))
    try:
        (partial / "data").write_bytes(b"x" * 1000)
        assert room() == 6000
        (partial / "data").write_bytes(b"x" * 5000)
        assert room() == 5000
        quota.ended(str(store), nothing=False)
        assert [room(), room()] == [5000, 5000], "the capture is still being written"
        (partial / "zarr.json").touch()
        partial.rename(store)
    finally:
        lock.release()
    assert room() == 5000, "the finished store must count with its bytes"
    shutil.rmtree(store)
    assert room() == 10_000
    for name in ("never", "late", "given-up"):
        quota.admit(str(directory / f"{name}.zarr"), 2000)
    quota.ended(str(directory / "never.zarr"), nothing=True)
    assert room() == 6000, "a request that ended without rows must not count"
    (directory / "given-up.zarr.partial").mkdir()
    (directory / "given-up.zarr.partial" / "data").write_bytes(b"x" * 100)
    assert room() == 7900, "a store without a writer must count with its bytes"
    quota.ended(str(directory / "late.zarr"), nothing=False)
    clock["ahead"] = 0.9 * FORGET_S
    assert room() == 7900, "its rows may still wait for a slow disk"
    clock["ahead"] = 1.1 * FORGET_S
    assert room() == 9900
    (directory / USAGE_NAME).write_text('{"bytes": 1, "measured": "2026"}')
    assert read_usage(str(directory)) is None, "a file of another version must be ignored"
    for damaged in ("", "{", "[]", "null", "3", "[" * 100_000):
        (directory / USAGE_NAME).write_text(damaged)
        assert read_usage(str(directory)) is None, "a damaged file must be ignored"


def burst(directory: Path, quota: Quota, count: int) -> None:
    """Admit captures of 2000 bytes, and write their stores of 500 bytes each."""
    directory.mkdir(exist_ok=True)
    for number in range(count):
        quota.admit(str(directory / f"{number}.zarr"), 2000)
    for number in range(count):
        store = directory / f"{number}.zarr"
        store.mkdir()
        (store / "data").write_bytes(b"x" * (500 - len(ROOT)))
        (store / "zarr.json").write_text(ROOT)
        append_index(str(directory), {"event": "start", "store": store.name})
        append_index(str(directory), {"event": "finish", "store": store.name, "state": "complete"})
        quota.ended(str(store), nothing=False)


def test_finished_captures_count_once_after_any_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usage file is read when a request arrives, which may be more than a minute after the last one."""
    monkeypatch.setattr("dmi_connector.engine.scheduler.quota.REFRESH_S", 0)
    now, ahead = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: now() + ahead)
    for pause in (0.1, 0.9 * RECENT_S, 1.1 * RECENT_S, 5 * RECENT_S):
        stores = tmp_path / f"after-{pause}"
        quota = Quota(ServerOptions.parse({"store_dir": str(stores), "max_total_bytes": 10_000}))
        stores.mkdir()
        keeper = Keeper(str(stores), measure=True)
        burst(stores, quota, 5)
        keeper.round()
        ahead += pause
        keeper.round()
        quota.admit(str(stores / "more.zarr"), 7500)
        with pytest.raises(OptionError, match="stores take 10000 bytes, 1 more"):
            quota.admit(str(stores / "other.zarr"), 1)


def test_the_newest_note_counts_after_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmi_connector.engine.scheduler.quota.REFRESH_S", 0)
    now, ahead = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: now() + ahead)
    keeper = Keeper(str(tmp_path), measure=True)
    keeper.round()
    quota = Quota(ServerOptions.parse({"store_dir": str(tmp_path), "max_total_bytes": 10_000}))
    keeper.round()
    quota.admit(str(tmp_path / "before.zarr"), 4000)
    quota.ended(str(tmp_path / "before.zarr"), nothing=False)
    ahead = -3600.0
    burst(tmp_path, quota, 3)
    prune(tmp_path, keep_bytes=0)
    keeper.round()
    quota.admit(str(tmp_path / "more.zarr"), 5900)
    ahead += 1.1 * FORGET_S
    keeper.round()
    quota.admit(str(tmp_path / "again.zarr"), 4000)


def test_the_note_of_an_earlier_server_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota measures the stores itself when it is created."""
    monkeypatch.setattr("dmi_connector.engine.scheduler.quota.REFRESH_S", 0)
    write_usage(str(tmp_path), Usage(9000, {}, [], time.time() - 3600))
    quota = Quota(ServerOptions.parse({"store_dir": str(tmp_path), "max_total_bytes": 10_000}))
    quota.admit(str(tmp_path / "a.zarr"), 6000)
    write_usage(str(tmp_path), Usage(3000, {}, [], time.time() - 7200))
    with pytest.raises(OptionError, match="stores take 9000 bytes, 1001 more"):
        quota.admit(str(tmp_path / "b.zarr"), 1001)


@pytest.mark.parametrize("measured", [True, False])
def test_removed_captures_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: bool) -> None:
    """With upload_remove_local, stores may also be written and removed between two measurements."""
    monkeypatch.setattr("dmi_connector.engine.scheduler.quota.REFRESH_S", 0)
    quota = Quota(ServerOptions.parse({"store_dir": str(tmp_path), "max_total_bytes": 10_000}))
    keeper = Keeper(str(tmp_path), measure=True)
    burst(tmp_path, quota, 5)
    if measured:
        keeper.round()
    prune(tmp_path, keep_bytes=1000)
    shutil.rmtree(tmp_path / "4.zarr")
    keeper.round()
    quota.admit(str(tmp_path / "more.zarr"), 9500)
    with pytest.raises(OptionError, match="stores take 10000 bytes, 1 more"):
        quota.admit(str(tmp_path / "other.zarr"), 1)


def test_a_capture_that_begins_anew_counts(tmp_path: Path) -> None:
    keeper = Keeper(str(tmp_path), measure=True)
    for event in ("start", "finish", "start"):
        append_index(str(tmp_path), {"event": event, "store": "a.zarr"})
    keeper.round()
    assert read_usage(str(tmp_path)).over == []  # type: ignore[union-attr]
    append_index(str(tmp_path), {"event": "abort", "store": "a.zarr"})
    keeper.round()
    assert read_usage(str(tmp_path)).over == [str(tmp_path / "a.zarr")]  # type: ignore[union-attr]


def test_captures_that_would_leave_less_than_min_free_bytes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"blocks": 100}
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free["blocks"], f_frsize=1000, f_fsid=7))
    tracker = make_tracker(tmp_path / "stores", min_free_bytes=90_000, hooks="resid_pre@0")
    row = 64 * 4 + 9
    assert "dmi_store" in run(tracker, {}, 10_000 // row, 1)[1]
    _, response = run(tracker, {}, 10_000 // row + 1, 1)
    assert response["dmi_error"].startswith("min_free_bytes: 100000 bytes are free")
    free["blocks"] = 1
    assert "dmi_error" in run(tracker, {}, 2, 1)[1]
    free["blocks"] = 1000
    assert "dmi_store" in run(tracker, {}, 2, 1)[1], "there is enough space again"


def test_a_burst_leaves_min_free_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that captures in progress will still write are not free, on their own file system."""
    monkeypatch.setattr("dmi_connector.engine.scheduler.quota.REFRESH_S", 0)
    free = {str(tmp_path): 10_000, str(tmp_path / "other"): 3000}
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_bavail=free[path], f_frsize=1, f_fsid=list(free).index(path) + 7)
    )
    options = ServerOptions.parse({"store_dir": str(tmp_path), "min_free_bytes": 1000})
    assert write_settings(options, 0, False).keep["measure"], "the coordinator must measure the written bytes"
    quota, keeper = Quota(options), Keeper(str(tmp_path), measure=True)
    burst(tmp_path, quota, 4)
    with pytest.raises(OptionError) as refused:
        quota.admit(str(tmp_path / "more.zarr"), 1001)
    assert str(refused.value).startswith(
        f"min_free_bytes: 10000 bytes are free in {tmp_path}; running captures reserve 8000, this capture "
        "needs 1001, and 1000 must stay free"
    )
    quota.admit(str(tmp_path / "other" / "more.zarr"), 2000)
    with pytest.raises(
        OptionError, match=r"3000 bytes are free .*; running captures reserve 2000, this capture needs 1,"
    ):
        quota.admit(str(tmp_path / "other" / "again.zarr"), 1)
    free[str(tmp_path)] -= 4 * 500
    time.sleep(0.002)
    keeper.round()
    quota.admit(str(tmp_path / "more.zarr"), 7000)
    with pytest.raises(OptionError, match=r"8000 bytes are free .*; running captures reserve 7000"):
        quota.admit(str(tmp_path / "last.zarr"), 1)
    quota.ended(str(tmp_path / "more.zarr"), nothing=True)
    quota.admit(str(tmp_path / "last.zarr"), 7000)


def test_without_limits_neither_free_space_nor_stores_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("statvfs", "scandir"):
        monkeypatch.setattr(os, name, lambda *_: pytest.fail("asked without need"))
    tracker = make_tracker(tmp_path)
    assert "dmi_store" in run(tracker, {}, 20, 1)[1]


def test_limits_are_checked_without_walking_the_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores are only walked when an engine starts, not when a request arrives."""
    options = {"store_dir": str(tmp_path), "max_total_bytes": 1 << 50, "min_free_bytes": 1, "max_request_bytes": 1000}
    quota = Quota(ServerOptions.parse(options))
    write_usage(str(tmp_path), Usage(5, {}, [], time.time()))
    asked = [(os, name) for name in ("scandir", "listdir", "walk")]
    stat = os.stat

    def of_a_directory(path: str, *args: Any, **named: Any) -> os.stat_result:
        assert ".zarr" not in os.fspath(path), "a store was accessed"
        return stat(path, *args, **named)

    for number in range(3):
        quota._read_at = -1e9
        with monkeypatch.context() as patch:
            for module, name in (*asked, (quota_module, "measure")):
                patch.setattr(module, name, lambda *_: pytest.fail("stores were walked"))
            patch.setattr(os, "stat", of_a_directory)
            quota.admit(str(tmp_path / f"{number}.zarr"), 10)
            quota.ended(str(tmp_path / f"{number}.zarr"), nothing=False)


# ---- removal ----------------------------------------------------------------------------------------------------


@pytest.fixture
def stores(tmp_path: Path) -> Path:
    """Five stores, one hour apart, s0 is the oldest. Other entries are not stores."""
    directory = tmp_path / "stores"
    owner = kit.Store(1 << 20)
    for i in range(5):
        owner.write(directory / f"s{i}.zarr", [Q], 20)
    assert owner.shutdown(kit.PATIENCE)
    for i in range(5):
        moment = time.time() - 3600 * (5 - i)
        os.utime(directory / f"s{i}.zarr" / "zarr.json", (moment, moment))
    (directory / "x.zarr.partial").mkdir()
    (directory / "empty.zarr").mkdir()
    (tmp_path / "elsewhere.zarr").mkdir()
    (tmp_path / "elsewhere.zarr" / "zarr.json").write_text("{}")
    os.utime(tmp_path / "elsewhere.zarr" / "zarr.json", (0, 0))
    (directory / "link.zarr").symlink_to(tmp_path / "elsewhere.zarr")
    return directory


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name[0] == "s")


def test_prune_removes_the_oldest_stores_by_age_and_by_bytes(stores: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.zarr" / "zarr.json").write_text(ROOT)
    assert [s.path.name for s in prune(stores, older_than=4.5 * 3600, dry_run=True)] == ["s0.zarr"]
    assert len(names(stores)) == 5
    assert [s.path.name for s in prune(stores, older_than=4.5 * 3600)] == ["s0.zarr"]
    sizes = [s.nbytes for s in finished_stores(stores)]
    total = sum(sizes)
    assert prune(stores, keep_bytes=total) == []
    assert [s.path.name for s in prune(stores, keep_bytes=total - sizes[0])] == ["s1.zarr"]
    assert prune(stores) == []
    assert [s.path.name for s in prune(stores, older_than=0)] == ["s2.zarr", "s3.zarr", "s4.zarr"]
    left = {p.name for p in stores.iterdir()}
    assert left == {"index.jsonl", "x.zarr.partial", "empty.zarr", "link.zarr"}
    assert (tmp_path / "elsewhere.zarr" / "zarr.json").exists(), "links must not be followed"
    (stores / "link.zarr").unlink()
    assert find_captures(stores) == []
    assert [line["store"] for line in read_index(stores) if line["event"] == "remove"] == [
        f"s{i}.zarr" for i in range(5)
    ]


READER = """
import sys, time
from dmi_connector.captures.capture import open_capture
capture = open_capture(sys.argv[1], 0)
print("open", flush=True)
sys.stdin.readline()
print(float(abs(capture.numpy("q")).sum()), len(capture.token_ids), flush=True)
capture.close()
print("closed", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("held", [(0,), (1,), (0, 1), (4,)])
def test_stores_in_use_count_with_those_that_are_kept(held: tuple[int, ...], tmp_path: Path) -> None:
    """Other stores are removed instead, so that the total is within the limit unless all stores are in use."""
    size = 1000
    for i in range(5):
        store = tmp_path / f"s{i}.zarr"
        store.mkdir()
        (store / "zarr.json").write_text(ROOT.ljust(size))
        os.utime(store / "zarr.json", (1000 + i, 1000 + i))
    locks = [share(tmp_path / f"s{i}.zarr") for i in held]
    try:
        removed = prune(tmp_path, keep_bytes=3 * size)
    finally:
        for lock in locks:
            os.close(lock)
    free = [f"s{i}.zarr" for i in range(5) if i not in held]
    assert [store.path.name for store in removed] == free[:2]
    assert sum(store.nbytes for store in finished_stores(tmp_path)) == 3 * size


def test_a_store_that_another_process_reads_is_not_removed(stores: Path) -> None:
    """It stays until the reader closes it. The next oldest store is removed instead."""
    expected = f"{float(abs(open_capture(stores / 's0.zarr', 0).numpy('q')).sum())} 20\n"
    command = [sys.executable, "-c", READER, str(stores / "s0.zarr")]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdin and reader.stdout
    try:
        assert reader.stdout.readline() == "open\n"
        three = sum(s.nbytes for s in finished_stores(stores) if s.path.name in ("s0.zarr", "s3.zarr", "s4.zarr"))
        assert [s.path.name for s in prune(stores, keep_bytes=three)] == ["s1.zarr", "s2.zarr"]
        assert not remove_store(stores / "s0.zarr")
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == expected, "every value must still be readable"
        assert reader.stdout.readline() == "closed\n"
        assert [s.path.name for s in prune(stores, older_than=4.5 * 3600)] == ["s0.zarr"]
    finally:
        reader.kill()
        reader.wait()
        reader.stdin.close()
        reader.stdout.close()
    assert names(stores) == ["s3.zarr", "s4.zarr"]


def test_an_open_capture_keeps_its_store_from_removal(stores: Path) -> None:
    capture = open_capture(stores / "s0.zarr", 0)
    assert not remove_store(capture.path)
    with open_capture(stores / "s0.zarr", 0) as second:
        capture.close()
        assert not remove_store(second.path)
    assert remove_store(capture.path) and not capture.path.exists()
    third = open_capture(stores / "s1.zarr", 0)
    assert not remove_store(third.path)
    del third
    assert remove_store(stores / "s1.zarr"), "deleting the object must release the store"
    copy = pickle.loads(pickle.dumps(open_capture(stores / "s2.zarr", 0)))
    assert not remove_store(stores / "s2.zarr"), "a pickled copy must have its own lock"
    assert copy.numpy("q").shape == (2, 20, 16)
    with pytest.raises(FileNotFoundError):
        type(capture)(stores / "s1.zarr", capture.attrs)


def test_a_store_that_is_being_written_is_not_removed(tmp_path: Path) -> None:
    stores = kit.Store(1 << 20)
    record = stores.open(tmp_path / "a.zarr", Q, attrs={"prompt_len": 300})
    stores.feed(record, {"q": kit.random_bits(Q, 256)}, 256)
    assert prune(tmp_path, older_than=0, keep_bytes=0) == []
    stores.close(record, 256)
    assert stores.flush(kit.PATIENCE) and stores.shutdown(kit.PATIENCE)
    assert [s.path.name for s in prune(tmp_path, older_than=-1)] == ["a.zarr"]


def test_an_interrupted_removal_is_finished_by_the_next_one(stores: Path) -> None:
    os.rename(stores / "s0.zarr", stores / ("s0.zarr" + REMOVING_SUFFIX))
    assert prune(stores, older_than=1e9) == []
    assert names(stores) == [f"s{i}.zarr" for i in range(1, 5)]


def test_an_interrupted_removal_of_an_earlier_store_does_not_stop_that_of_a_new_one(stores: Path) -> None:
    left = stores / ("s0.zarr" + REMOVING_SUFFIX)
    shutil.copytree(stores / "s1.zarr", left)
    assert remove_store(stores / "s0.zarr") and not left.exists()
    assert names(stores) == [f"s{i}.zarr" for i in range(1, 5)]


def test_a_removal_that_another_process_finishes_is_not_an_error(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.rename(stores / "s0.zarr", stores / ("s0.zarr" + REMOVING_SUFFIX))

    def just_gone(path: str) -> contextlib.AbstractContextManager[bool]:
        shutil.rmtree(path)
        return claim(path)

    monkeypatch.setattr("dmi_connector.store.write.finish.retention.claim", just_gone)
    assert prune(stores, older_than=1e9) == []


def test_one_failed_removal_does_not_stop_the_others(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rmtree(path: os.PathLike[str] | str) -> None:
        if "s0" in str(path):
            raise PermissionError(f"no removal of {path}")
        remove(path)

    remove = shutil.rmtree
    monkeypatch.setattr("dmi_connector.store.write.finish.retention.shutil.rmtree", rmtree)
    keeper = Keeper(str(stores), measure=True, retain_seconds=int(3.5 * 3600))
    for _ in range(2):
        with pytest.raises(OSError, match=r"1 stores cannot be removed: s0\.zarr.*no removal"):
            keeper.round()
        assert names(stores) == ["s0.zarr.removing", "s2.zarr", "s3.zarr", "s4.zarr"]
        assert read_usage(str(stores)).nbytes == measure(str(stores)).nbytes  # type: ignore[union-attr]


def test_the_keeper_removes_old_stores_and_measures_the_rest(stores: Path) -> None:
    sizes = [s.nbytes for s in finished_stores(stores)]
    keeper = Keeper(str(stores), measure=True, retain_seconds=int(3.5 * 3600), retain_bytes=sizes[3] + sizes[4])
    keeper.round()
    assert names(stores) == ["s3.zarr", "s4.zarr"]
    usage = read_usage(str(stores))
    assert usage is not None and usage.nbytes == sizes[3] + sizes[4] == measure(str(stores)).nbytes
    shutil.rmtree(stores / "s3.zarr")
    keeper.round()
    assert read_usage(str(stores)).nbytes == sizes[4]  # type: ignore[union-attr]


def test_stores_are_measured_at_any_depth_and_finished_ones_once(tmp_path: Path) -> None:
    """save_path_roots are searched at any depth, the store directory only at the top level."""
    own, root, sizes = tmp_path / "own", tmp_path / "root", StoreSizes()
    for path in (own / "a.zarr", own / "b.zarr.partial", own / "x/c.zarr", root / "d.zarr", root / "x/y/z/e.zarr"):
        path.mkdir(parents=True)
        (path / "data").write_bytes(b"x" * (1 << len(path.parts[-1])))
    (own / "a.zarr/zarr.json").touch()
    (root / "link").symlink_to(own)
    first = measure(str(own), [str(root)], sizes)
    assert first.nbytes == 3 * (1 << 6) + (1 << 14)
    assert first.unfinished.keys() | set(first.over) >= {str(own / "b.zarr")}
    for path in (own / "a.zarr", own / "b.zarr.partial"):
        (path / "more").write_bytes(b"x" * 1000)
    assert measure(str(own), [str(root)], sizes).nbytes == first.nbytes + 1000, "a finished store must be measured once"
    assert measure(str(own), [str(root)]).nbytes == first.nbytes + 2000
    (root / "d.zarr/more").write_bytes(b"x" * 100)
    again = measure(str(own), [str(root)], sizes).nbytes
    assert again == first.nbytes + 1100, "a copy without a root document is not finished"
    (own / "a.zarr").rename(own / "away")
    measure(str(own), [str(root)], sizes)
    (own / "away").rename(own / "a.zarr")
    assert measure(str(own), [str(root)], sizes).nbytes == first.nbytes + 2100, "removed stores must be forgotten"


def test_the_usage_file_names_only_stores_that_were_finished_lately(stores: Path) -> None:
    """A new keeper names them too, because the scheduler needs the names."""
    moment = time.time() - 59
    os.utime(stores / "s4.zarr" / "zarr.json", (moment, moment))
    Keeper(str(stores), measure=True).round()
    usage = read_usage(str(stores))
    assert usage is not None and usage.over == [os.path.realpath(stores / "s4.zarr")]


def test_the_coordinator_removes_old_stores_while_it_runs(stores: Path) -> None:
    """It also measures the directory, writes a private file, and removes nothing after it has ended."""
    keep = {"directory": str(stores), "measure": True, "retain_seconds": int(3.5 * 3600), "interval_s": 0.1}
    client = StoreClient(1 << 20, 1, WriteSettings(keep=keep))
    kit.until(lambda: len(names(stores)) <= 3 and (stores / USAGE_NAME).exists())
    assert names(stores) == ["s2.zarr", "s3.zarr", "s4.zarr"]
    assert (stores / USAGE_NAME).stat().st_mode & 0o777 == 0o600
    assert client.shutdown(kit.PATIENCE)
    os.utime(stores / "s2.zarr" / "zarr.json", (0, 0))
    time.sleep(0.5)
    assert names(stores) == ["s2.zarr", "s3.zarr", "s4.zarr"]


def test_make_directory_keeps_the_mode_of_an_existing_directory(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o755)
    make_directory(str(tmp_path / "a"), "private")
    make_directory(str(tmp_path / "b" / "c"), "private")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "b" / "c").stat().st_mode & 0o777 == 0o700


# ---- the command line -------------------------------------------------------------------------------------------


def test_dmi_prune_removes_by_age_and_bytes_and_refuses_bad_values(
    stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prune", str(stores), "--older-than", "270m", "--dry-run"]) == 0
    assert "s0.zarr: would be removed" in capsys.readouterr().out and len(names(stores)) == 5
    assert main(["prune", str(stores), "--older-than", "270m", "--json"]) == 0
    assert [Path(line["store"]).name for line in json.loads(capsys.readouterr().out)] == ["s0.zarr"]
    assert main(["prune", str(stores), "--keep-bytes", "0"]) == 0
    assert "4 removed, " in capsys.readouterr().out and names(stores) == []
    assert main(["prune", str(stores)]) == 2
    assert "give --older-than, --keep-bytes or both" in capsys.readouterr().err
    for flags in (["--older-than", "7w"], ["--keep-bytes", "-1"], ["--keep-bytes", "1.5G"], ["--older-than", ""]):
        with pytest.raises(SystemExit):
            main(["prune", str(stores), *flags])
        assert "give an integer" in capsys.readouterr().err or flags[1] == "-1"


def test_other_zarr_stores_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, text in {"mine": '{"attributes": {}}', "array": "[]", "damaged": "{", "old": ROOT}.items():
        (tmp_path / f"{name}.zarr").mkdir()
        (tmp_path / f"{name}.zarr" / "zarr.json").write_text(text)
        os.utime(tmp_path / f"{name}.zarr" / "zarr.json", (0, 0))
    Keeper(str(tmp_path), measure=True, retain_seconds=60).round()
    assert {path.name for path in tmp_path.glob("*.zarr")} == {"mine.zarr", "array.zarr", "damaged.zarr"}
    assert f"skip {tmp_path}/damaged.zarr: its zarr.json cannot be read" in caplog.text


def test_directories_that_cannot_be_read_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tests may run as root, who can read all directories."""
    stores, root = tmp_path / "stores", tmp_path / "root"
    for path in (stores / "old.zarr", stores / "closed.zarr", root / "deep" / "a.zarr", root / "lost+found"):
        path.mkdir(parents=True)
        (path / "zarr.json").write_text(ROOT)
        os.utime(path / "zarr.json", (0, 0))
    lstat, scandir = os.lstat, os.scandir

    def unless_closed(of: Any, path: Any, **more: Any) -> Any:
        if "closed.zarr" in str(path) or str(path).endswith("lost+found"):
            raise PermissionError(13, "Permission denied", path)
        return of(path, **more)

    monkeypatch.setattr(os, "lstat", functools.partial(unless_closed, lstat))
    monkeypatch.setattr(os, "scandir", functools.partial(unless_closed, scandir))
    keeper = Keeper(str(stores), [str(root)], measure=True, retain_seconds=60)
    keeper.round()
    keeper.round()
    assert not (stores / "old.zarr").exists() and (stores / "closed.zarr").exists()
    usage = read_usage(str(stores))
    assert usage is not None and usage.nbytes == len(ROOT)
    assert caplog.text.count("closed.zarr: ") == 1 and caplog.text.count("lost+found: ") == 1


def test_dmi_ls_stats_adds_up_the_captures_of_a_directory(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owner = kit.Store(1 << 20)
    for i, stop in enumerate((25, 26)):
        loss = Loss.of(Cause.ENDED_EARLY, [[20, stop]], finish="abort", end=20, expected=stop)
        owner.write(stores / f"t{i}.zarr", [Q], 20, losses=[loss])
    assert owner.shutdown(kit.PATIENCE)
    remove_store(stores / "s0.zarr")
    shutil.rmtree(stores / "s1.zarr")
    assert main(["ls", str(stores), "--stats", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    infos = [info for info in find_captures(stores) if info.store.exists()]
    assert found == {
        "captures": 6,
        "states": {"complete": 4, "incomplete": 2},
        "absent": 1,
        "bytes": sum(info.bytes or 0 for info in infos),
        "tokens": 100,
        "missing_rows": 11,
        "reasons": {"the request ended (abort) after # of # tokens were computed": 2},
        "oldest": infos[0].started,
        "newest": infos[-1].started,
    }
    assert main(["ls", str(stores), "--stats"]) == 0
    text = capsys.readouterr().out
    assert "2 x the request ended (abort) after # of # tokens were computed" in text
    assert dict(line.rsplit(None, 1) for line in text.splitlines() if line.startswith(("missing", "state c"))) == {
        "missing rows": "11",
        "state complete": "4",
    }


def test_engines_that_start_together_can_make_the_same_directory(tmp_path: Path) -> None:
    """One of two data-parallel engines used to fail if the other one had just made the directory."""
    together = threading.Barrier(8)

    def make(path: Path) -> None:
        together.wait()
        make_directory(str(path), "group")

    with ThreadPoolExecutor(8) as pool:
        for i in range(200):
            list(pool.map(make, [tmp_path / f"{i}" / "stores"] * 8))
            assert (tmp_path / f"{i}" / "stores").stat().st_mode & 0o777 == 0o750
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        make_directory(str(tmp_path / "file"), "group")


@pytest.mark.parametrize(("took", "waits"), [(0.0, 5.0), (0.5, 5.0), (2.0, 20.0)])
def test_a_keeper_takes_at_most_a_tenth_of_a_core(
    took: float, waits: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Enough(Exception):
        pass

    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise Enough

    clock = iter([0.0, took] * 3)
    fake = SimpleNamespace(monotonic=lambda: next(clock), sleep=sleep)
    monkeypatch.setattr("dmi_connector.store.write.finish.retention.time", fake)
    keeper = Keeper(str(tmp_path), measure=True)
    monkeypatch.setattr(keeper, "round", lambda: None)
    with pytest.raises(Enough):
        keeper._run()
    assert slept == [waits] * 3


def test_the_reason_of_the_limit_counts_rows_from_the_first_position(tmp_path: Path) -> None:
    """A request that skips positions misses fewer rows than tokens."""
    tracker = make_tracker(tmp_path, max_request_bytes=50 * ROW + 21 * LOGITS)
    wanted = {"include_output_tokens": True, "dmi": {"tokens": [10, None]}}
    _, response = run(tracker, wanted, 40, 60)  # 99 tokens have rows, 89 of them after position 10
    close = tracker.pending_closes[0]
    assert response["dmi_missing"] == [[close.length, 89]]
    assert f"the rows of {close.length} of 89 tokens" in response["dmi_reason"]


def test_the_file_of_disk_usage_says_when_it_was_measured(tmp_path: Path) -> None:
    write_usage(str(tmp_path), Usage(9, {"a.zarr": 4}, [], 1.5))
    found = json.loads((tmp_path / USAGE_NAME).read_text())
    measured = datetime.fromisoformat(found.pop("measured"))
    assert abs(datetime.now(UTC) - measured) < timedelta(days=1)
    assert found == {"nbytes": 9, "unfinished": {"a.zarr": 4}, "over": [], "began": 1.5}
