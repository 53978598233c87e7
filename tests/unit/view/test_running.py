# SPDX-License-Identifier: Apache-2.0
"""`dmi view` over HTTP while a store is being written: the list, the rows so far, and the end of the request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from dmi_connector.analysis.texts import Texts
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.read.partial import PartialStore
from dmi_connector.view import data, running
from dmi_connector.view.app import make_app
from dmi_connector.view.data import Library
from tests import storekit as kit
from tests import viewkit

LAYERS, HEADS, SIZE = 2, 2, 4
SPECS = (
    ArraySpec("resid_pre", "bfloat16", (0, 1), 8),
    ArraySpec("q_rot", "float32", (0, 1), HEADS * SIZE),
    ArraySpec("k_rot", "float32", (0, 1), SIZE),
    ArraySpec("topk_ids", "int32", (0, 1), 2),
)
LOGITS = ArraySpec("logits", "float32", (), 33)
ABOUT = {"num_layers": LAYERS, "rotary": True, "dims": {"heads": HEADS, "kv_heads": 1, "head_dim": SIZE}}
VALUES = {spec.name: kit.random_bits(spec, 80) for spec in SPECS}
VALUES["topk_ids"] %= 4
IDS = (np.arange(80) * 7 % 97).astype("<i4")


@pytest.fixture(scope="module")
def store() -> Iterator[kit.Store]:
    made = kit.Store(writers=2)
    yield made
    assert made.shutdown()


def begin(store: kit.Store, path: Path, *more: ArraySpec, **options: Any) -> Any:
    return store.open(path, *SPECS, *more, attrs=ABOUT, chunk=16, segment=32, key="now", request_id="r-1", **options)


def client(path: Path, tokenizer: Path | None = None) -> TestClient:
    return TestClient(make_app(Library.at(path), "secret", tokenizer=tokenizer), base_url="http://127.0.0.1/secret/")


def floats(response: Any) -> np.ndarray:
    assert response.status_code == 200, response.text
    return np.frombuffer(response.content, "<f4").reshape([int(n) for n in response.headers["x-shape"].split(",")])


def listed(page: TestClient, **query: Any) -> dict[str, Any]:
    found = page.get("api/captures", params=query).json()
    return {line["name"]: (line["state"], line["tokens"]) for line in found["captures"]}


def has(page: TestClient, tokens: int) -> None:
    kit.until(lambda: page.get("api/capture/a.zarr").json().get("tokens") == tokens)


def test_a_request_under_way_is_listed_until_it_is_an_ordinary_entry(store: kit.Store, tmp_path: Path) -> None:
    store.write(tmp_path / "old.zarr", [SPECS[0]], 20)
    page = client(tmp_path)
    assert listed(page) == {"old.zarr": ("complete", 20)}
    record = begin(store, tmp_path / "a.zarr")
    kit.until(lambda: listed(page) == {"a.zarr": ("running", 0), "old.zarr": ("complete", 20)})
    store.feed(record, VALUES, 48, ids=IDS)
    kit.until(lambda: listed(page, again=1)["a.zarr"] == ("running", 48))
    assert page.get("api/captures").json()["running"] == 1
    assert [*listed(page, search="NOW running")] == ["a.zarr"] and listed(page, search="now complete") == {}
    store.put(record, VALUES, 48, 10, IDS)
    store.close(record, 58, ids=IDS[:58])
    assert store.flush(kit.PATIENCE)
    for again in ({"again": 1}, {}):
        assert listed(page, **again) == {"a.zarr": ("complete", 58), "old.zarr": ("complete", 20)}
    assert page.get("api/captures").json()["running"] == 0
    (tmp_path / "old.zarr").rename(tmp_path / "old")
    assert listed(page, again=1) == {"a.zarr": ("complete", 58)}


def test_the_list_has_the_prompt_once_the_request_has_ended(store: kit.Store, tmp_path: Path, model: Path) -> None:
    page, record = client(tmp_path, model), begin(store, tmp_path / "a.zarr")
    kit.until(lambda: listed(page) == {"a.zarr": ("running", 0)})
    store.put(record, VALUES, 0, 16, IDS)
    store.close(record, 16, ids=IDS[:16])
    assert store.flush(kit.PATIENCE)
    (line,) = page.get("api/captures", params={"again": 1}).json()["captures"]
    assert line["text"] == " ".join(Texts(model).whole(IDS[:10].tolist()).split())


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_the_rows_so_far_are_shown_as_those_of_a_finished_store(store: kit.Store, tmp_path: Path, codec: str) -> None:
    page, record = client(tmp_path), begin(store, tmp_path / "a.zarr", codec=codec)
    has(page, 0)
    query = {"hook": "resid_pre"}
    assert floats(page.get("api/heat/a.zarr", params=query)).shape == (2, 0)
    assert page.get("api/tokens/a.zarr").json()["ids"] == []
    store.feed(record, VALUES, 32, ids=IDS)
    has(page, 32)
    about = page.get("api/capture/a.zarr").json()
    assert (about["running"], about["complete"], about["missing"], about["prompt"]) == (True, True, [], 10)
    assert about["attention"] == {"layers": [0, 1], "until": 32}
    asked = {
        "tokens": {"first": 5, "count": 20},
        "heat": {**query, "statistic": "value", "index": 3, "first": 5, "count": 20},
        "attention": {"layer": 1, "head": 1, "first": 5, "count": 20},
        "attended": {"layer": 1, "head": 1, "token": 20},
        "experts": {"first": 5, "count": 20},
    }
    before = {action: page.get(f"api/{action}/a.zarr", params=query) for action, query in asked.items()}
    wanted = kit.to_float(VALUES["resid_pre"], "bfloat16")[:, 5:25, 3]
    assert np.array_equal(floats(before["heat"]), wanted)
    assert page.get("api/attended/a.zarr", params={"layer": 0, "head": 0, "token": 32}).status_code == 400
    store.close(record, 32, ids=IDS[:32])
    assert store.flush(kit.PATIENCE)
    assert page.get("api/capture/a.zarr").json()["running"] is False
    for action, query in asked.items():
        assert page.get(f"api/{action}/a.zarr", params=query).content == before[action].content, action


def test_every_statistic_of_rows_under_way_is_answered(store: kit.Store, tmp_path: Path) -> None:
    page, record = client(tmp_path), begin(store, tmp_path / "a.zarr")
    store.feed(record, VALUES, 32, ids=IDS)
    has(page, 32)
    for hook in page.get("api/capture/a.zarr").json()["hooks"]:
        for statistic in hook["statistics"]:
            query = {"hook": hook["name"], "statistic": statistic["name"], "index": 1}
            assert np.isfinite(floats(page.get("api/heat/a.zarr", params=query))).all(), query
    store.abort(record)


def test_rows_wait_for_their_logits(store: kit.Store, tmp_path: Path) -> None:
    """The last eight samples may be replaced. A row without its logits would look as if it had none."""
    page, record, values = client(tmp_path), begin(store, tmp_path / "a.zarr", LOGITS), kit.random_bits(LOGITS, 40)
    store.feed(record, VALUES, 32, ids=IDS)
    has(page, 9)  # the last row of the prompt is the first with logits
    for i in range(20):
        store.put_rows(record, "logits", values[i : i + 1], i, 9 + i)
    has(page, 9 + 20 - 8)
    heat = {"hook": "logits", "statistic": "log-probability of", "index": 3}
    found = floats(page.get("api/heat/a.zarr", params=heat))[0]
    assert np.flatnonzero(np.isfinite(found)).tolist() == list(range(9, 21))
    for i in range(20, 23):
        store.put_rows(record, "logits", values[i : i + 1], i, 9 + i)
    store.close(record, 32, {"logits": 23}, IDS[:32])
    assert store.flush(kit.PATIENCE)
    assert np.array_equal(floats(page.get("api/heat/a.zarr", params=heat))[0, :21], found, equal_nan=True)


def test_layers_and_columns_of_ranks_are_joined(store: kit.Store, tmp_path: Path) -> None:
    wide = ArraySpec("q", "float32", (0, 1), 8, shards=2)
    parts = ArraySpec("resid_pre", "float32", (0, 1, 2), 4, shards=2, part_layers=2)
    values = {spec.name: kit.random_bits(spec, 16) for spec in (wide, parts)}
    page = client(tmp_path)
    records = [
        store.open(tmp_path / "a.zarr", *kit.shard_specs((wide, parts), 2, rank), chunk=16, rank=rank, ranks=2)
        for rank in (0, 1)
    ]
    store.put(records[0], values, 0, 16)
    has(page, 0)
    partial = PartialStore(tmp_path / "a.zarr")

    def first() -> np.ndarray | None:
        partial.refresh()
        return partial.token_ids(0)

    kit.until(lambda: first() is not None)
    has(page, 0)  # rank 1 has not written these rows
    store.put(records[1], values, 0, 16)
    has(page, 16)
    for name in ("q", "resid_pre"):
        query = {"hook": name, "statistic": "value", "index": 3}
        assert np.array_equal(floats(page.get("api/heat/a.zarr", params=query)), values[name].view("f4")[..., 3])
    for record in records:
        store.abort(record)


def test_the_page_says_how_a_request_ended_that_gives_no_store(store: kit.Store, tmp_path: Path) -> None:
    page, record = client(tmp_path), begin(store, tmp_path / "a.zarr")
    store.feed(record, VALUES, 16, ids=IDS)
    has(page, 16)
    store.abort(record)
    kit.until(lambda: page.get("api/capture/a.zarr").status_code == 404)
    assert "was aborted, and no rows were kept" in page.get("api/capture/a.zarr").json()["error"]
    kit.until(lambda: listed(page) == {})
    assert "was aborted" in page.get("api/heat/a.zarr?hook=q_rot").json()["error"], (
        "a request that left the list must still be named"
    )


def test_a_request_that_ends_while_it_is_read_is_answered_from_its_store(
    store: kit.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, record, find = client(tmp_path), begin(store, tmp_path / "a.zarr"), Library.open
    store.feed(record, VALUES, 32, ids=IDS)
    has(page, 32)
    given: list[bool] = []

    def ending(library: Library, name: str) -> Capture:
        found = find(library, name)
        if not given:
            store.close(record, 32, ids=IDS[:32])
            assert store.flush(kit.PATIENCE)
        given.append(isinstance(found, running.RunningCapture))
        return found

    monkeypatch.setattr(Library, "open", ending)
    found = floats(page.get("api/heat/a.zarr", params={"hook": "q_rot", "statistic": "value", "index": 2}))
    assert np.array_equal(found, VALUES["q_rot"].view("f4")[:, :32, 2]) and given == [True, False]


def test_an_incomplete_end_marks_the_rows_that_never_came(store: kit.Store, tmp_path: Path) -> None:
    page, record = client(tmp_path), begin(store, tmp_path / "a.zarr")
    store.put(record, VALUES, 0, 16, IDS)
    store.put(record, VALUES, 32, 16, IDS)  # rows 16 to 31 are lost
    has(page, 16)
    store.close(record, 48, ids=IDS[:48], losses=[Loss.of(Cause.FELL_BEHIND, [[16, 32]])])
    assert store.flush(kit.PATIENCE)
    about = page.get("api/capture/a.zarr").json()
    assert (about["running"], about["complete"], about["missing"]) == (False, False, [[16, 32]])


def test_a_request_that_nobody_writes_any_more_is_not_listed(store: kit.Store, tmp_path: Path) -> None:
    page, record = client(tmp_path), begin(store, tmp_path / "a.zarr")
    kit.until(lambda: "a.zarr" in listed(page))
    left = tmp_path / "left.zarr.partial"
    left.mkdir()
    for journal in (tmp_path / "a.zarr.partial").glob(".journal-*"):
        (left / journal.name).write_bytes(journal.read_bytes())
    (tmp_path / "link.zarr.partial").symlink_to(tmp_path / "a.zarr.partial")
    assert listed(page) == {"a.zarr": ("running", 0)}
    assert page.get("api/capture/link.zarr").status_code == 404
    store.abort(record)


def test_one_store_is_shown_alone_while_it_is_written(store: kit.Store, tmp_path: Path) -> None:
    records = [begin(store, tmp_path / f"{name}.zarr") for name in "ab"]
    page = client(tmp_path / "a.zarr")
    kit.until(lambda: listed(page) == {"a.zarr": ("running", 0)})
    assert page.get("api/capture/b.zarr").status_code == 404
    for record in records:
        store.abort(record)


def test_unchanged_captures_of_ten_thousand_are_not_opened_again(
    store: kit.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    viewkit.write_list(tmp_path / "many", 10_000)
    page, record = client(tmp_path / "many"), begin(store, tmp_path / "many/a.zarr")
    store.feed(record, VALUES, 32, ids=IDS)
    kit.until(lambda: listed(page).get("a.zarr") == ("running", 32))
    opened: list[Path] = []
    read = data.info_of
    monkeypatch.setattr(data, "info_of", lambda path: opened.append(path) or read(path))
    monkeypatch.setattr(data, "open_captures", lambda *_, **__: pytest.fail("the index is read"))
    monkeypatch.setattr(running.PartialStore, "refresh", lambda _: pytest.fail("a journal is read"))
    os.utime(tmp_path / "many")
    assert listed(page, again=1)["a.zarr"] == ("running", 32) and opened == []
    monkeypatch.undo()
    monkeypatch.setattr(data, "info_of", lambda path: opened.append(path) or read(path))
    store.close(record, 32, ids=IDS[:32])
    assert store.flush(kit.PATIENCE)
    found = page.get("api/captures", params={"again": 1, "count": 1}).json()
    assert (found["total"], found["captures"][0]["state"], len(opened)) == (10_001, "complete", 1)


def test_a_capture_of_rows_under_way_reads_as_the_finished_one(store: kit.Store, tmp_path: Path) -> None:
    record, library = begin(store, tmp_path / "a.zarr"), Library.at(tmp_path)
    store.feed(record, VALUES, 48, ids=IDS)
    kit.until(lambda: library._running.infos() and library.open("a.zarr").attrs["num_tokens"] == 48)
    now = library.open("a.zarr")
    rows = ([3, 40, 17], slice(2, 41, 3), None, np.arange(48) % 5 == 0)
    asked = [
        (hook, layer, tokens) for hook in ("resid_post", "topk_ids") for layer in (None, 0, [0]) for tokens in rows
    ]
    seen = [now.numpy(*one) for one in asked]
    plain = [now.token_ids, now.positions, now.phase]
    store.close(record, 48, ids=IDS[:48])
    assert store.flush(kit.PATIENCE)
    with open_capture(tmp_path / "a.zarr") as cap:
        for one, values in zip(asked, seen, strict=True):
            np.testing.assert_array_equal(values, cap.numpy(*one), err_msg=str(one), strict=True)
        for mine, theirs in zip(plain, (cap.token_ids, cap.positions, cap.phase), strict=True):
            np.testing.assert_array_equal(mine, theirs, strict=True)
    with pytest.raises(FileNotFoundError):
        now.numpy("topk_ids")


def test_ended_captures_are_forgotten_unless_they_left_no_store(store: kit.Store, tmp_path: Path) -> None:
    """A page may be open for days. It must not keep the journals of all requests that were shown."""
    library, records = Library.at(tmp_path), {name: begin(store, tmp_path / f"{name}.zarr") for name in "abc"}
    kit.until(lambda: len(library._running.infos()) == 3)
    for name, record in records.items():
        store.put(record, VALUES, 0, 16, IDS)
        assert library.open(f"{name}.zarr").attrs["start"] == 0
    store.close(records["a"], 16, ids=IDS[:16])
    store.abort(records["b"])
    assert store.flush(kit.PATIENCE)
    assert [info.store.name for info in library._running.infos()] == ["c.zarr"]
    assert sorted(library._running._known) == ["b.zarr", "c.zarr"]
    store.abort(records["c"])
