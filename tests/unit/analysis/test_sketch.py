# SPDX-License-Identifier: Apache-2.0
"""Frequent Directions: error bounds compared with numpy's singular values, sketches of captures, and `dmi sketch`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from dmi_connector import open_capture
from dmi_connector.analysis.frequent_directions import FrequentDirections
from dmi_connector.analysis.sketch import Sketch, sketch
from dmi_connector.cli import sketch as sketch_command
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.option_values import OptionError
from dmi_connector.reduce import parse
from dmi_connector.settings import ServerOptions
from dmi_connector.store.format.completeness import Cause, Loss
from tests import storekit as kit

Q = ArraySpec("q", "float32", (0, 2), 8)
RESID = ArraySpec("resid_pre", "bfloat16", (1, 2), 16)
FINAL = ArraySpec("resid_final", "bfloat16", (), 16)
IDS = ArraySpec("topk_ids", "int32", (1,), 4)
LOGITS = ArraySpec("logits", "float32", (), 33)
ROUNDING = 1e-6
"""Relative tolerance for float32 rounding, in units of |A|²."""


# ---- the bounds -----------------------------------------------------------------------------------------------------


def made(kind: str, count: int, width: int, seed: int = 0) -> np.ndarray:
    """Rows of one of KINDS, float32 [count, width]."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, width))
    if kind == "low rank":
        rows = rng.standard_normal((count, 2)) @ rng.standard_normal((2, width))
    elif kind == "decaying":
        rows = rows @ np.diag(0.7 ** np.arange(width)) @ np.linalg.qr(rng.standard_normal((width, width)))[0]
    elif kind == "identical":
        rows = np.repeat(rows[:1], count, 0)
    elif kind == "zeros":
        rows = np.zeros_like(rows)
    elif kind == "one huge row":
        rows[count // 2 : count // 2 + 1] *= 1e15
    elif kind == "axes":  # all directions are equally large, so the sketch loses the most
        rows = np.eye(width)[np.arange(count) % width]
    return rows.astype(np.float32)


KINDS = ("random", "low rank", "decaying", "identical", "zeros", "one huge row", "axes")


def check_bounds(found: FrequentDirections, rows: np.ndarray) -> None:
    """Check the bounds that the class states for its rows and its error."""
    k, a, b = found.k, rows.astype(np.float64), found.rows.astype(np.float64)
    assert found.rows.dtype == np.float32 and len(b) <= k and b.shape[1] == a.shape[1] and np.isfinite(b).all()
    squares = np.linalg.svd(a, compute_uv=False) ** 2
    total = squares.sum()
    rounding = ROUNDING * total
    assert found.count == len(rows) and found.squared == pytest.approx(total, rel=1e-9)
    lost = np.linalg.eigvalsh(a.T @ a - b.T @ b)
    assert -rounding <= lost[0] and lost[-1] <= found.error + rounding
    assert found.error <= (total - np.square(b).sum()) / (k + 1) + rounding
    for j in range(k + 1):
        assert found.error <= squares[j:].sum() / (k + 1 - j) + rounding, j
    products = b @ b.T
    assert np.abs(products - np.diag(np.diag(products))).max(initial=0) <= rounding
    assert (np.diff(np.diag(products)) <= rounding).all()


SHAPES = st.tuples(st.sampled_from(KINDS), st.integers(0, 60), st.integers(1, 12), st.integers(0, 9))


@given(SHAPES, st.integers(1, 9), st.data())
def test_the_bounds_hold_for_any_rows_however_they_come(
    shape: tuple[str, int, int, int], k: int, data: st.DataObject
) -> None:
    rows = made(*shape)
    order = np.random.default_rng(shape[-1]).permutation(len(rows)) if data.draw(st.booleans()) else slice(None)
    rows = rows[order]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=6)))
    whole, parts = (FrequentDirections(k, rows.shape[1]) for _ in range(2))
    whole.update(rows)
    for part in np.split(rows, cuts):
        parts.update(part)
        parts.rows, parts.error  # noqa: B018 (a look at the sketch does not change it)
    check_bounds(whole, rows)
    assert np.array_equal(parts.rows, whole.rows) and parts.error == whole.error


@given(SHAPES, st.sampled_from(KINDS), st.integers(0, 40), st.integers(1, 9))
def test_merged_sketches_have_the_bounds_of_all_rows(
    shape: tuple[str, int, int, int], kind: str, count: int, k: int
) -> None:
    width = shape[2]
    both = made(*shape), made(kind, count, width, 77)
    one, other = (FrequentDirections(k, width) for _ in range(2))
    one.update(both[0])
    other.update(both[1])
    before = other.rows
    one.merge(other)
    check_bounds(one, np.concatenate(both))
    assert np.array_equal(other.rows, before)
    one.merge(one)
    check_bounds(one, np.concatenate([*both, *both]))


def test_rows_of_rank_k_are_kept() -> None:
    rows = made("random", 500, 40) @ np.diag([1.0] * 5 + [0] * 35).astype("f4")
    found = FrequentDirections(5, 40)
    found.update(rows)
    np.testing.assert_allclose(found.rows.T @ found.rows, rows.T @ rows, atol=1e-3)
    assert found.error <= 1e-12 * found.squared
    few = FrequentDirections(4, 40)
    few.update(rows)
    assert few.error > 0.05 * few.squared, "a sketch with one row fewer must lose some"


def test_rows_that_are_not_finite_are_counted_in_all_updates() -> None:
    found = FrequentDirections(4, 6)
    rows = np.ones((5, 6), "f4")
    rows[1, 2] = np.nan
    found.update(rows)
    rows[3, 0] = np.inf
    found.update(rows)
    assert (found.not_finite, found.count) == (3, 7)


def test_the_relative_bound_of_small_rows_is_divided_by_their_norm() -> None:
    one = FrequentDirections(2, 6)
    one.update(np.random.default_rng(0).standard_normal((40, 6)).astype("f4") / 100)
    found = Sketch(2, {"q": {0: one}}, {"q": 24}, ["a.zarr"], None, 40, 0)
    assert 0 < one.squared < 1 and found.relative_error("q").tolist() == [pytest.approx(one.error / one.squared)]


def test_the_first_directions_are_those_of_an_svd() -> None:
    rows = made("decaying", 3000, 60)
    found = FrequentDirections(16, 60)
    found.update(rows)
    _, singular, directions = np.linalg.svd(rows, full_matrices=False)
    mine = found.rows / np.linalg.norm(found.rows, axis=1, keepdims=True)
    cosines = np.abs((mine[:8] * directions[:8]).sum(1))
    assert cosines.min() > 0.999, cosines
    np.testing.assert_allclose(np.linalg.norm(found.rows, axis=1)[:8], singular[:8], rtol=1e-2)


def test_rows_that_are_not_finite_are_left_out_and_counted() -> None:
    rows = made("random", 50, 8)
    bad = rows.copy()
    bad[3, 1], bad[40, 7] = np.nan, -np.inf
    one, other = FrequentDirections(4, 8), FrequentDirections(4, 8)
    one.update(bad)
    other.update(np.delete(rows, [3, 40], 0))
    assert (one.count, one.not_finite) == (48, 2) and np.array_equal(one.rows, other.rows)
    one.merge(one)
    assert (one.count, one.not_finite) == (96, 4)


def test_incompatible_stores_are_refused() -> None:
    with pytest.raises(ValueError, match="k 0, width 8 are not valid; give 1 or more"):
        FrequentDirections(0, 8)
    found = FrequentDirections(2, 8)
    for rows in (np.zeros((3, 7)), np.zeros(8)):
        with pytest.raises(ValueError, match=r"do not fit; give rows of \[n, 8\]"):
            found.update(rows)
    for other in (FrequentDirections(2, 9), FrequentDirections(3, 8)):
        with pytest.raises(ValueError, match="cannot be merged into one of k 2, width 8; give"):
            found.merge(other)


# ---- of captures ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store() -> Iterator[kit.Store]:
    made = kit.Store(4 << 20, writers=2)
    yield made
    assert made.shutdown()


@pytest.fixture(scope="module")
def captures(store: kit.Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.zarr and b.zarr with 300 and 200 tokens, from a model with 3 layers."""
    folder = tmp_path_factory.mktemp("captures")
    for name, length in (("a", 300), ("b", 200)):
        arrays = [Q, RESID, FINAL, IDS, LOGITS]
        values = {spec.name: kit.random_bits(spec, 2 if spec.per_sample else length, ord(name)) for spec in arrays}
        store.write(folder / f"{name}.zarr", arrays, length, 2, values, attrs={"num_layers": 3})
    return folder


def same(one: Sketch, other: Sketch) -> bool:
    """Whether two sketches have equal counts and norms of rows. Rows in a file are float32, with any sign."""
    parts = [
        {
            (hook, layer): (own.error, own.squared, own.count, own.not_finite, own.rows.shape)
            for hook, layers in which.hooks.items()
            for layer, own in layers.items()
        }
        for which in (one, other)
    ]
    return parts[0] == parts[1] and (one.k, one.tokens, one.missing) == (other.k, other.tokens, other.missing)


def test_a_sketch_of_a_capture_is_that_of_its_rows(captures: Path) -> None:
    with open_capture(captures / "a.zarr") as cap:
        found = sketch(cap, "q@2,resid_post,resid_final", 4)
        assert {hook: [*own] for hook, own in found.hooks.items()} == {
            "q": [2],
            "resid_post": [0, 1, 2],
            "resid_final": [0],
        }
        for hook, layers in found.hooks.items():
            for number, layer in enumerate(layers):
                own = FrequentDirections(4, cap.shape(hook)[-1])
                own.update(cap.numpy(hook, layer))
                rows = found.rows(hook)[number]
                assert np.array_equal(rows[: len(own.rows)], own.rows) and not rows[len(own.rows) :].any()
                assert found.error(hook)[number] == own.error > 0
                check_bounds(found.hooks[hook][layer], cap.numpy(hook, layer))
        assert (found.tokens, found.missing, found.model, found.stores) == (300, 0, "tiny", ["a.zarr"])
        assert found.row_bytes == {"q": 32, "resid_post": 32, "resid_final": 32}
        assert np.array_equal(found.relative_error("q"), found.error("q") / found.hooks["q"][2].squared)


SELECTED = {
    "q": ["q@0", "q@2"],
    "q@-1": ["q@2"],
    "q@0-1": ["q@0"],
    "resid_post@2": ["resid_post@2"],
    "resid_*": ["resid_pre@1", "resid_pre@2", "resid_final"],
    "*,-resid_*,-q@2": ["q@0"],
    "vllm-full": ["q@0", "q@2", "resid_pre@1", "resid_pre@2", "resid_final"],
    "resid_*@2": ["resid_pre@2"],
}


@pytest.mark.parametrize("spec", SELECTED)
def test_hooks_are_named_as_in_the_servers_option(captures: Path, spec: str) -> None:
    """Presets and wildcards skip hooks without a sketch: integers and logits."""
    with open_capture(captures / "a.zarr") as cap:
        found = sketch(cap, spec, 2)
    named = {(hook, layer) for hook, layers in found.hooks.items() for layer in layers}
    assert named == {(n.partition("@")[0], int(n.partition("@")[2] or 0)) for n in SELECTED[spec]}


REFUSED = {
    "v": "a.zarr: hook 'v' is not in this store",
    "qq": "hooks: 'qq' is unknown: did you mean 'q'",
    "q@1": r"hooks: 'q@1' of .*a.zarr cannot be sketched: captured layers are \[0, 2\]; leave it out",
    "q@7": "hooks: 'q@7' names layer 7, but .*a.zarr has layers 0 to 2",
    "resid_final@0": "'resid_final@0' of .* cannot be sketched: it has no layers",
    "logits": "'logits' of .* cannot be sketched: it has rows for sampled tokens only",
    "topk_ids": "'topk_ids' of .* cannot be sketched: it holds integers",
    "q,-q": "hooks: 'q,-q' selects nothing of .*a.zarr that can be sketched; it holds",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_a_selection_that_cannot_be_sketched_is_refused(captures: Path, spec: str) -> None:
    with open_capture(captures / "a.zarr") as cap, pytest.raises((ValueError, KeyError), match=REFUSED[spec]):
        sketch(cap, spec)


@pytest.mark.parametrize(("reduction", "kept"), [("int8", True), ("rp(4)", True), ("attn(1)", False)])
def test_reduced_rows_are_decoded(store: kit.Store, tmp_path: Path, reduction: str, kept: bool) -> None:
    torch = pytest.importorskip("torch")
    one = parse(reduction)
    assert one is not None
    hook, width = ("q", 32) if kept else ("pattern", 12)
    real = np.random.default_rng(0).standard_normal((20, 32)).astype("f4")
    stored = one.encode(torch.tensor(real)).numpy()[None] if kept else np.zeros((1, 20, width), "u1")
    settings = {**one.settings(), "dtype": "float32", "width": 32 if kept else 1}
    spec = ArraySpec(hook, "uint8", (0,), stored.shape[-1], reduce=settings)
    store.write(tmp_path / "a.zarr", [spec], 20, values={hook: stored})
    with open_capture(tmp_path / "a.zarr", kit.PATIENCE) as cap:
        if kept:
            found, own = sketch(cap, "q", 3), FrequentDirections(3, cap.shape("q")[-1])
            own.update(cap.numpy("q", 0))
            assert np.array_equal(found.rows("q")[0], own.rows)
        else:
            with pytest.raises(ValueError, match="it was stored as attn, which keeps no directions; leave it out"):
                sketch(cap, "pattern")


def test_a_capture_is_sketched_while_it_is_written(store: kit.Store, tmp_path: Path) -> None:
    """Lost rows are left out, and so is a row that is not finite."""
    values = {"q": kit.random_bits(Q, 384)}
    values["q"].view("f4")[1, 5, 3] = np.inf
    path = tmp_path / "a.zarr"
    record = store.open(path, Q)
    with open_capture(path, kit.PATIENCE, follow=True) as live:
        store.put(record, values, 0, 128)
        seen = iter(live.follow("q@0"))
        assert next(seen)[0] == 0, "rows must be there before the capture ends"
        store.put(record, values, 256, 128)
        store.close(record, 384, losses=[Loss.of(Cause.FELL_BEHIND, [[128, 256]])])
        found = sketch(live, "q", 4)
    with open_capture(path, 0, allow_incomplete=True) as cap:
        finished = sketch(cap, "q", 4)
        assert same(found, finished) and np.array_equal(found.rows("q"), finished.rows("q"))
        kept = np.delete(cap.numpy("q"), np.s_[128:256], 1)
    assert (found.tokens, found.missing) == (256, 128)
    check_bounds(found.hooks["q"][0], kept[0])
    check_bounds(found.hooks["q"][2], np.delete(kept[1], 5, 0))
    assert [one.not_finite for one in found.hooks["q"].values()] == [0, 1]


def test_a_capture_without_rows_has_an_empty_sketch(store: kit.Store, tmp_path: Path) -> None:
    record = store.open(tmp_path / "a.zarr", Q)
    store.close(record, 128, losses=[Loss.of(Cause.FELL_BEHIND, [[0, 128]])])
    with open_capture(tmp_path / "a.zarr", kit.PATIENCE, allow_incomplete=True) as cap:
        found = sketch(cap, "q@0", 4)
    assert found.rows("q").shape == (1, 4, 8) and not found.rows("q").any()
    assert (found.tokens, found.missing, found.error("q").tolist()) == (0, 128, [0])
    assert found.relative_error("q").tolist() == [0]


def test_a_file_has_the_sketch_and_merges(captures: Path, tmp_path: Path) -> None:
    found, rows = [], []
    for name in "ab":
        with open_capture(captures / f"{name}.zarr") as cap:
            found.append(sketch(cap, "q,resid_final", 4))
            rows.append(cap.numpy("q", 2))
        found[-1].save(tmp_path / name)
    loaded = Sketch.load(tmp_path / "a")
    assert same(loaded, found[0]) and loaded.stores == ["a.zarr"] and loaded.row_bytes == found[0].row_bytes
    for hook in ("q", "resid_final"):
        products = [np.matmul(one.rows(hook).swapaxes(1, 2), one.rows(hook)) for one in (loaded, found[0])]
        np.testing.assert_allclose(*products, atol=1e-4)
    tensors = load_file(tmp_path / "a")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {"q": (2, 4, 8), "resid_final": (1, 4, 16)}
    assert all(np.array_equal(tensor, found[0].rows(name)) for name, tensor in tensors.items())
    loaded.merge(Sketch.load(tmp_path / "b"))
    check_bounds(loaded.hooks["q"][2], np.concatenate(rows))
    assert (loaded.tokens, loaded.stores, loaded.model) == (500, ["a.zarr", "b.zarr"], "tiny")


def test_sketches_that_do_not_fit_are_not_merged(captures: Path) -> None:
    with open_capture(captures / "a.zarr") as cap:
        one, narrow, other = sketch(cap, "q", 4), sketch(cap, "q", 3), sketch(cap, "q@0", 4)
        foreign = sketch(cap, "q", 4)
    with pytest.raises(
        ValueError, match="k 4 and 3, hooks that differ: none; sketch both with the same k, hooks and reductions"
    ):
        one.merge(narrow)
    with pytest.raises(ValueError, match="k 4 and 4, hooks that differ: q@2;"):
        one.merge(other)
    foreign.model = "large"
    with pytest.raises(ValueError, match="is of the model large"):
        one.merge(foreign)


def test_other_files_are_not_sketches(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("no file of tensors")
    save_file({"q": np.zeros((1, 2, 3), "f4")}, tmp_path / "b")
    for name in "ab":
        with pytest.raises(ValueError, match=r"holds no sketch .*; give a file that dmi sketch made"):
            Sketch.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        Sketch.load(tmp_path / "c")


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_writes_a_file_for_each_capture(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sketch", str(captures), "--hooks", "q,resid_final", "-k", "3", "-o", f"{tmp_path}/new/out"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path}/new/out/a.safetensors: 1 captures, 300 tokens"
    assert lines[1].split() == ["hook", "layers", "tokens", "raw", "sketch", "bound"]
    with open_capture(captures / "a.zarr") as cap:
        own = sketch(cap, "q,resid_final", 3)
    bound = f"{100 * own.relative_error('q').max():.2f}"
    assert lines[3].split() == ["q", "2", "300", "19.2", "kB", "192", "B", bound, "%"]
    assert same(Sketch.load(tmp_path / "new/out/a.safetensors"), own)
    assert Sketch.load(tmp_path / "new/out/b.safetensors").tokens == 200


def test_the_command_prints_json(captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["sketch", str(captures), "--hooks", "q,resid_final", "-k", "3", "--json"]
    assert main([*given, "-o", str(tmp_path)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(one["file"], one["stores"]) for one in listed] == [
        (f"{tmp_path}/{name}.safetensors", [f"{name}.zarr"]) for name in "ab"
    ]
    with open_capture(captures / "a.zarr") as cap:
        own = sketch(cap, "q,resid_final", 3)
    assert (listed[0]["k"], listed[0]["model"], listed[0]["tokens"], listed[0]["missing"]) == (3, "tiny", 300, 0)
    bounds = [*own.relative_error("q"), *own.relative_error("resid_final")]
    each = {"tokens": 300, "not_finite": 0}
    assert listed[0]["hooks"] == [
        {"hook": "q", "layer": 0, **each, "raw": 9600, "sketch": 96, "bound": bounds[0]},
        {"hook": "q", "layer": 2, **each, "raw": 9600, "sketch": 96, "bound": bounds[1]},
        {"hook": "resid_final", "layer": 0, **each, "raw": 9600, "sketch": 192, "bound": bounds[2]},
    ]
    assert all(0 < bound < 1 for bound in bounds)
    assert main([*given, "-o", f"{tmp_path}/all.safetensors", "--merge"]) == 0
    (merged,) = json.loads(capsys.readouterr().out)
    assert merged["tokens"] == 500 and sorted(merged["stores"]) == ["a.zarr", "b.zarr"]


def test_the_command_follows_and_merges(
    captures: Path, store: kit.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"{tmp_path}/all.safetensors"
    assert main(["sketch", str(captures), "--hooks", "q", "-k", "3", "--follow", "--merge", "-o", out]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 2 captures, 500 tokens\n")
    found = Sketch.load(out)
    rows = []
    for name in found.stores:
        with open_capture(captures / name) as cap:
            rows.append(cap.numpy("q", 0))
    assert sorted(found.stores) == ["a.zarr", "b.zarr"]
    check_bounds(found.hooks["q"][0], np.concatenate(rows))


def test_a_capture_that_fails_is_named_and_the_others_are_sketched(
    captures: Path,
    store: kit.Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "begun.zarr"
    record = store.open(path, Q)
    with open_capture(path, kit.PATIENCE, follow=True):
        store.abort(record)
    given = [str(path), str(captures / "a.zarr")]
    assert main(["sketch", *given, "--hooks", "q", "--follow", "-o", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "begun.zarr" in err and "aborted" in err and "a.safetensors: 1 captures" in out
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["a.safetensors"]
    (tmp_path / "json").mkdir()
    assert main(["sketch", *given, "--hooks", "q", "--follow", "--json", "-o", f"{tmp_path}/json"]) == 1
    out, err = capsys.readouterr()
    assert [one["stores"] for one in json.loads(out)] == [["a.zarr"]] and "aborted" in err
    assert main(["sketch", *given, "--hooks", "q", "--follow", "--merge", "-o", f"{tmp_path}/m.safetensors"]) == 1
    assert Sketch.load(tmp_path / "m.safetensors").stores == ["a.zarr"]
    assert main(["sketch", given[0], "--hooks", "q", "--follow", "--merge", "-o", f"{tmp_path}/n.safetensors"]) == 1
    assert not (tmp_path / "n.safetensors").exists()


def test_a_command_that_was_stopped_can_be_started_again(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, asked = tmp_path / "out", ["--hooks", "q,-q@2", "-k", "3"]

    def stopped(store: Path, *more: Any) -> Any:
        if store.name == "b.zarr":
            raise KeyboardInterrupt
        return sketched(store, *more)

    sketched = sketch_command._sketch
    monkeypatch.setattr(sketch_command, "_sketch", stopped)
    with contextlib.suppress(KeyboardInterrupt):
        main(["sketch", str(captures), *asked, "-o", str(out)])
    assert [path.name for path in out.iterdir()] == ["a.safetensors"]
    first, text = (out / "a.safetensors").stat(), capsys.readouterr().out
    monkeypatch.setattr(sketch_command, "_sketch", sketched)
    assert main(["sketch", str(captures), *asked, "-o", str(out)]) == 0
    assert (out / "a.safetensors").stat() == first, "it must not be read again"
    assert capsys.readouterr().out.startswith(text) and Sketch.load(out / "b.safetensors").stores == ["b.zarr"]
    for other in (["--hooks", "q,-q@2", "-k", "4"], ["--hooks", "q", "-k", "3"]):
        assert main(["sketch", str(captures), *other, "-o", str(out)]) == 2
        assert "a.safetensors exists, but is a sketch of other rows, hooks or k" in capsys.readouterr().err
    (out / "b.safetensors").write_bytes(b"x")
    assert main(["sketch", str(captures), *asked, "-o", str(out)]) == 2
    assert "b.safetensors holds no sketch" in capsys.readouterr().err


MISTAKES = {
    "-k 0 -o new": "-k 0 is not valid; keep 1 row or more",
    f"-k {10**14} -o new.safetensors --merge": f"k {10**14} needs {128 * 10**14} bytes of memory per layer; give a"
    " smaller k",
    f"-k {10**20} -o new.safetensors --merge": f"k {10**20} needs {128 * 10**20} bytes of memory per layer; give a"
    " smaller k",
    "-o new --merge": "-o new is not a file name; --merge writes one file: give -o NAME.safetensors",
    "-o new.safetensors": "-o new.safetensors is one file for 2 captures; give a directory, or --merge",
    "-o old.safetensors --merge": "old.safetensors exists; give a new name",
    "-o old.txt": "-o old.txt is a file whose name does not end in .safetensors; give a directory, or NAME.safetensors",
    "{captures}/../copies/a.zarr -o new": "-o new: several captures have the same name; sketch their directories one by"
    " one",
}


@pytest.mark.parametrize("options", MISTAKES)
def test_mistakes_are_answered_in_one_line(
    captures: Path, tmp_path: Path, options: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("old.safetensors", "old.txt"):
        Path(name).touch()
    if not (copies := captures.with_name("copies")).exists():
        copies.symlink_to(captures)
    given = options.format(captures=captures).split()
    assert main(["sketch", str(captures), *given, "--hooks", "q"]) == 2
    assert capsys.readouterr().err == f"dmi: {MISTAKES[options]}\n"
    assert {path.name for path in tmp_path.iterdir()} == {"old.safetensors", "old.txt"}


def test_a_store_that_is_named_twice_is_sketched_once(captures: Path, tmp_path: Path) -> None:
    out = tmp_path / "new.safetensors"
    given = [str(captures), str(captures / "a.zarr"), str(captures)]
    for more in ([], ["--follow"]):
        assert main(["sketch", *given, "--hooks", "q", "--merge", *more, "-o", str(out)]) == 0
        assert Sketch.load(out).stores == ["a.zarr", "b.zarr"]
        out.unlink()


def test_following_without_a_capture_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sketch", str(tmp_path), "--hooks", "q", "--follow", "-o", f"{tmp_path}/new"]) == 2
    assert "no capture has begun in it; give NAME.zarr, or wait for one" in capsys.readouterr().err


# ---- the server's option --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["fd(64)", "fd", {"*": "fd(64)"}, {"q": " fd (64)"}])
def test_the_server_names_the_command(value: str | dict[str, str]) -> None:
    with pytest.raises(OptionError, match=r"^reduce: ' ?fd.*' is not a reduction: .* run dmi sketch on the stores"):
        ServerOptions.parse({"store_dir": "/tmp/captures", "reduce": value})


def test_dmi_serve_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "MODEL", "--hooks", "q", "--store-dir", "captures", "--reduce", "fd(64)"])
    assert "run dmi sketch on the stores" in capsys.readouterr().err


@pytest.mark.parametrize("spec", ["fdx", "rfd(2)"])
def test_other_names_are_unknown(spec: str) -> None:
    with pytest.raises(ValueError, match="is unknown; use one of"):
        parse(spec)
