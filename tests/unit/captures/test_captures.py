# SPDX-License-Identifier: Apache-2.0
"""Many stores: filters, loops, tables, and their rows as one array."""

from __future__ import annotations

import datetime
import json
import os
import pickle
import re
import shutil
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector import TokenDataset, importance, open_capture, open_captures
from dmi_connector.analysis.directions import mean_difference
from dmi_connector.analysis.fit_pca import fit_pca
from dmi_connector.analysis.neurons import top_tokens
from dmi_connector.captures.captures import Captures
from dmi_connector.captures.row_view import RowView
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce import parse
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.format.schema import INDEX_NAME
from dmi_connector.store.read import reader
from dmi_connector.store.read.index import find_captures, indexed_captures
from dmi_connector.store.write.finish.repair import repair
from tests import storekit as kit

ARRAYS = (
    ArraySpec("resid_pre", "bfloat16", (0, 1), 8),
    ArraySpec("z", "float32", (1,), 6, shards=1),
    ArraySpec("topk_ids", "int32", (0, 1), 2),
    ArraySpec("resid_final", "bfloat16", (), 8),
    ArraySpec("logits", "float32", (), 5),
)
LENGTHS = (300, 7, 128, 40)
"""Rows of the stores. Half of each is a prompt. Rows 8 to 15 of the last one are missing."""
KEYS = ("a", "b", "a", None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stores(tmp_path_factory.mktemp("many"), ["/models/m0"] * 4)


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stores(tmp_path_factory.mktemp("two"), ["/models/m0", "/models/m1"] * 2)


def write_stores(folder: Path, models: Sequence[str]) -> Path:
    """Write the stores of LENGTHS and KEYS, each with its own model name."""
    stores = kit.Store(4 << 20)
    for i, (length, key) in enumerate(zip(LENGTHS, KEYS, strict=True)):
        names = {"key": key, "request_id": f"r{i}", "attrs": {"num_layers": 2, "model": models[i]}}
        values = values_of(i)
        losses = [Loss.of(Cause.FELL_BEHIND, [[8, 16]])] if i == 3 else []
        record = stores.open(folder / f"{i}.zarr", *ARRAYS, chunk=8 if i == 3 else 32, segment=64, **names)
        record.attrs["prompt_len"] = length // 2
        stores.feed(record, values, length, skip=[8] if i == 3 else [])
        stores.put_rows(record, "logits", values["logits"], 0, 0)
        stores.close(record, length, {"logits": 1}, losses=losses)
        assert stores.flush(kit.PATIENCE)
    assert stores.shutdown()
    return folder


def values_of(number: int) -> kit.Values:
    return {s.name: kit.random_bits(s, 1 if s.per_sample else LENGTHS[number], number) for s in ARRAYS}


def names(captures: Captures) -> list[str]:
    return [info.store.name for info in captures.infos]


@pytest.fixture
def unindexed(directory: Path, tmp_path: Path) -> Path:
    shutil.copytree(directory, tmp_path / "copy")
    (tmp_path / "copy" / INDEX_NAME).unlink()
    return tmp_path / "copy"


# ---- filters ---------------------------------------------------------------------------------------------------------


def test_complete_stores_are_found_in_the_order_they_began(directory: Path) -> None:
    assert names(open_captures(directory)) == ["0.zarr", "1.zarr", "2.zarr"]
    assert names(open_captures(directory, incomplete=True)) == ["0.zarr", "1.zarr", "2.zarr", "3.zarr"]


def test_filters_choose_stores(directory: Path) -> None:
    assert names(open_captures(directory, key="a")) == ["0.zarr", "2.zarr"]
    assert names(open_captures(directory, request_id="r1")) == ["1.zarr"]
    assert names(open_captures(directory, prompt_len=range(10, 151))) == ["0.zarr", "2.zarr"]
    assert names(open_captures(directory, prompt_len=3)) == ["1.zarr"]
    assert names(open_captures(directory, prompt_len=np.int64(3))) == ["1.zarr"]
    for wrong in (3.0, [3, 150], "3"):
        with pytest.raises(ValueError, match=re.escape(f"prompt_len {wrong!r} is not valid; give a number of tokens")):
            open_captures(directory, prompt_len=wrong)  # type: ignore[arg-type]
    given: tuple[dict[str, Any], ...] = ({"key": 5}, {"key": ["a", 5]}, {"request_id": 5}, {"model": 5})
    for one in given:
        name = next(iter(one))
        with pytest.raises(ValueError, match=re.escape(f"{name} 5 is not valid; give a string, as in {name}='5'")):
            open_captures(directory, **one)
    with pytest.raises(ValueError, match=re.escape("key ['a'] is not valid; give a string")):
        find_captures(directory, key=["a"])  # type: ignore[arg-type]
    assert names(open_captures(directory, key=np.array(["a", "b"]))) == ["0.zarr", "1.zarr", "2.zarr"]
    assert names(open_captures(directory, where=lambda info: info.num_tokens == 128)) == ["2.zarr"]
    both = open_captures(directory, incomplete=True).filter(lambda info: info.state == "incomplete")
    assert names(both) == ["3.zarr"]


def test_times_choose_stores(directory: Path) -> None:
    second = open_captures(directory).infos[1].started
    assert names(open_captures(directory, after=second)) == ["1.zarr", "2.zarr"]
    assert names(open_captures(directory, before=second)) == ["0.zarr"]
    at = datetime.datetime.fromisoformat(second)
    assert names(open_captures(directory, after=at, before=at + datetime.timedelta(microseconds=1))) == ["1.zarr"]
    naive = at.replace(tzinfo=None).isoformat()
    assert names(open_captures(directory, before=naive)) == ["0.zarr"], "a time without a time zone is UTC"
    tomorrow = at.date() + datetime.timedelta(days=1)
    assert len(open_captures(directory, after=at.date() - datetime.timedelta(days=1), before=tomorrow)) == 3
    assert not open_captures(directory, after=tomorrow + datetime.timedelta(days=1)).infos
    for number in (5, datetime.time(12)):
        with pytest.raises(ValueError, match=r"after .* is not a time"):
            open_captures(directory, after=number)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="after 'yesterday' is not a time"):
        open_captures(directory, after="yesterday")


def test_a_directory_without_an_index_is_searched(unindexed: Path, directory: Path) -> None:
    found, known = open_captures(unindexed, incomplete=True), open_captures(directory, incomplete=True)
    plain = [{**vars(info), "store": info.store.name} for info in found.infos]
    assert plain == [{**vars(info), "store": info.store.name} for info in known.infos]
    assert names(open_captures(unindexed, key="b")) == ["1.zarr"]
    assert names(open_captures(unindexed, request_id="r2")) == ["2.zarr"]


def test_find_captures_searches_a_directory_without_an_index(unindexed: Path, directory: Path) -> None:
    assert [i.store.name for i in find_captures(unindexed)] == [i.store.name for i in find_captures(directory)]
    assert [i.store.name for i in find_captures(unindexed, key="a")] == ["0.zarr", "2.zarr"]
    assert [i.store.name for i in find_captures(unindexed, request_id="r3")] == ["3.zarr"]
    assert indexed_captures(unindexed) == []


def test_a_damaged_store_of_a_directory_without_an_index_is_named(unindexed: Path) -> None:
    (unindexed / "1.zarr/zarr.json").write_text("{")
    for find in (find_captures, open_captures):
        with pytest.raises(ValueError, match=r"/1\.zarr is not a capture: .*; dmi verify .*copy lists all stores that"):
            find(unindexed)
    assert repair(unindexed) == [], "only an index lists uploads"


def test_a_model_is_named_in_full_or_by_the_last_part_of_its_path(two_models: Path) -> None:
    assert names(open_captures(two_models, key=["a", "b"], model="m0")) == ["0.zarr", "2.zarr"]
    assert names(open_captures(two_models, model="/models/m1")) == ["1.zarr"]
    assert names(open_captures(two_models, model="m")) == []


def test_rows_of_two_models_are_not_joined(two_models: Path, tmp_path: Path) -> None:
    """Both models have the same shape. An older index does not have the names of models."""
    shutil.copytree(two_models, tmp_path / "old")
    index = tmp_path / "old" / INDEX_NAME
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if k not in ("prompt_len", "model")} for line in lines]
    index.write_text("".join(json.dumps(line) + "\n" for line in kept))
    for folder in (two_models, tmp_path / "old"):
        captures = open_captures(folder)
        with pytest.raises(ValueError, match=r"1\.zarr is of the model /models/m1, .*0\.zarr of /models/m0: .*model="):
            captures.rows("resid_pre", 1)
        with pytest.raises(ValueError, match=r"name one model with open_captures\(model=\.\.\.\)"):
            TokenDataset(captures, "resid_pre@1", 4)
        for joined in (captures, list(captures)):
            for use in (
                lambda c: top_tokens(c, "resid_pre", 0, 1),
                lambda c: importance(c, "resid_pre", 1),
                lambda c: mean_difference(c, c, "resid_pre", 1),
            ):
                with pytest.raises(ValueError, match="their rows cannot be mixed"):
                    use(joined)
        one = open_captures(folder, model="m0")
        assert len(one.rows("resid_pre", 1)) == 428 and len(one[:1].filter(hooks="z").rows("z", 1)) == 300
        assert top_tokens(one, "resid_pre", 0, 1, count=1) and importance(one, "resid_pre", 1).all()
        assert mean_difference(one, open_captures(folder, model="m1"), "resid_pre", 1).vector.all()
        assert len(captures[::2].rows("resid_pre", 1)) == 428


def test_copies_of_a_model_are_joined_when_their_name_is_given(tmp_path: Path) -> None:
    write_stores(tmp_path, ["/here/m0", "/there/m0"] * 2)
    with pytest.raises(ValueError, match="of the model /there/m0"):
        open_captures(tmp_path).rows("resid_pre", 1)
    one = open_captures(tmp_path, model="m0")
    assert len(one.rows("resid_pre", 1)) == 435 and top_tokens(one, "resid_pre", 0, 1, count=1)


def test_a_basis_is_of_the_rows_of_one_model(two_models: Path, tmp_path: Path) -> None:
    stores, out = sorted(two_models.glob("*.zarr")), tmp_path / "basis"
    with pytest.raises(ValueError, match=r"their rows cannot be mixed; name one model .* fit-pca"):
        fit_pca(stores, ["resid_pre"], 2, out, [1])
    with pytest.raises(ValueError, match="fit-pca: no store is of the model m; dmi info names the model of a store"):
        fit_pca(stores, ["resid_pre"], 2, out, [1], model="m")
    assert not out.exists()
    command = ["fit-pca", *map(str, stores), "--hook", "resid_pre", "--layer", "1", "--rank", "2", "-o", str(out)]
    assert main([*command, "--model", "m0"]) == 0 and out.exists()


def test_an_index_of_an_older_version_is_filled_up_from_the_stores(two_models: Path, tmp_path: Path) -> None:
    shutil.copytree(two_models, tmp_path / "old")
    index = tmp_path / "old" / INDEX_NAME
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if k not in ("prompt_len", "model")} for line in lines]
    index.write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert names(open_captures(tmp_path / "old", model="m1")) == ["1.zarr"]
    assert names(open_captures(tmp_path / "old", prompt_len=64)) == ["2.zarr"]
    assert open_captures(tmp_path / "old").table()["prompt_len"].tolist() == [150, 3, 64]


def test_a_store_that_is_removed_while_it_is_opened_is_missing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention may remove a store after it was found and before its root document is read."""
    monkeypatch.setattr(reader, "wait_for", lambda _final, _seconds: None)
    with pytest.raises(FileNotFoundError, match=r"gone\.zarr was removed just now"):
        open_capture(directory / "gone.zarr", 0)


def test_stores_that_were_removed_by_hand_are_left_out(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "some")
    before = open_captures(tmp_path / "some")
    shutil.rmtree(tmp_path / "some" / "1.zarr")
    assert names(open_captures(tmp_path / "some")) == names(before.filter(hooks="resid_final")) == ["0.zarr", "2.zarr"]
    with pytest.raises(ValueError, match="is not a directory; give a directory of stores"):
        open_captures(tmp_path / "none")


# ---- loops and tables ------------------------------------------------------------------------------------------------


def test_a_loop_opens_one_store_at_a_time(directory: Path) -> None:
    captures = open_captures(directory)
    before = len(os.listdir("/proc/self/fd"))
    most, lengths = 0, []
    for capture in captures:
        most = max(most, len(os.listdir("/proc/self/fd")))
        lengths.append(capture.numpy("resid_final").shape[0])
    assert lengths == [300, 7, 128] and most <= before + 1
    assert captures[-1].attrs["num_tokens"] == 128
    assert names(captures[1:]) == ["1.zarr", "2.zarr"] and len(captures[1:]) == 2
    assert repr(captures) == "Captures(3 stores, 435 tokens)"


def test_the_progress_bar_counts_stores(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [c.prompt_len for c in open_captures(directory).progress("norms")] == [150, 3, 64]
    bar = capsys.readouterr().err
    assert "norms: 100%" in bar and "3/3" in bar


def test_ten_thousand_stores_take_little_memory(directory: Path, tmp_path: Path) -> None:
    """The index names 10,000 stores, which are links to one store."""
    target = directory / "1.zarr"
    lines = (directory / INDEX_NAME).read_text().splitlines()
    finish = next(json.loads(line) for line in lines if '"1.zarr"' in line and '"finish"' in line)
    with open(tmp_path / INDEX_NAME, "w") as index:
        for i in range(10_000):
            (tmp_path / f"{i}.zarr").symlink_to(target)
            index.write(json.dumps({**finish, "store": f"{i}.zarr"}) + "\n")
    captures = open_captures(tmp_path, key="b", prompt_len=3)
    assert len(captures) == 10_000
    few, many = [], []
    tracemalloc.start()
    try:
        for number, capture in enumerate(captures[:2_000]):
            capture.numpy("resid_pre", 1)
            (few if number < 200 else many).append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert max(many) < max(few) + (1 << 20), "memory must not grow with the number of stores that were read"
    assert len(captures.rows("resid_pre", 1)) == 70_000


def test_the_table_has_a_row_for_each_store(directory: Path) -> None:
    captures = open_captures(directory, incomplete=True)
    frame = captures.table()
    assert frame["key"].tolist()[:3] == ["a", "b", "a"] and frame["num_tokens"].tolist() == list(LENGTHS)
    assert str(frame["started"].dtype).endswith("UTC]") and frame["started"].is_monotonic_increasing
    assert str(frame["prompt_len"].dtype) == "Int64"
    other = captures.table("polars")
    assert other.columns == list(frame.columns) and other["num_tokens"].to_list() == list(LENGTHS)
    assert other["started"].to_list() == [time.to_pydatetime() for time in frame["started"]]
    assert other["store"].to_list() == [str(info.store) for info in captures.infos]
    with pytest.raises(ValueError, match="table: 'arrow' is not valid"):
        captures.table("arrow")  # type: ignore[call-overload]


def test_the_table_counts_draft_tokens(directory: Path, tmp_path: Path) -> None:
    """The index has the counts, or the stores do. Requests without speculative decoding have none."""
    shutil.copytree(directory, tmp_path / "drafts")
    stores, counts = kit.Store(), {"scheduled": 12, "accepted": 7}
    stores.write(tmp_path / "drafts" / "drafted.zarr", [kit.Q], 20, attrs={"draft_tokens": counts})
    assert stores.shutdown()
    indexed = open_captures(tmp_path / "drafts").table()
    (tmp_path / "drafts" / INDEX_NAME).unlink()
    for frame in (indexed, open_captures(tmp_path / "drafts").table()):
        found = frame[["draft_tokens_scheduled", "draft_tokens_accepted"]]
        assert found.loc[frame["num_tokens"] == 20].to_numpy().tolist() == [[12, 7]]
        assert found.loc[frame["num_tokens"] != 20].isna().all(axis=None) and {*map(str, found.dtypes)} == {"Int64"}
    rate = open_captures(tmp_path / "drafts").table("polars").drop_nulls("draft_tokens_scheduled")
    assert rate["draft_tokens_accepted"].to_list() == [7]


def test_an_empty_selection_has_an_empty_table(directory: Path) -> None:
    captures = open_captures(directory, key="nobody")
    assert len(captures.table()) == len(captures.table("polars")) == len(captures) == 0


@pytest.mark.parametrize(("module", "extra"), [("pandas", "pandas"), ("polars", "polars"), ("tqdm.auto", "progress")])
def test_an_absent_library_is_named_with_its_extra(
    directory: Path, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    captures = open_captures(directory)
    with pytest.raises(ImportError, match=rf"install dmi_connector\[{extra}\]"):
        list(captures.progress()) if extra == "progress" else captures.table(extra)  # type: ignore[call-overload]


# ---- rows of many stores ---------------------------------------------------------------------------------------------


def joined(name: str, numbers: tuple[int, ...] = (0, 1, 2), skip: int = 0) -> np.ndarray:
    """float32 [layers, rows, width] of some stores, without missing rows."""
    dtype = next(s.dtype for s in ARRAYS if s.name == name)
    parts = []
    for number in numbers:
        values = kit.to_float(values_of(number)[name], dtype)
        rows = [i for i in range(skip, LENGTHS[number]) if number != 3 or not 8 <= i < 16]
        parts.append(values[:, rows])
    return np.concatenate(parts, axis=1)


@pytest.fixture
def view(directory: Path) -> RowView:
    return open_captures(directory).rows("resid_pre", 1)


def test_a_view_is_the_rows_of_all_stores(view: RowView) -> None:
    expected = joined("resid_pre")[1]
    assert view.shape == expected.shape == (435, 8) and len(view) == 435
    np.testing.assert_array_equal(view[:], expected)
    np.testing.assert_array_equal(view[290:310:3], expected[290:310:3])
    np.testing.assert_array_equal(view[::-1], expected[::-1])
    np.testing.assert_array_equal(view[-1], expected[-1])
    mask = np.arange(435) % 5 == 0
    np.testing.assert_array_equal(view[mask], expected[mask])


def test_random_rows_may_repeat_and_come_in_any_order(view: RowView) -> None:
    rows = np.random.default_rng(0).integers(-435, 435, 500)
    np.testing.assert_array_equal(view[rows], joined("resid_pre")[1][rows])
    assert view[[]].shape == (0, 8)
    with pytest.raises(IndexError, match="the view of 'resid_pre' has 435 rows, row 435 does not exist"):
        view[[435]]


def test_an_ellipsis_without_a_dimension_moves_axes_as_in_numpy(directory: Path) -> None:
    view, expected = open_captures(directory).rows("resid_pre"), joined("resid_pre")
    for index in ((slice(None), [2, 4], ..., 0), ([1, 0], [2, 4], ...), (..., [2, 4], [0, 1]), (0, [3], ..., [1])):
        np.testing.assert_array_equal(view[index], expected[index], strict=True)


def test_invalid_indexes_of_a_view_are_refused(view: RowView) -> None:
    bad: list[tuple[Any, str]] = [
        ((3, 4, 5), r"has 2 dimensions, the index \(3, 4, 5\) has more"),
        ((..., 3, ...), "has 2 dimensions, the index .* has several ellipses; give one"),
        ((435, 0), "has 435 rows, row 435 does not exist"),
        ((slice(None), None), "has no column None"),
        ((..., True), "has no column True"),
        (np.zeros((435, 8), bool), r"has 435 rows, the mask of tokens has shape \(435, 8\)"),
        ("5", "has no row 5;"),
        (np.array([2**64 - 1], np.uint64), "row 18446744073709551615 does not exist"),
        (2.9, "has no row 2.9; give integers, a slice or a mask"),
        ([1.9], "has no row 1.9"),
        (np.array([0, 1.5]), "has no row 0.0"),
        (None, "has no row None"),
        (np.array([False, True]), r"has 435 rows, the mask of tokens has shape \(2,\)"),
        (True, r"the mask of tokens has shape \(\)"),
    ]
    for index, message in bad:
        with pytest.raises(IndexError, match=message):
            view[index]
    for read in (view.read, view.torch, view.origins):
        with pytest.raises(IndexError, match=r"has no row 1\.9;"):
            read([1.9])
        for shape in ((), (2, 2)):
            with pytest.raises(IndexError, match=re.escape(f"takes a list of rows, not numbers of shape {shape}")):
                read(np.zeros(shape, int))


INDEXES = [
    3, -1, np.int64(3), np.array(7), np.uint8(200), slice(None), slice(290, 310, 3), slice(None, None, -1), slice(5, 5),
    ..., (), (..., slice(2, 5)), (3, 4), (slice(None), 0), (slice(3, 9), slice(None, None, -2)), (..., 3),
    [7, 3, 7], [-1, 0], [[0, 1], [2, 3]], [], [[]], np.zeros((2, 0), int), range(5), np.array([434, 0], np.uint64),
    np.arange(435) % 5 == 0, np.zeros(435, bool), (np.arange(435) % 5 == 0, slice(1, 3)),
    ([0, 1, 2], [3, 4, 5]), ([[0], [1]], [3, 4, 5]), (5, [1, 1]), ([5, 6], 1), (slice(2, 4), [1, 0]),
    (slice(2, 4), np.arange(8) > 5), ([1, 2], ...), (..., [1, 2]),
]  # fmt: skip
OF_LAYERS = [
    0, -1, [1, 0], [[1], [0]], slice(1, None), slice(0, 0), np.array([True, False]), (0, 5), (slice(None), 5),
    (slice(None), [5, 5, 434]), (..., 5, slice(None)), (..., 2), (1, slice(3, 9), 2), ([1, 0], [5, 6]), ([1, 0], 5),
    (1, [5, 6], [0, 1]), ([[0], [1]], [5, 6]), (0, slice(None), [1, 2]), (slice(None), np.arange(435) < 4, 1), (), ...,
]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=repr)
def test_an_index_of_a_view_is_one_of_numpy(view: RowView, index: Any) -> None:
    found, expected = view[index], joined("resid_pre")[1][index]
    assert np.shape(found) == expected.shape
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("index", OF_LAYERS, ids=repr)
def test_an_index_of_a_view_of_all_layers_is_one_of_numpy(directory: Path, index: Any) -> None:
    found, expected = open_captures(directory).rows("resid_pre")[index], joined("resid_pre")[index]
    assert np.shape(found) == expected.shape
    np.testing.assert_array_equal(found, expected)


def test_a_view_of_all_layers_reads_only_those_it_is_asked_for(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "d")
    for name in ("2.zarr", "1.zarr", "0.zarr"):
        (file,) = (tmp_path / "d" / name / "resid_pre/c/0/0").iterdir()
        data = bytearray(file.read_bytes())
        data[10] ^= 1  # of layer 0
        file.write_bytes(data)
    view = open_captures(tmp_path / "d").rows("resid_pre")
    np.testing.assert_array_equal(view[1], joined("resid_pre")[1])
    with pytest.raises(ValueError, match="crc32c"):
        view[0]


@pytest.mark.parametrize("index", [2, (slice(None), 435), (0, 0, 8), (None, 0), ([0, 2],), (0, 0, 0, 0)], ids=repr)
def test_invalid_indexes_of_a_view_of_all_layers_are_refused(directory: Path, index: Any) -> None:
    with pytest.raises(IndexError):
        open_captures(directory).rows("resid_pre")[index]


def reads_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each later read of a view."""
    counts: list[int] = []
    read = RowView._read

    def counted(self: RowView, numbers: np.ndarray, layers: Sequence[int], convert: bool) -> np.ndarray:
        counts.append(len(numbers))
        return read(self, numbers, layers, convert)

    monkeypatch.setattr(RowView, "_read", counted)
    return counts


def test_a_view_is_an_array_to_numpy(view: RowView, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, counts = joined("resid_pre")[1], reads_of(monkeypatch)
    assert (view.ndim, view.dtype, view.size) == (2, np.float32, expected.size)
    for made in (np.asarray(view), np.array(view), np.array(view, copy=None), np.concatenate([view])):
        assert made.dtype == np.float32
        np.testing.assert_array_equal(made, expected)
    assert np.asarray(view, np.float64).dtype == np.float64
    assert np.mean(view) == pytest.approx(expected.mean()) and np.linalg.norm(view) > 0
    assert counts == [435] * len(counts) and len(counts) == 7, "each call must read all rows at once"
    with pytest.raises(ValueError, match="leave copy=False out"):
        np.array(view, copy=False)


def test_a_loop_over_a_view_reads_many_rows_at_a_time(view: RowView, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, counts = joined("resid_pre")[1], reads_of(monkeypatch)
    np.testing.assert_array_equal(list(view), expected)
    assert counts == [435]
    monkeypatch.setattr("dmi_connector.captures.row_view._ITERATED", 200 * 8 * 4)
    np.testing.assert_array_equal([row for row in view], expected)
    assert counts == [435, 200, 200, 35]


def test_views_of_other_hooks_are_arrays_too(directory: Path) -> None:
    captures = open_captures(directory)
    both, ids = captures.rows("resid_pre"), captures.rows("topk_ids", 0)
    assert (both.ndim, len(both), both.shape) == (3, 2, (2, 435, 8))
    np.testing.assert_array_equal(np.asarray(both), joined("resid_pre"))
    np.testing.assert_array_equal(list(both), joined("resid_pre"))
    assert ids.dtype == np.asarray(ids).dtype == ids[3:4].dtype == np.int32


def test_dask_reads_a_view_in_parts(directory: Path, view: RowView, monkeypatch: pytest.MonkeyPatch) -> None:
    array = pytest.importorskip("dask.array")
    counts = reads_of(monkeypatch)
    lazy = array.from_array(view, chunks=(100, -1))
    assert (lazy.shape, lazy.dtype) == (view.shape, np.float32) and sum(counts) == 0
    expected = joined("resid_pre")[1]
    np.testing.assert_array_equal(lazy.compute(scheduler="sync"), expected)
    assert max(counts) == 100
    np.testing.assert_array_equal(lazy[[5, 300], 3].compute(scheduler="sync"), expected[[5, 300], 3])
    np.testing.assert_array_equal(lazy[5:9, ::2].compute(scheduler="sync"), expected[5:9, ::2])
    both = array.from_array(open_captures(directory).rows("resid_pre"))
    np.testing.assert_array_equal(both[1, 5].compute(scheduler="sync"), joined("resid_pre")[1, 5])


def test_a_view_keeps_the_stored_dtype_where_it_is_asked_to(view: RowView) -> None:
    torch = pytest.importorskip("torch")
    tensor = view.torch([3, 1])
    assert tensor.dtype == torch.bfloat16 and view.read([3, 1], convert=False).dtype.name == "bfloat16"
    np.testing.assert_array_equal(tensor.float().numpy(), joined("resid_pre")[1][[3, 1]])


def test_a_view_reads_other_hooks_and_all_layers(directory: Path) -> None:
    captures = open_captures(directory)
    both = captures.rows("resid_pre")
    assert both.shape == (2, 435, 8) and both.layers == [0, 1]
    np.testing.assert_array_equal(both.read([299, 300]), joined("resid_pre")[:, [299, 300]])
    np.testing.assert_array_equal(captures.rows("resid_final")[5:9], joined("resid_final")[0, 5:9])
    np.testing.assert_array_equal(captures.rows("resid_post", 0)[5:9], joined("resid_pre")[1, 5:9])
    np.testing.assert_array_equal(captures.rows("resid_post", -1)[5:9], joined("resid_final")[0, 5:9])
    np.testing.assert_array_equal(captures.rows("resid_pre@1", skip=1)[5:9], joined("resid_pre")[1, 6:10])
    with pytest.raises(ValueError, match="'q@1' names its layer; leave layer=0 out"):
        captures.rows("q@1", 0)
    ids = captures.rows("topk_ids", -1)[:]
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, joined("topk_ids")[1])


def test_missing_rows_are_left_out_of_a_view_and_so_are_skipped_ones(directory: Path) -> None:
    captures = open_captures(directory, incomplete=True)
    view = captures.rows("z", 1, skip=10)
    expected = joined("z", (0, 1, 2, 3), skip=10)[0]
    assert len(view) == 290 + 0 + 118 + 24
    np.testing.assert_array_equal(view[:], expected)
    stores, rows = view.origins([289, 290, -24, -1])
    assert stores.tolist() == [0, 2, 3, 3] and rows.tolist() == [299, 10, 16, 39]


def test_batches_of_a_view_are_all_its_rows_in_order(view: RowView) -> None:
    parts = list(view.batches(100))
    assert [len(part) for part in parts] == [100, 100, 100, 100, 35]
    np.testing.assert_array_equal(np.concatenate(parts), joined("resid_pre")[1])
    with pytest.raises(ValueError, match="size 0 is not valid"):
        next(view.batches(0))


def test_a_view_can_be_pickled(view: RowView) -> None:
    view[[0]]
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(view))[[0, 434]], joined("resid_pre")[1][[0, 434]])


def test_blocks_are_whole_chunks_and_hold_each_row_once(directory: Path) -> None:
    view = open_captures(directory, incomplete=True).rows("z", 1, skip=3)
    stores, first, counts = view.blocks()
    begins = np.cumsum(counts) - counts
    assert counts.sum() == len(view)
    for store, start, begin, count in zip(stores, first, begins, counts, strict=True):
        of_stores, rows = view.origins(np.arange(begin, begin + count))
        assert set(of_stores.tolist()) == {store} and rows[0] == start and len(set((rows // 32).tolist())) == 1
        span = view.runs.span(int(begin), int(count))
        assert np.array_equal(np.arange(400)[span], rows)


def test_invalid_arguments_of_a_view_are_refused(directory: Path) -> None:
    captures = open_captures(directory)
    for hook, layer, skip, error, message in [
        ("resid_post", None, 0, ValueError, "lies in several arrays"),
        ("resid_pre", 5, 0, KeyError, "no layer 5"),
        ("resid_pri", 0, 0, KeyError, "did you mean 'resid_pre'"),
        ("z", 1, -1, ValueError, "skip -1 is not valid"),
    ]:
        with pytest.raises(error, match=message):
            captures.rows(hook, layer, skip)
    with pytest.raises(ValueError, match="no store to read 'z' from"):
        open_captures(directory, key="nobody").rows("z", 1)


@pytest.fixture
def stores() -> Iterator[kit.Store]:
    made = kit.Store(1 << 20)
    yield made
    assert made.shutdown()


def test_stores_of_other_shapes_are_refused_when_they_are_read(stores: kit.Store, tmp_path: Path) -> None:
    for i, spec in enumerate([ArraySpec("z", "float32", (1,), 6), ArraySpec("z", "float32", (1,), 5)]):
        stores.write(tmp_path / f"{i}.zarr", [spec], 10, attrs={"num_layers": 2})
    stores.write(tmp_path / "2.zarr", [ArraySpec("z", "float32", (0,), 6)], 10, attrs={"num_layers": 2})
    view = open_captures(tmp_path).rows("z", 1)
    assert view[:10].shape == (10, 6)
    with pytest.raises(ValueError, match=r"1\.zarr holds rows of 'z' of another width"):
        view[10:20]
    with pytest.raises(KeyError, match=r"2\.zarr did not capture \['z@1'\]; leave .* open_captures\(hooks=\['z@1'\]\)"):
        view[20:]


def test_stores_without_a_hook_or_layer_are_named_and_can_be_left_out(stores: kit.Store, tmp_path: Path) -> None:
    both, one, none = (
        ArraySpec("z", "float32", (0, 1), 6),
        ArraySpec("z", "float32", (1,), 6),
        ArraySpec("v", "float32", (0,), 6),
    )
    for name, spec, length in (("0", both, 10), ("1", one, 20), ("2", none, 30)):
        stores.write(tmp_path / f"{name}.zarr", [spec], length, attrs={"num_layers": 2})
    captures = open_captures(tmp_path)
    for layer, lacking, rows in (
        (0, ["z@0"], slice(10, 20)),
        (1, ["z@1"], slice(30, 40)),
        (None, ["z@0"], slice(10, 20)),
    ):
        view = captures.rows("z", layer)
        assert view.shape[-2:] == (60, 6) and view.read(slice(0, 10)).shape[-2:] == (10, 6)
        with pytest.raises(KeyError, match=re.escape(f"zarr did not capture {lacking}; leave such stores out")):
            view.read(rows)
    assert names(open_captures(tmp_path, hooks="z")) == ["0.zarr", "1.zarr"]
    for hooks, kept in [
        ("z@0", ["0.zarr"]),
        (["z@0", "z@-1"], ["0.zarr"]),
        ("blocks.1.attn.hook_z", ["0.zarr", "1.zarr"]),
        (["z", "v"], []),
        ([], ["0.zarr", "1.zarr", "2.zarr"]),
    ]:
        assert names(open_captures(tmp_path, hooks=hooks)) == names(captures.filter(hooks=hooks)) == kept
    assert names(captures.filter(lambda info: info.num_tokens != 10, hooks="z")) == ["1.zarr"]
    assert open_captures(tmp_path, hooks="z@1").rows("z", 1)[:].shape == (30, 6)
    with pytest.raises(ValueError, match="'z@x' names no layer"):
        open_captures(tmp_path, hooks="z@x")


def test_a_lost_array_of_a_view_is_damage(stores: kit.Store, tmp_path: Path) -> None:
    for i in range(2):
        stores.write(tmp_path / f"{i}.zarr", [kit.Q], 10)
    view = open_captures(tmp_path).rows("q", 0)
    (tmp_path / "1.zarr/q/zarr.json").unlink()
    with pytest.raises(ValueError, match="the metadata of array 'q' cannot be read"):
        view[10]


@pytest.mark.parametrize("shards", [1, 2])
def test_reduced_hooks_are_decoded(shards: int, stores: kit.Store, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    reduction = parse("int8")
    wide = np.random.default_rng(0).standard_normal((2, 40, 8)).astype("f4")
    slices = [
        np.stack([reduction.encode(torch.from_numpy(np.ascontiguousarray(layer))).numpy() for layer in part])
        for part in np.split(wide, shards, axis=-1)
    ]
    stored = np.concatenate(slices, axis=-1)
    settings = {**reduction.settings(), "width": 8, "dtype": "float32"}
    spec = ArraySpec("resid_pre", "uint8", (0, 1), stored.shape[-1], shards, reduce=settings)
    # Each rank needs a writer of its own.
    others = [kit.Store(1 << 20) for _ in range(shards - 1)]
    for i in range(2):
        for rank, part in enumerate([*others, stores]):
            own = kit.shard_specs([spec], shards, shards - 1 - rank) if shards > 1 else [spec]
            options = {"ranks": shards, "rank": shards - 1 - rank}
            part.write(tmp_path / f"{i}.zarr", own, 40, values={"resid_pre": stored}, wait=False, **options)
    assert all(part.flush(kit.PATIENCE) for part in [*others, stores])
    for part in others:
        part.shutdown()
    captures = open_captures(tmp_path)
    whole = captures[0].numpy("resid_pre", 1)
    assert whole.shape == (40, 8) and np.abs(whole - wide[1]).max() < 0.05
    view = captures.rows("resid_pre", 1)
    assert view.shape == (80, 8)
    np.testing.assert_array_equal(view[[79, 0]], whole[[39, 0]])


def test_layers_of_models_of_other_depth_are_not_mixed(tmp_path: Path) -> None:
    owner = kit.Store(1 << 20)
    for layers in (2, 4):
        spec = ArraySpec("q", "float32", tuple(range(layers)), 8)
        owner.write(tmp_path / f"{layers}.zarr", [spec], 20, attrs={"num_layers": layers})
    assert owner.shutdown()
    captures = open_captures(tmp_path)
    assert captures.rows("q", 1)[:].shape == (40, 8)
    with pytest.raises(ValueError, match=r"of a model with 4 layers, .* of one with 2: .*model="):
        captures.rows("q", -1)[:]


def test_resid_post_of_models_of_other_depth_is_not_mixed(tmp_path: Path) -> None:
    """After the last layer it is resid_final, which has the number of a middle layer in a deeper model."""
    owner = kit.Store(1 << 20)
    for layers in (2, 3):
        specs = [ArraySpec("resid_pre", "float32", tuple(range(layers)), 8), ArraySpec("resid_final", "float32", (), 8)]
        owner.write(tmp_path / f"{layers}.zarr", specs, 20, attrs={"num_layers": layers})
    assert owner.shutdown()
    captures = open_captures(tmp_path)
    assert captures.rows("resid_final")[:].shape == captures.rows("resid_pre", 1)[:].shape == (40, 8)
    for layer in (0, 1, -1):
        with pytest.raises(ValueError, match=r"of a model with 3 layers, .* of one with 2: layers of 'resid_post'"):
            captures.rows("resid_post", layer)[:]


def test_a_store_whose_root_document_lacks_a_field_is_failed(tmp_path: Path) -> None:
    owner = kit.Store(1 << 20)
    for name in "ab":
        owner.write(tmp_path / f"{name}.zarr", [ArraySpec("q", "float32", (0,), 8)], 20, attrs={"num_layers": 1})
    assert owner.shutdown()
    (tmp_path / "a.zarr").rename(tmp_path / "c.zarr")  # the index does not list it
    path = tmp_path / "c.zarr/zarr.json"
    document = json.loads(path.read_text())
    del document["attributes"]["dmi"]["complete"]
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="complete"):
        open_capture(tmp_path / "c.zarr", 0)
    assert {"b.zarr"} <= {info.store.name for info in find_captures(tmp_path)}


def test_a_store_without_the_file_of_its_tokens_says_so(tmp_path: Path) -> None:
    owner = kit.Store(1 << 20)
    owner.write(tmp_path / "a.zarr", [ArraySpec("q", "float32", (0,), 8)], 20, attrs={"num_layers": 1})
    assert owner.shutdown()
    (tmp_path / "a.zarr/token_ids/c/0").unlink()
    with (
        open_capture(tmp_path / "a.zarr", 0) as capture,
        pytest.raises(ValueError, match="token_ids: its chunk is missing"),
    ):
        _ = capture.token_ids
    with (
        open_capture(tmp_path / "a.zarr", 0) as capture,
        pytest.raises(KeyError, match=r"a\.zarr: hook 'q' has no layer 7"),
    ):
        capture.numpy("q", 7)
