# SPDX-License-Identifier: Apache-2.0
"""The index of a store directory finds captures by key and request id, even with torn lines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dmi_connector.captures.captures import open_captures
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.format.paths import store_name
from dmi_connector.store.format.schema import INDEX_NAME
from dmi_connector.store.read import index, index_lines
from dmi_connector.store.read.index import IndexTail, find_captures
from dmi_connector.store.write.finish.commit import append_index
from tests import storekit as kit

SPEC = ArraySpec("q", "float32", (0,), 4)


def start(directory: Path, store: str, created: str, **more: str) -> None:
    append_index(directory, {"event": "start", "store": store, "state": "started", "created": created, **more})


def test_a_request_id_is_found_with_the_parts_that_vllm_adds_to_it(tmp_path: Path) -> None:
    ids = ["cmpl-7", "cmpl-7-0-ab12", "0_cmpl-7-ff00", "11_cmpl-7", "cmpl-77", "x_cmpl-7", "cmpl-8"]
    for i, name in enumerate(ids):
        start(tmp_path, f"{i}.zarr", f"2025-01-01T00:00:0{9 - i}", request_id=name)
    start(tmp_path, "none.zarr", "2025-01-02")
    found = [c.request_id for c in find_captures(tmp_path, request_id="cmpl-7")]
    assert found == ["11_cmpl-7", "0_cmpl-7-ff00", "cmpl-7-0-ab12", "cmpl-7"]  # in order of start, the latest last
    assert len(find_captures(tmp_path)) == 8 and find_captures(tmp_path, key="k") == []


def test_a_capture_of_the_responses_api_is_found_by_the_id_of_its_response(tmp_path: Path) -> None:
    """vLLM numbers the requests of one response from 0."""
    ids = ["resp_a1_0-9f3b", "resp_a1_1-77aa", "resp_a1_12", "0_resp_a1_2-b", "resp_a1", "resp_a1_x", "resp_a1_0x-1"]
    for i, name in enumerate([*ids, "resp_a12_0-1", "resp_a1__0"]):
        start(tmp_path, store_name(None, name), f"2025-01-01T00:00:0{i}", request_id=name)
    assert [c.request_id for c in find_captures(tmp_path, request_id="resp_a1")] == ids[:5]
    assert [c.request_id for c in find_captures(tmp_path, request_id="resp_a1_0")] == ids[:1]


def test_a_path_that_is_not_a_directory_of_stores_is_refused(tmp_path: Path) -> None:
    stores = kit.Store(1 << 20)
    stores.write(tmp_path / "a.zarr", [SPEC], 10)
    assert stores.shutdown(kit.PATIENCE)
    (tmp_path / "a.zip").touch()
    (tmp_path / "file").touch()
    (tmp_path / "index").mkdir()
    for find in (find_captures, open_captures):
        for name in ("nowhere", "nowhere.zarr", "file", "file/below"):
            with pytest.raises(ValueError, match=rf"/{name} is not a directory; give a directory of stores"):
                find(tmp_path / name)
        for name in ("a.zarr", "a.zip"):
            with pytest.raises(
                ValueError, match=rf"/{name} is a store; give its directory, or open it with open_capture"
            ):
                find(tmp_path / name)
        assert len(find(tmp_path / "index")) == 0, (
            "a directory without stores must be accepted, because a server may write none"
        )
    (tmp_path / "index").rename(tmp_path / "stores.zarr")
    start(tmp_path / "stores.zarr", "b.zarr", "1")
    assert len(find_captures(tmp_path / "stores.zarr")) == 1, (
        "a directory with an index must be accepted in spite of its suffix"
    )


def test_torn_lines_of_the_index_are_skipped(tmp_path: Path) -> None:
    start(tmp_path, "a.zarr", "1", key="k")
    with open(tmp_path / INDEX_NAME, "ab") as f:
        f.write(b'{"event":"start","store":"torn.za')
    assert [c.store.name for c in find_captures(tmp_path)] == ["a.zarr"]
    start(tmp_path, "b.zarr", "2", key="k")
    with open(tmp_path / INDEX_NAME, "ab") as f:
        f.write(b'\xff\xfe\n[1]\n{"event":"finish"}\n' + b"[" * 100_000 + b"\n")
    assert [c.store.name for c in find_captures(tmp_path, key="k")] == ["a.zarr", "b.zarr"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("store", name) for name in ("../b.zarr", "/b.zarr")),
        *((name, 5) for name in ("event", "state", "key", "request_id", "created", "finished", "model", "url")),
        *((name, "x") for name in ("bytes", "num_tokens", "prompt_len", "draft_tokens_accepted", "scores")),
    ],
)
def test_lines_with_values_of_other_types_are_skipped(tmp_path: Path, field: str, value: object) -> None:
    start(tmp_path, "a.zarr", "1", key="k", request_id="r")
    line = {"event": "finish", "store": "b.zarr", "state": "complete", "key": "k", "request_id": "r", "created": "2"}
    append_index(tmp_path, {**line, "finished": "3", "num_tokens": 5, "prompt_len": 5, "model": "m", field: value})
    for given in ({}, {"key": "k"}, {"request_id": "r"}):
        assert [info.store.name for info in find_captures(tmp_path, **given)] == ["a.zarr"]
    append_index(tmp_path, {**line, "created": None})
    assert [info.started for info in find_captures(tmp_path)] == ["", "1"]


def test_the_index_gives_the_state_of_each_capture(tmp_path: Path) -> None:
    stores = kit.Store(1 << 20)
    stores.write(tmp_path / "a.zarr", [SPEC], 10, key="mine", request_id="r1")
    loss = Loss.of(Cause.ENDED_EARLY, [[10, 12]], finish="abort", end=10, expected=12)
    stores.write(tmp_path / "b.zarr", [SPEC], 10, losses=[loss])
    assert stores.shutdown(kit.PATIENCE)
    a, b = find_captures(tmp_path)
    assert (a.key, a.request_id, a.state, a.num_tokens) == ("mine", "r1", "complete", 10)
    listed = sum(p.stat().st_size for p in a.store.rglob("*") if p.is_file() and p != a.store / "zarr.json")
    assert a.bytes == listed and a.finished is not None and a.finished > a.started
    assert (b.state, b.reason) == ("incomplete", loss.words)


def test_a_store_that_begins_anew_has_nothing_of_its_earlier_life(tmp_path: Path) -> None:
    """After a removal, a client that names its stores may use a name again."""
    start(tmp_path, "a.zarr", "1", key="old", request_id="r1")
    line = {"event": "finish", "store": "a.zarr", "state": "incomplete", "reason": "why", "finished": "2", "bytes": 7}
    append_index(str(tmp_path), {**line, "num_tokens": 3})
    [found] = find_captures(tmp_path)
    assert (found.started, found.finished, found.key, found.bytes, found.num_tokens) == ("1", "2", "old", 7, 3)
    start(tmp_path, "a.zarr", "3", request_id="r2")
    [found] = find_captures(tmp_path)
    assert (found.started, found.state, found.request_id, found.store) == ("3", "started", "r2", tmp_path / "a.zarr")
    assert (found.key, found.reason, found.finished, found.bytes, found.num_tokens) == (None,) * 5
    append_index(str(tmp_path), {"event": "remove", "store": "a.zarr", "state": "removed"})
    assert find_captures(tmp_path) == []


def test_a_tail_of_new_lines_alone_begins_at_the_end(tmp_path: Path) -> None:
    """This also holds if there is no index yet, or if the last line is torn."""

    def finish(name: str) -> None:
        append_index(str(tmp_path), {"event": "finish", "store": name, "state": "complete"})

    first = IndexTail(tmp_path, new_only=True)
    finish("a.zarr")
    assert [info.store.name for info in first.read()] == ["a.zarr"]
    with open(tmp_path / "index.jsonl", "a") as index:
        index.write('{"event": "finish", "store": "torn')
    later = IndexTail(tmp_path, new_only=True)
    assert later.read() == []
    finish("b.zarr")
    assert [info.store.name for info in later.read()] == ["b.zarr"] == [info.store.name for info in first.read()]


def test_finding_a_key_parses_only_lines_of_its_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines without a key also belong to the stores of the key, because the names of stores include it."""
    for i in range(200):
        start(
            tmp_path, store_name(f"k{i}", f"cmpl-{i}"), f"2025-01-01T00:00:{i:03d}", key=f"k{i}", request_id=f"cmpl-{i}"
        )
    names = {c.key: c.store.name for c in find_captures(tmp_path)}
    append_index(tmp_path, {"event": "remove", "store": names["k7"], "state": "removed"})
    append_index(tmp_path, {"event": "finish", "store": names["k8"], "state": "complete", "bytes": 5})
    parsed: list[bytes] = []
    loads = json.loads
    monkeypatch.setattr(index_lines.json, "loads", lambda raw: (parsed.append(raw), loads(raw))[1])
    assert find_captures(tmp_path, key="k7") == []
    [eight] = find_captures(tmp_path, key="k8")
    [same] = find_captures(tmp_path, request_id="cmpl-8")
    assert eight == same and (eight.state, eight.bytes) == ("complete", 5)
    assert len(parsed) < 60, "only lines of k7, k70 to k79 and the like must be parsed"


@pytest.mark.parametrize("key", ["a/b", 'say "hi"', "sch\u00f6n", "k" * 200, "", "x"])
def test_keys_that_names_do_not_hold_are_found_too(tmp_path: Path, key: str) -> None:
    """For x, somebody has renamed the store."""
    name = "other.zarr" if key == "x" else store_name(key, "r1")
    start(tmp_path, name, "1", key=key, request_id="r1")
    start(tmp_path, store_name("y", "r2"), "2", key="y", request_id="r2")
    append_index(tmp_path, {"event": "finish", "store": name, "state": "complete", "bytes": 5})
    [found] = find_captures(tmp_path, key=key)
    assert (found.store.name, found.bytes) == (name, 5)


def test_a_last_line_without_a_line_break_is_found_by_its_key(tmp_path: Path) -> None:
    for number in (1, 2):
        start(tmp_path, store_name("k", f"r{number}"), str(number), key="k", request_id=f"r{number}")
    whole = (tmp_path / INDEX_NAME).read_bytes()
    (tmp_path / INDEX_NAME).write_bytes(whole.removesuffix(b"\n"))
    assert [info.request_id for info in find_captures(tmp_path, key="k")] == ["r1", "r2"]


def test_an_empty_index_has_nothing(tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).touch()
    assert find_captures(tmp_path) == find_captures(tmp_path, key="k") == []


def test_stores_that_the_index_does_not_name_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = kit.Store(1 << 20)
    named = tmp_path / "here" / store_name("one", "r1")
    stores.write(named, [SPEC], 10, key="one", request_id="r1")
    foreign = tmp_path / "there" / store_name("a/b", "r2-0-77")
    stores.write(foreign, [SPEC], 11, key="a/b", request_id="r2-0-77")
    others = {"-r3": None, "cmpl-" + "r" * 36: "k" * 128}  # neither name has the full request id
    for request_id, key in others.items():
        store = tmp_path / "others" / store_name(key, request_id)
        stores.write(store, [SPEC], 12, key=key, request_id=request_id)
    assert stores.shutdown(kit.PATIENCE)
    shutil.copytree(named.parent, tmp_path / "more")
    for store in (tmp_path / "others").glob("*.zarr"):
        shutil.copytree(store, tmp_path / "more" / store.name)
    assert [find_captures(tmp_path / "more", request_id=one)[0].key for one in others] == [*others.values()]
    copied = named.parent / foreign.name
    shutil.copytree(foreign, copied)
    assert [c.store for c in find_captures(named.parent)] == [named, copied]
    assert [len(c.token_ids) for c in open_captures(named.parent)] == [10, 11]
    assert [c.store for c in find_captures(named.parent, key="a/b")] == [copied]
    assert [c.store for c in find_captures(named.parent, request_id="r2")] == [copied]
    assert find_captures(named.parent, key="a_b") == [] and find_captures(named.parent, key="two") == []
    append_index(named.parent, {"event": "remove", "store": named.name, "state": "removed"})
    assert [c.store for c in find_captures(named.parent)] == [copied], (
        "a store that the index lists as removed must be left out"
    )

    opened: list[Path] = []
    monkeypatch.setattr(index, "info_of", opened.append)
    start(named.parent, copied.name, "3", key="a/b", request_id="r2")
    append_index(named.parent, {"event": "finish", "store": copied.name, "state": "complete"})
    assert len(find_captures(named.parent, key="a/b")) == 1 and not opened, "stores in the index must not be opened"


def test_a_store_whose_end_the_index_lacks_is_found_as_it_is(tmp_path: Path) -> None:
    """Its writer was killed before it wrote the line, or the disk was full."""
    stores = kit.Store(1 << 20)
    loss = Loss.of(Cause.FELL_BEHIND, [[0, 2]])
    for name, losses in (("a", []), ("b", [loss]), ("damaged", [])):
        stores.write(tmp_path / f"{name}.zarr", [SPEC], 10, key=name, request_id="r", losses=losses)
    assert stores.shutdown(kit.PATIENCE)
    known = {info.store.name: info for info in find_captures(tmp_path)}
    path = tmp_path / INDEX_NAME
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"start"' in line))
    start(tmp_path, "c.zarr", "9", key="c")
    (tmp_path / "damaged.zarr/zarr.json").write_text("{")
    assert index.unrecorded_stores(tmp_path) == [tmp_path / "a.zarr", tmp_path / "b.zarr"]
    found = {info.store.name: info for info in find_captures(tmp_path)}
    assert {name: info.state for name, info in found.items()} == {
        "a.zarr": "complete",
        "b.zarr": "incomplete",
        "c.zarr": "started",
        "damaged.zarr": "failed",
    }
    assert [found[name] for name in ("a.zarr", "b.zarr")] == [known[name] for name in ("a.zarr", "b.zarr")]
    assert find_captures(tmp_path, key="b") == find_captures(tmp_path, request_id="r")[1:2] == [known["b.zarr"]]
    assert [info.store.name for info in open_captures(tmp_path).infos] == ["a.zarr"]


def test_a_damaged_store_that_the_index_does_not_name_is_a_failed_capture(tmp_path: Path) -> None:
    start(tmp_path, "a.zarr", "1", key="k")
    (tmp_path / "b.zarr").mkdir()
    (tmp_path / "b.zarr" / "zarr.json").write_text('{"attributes": {')
    (tmp_path / "foreign.zarr").mkdir()
    (tmp_path / "foreign.zarr" / "zarr.json").write_text('{"attributes": {}}')
    (tmp_path / "empty.zarr").mkdir()
    failed, started = find_captures(tmp_path)
    assert (started.state, failed.state) == ("started", "failed") and "b.zarr is not a capture" in str(failed.reason)
    assert len(open_captures(tmp_path)) == 0 and [c.key for c in find_captures(tmp_path, key="k")] == ["k"]
