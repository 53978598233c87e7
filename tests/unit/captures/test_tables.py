# SPDX-License-Identifier: Apache-2.0
"""Captures by name, tables of captures and of tokens, and one xarray Dataset of many captures."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector import open_captures
from dmi_connector.captures.captures import Captures
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss
from tests import storekit as kit

SPECS = (ArraySpec("z", "float32", (0, 1), 4), ArraySpec("topk_ids", "int32", (0,), 2))
LENGTHS, KEYS = (20, 9, 12), ("run/0", "run/1", "run/1")
LOST = [8, 9, 10, 11]
"""Missing rows of the last store."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[kit.Values]]:
    """Three stores of a `dmi run`. Its manifest names two of them."""
    folder, owner = tmp_path_factory.mktemp("tables"), kit.Store(1 << 20)
    values = []
    for i, length in enumerate(LENGTHS):
        losses = [Loss.of(Cause.FELL_BEHIND, [[8, 12]])] if i == 2 else []
        values.append(owner.write(folder / f"s{i}.zarr", SPECS, length, key=KEYS[i], losses=losses))
    assert owner.shutdown()
    lines = [{"row": 5, "id": "doc-5", "finish_reason": "stop"}, {"row": 2, "id": 7, "finish_reason": None}]
    text = "".join(json.dumps({**line, "key": KEYS[i], "store": f"s{i}.zarr"}) + "\n" for i, line in enumerate(lines))
    (folder / "manifest.jsonl").write_text(text)
    return folder, values


@pytest.fixture
def captures(written: tuple[Path, list[kit.Values]]) -> Captures:
    return open_captures(written[0], incomplete=True)


def text_of(ids: list[int]) -> str:
    return "-".join(map(str, ids))


def test_a_capture_is_found_by_its_name_or_key(captures: Captures) -> None:
    for name in ("s1.zarr", "s1"):
        assert captures[name].path.name == "s1.zarr"
    assert captures["run/0"].path.name == "s0.zarr"
    with pytest.raises(KeyError, match="2 stores are named 'run/1'; choose them with open_captures"):
        captures["run/1"]
    with pytest.raises(KeyError, match=r"no store of 3 has the name or key 's9.zarr': did you mean 's[0-2].zarr'"):
        captures["s9.zarr"]


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_the_table_has_the_rows_of_the_run(captures: Captures, library: str, tmp_path: Path) -> None:
    rows = captures.table(library, text=text_of)  # type: ignore[call-overload]
    found = rows.to_dict("records") if library == "pandas" else rows.to_dicts()
    shown = [
        [None if value != value else value for value in (r["row"], r["id"], r["finish_reason"])] for r in found[:2]
    ]
    assert shown == [[5, "doc-5", "stop"], [2, "7", None]]
    assert found[0]["prompt"] == text_of(list(range(10))) and found[1]["prompt"] == "0-1-2-3"
    if library == "polars":
        assert found[2]["row"] is None and rows["row"].dtype.is_integer()
    else:
        assert rows["row"].isna().tolist() == [False, False, True] and str(rows["row"].dtype) == "Int64"
    shutil.copytree(captures.infos[0].store.parent, tmp_path / "d")
    (tmp_path / "d/manifest.jsonl").unlink()
    plain = open_captures(tmp_path / "d").table(library)  # type: ignore[call-overload]
    assert not {"row", "id", "prompt"} & {*plain.columns}


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_time_that_is_none_is_null_in_the_table(captures: Captures, library: str) -> None:
    times = ("", "yesterday", "2026-01-02T03:04:05+01:00", "2026-01-02T02:04:05.5+00:00")
    infos = tuple(replace(captures.infos[0], started=time, finished=time or None) for time in times)
    frame: Any = replace(captures, infos=infos).table(library)  # type: ignore[call-overload]
    for column in ("started", "finished"):
        empty = frame[column].isna() if library == "pandas" else frame[column].is_null()
        assert [*empty] == [True, True, False, False]
        assert (frame[column][3] - frame[column][2]).total_seconds() == 0.5


def test_a_prompt_with_missing_rows_has_no_text(tmp_path: Path) -> None:
    owner = kit.Store(1 << 20)
    owner.write(tmp_path / "a.zarr", SPECS, 20, losses=[Loss.of(Cause.FELL_BEHIND, [[2, 3]])])
    owner.write(tmp_path / "b.zarr", SPECS, 20, attrs={"start": 4, "prompt_len": 10})
    assert owner.shutdown()
    assert open_captures(tmp_path, incomplete=True).table("polars", text=text_of)["prompt"].to_list() == [None, None]


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_table_has_a_row_for_each_token(captures: Captures, library: str) -> None:
    table = captures.token_table(library, text=text_of)
    assert len(table) == sum(LENGTHS) - len(LOST)
    assert [*table.columns] == ["store", "key", "row", "position", "token_id", "phase", "text"]
    last = table[-1:].to_dict("records")[0] if library == "pandas" else table[-1:].to_dicts()[0]
    assert last == {
        "store": "s2.zarr",
        "key": "run/1",
        "row": 7,
        "position": 7,
        "token_id": 7,
        "phase": 1,
        "text": "7",
    }
    assert table["phase"].to_numpy()[:20].tolist() == [0] * 10 + [1] * 10
    assert len(captures[:0].token_table(library)) == 0
    with pytest.raises(ValueError, match="table: 'arrow' is not valid"):
        captures.token_table("arrow")


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_tokens_join_with_the_table_of_captures(captures: Captures, library: str) -> None:
    tokens, table = captures.token_table(library), captures.table(library)[["name", "num_tokens"]]  # type: ignore[call-overload]
    if library == "pandas":
        joined = tokens.merge(table, left_on="store", right_on="name")
    else:
        joined = tokens.join(table, left_on="store", right_on="name")
    assert len(joined) == len(tokens) > 0
    ends = dict(zip(joined["store"], joined["num_tokens"], strict=True))
    assert ends == {f"s{i}.zarr": length for i, length in enumerate(LENGTHS)}


def test_a_ragged_dataset_has_all_rows(captures: Captures, written: tuple[Path, list[kit.Values]]) -> None:
    ds = captures.xarray(["z@1", "topk_ids"])
    rows = [v["z"].view("f4")[1] for v in written[1]]
    np.testing.assert_array_equal(ds["z@1"].compute(), np.concatenate([rows[0], rows[1], rows[2][:8]]))
    assert ds["z@1"].dims == ("token", "z_width") and ds["topk_ids"].dims[0] == "layer_topk_ids"
    assert ds.sizes["token"] == 37 and ds["topk_ids"].dtype == np.int32
    one = ds.isel(token=ds.capture.values == 1)
    assert one.position.values.tolist() == list(range(9)) and one.phase.values.tolist() == [0] * 4 + [1] * 5
    assert ds.key.values.tolist() == [*KEYS]
    with pytest.raises(ValueError, match="give hooks with a row per token"):
        captures.xarray([])


@pytest.mark.parametrize("padded", [False, True])
def test_a_dataset_names_its_stores_and_layers(captures: Captures, padded: bool) -> None:
    ds, each = captures.xarray("z", padded=padded), "capture" if padded else "store_number"
    assert ds["store"].dims == ds["key"].dims == (each,)
    assert ds["store"].values.tolist() == ["s0.zarr", "s1.zarr", "s2.zarr"]
    assert ds["layer_z"].values.tolist() == [0, 1]
    rows = [*range(20), *range(9), *range(8)]
    assert padded or ds["row"].values.tolist() == rows


def test_a_padded_dataset_is_as_long_as_the_longest(captures: Captures, written: tuple[Path, list[kit.Values]]) -> None:
    ds = captures.xarray(["z", "topk_ids@0"], padded=True)
    assert ds["z"].dims == ("layer_z", "capture", "row", "z_width") and ds["z"].shape == (2, 3, 20, 4)
    values = ds["z"].compute().values
    for i, (length, v) in enumerate(zip(LENGTHS, written[1], strict=True)):
        there = [row for row in range(length) if not (i == 2 and row in LOST)]
        np.testing.assert_array_equal(values[:, i, there], v["z"].view("f4")[:, there])
        lacking = [row for row in range(20) if row not in there]
        assert np.isnan(values[:, i, lacking]).all() and (ds.token_id.values[i, lacking] == -1).all()
        assert np.flatnonzero(ds.valid.values[i]).tolist() == there
        np.testing.assert_array_equal(ds["topk_ids@0"][i, there].compute(), v["topk_ids"].view("i4")[0, there])
    np.testing.assert_array_equal(ds["z"][1, 0, 3:5, 2].compute(), written[1][0]["z"].view("f4")[1, 3:5, 2])
