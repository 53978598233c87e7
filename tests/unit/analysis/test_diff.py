# SPDX-License-Identifier: Apache-2.0
"""`dmi diff` compares two captures of the same tokens, with known differences."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector import open_capture, open_captures
from dmi_connector.analysis.diff import NothingToCompare, diff, pairs
from dmi_connector.cli.main import main as cli
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss
from tests import storekit as kit

ROWS, WIDTH = 12, 8
ARRAYS = (
    ArraySpec("resid_pre", "float32", (0, 1), WIDTH),
    ArraySpec("mlp_out", "float32", (0, 1), WIDTH),
    ArraySpec("resid_final", "float32", (), WIDTH),
    ArraySpec("logits", "float32", (), 16),
)
IDS = np.arange(ROWS)
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a store. All stores have the same rows, except for the changes by `change(values)`."""

    def made(
        name: str,
        change: Callable[[dict[str, np.ndarray]], None] = lambda _values: None,
        ids: Sequence[int] | np.ndarray = IDS,
        arrays: Sequence[ArraySpec] = ARRAYS,
        losses: Sequence[Loss] = (),
        about: dict[str, Any] | None = None,
        **names: Any,
    ) -> Path:
        rng = np.random.default_rng(0)
        values = {}
        for spec in ARRAYS:
            count = 3 if spec.name == "logits" else ROWS
            shape = (count, spec.width) if spec.name == "logits" else (max(1, len(spec.layers)), count, spec.width)
            values[spec.name] = rng.standard_normal(shape).astype(np.float32)
        change(values)
        stored = {name: np.ascontiguousarray(rows).view("u4") for name, rows in values.items()}
        owner = kit.Store(1 << 20)
        try:
            samples = 3 if any(spec.name == "logits" for spec in arrays) else 0
            attrs = {"dtype": "float32", "num_layers": 2, **(about or {})}
            owner.write(
                tmp_path / f"{name}.zarr",
                arrays,
                ROWS,
                samples,
                stored,
                ids=np.asarray(ids),
                losses=losses,
                attrs=attrs,
                **names,
            )
        finally:
            assert owner.shutdown(kit.PATIENCE)
        return tmp_path / f"{name}.zarr"

    return made


def both(a: Path, b: Path, **options: Any) -> Any:
    with open_capture(a, 0, True) as one, open_capture(b, 0, True) as other:
        return diff(one, other, **options)


def test_captures_of_the_same_rows_agree(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write("a"), write("b")
    found = both(a, b)
    assert found.alike and found.first is None and found.tokens_differ is None
    assert [hook.name for hook in found.hooks] == [
        *("resid_pre@0", "mlp_out@0", "resid_pre@1", "mlp_out@1", "resid_final", "logits")
    ]
    assert [(hook.rows, hook.worst) for hook in found.hooks] == [(ROWS, 0.0)] * 5 + [(3, 0.0)]
    assert cli(["diff", str(a), str(b)]) == 0
    assert "no row differs" in capsys.readouterr().out


def test_the_first_difference_is_that_of_the_forward(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    def change(values: dict[str, np.ndarray]) -> None:
        values["resid_pre"][1, 4:] *= 1.1
        values["mlp_out"][0, 5] *= 1.5
        values["resid_final"][0, 2] *= -1
        values["logits"][1, 0] += 100

    a, b = write("a"), write("b", change)
    found = both(a, b)
    assert found.first.name == "mlp_out@0" and found.first.position == 5 and found.first.unlike == 1
    unlike = {hook.name: hook for hook in found.hooks if hook.unlike}
    assert list(unlike) == ["mlp_out@0", "resid_pre@1", "resid_final", "logits"]
    assert unlike["resid_pre@1"].unlike == ROWS - 4 and unlike["resid_pre@1"].worst == pytest.approx(
        0.1 / 1.1, rel=1e-5
    )
    assert unlike["resid_final"].worst == pytest.approx(2.0)
    assert unlike["logits"].position == ROWS // 2 + 1  # the second sample
    assert both(a, b, tolerance=0.1).hooks[2].unlike == 0
    assert not both(a, b, hooks="resid_pre,mlp_out", tolerance=2).first
    assert cli(["diff", str(a), str(b)]) == 1
    assert "first: mlp_out@0 at position 5 (token 5)" in capsys.readouterr().out
    assert cli(["diff", str(a), str(b), "--json"]) == 1
    [printed] = json.loads(capsys.readouterr().out)
    assert printed["first"]["position"] == 5 and not printed["alike"]


@pytest.mark.parametrize("hook", ["topk_ids", "indexer_topk"])
def test_integers_differ_by_their_share_and_choices_have_no_order(hook: str, tmp_path: Path) -> None:
    ids = np.arange(2 * ROWS * 4, dtype=np.int32).reshape(2, ROWS, 4)
    other = ids[..., ::-1].copy()
    other[1, 3, 0] = other[0, 6, 2] = 10_000
    arrays, owner = [ArraySpec(hook, "int32", (0, 1), 4)], kit.Store(1 << 20)
    for name, values in (("a", ids), ("b", other)):
        owner.write(tmp_path / f"{name}.zarr", arrays, ROWS, values={hook: values.view("u4")})
    assert owner.shutdown(kit.PATIENCE)
    found = both(tmp_path / "a.zarr", tmp_path / "b.zarr")
    assert [(one.name, one.tolerance, one.unlike, one.position, one.worst) for one in found.hooks] == [
        *((f"{hook}@0", 0.0, 1, 6, 0.25), (f"{hook}@1", 0.0, 1, 3, 0.25))
    ]


def test_a_position_that_only_one_indexer_chose_is_found_in_both_orders(tmp_path: Path) -> None:
    """A row with fewer positions is padded with -1. Here, both rows are."""
    few, more = (np.array([[[1, 2, last, -1]]], np.int32).repeat(ROWS, 1) for last in (-1, 3))
    arrays, owner = [ArraySpec("indexer_topk", "int32", (0,), 4)], kit.Store(1 << 20)
    for name, values in (("few", few), ("more", more)):
        owner.write(tmp_path / f"{name}.zarr", arrays, ROWS, values={"indexer_topk": values.view("u4")})
    assert owner.shutdown(kit.PATIENCE)
    for names in (("few", "more"), ("more", "few")):
        (found,) = both(*(tmp_path / f"{name}.zarr" for name in names)).hooks
        assert (found.unlike, found.worst) == (ROWS, 0.25)


def test_logits_of_other_positions_are_not_compared(tmp_path: Path) -> None:
    owner = kit.Store(1 << 20)
    for name, prompt in (("a", 2), ("b", 8)):
        record = owner.open(tmp_path / f"{name}.zarr", *ARRAYS[2:], attrs={"prompt_len": 4, "dtype": "float32"})
        owner.feed(record, {"resid_final": np.ones((1, ROWS, WIDTH), "f4").view("u4")}, ROWS)
        owner.put_rows(record, "logits", np.ones((2, 16), "f4").view("u4"), 0, prompt)
        owner.close(record, ROWS, {"logits": 2})
    assert owner.shutdown(kit.PATIENCE)
    a, b = tmp_path / "a.zarr", tmp_path / "b.zarr"
    found = both(a, b)
    assert [hook.name for hook in found.hooks] == ["resid_final"]
    assert found.left_out == {"logits": "no position has a row in both"}
    with pytest.raises(NothingToCompare, match="logits: no position has a row in both"):
        both(a, b, hooks="logits")


def test_a_summary_beside_full_rows_is_not_compared(write: Write, tmp_path: Path) -> None:
    kept = {"kind": "topk", "k": 2, "width": WIDTH, "dtype": "float32"}
    arrays, owner = [ArraySpec("mlp_out", "uint8", (0, 1), 12, reduce=kept), ARRAYS[2]], kit.Store(1 << 20)
    owner.write(tmp_path / "b.zarr", arrays, ROWS, ids=IDS, attrs={"dtype": "float32", "num_layers": 2})
    assert owner.shutdown(kit.PATIENCE)
    found = both(write("a"), tmp_path / "b.zarr")
    why = "it is stored as full rows in one and as topk in the other, or with other settings"
    assert found.left_out["mlp_out"] == why


def test_rows_of_other_widths_are_not_compared_and_stores_need_no_dtype(tmp_path: Path) -> None:
    owner = kit.Store(1 << 20)
    for name, width in (("a", WIDTH), ("b", WIDTH // 2)):
        spec = ArraySpec("mlp_out", "float32", (0,), width)
        both_have, attrs = ArraySpec("q", "float32", (0,), WIDTH), {"num_layers": 2}
        owner.write(tmp_path / f"{name}.zarr", [spec, both_have], ROWS, ids=IDS, attrs=attrs)
    assert owner.shutdown(kit.PATIENCE)
    found = both(tmp_path / "a.zarr", tmp_path / "b.zarr")
    assert found.left_out == {"mlp_out": "its rows have 8 and 4 values"}
    assert [hook.name for hook in found.hooks] == ["q@0"]


def test_rows_after_a_different_token_and_missing_rows_are_not_compared(write: Write) -> None:
    other = IDS.copy()
    other[8] = 90

    def change(values: dict[str, np.ndarray]) -> None:
        values["resid_pre"][:, 8:] += 1
        values["resid_pre"][:, 2] += 1

    lost = [Loss(Cause.FELL_BEHIND, rows=((2, 3),))]
    found = both(write("a", losses=lost), write("b", change, other))
    assert found.tokens_differ == 8 and found.positions == 7 and found.first is None and not found.alike
    with pytest.raises(ValueError, match="their first tokens differ"):
        both(write("c"), write("d", ids=IDS + 1))


def test_a_value_that_is_finite_in_only_one_capture_differs(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    def change(values: dict[str, np.ndarray]) -> None:
        values["resid_pre"][0, 3, 0] = np.nan

    a, b, c = write("a"), write("b", change), write("c", change)
    found = both(a, b)
    assert found.first.name == "resid_pre@0" and found.first.position == 3 and found.first.worst == np.inf
    assert both(b, c).alike
    assert cli(["diff", str(a), str(b), "--json"]) == 1
    [printed] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed["first"]["hook"] == "resid_pre" and printed["first"]["worst"] is None


def test_hooks_of_only_one_capture_are_named(write: Write) -> None:
    few = [ARRAYS[0], ArraySpec("mlp_out", "float32", (1,), WIDTH)]

    def change(values: dict[str, np.ndarray]) -> None:
        values["mlp_out"] = values["mlp_out"][1:]

    found = both(write("a"), write("b", change, arrays=few))
    assert [hook.name for hook in found.hooks] == ["resid_pre@0", "resid_pre@1", "mlp_out@1"] and found.alike
    assert found.left_out["mlp_out"] == "layers 0 are in only one of the captures"
    assert "b.zarr" in found.left_out["logits"]
    with pytest.raises(ValueError, match="have no hook to compare"):
        both(write("c"), write("d"), hooks="q*")
    with pytest.raises(ValueError, match="tolerance: -1"):
        both(write("e"), write("f"), tolerance=-1)


def test_stores_of_directories_are_paired_by_key_and_by_prompt(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(values: dict[str, np.ndarray]) -> None:
        values["mlp_out"][1] *= 2

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    write("one/x", key="x")
    write("one/y", ids=IDS + 20)
    write("one/alone", ids=IDS + 40)
    write("two/renamed", key="x")
    write("two/z", change, IDS + 20, key="z")
    one, two = open_captures(tmp_path / "one"), open_captures(tmp_path / "two")
    matched, alone = pairs(one, two)
    names = {(one.infos[a].store.stem, two.infos[b].store.stem) for a, b in matched}
    assert names == {("x", "renamed"), ("y", "z")} and alone == 1
    assert cli(["diff", str(tmp_path / "one"), str(tmp_path / "two")]) == 1
    out = capsys.readouterr().out
    assert "2 pairs, 1 differ" in out and "1 captures have no partner" in out and "mlp_out@1" in out


def test_pairs_that_cannot_be_compared_do_not_stop_the_others(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(f"{name}/whole", key="whole")
        write(f"{name}/empty", key="empty", losses=[Loss(Cause.FELL_BEHIND, rows=((0, ROWS),))])
    write("one/parted", key="parted")
    write("two/parted", ids=IDS + 1, key="parted")
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert cli(["diff", one, two]) == 1
    out = capsys.readouterr().out
    assert "1 pairs, 0 differ" in out and out.count("not compared: ") == 2
    assert "empty.zarr have no rows to compare: no position is in both" in out and "their first tokens differ" in out
    assert cli(["diff", one, two, "--json"]) == 1
    whole, *others = json.loads(capsys.readouterr().out)
    assert whole["alike"] and whole["not_compared"] is None
    assert {Path(each["b"]).stem for each in others} == {"empty", "parted"} and not any(e["alike"] for e in others)
    assert cli(["diff", f"{one}/empty.zarr", f"{two}/empty.zarr"]) == 2, "no capture was compared"
    assert cli(["diff", one, two, "--tolerance", "-1"]) == 2


def test_stores_that_share_a_key_are_paired_by_prompt(write: Write, tmp_path: Path) -> None:
    for name, order in (("one", (0, 20, 40, 60)), ("two", (20, 0, 60, 80))):
        (tmp_path / name).mkdir()
        for prompt in order:
            write(f"{name}/{prompt}", ids=IDS + prompt, key="run")
    one, two = open_captures(tmp_path / "one"), open_captures(tmp_path / "two")
    matched, alone = pairs(one, two)
    names = {(one.infos[a].store.stem, two.infos[b].store.stem) for a, b in matched}
    assert names == {("0", "0"), ("20", "20"), ("60", "60"), ("40", "80")} and alone == 0


def test_captures_that_begin_later_are_paired_by_the_prompt_tokens_that_they_have(write: Write, tmp_path: Path) -> None:
    """Generated tokens differ. A capture that begins after its prompt has no pair."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        ids = np.where(IDS < 4, IDS, IDS + (100 if name == "one" else 200))
        write(f"{name}/later", ids=ids, about={"start": 10, "prompt_len": 14})
        write(f"{name}/after", ids=ids, about={"start": 20, "prompt_len": 14})
    one, two = open_captures(tmp_path / "one"), open_captures(tmp_path / "two")
    matched, alone = pairs(one, two)
    names = {(one.infos[a].store.stem, two.infos[b].store.stem) for a, b in matched}
    assert names == {("later", "later")} and alone == 2


def test_unknown_tokens_of_a_salvaged_store_are_not_a_difference(write: Write) -> None:
    ids = IDS + 1
    lost = [Loss.of(Cause.TOKEN_IDS_UNKNOWN), Loss(Cause.FELL_BEHIND, rows=((4, 6),))]
    whole, salvaged = (
        write("whole", ids=ids),
        write("salvaged", ids=np.where((IDS >= 4) & (IDS < 6), 0, ids), losses=lost),
    )
    for a, b in ((whole, salvaged), (salvaged, whole)):
        found = both(a, b)
        assert found.tokens_differ is None and found.alike and found.positions == ROWS - 2
