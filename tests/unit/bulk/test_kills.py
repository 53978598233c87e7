# SPDX-License-Identifier: Apache-2.0
"""A run that is killed at any step continues, and neither loses a prompt nor captures it twice."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector.bulk.order import Order
from dmi_connector.bulk.recovery import not_uploaded, recover
from dmi_connector.layout import ArraySpec
from dmi_connector.store.read.index_lines import read_index
from dmi_connector.store.read.run_manifest import read_manifest
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.finish import commit
from dmi_connector.store.write.finish.commit import append_index
from tests import bulkkit
from tests.bulkkit import RUN, FakeEngines, Killed, Kills, check_whole, go, template, write_prompts
from tests.storekit import Store, random_bits

COUNT, BAD = 6, (2,)
GOOD = [i for i in range(COUNT) if i not in BAD]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return template(tmp_path_factory.mktemp("template") / "one.zarr")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "p.jsonl", COUNT, BAD)


def attempt(prompts: Path, out: Path, store: Path, kills: Kills) -> bool:
    """Start the run once. Returns whether it finished."""
    try:
        with kills.watching():
            go(prompts, out, FakeEngines(store, out))
    except Killed:
        return False
    return True


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.soak)])
def test_a_kill_at_any_step_loses_no_prompt_and_captures_none_twice(
    prompts: Path, store: Path, tmp_path: Path, every: int
) -> None:
    """Of the many steps in which files of stores are copied, only one in `every` is tested."""
    kills = Kills()
    (tmp_path / "whole").mkdir()
    assert attempt(prompts, tmp_path / "whole", store, kills)
    check_whole(tmp_path / "whole", GOOD)
    total, rng = kills.steps, random.Random(0)
    assert total > 60, "the run is cut into many steps"
    copies = ("mkdir", "copyfile")
    tested = [step for step, kind in enumerate(kills.kinds, 1) if kind not in copies or step % every == 0]
    assert {"write", "fsync", "rename"} <= {kills.kinds[step - 1] for step in tested}
    for step in tested:
        out = tmp_path / f"{step}"
        out.mkdir()
        assert not attempt(prompts, out, store, Kills(step))
        attempt(prompts, out, store, Kills(rng.randint(1, total)))  # the recovery may be killed too
        attempt(prompts, out, store, Kills(rng.randint(1, 12)))
        assert attempt(prompts, out, store, Kills())
        check_whole(out, GOOD)
        shutil.rmtree(out)


def test_a_finished_run_writes_nothing(prompts: Path, store: Path, tmp_path: Path) -> None:
    go(prompts, tmp_path, FakeEngines(store, tmp_path))
    before = (tmp_path / "manifest.jsonl").read_bytes()
    engines = FakeEngines(store, tmp_path)
    outcome = go(prompts, tmp_path, engines)
    assert outcome.all_done and not engines.started and outcome.counts.before == len(GOOD)
    assert (tmp_path / "manifest.jsonl").read_bytes() == before


def some_done(prompts: Path, out: Path, store: Path) -> list[Path]:
    go(prompts, out, FakeEngines(store, out))
    return sorted(out.glob("*.zarr"))


def test_a_torn_last_line_is_removed_and_written_again(prompts: Path, store: Path, tmp_path: Path) -> None:
    some_done(prompts, tmp_path, store)
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    engines = FakeEngines(store, tmp_path)
    go(prompts, tmp_path, engines)
    assert engines.submitted == [], "its store is there"
    check_whole(tmp_path, GOOD)


def test_without_a_manifest_stores_show_which_prompts_are_done(prompts: Path, store: Path, tmp_path: Path) -> None:
    some_done(prompts, tmp_path, store)
    (tmp_path / "manifest.jsonl").unlink()
    engines = FakeEngines(store, tmp_path)
    go(prompts, tmp_path, engines)
    assert engines.submitted == []
    check_whole(tmp_path, GOOD)


def cut(path: Path) -> None:
    """Remove the last byte of a shard."""
    shard = next(file for file in path.rglob("*") if file.is_file() and "/c/" in str(file))
    shard.write_bytes(shard.read_bytes()[:-1])


def test_a_store_without_a_finish_line_in_the_index_gets_one(
    prompts: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was killed after the rename and before it wrote the line."""
    ends = iter(range(9))

    def append_finish(*args: Any) -> None:
        if next(ends) == 1:
            raise Killed
        commit.append_finish(*args)

    monkeypatch.setattr(bulkkit, "append_finish", append_finish)
    with pytest.raises(Killed):
        go(prompts, tmp_path, FakeEngines(store, tmp_path))
    lacking = {path.name for path in tmp_path.glob("*.zarr")} - {line["store"] for line in read_index(tmp_path)}
    assert lacking
    for name in lacking:
        append_index(str(tmp_path), {"event": "start", "store": name, "state": "started", "created": "0"})
    assert go(prompts, tmp_path, FakeEngines(store, tmp_path)).all_done
    check_whole(tmp_path, GOOD)
    finished = [line["store"] for line in read_index(tmp_path) if line["event"] == "finish"]
    assert sorted(finished) == sorted(path.name for path in tmp_path.glob("*.zarr")), "each store has one line"


@pytest.mark.parametrize(
    "harm",
    [
        cut,
        lambda path: (path / "zarr.json").unlink(),
        lambda path: path.rename(path.with_name(path.name + ".partial")),
        lambda path: path.rename(path.with_name(path.name + ".removing")),
        shutil.rmtree,
    ],
    ids=["damaged", "no root document", "partial", "half removed", "gone"],
)
def test_an_incomplete_store_without_a_line_is_captured_again(
    harm: Callable[[Path], object], prompts: Path, store: Path, tmp_path: Path
) -> None:
    stores = some_done(prompts, tmp_path, store)
    manifest = tmp_path / "manifest.jsonl"
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("".join(line for line in lines if stores[1].name not in line))
    harm(stores[1])
    engines = FakeEngines(store, tmp_path)
    go(prompts, tmp_path, engines)
    assert engines.submitted == [GOOD[1]]
    check_whole(tmp_path, GOOD)


@pytest.mark.parametrize("suffix", [".partial", ".removing"])
def test_the_index_records_the_removal_of_an_unfinished_store(
    suffix: str, prompts: Path, store: Path, tmp_path: Path
) -> None:
    """If the store was being removed, the index has the line already."""
    first = some_done(prompts, tmp_path, store)[0]
    (tmp_path / "manifest.jsonl").unlink()
    first.rename(first.with_name(first.name + suffix))
    said = len(list(read_index(tmp_path)))
    assert recover(tmp_path, RUN, Order(), tmp_path / "manifest.jsonl").removed == 1
    ended = {"event": "abort", "store": first.name, "state": "aborted"}
    assert list(read_index(tmp_path))[said:] == ([ended] if suffix == ".partial" else [])
    assert not first.with_name(first.name + suffix).exists()


def test_a_store_with_values_that_are_not_finite_is_kept(prompts: Path, store: Path, tmp_path: Path) -> None:
    """The model would compute the same values again."""
    owner, spec = Store(), ArraySpec("q", "float32", (0,), 8)
    values = random_bits(spec, 17)
    values.view("f4")[0, 3, 3] = np.nan
    attrs = {"prompt_len": 10, "include_output_tokens": True, "finish_reason": "length"}
    owner.write(tmp_path / "nan.zarr", [spec], 17, values={"q": values}, attrs=attrs)
    owner.shutdown()
    path = tmp_path / f"{RUN}-000000000--0-aaaaaaaaaaaa.zarr"
    for _ in bulkkit.write_store(tmp_path / "nan.zarr", path, f"{RUN}-000000000"):
        pass
    engines = FakeEngines(store, tmp_path)
    go(prompts, tmp_path, engines)
    assert GOOD[0] not in engines.submitted and path.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"finish_reason": "abort"},
        {"finish_reason": "error"},
        {"complete": False, "missing": [[0, 1]], "reason": "the engine ended before the request did"},
    ],
)
def test_a_store_of_an_aborted_request_is_captured_again(
    changes: dict[str, Any], prompts: Path, store: Path, tmp_path: Path
) -> None:
    """An engine that shuts down aborts its requests. Their stores may be complete up to the abort."""
    path = tmp_path / f"{RUN}-000000003--3-aaaaaaaaaaaa.zarr"
    for _ in bulkkit.write_store(store, path, f"{RUN}-000000003", **changes):
        pass
    assert verify_store(path, begun={}) == [], "it is sound"
    engines = FakeEngines(store, tmp_path)
    go(prompts, tmp_path, engines)
    assert sorted(engines.submitted) == GOOD and not path.exists()
    check_whole(tmp_path, GOOD)


def test_the_store_in_the_manifest_is_kept_if_there_are_two(prompts: Path, store: Path, tmp_path: Path) -> None:
    stores = some_done(prompts, tmp_path, store)
    for name in ("aaaaaaaaaaaa", "ffffffffffff"):
        shutil.copytree(stores[0], tmp_path / f"{RUN}-000000000--0-{name}.zarr")
    found = recover(tmp_path, RUN, Order(), tmp_path / "manifest.jsonl")
    assert found.removed == 2 and stores[0].exists() and not found.found
    go(prompts, tmp_path, FakeEngines(store, tmp_path))
    assert stores[0].exists()
    check_whole(tmp_path, GOOD)


def test_pending_uploads_are_counted_with_the_latest_reason(tmp_path: Path) -> None:
    """Stores of other shares and runs, and stores that no longer exist, do not count."""
    names = [f"{RUN}-00000000{i}--{i}-aaaaaaaaaaaa.zarr" for i in range(6)]
    names.append("9999abcd-000000001--1-aaaaaaaaaaaa.zarr")
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / names[2]).rmdir()
    said = [
        {"store": names[0], "upload": "failed", "upload_reason": "first"},
        {"store": names[1], "upload": "pending"},
        {"store": names[0], "upload": "failed", "upload_reason": "second"},
        {"store": names[2], "upload": "failed", "upload_reason": "it is gone"},
        {"store": names[3], "upload": "failed", "upload_reason": "done since"},
        {"store": names[4], "upload": "failed", "upload_reason": "third"},
        {"store": names[5], "state": "complete"},
        {"store": names[6], "upload": "failed", "upload_reason": "of another run"},
        {"store": names[3], "upload": "done"},
        {"store": names[1], "upload": "pending"},
    ]
    (tmp_path / "index.jsonl").write_text("".join(json.dumps({"event": "finish", **line}) + "\n" for line in said))
    assert not_uploaded(tmp_path, RUN, Order()) == (3, "third")
    assert not_uploaded(tmp_path, RUN, Order(share=1, shares=2)) == (1, None)
    assert not_uploaded(tmp_path, RUN, Order(share=0, shares=2)) == (2, "third")


def test_the_valid_store_is_kept_if_neither_is_in_the_manifest(prompts: Path, store: Path, tmp_path: Path) -> None:
    stores = some_done(prompts, tmp_path, store)
    (tmp_path / "manifest.jsonl").unlink()
    for name in ("aaaaaaaaaaaa", "ffffffffffff"):
        shutil.copytree(stores[0], tmp_path / f"{RUN}-000000000--0-{name}.zarr")
    cut(tmp_path / f"{RUN}-000000000--0-aaaaaaaaaaaa.zarr")
    engines = FakeEngines(store, tmp_path)
    go(prompts, tmp_path, engines)
    assert engines.submitted == []
    check_whole(tmp_path, GOOD)


def test_prompts_of_removed_stores_stay_done_without_redo_missing(prompts: Path, store: Path, tmp_path: Path) -> None:
    stores = some_done(prompts, tmp_path, store)
    shutil.rmtree(stores[0])
    engines = FakeEngines(store, tmp_path)
    assert go(prompts, tmp_path, engines).all_done and engines.submitted == []
    go(prompts, tmp_path, engines, redo_missing=True)
    assert engines.submitted == [0]
    noted = {entry["key"]: entry["store"] for entry in read_manifest(tmp_path / "manifest.jsonl")}
    assert {path.name for path in tmp_path.glob("*.zarr")} == set(noted.values()), "the later line counts"


@pytest.mark.parametrize("changes", [{}, {"complete": False, "missing": [[0, 1]], "reason": "a writer ended"}])
def test_a_redone_prompt_without_a_new_line_is_checked_again(
    changes: dict[str, Any], prompts: Path, store: Path, tmp_path: Path
) -> None:
    """The run was killed before it wrote the new line. The old line names the removed store."""
    shutil.rmtree(some_done(prompts, tmp_path, store)[0])
    redone = tmp_path / f"{RUN}-000000000--0-aaaaaaaaaaaa.zarr"
    for _ in bulkkit.write_store(store, redone, f"{RUN}-000000000", **changes):
        pass
    engines = FakeEngines(store, tmp_path)
    go(prompts, tmp_path, engines, redo_missing=True)
    assert engines.submitted == ([0] if changes else [])
    noted = {entry["key"]: entry["store"] for entry in read_manifest(tmp_path / "manifest.jsonl")}
    assert {path.name for path in tmp_path.glob("*.zarr")} == set(noted.values())
    assert redone.exists() == (not changes)


def test_stores_of_other_runs_and_shares_are_not_touched(prompts: Path, store: Path, tmp_path: Path) -> None:
    others = [
        tmp_path / "9999abcd-000000001--1-aaaaaaaaaaaa.zarr.partial",
        tmp_path / f"{RUN}-000000001--1-aaaaaaaaaaaa.zarr.partial",
        tmp_path / "notes",
    ]
    for path in others:
        path.mkdir()
    go(prompts, tmp_path, FakeEngines(store, tmp_path), order=Order(share=0, shares=2))
    assert all(path.exists() for path in others)
    assert {path.name.split("--")[0] for path in tmp_path.glob("*.zarr")} == {f"{RUN}-00000000{i}" for i in (0, 4)}


def test_a_partial_store_in_use_stops_the_recovery(prompts: Path, store: Path, tmp_path: Path) -> None:
    from dmi_connector.store.format.locks import PartialLock

    path = tmp_path / f"{RUN}-000000001--1-aaaaaaaaaaaa.zarr.partial"
    lock = PartialLock(str(path))
    with pytest.raises(ValueError, match="written or repaired by another process"):
        go(prompts, tmp_path, FakeEngines(store, tmp_path))
    lock.release()
    go(prompts, tmp_path, FakeEngines(store, tmp_path))
    check_whole(tmp_path, GOOD)
