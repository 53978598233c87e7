# SPDX-License-Identifier: Apache-2.0
"""Drift, top tokens and mean differences, compared with numpy on the values that were written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dmi_connector import open_capture, open_captures
from dmi_connector.analysis import directions, heat, neurons
from dmi_connector.analysis.directions import mean_difference
from dmi_connector.analysis.neurons import top_tokens
from dmi_connector.analysis.patterns import attention_pattern
from dmi_connector.analysis.residual import drift, residual_norms
from dmi_connector.analysis.training.rows import present_rows
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce import parse
from dmi_connector.store.format.completeness import Cause, Loss
from tests import storekit as kit

TOKENS, WIDTH, STORES = 40, 16, 4
NEURONS, STREAM = ArraySpec("mlp_post", "float32", (0, 1), WIDTH), ArraySpec("resid_final", "float32", (), WIDTH)
LOST = (8, 12)
"""Rows that are missing in the last store."""


def values(store: int) -> dict[str, np.ndarray]:
    """The values of a store. In the first two stores, neuron 3 is larger."""
    rng = np.random.default_rng(store)
    shift = 2.0 * (store < 2) * (np.arange(WIDTH) == 3)
    neurons = rng.normal(size=(2, TOKENS, WIDTH)) + shift
    return {"mlp_post": neurons.astype("f4"), "resid_final": rng.normal(size=(1, TOKENS, WIDTH)).astype("f4")}


def there(store: int) -> np.ndarray:
    """The rows of a store that are not missing."""
    rows = np.arange(TOKENS)
    return rows if store < STORES - 1 else rows[(rows < LOST[0]) | (rows >= LOST[1])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four stores "0" to "3" with random values. Half of each is a prompt, and rows are missing in the last one."""
    root, owner = tmp_path_factory.mktemp("sets"), kit.Store()
    for i in range(STORES):
        losses = [Loss.of(Cause.FELL_BEHIND, [LOST])] if i == STORES - 1 else []
        written = {name: rows.view("u4") for name, rows in values(i).items()}
        owner.write(root / f"{i}.zarr", (NEURONS, STREAM), TOKENS, values=written, losses=losses, key=str(i), chunk=16)
    assert owner.shutdown()
    return root


def test_drift_is_the_angle_from_the_prompt_or_the_row_before(folder: Path) -> None:
    rows = values(3)["resid_final"][0].astype(np.float64)
    rows[LOST[0] : LOST[1]] = np.nan
    with np.errstate(invalid="ignore"):
        units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    mean = np.nanmean(rows[: TOKENS // 2], axis=0)
    with open_capture(folder / "3.zarr", 0, allow_incomplete=True) as capture:
        np.testing.assert_allclose(drift(capture), 1 - units @ mean / np.linalg.norm(mean), atol=1e-6)
        previous = drift(capture, since="previous")
        np.testing.assert_allclose(previous[1:], 1 - (units[1:] * units[:-1]).sum(1), atol=1e-6)
        assert np.isnan(previous[0]) and np.isnan(previous[LOST[0] : LOST[1] + 1]).all()
        one = drift(capture, "mlp_post", layer=-1, since="previous")
        first, second = values(3)["mlp_post"][1, :2].astype(np.float64)
        cosine = first @ second / np.sqrt(first @ first * (second @ second))
        np.testing.assert_allclose(one[1], 1 - cosine, atol=1e-6)


@pytest.fixture(params=[4096, 7])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Number of rows that are read at a time."""
    for module in (directions, neurons):
        monkeypatch.setattr(module, "BLOCK", request.param)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("lowest", [False, True])
def test_top_tokens_are_the_largest_of_all_stores_with_their_context(folder: Path, lowest: bool) -> None:
    everything = [(values(i)["mlp_post"][1, row, 5], i, int(row)) for i in range(STORES) for row in there(i)]
    expected = sorted(everything, key=lambda one: one[0] if lowest else -one[0])[:7]
    captures = open_captures(folder, incomplete=True)
    found = top_tokens(captures, "mlp_post", 5, layer=1, count=7, context=3, lowest=lowest)
    assert [(a.value, int(a.store.stem), a.row) for a in found] == [(float(v), i, row) for v, i, row in expected]
    for one in found:
        around = range(max(0, one.row - 3), min(TOKENS, one.row + 4))
        assert one.context == tuple(around) and one.context[one.before] == one.token_id == one.row


@pytest.mark.usefixtures("block")
def test_top_tokens_have_the_values_of_their_context_and_none_of_missing_rows(folder: Path) -> None:
    lacking = 0
    for one in top_tokens(open_captures(folder, incomplete=True), "mlp_post", 5, layer=1, count=200, context=3):
        rows = slice(one.row - one.before, one.row - one.before + len(one.context))
        held = np.isin(np.arange(TOKENS)[rows], there(int(one.store.stem)))
        wanted = np.where(held, values(int(one.store.stem))["mlp_post"][1, rows, 5], np.nan)
        np.testing.assert_array_equal(np.array(one.values, "f4"), wanted.astype("f4"))
        assert one.values[one.before] == one.value
        lacking += int((~held).sum())
    assert lacking > 0


def test_top_tokens_gives_all_rows_where_there_are_fewer_and_keeps_the_order_of_equal_ones(tmp_path: Path) -> None:
    owner = kit.Store()
    for name in ("a", "b"):
        flat = {"resid_final": np.ones((1, 5, WIDTH), "f4").view("u4")}
        owner.write(tmp_path / f"{name}.zarr", (STREAM,), 5, values=flat)
    assert owner.shutdown()
    captures = [open_capture(tmp_path / f"{name}.zarr", 0) for name in ("a", "b")]
    assert len(top_tokens(captures, "resid_final", 0, count=99)) == 10
    first = top_tokens(captures, "resid_final", 0, count=7)
    assert [(a.store.stem, a.row) for a in first] == [*(("a", i) for i in range(5)), ("b", 0), ("b", 1)]


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("rows", ["all", "prompt", "generated", "last"])
def test_mean_difference_is_that_of_plain_means_and_finds_the_planted_neuron(folder: Path, rows: str) -> None:
    half = TOKENS // 2
    wanted = {"all": range(TOKENS), "prompt": range(half), "generated": range(half, TOKENS), "last": [half - 1]}[rows]
    sets = [
        np.concatenate([values(i)["mlp_post"][0, np.intersect1d(there(i), wanted)] for i in stores]).astype(np.float64)
        for stores in ((0, 1), (2, 3))
    ]
    captures = open_captures(folder, incomplete=True)
    found = mean_difference(captures[:2], iter(captures[2:]), "mlp_post", 0, rows)
    assert [len(scores) for scores in found.scores] == [len(sets[0]), len(sets[1])]
    np.testing.assert_allclose(found.vector, sets[0].mean(0) - sets[1].mean(0), atol=1e-6)
    np.testing.assert_allclose(found.score(np.stack([sets[0].mean(0), sets[1].mean(0)])), [1, 0], atol=1e-6)
    along = [s @ found.vector.astype(np.float64) for s in sets]
    pooled = np.sqrt(sum(((a - a.mean()) ** 2).sum() for a in along) / (len(along[0]) + len(along[1]) - 2))
    np.testing.assert_allclose(found.separation, (along[0].mean() - along[1].mean()) / pooled, rtol=1e-5)
    np.testing.assert_allclose(found.scores[0], found.score(sets[0]), atol=1e-6)
    if rows != "last":
        assert np.abs(found.vector).argmax() == 3 and 1 < found.separation < 4


def write_summaries(path: Path, *others: ArraySpec, **attrs: object) -> np.ndarray:
    """Write a store with made-up attention summaries of two heads with 3 keys each. Returns weights [heads, queries,
    keys].

    others: other hooks of the store. attrs: its attributes.
    """
    heads, keep, reduction = 2, 3, parse("attn(3)")
    assert reduction is not None
    rng = np.random.default_rng(0)
    words, expected = np.zeros((1, TOKENS, heads, 2 * keep + 1), "<i4"), np.zeros((heads, TOKENS, TOKENS), "f4")
    for row in range(TOKENS):
        for head in range(heads):
            keys = rng.permutation(row + 1)[:keep]
            weights = rng.random(len(keys), np.float32)
            words[0, row, head, :keep] = [*keys, *[-1] * (keep - len(keys))]
            words[0, row, head, keep : keep + len(keys)] = weights.view("<i4")
            expected[head, row, keys] = weights
    width = reduction.stored_width(heads, "float32")
    spec = ArraySpec(
        "pattern", "uint8", (0,), width, reduce=reduction.settings() | {"dtype": "float32", "width": heads}
    )
    owner = kit.Store()
    stored = {"pattern": words.view("u1").reshape(1, TOKENS, width)}
    stored |= {other.name: kit.random_bits(other, TOKENS) for other in others}
    owner.write(path, [spec, *others], TOKENS, values=stored, attrs=attrs)
    assert owner.shutdown()
    return expected


def test_summaries_of_attention_become_a_pattern_with_zeros_elsewhere(tmp_path: Path) -> None:
    expected = write_summaries(tmp_path / "a.zarr")
    with open_capture(tmp_path / "a.zarr", 0) as capture:
        np.testing.assert_array_equal(attention_pattern(capture, 0), expected)
        np.testing.assert_array_equal(attention_pattern(capture, 0, -1), expected[1])
        with pytest.raises(ValueError, match="head 2 does not exist: the model has heads 0 to 1"):
            attention_pattern(capture, 0, 2)


def test_some_queries_of_a_summary_have_the_keys_up_to_the_last_of_them(tmp_path: Path) -> None:
    expected = write_summaries(tmp_path / "a.zarr")
    with open_capture(tmp_path / "a.zarr", 0) as capture:
        np.testing.assert_array_equal(attention_pattern(capture, 0, None, slice(5, 9)), expected[:, 5:9, :9])
        np.testing.assert_array_equal(attention_pattern(capture, 0, 1, slice(-2, None)), expected[1, -2:])
        assert attention_pattern(capture, 0, None, slice(7, 7)).shape == (2, 0, 0)
        with pytest.raises(ValueError, match="must be a slice with step 1"):
            attention_pattern(capture, 0, None, slice(0, 9, 2))


@pytest.mark.parametrize(
    ("hooks", "attrs"),
    [
        (("q",), {"rotary": True}),
        (("q", "k"), {"rotary": True}),
        (("q_rot",), {"rotary": True}),
        (("q",), {"rotary": False}),
        (("q", "k"), {}),
    ],
)
def test_a_summary_is_taken_where_queries_or_keys_may_not_be_those_that_attention_sees(
    hooks: tuple[str, ...], attrs: dict[str, bool], tmp_path: Path
) -> None:
    others = [ArraySpec(name, "float32", (0,), WIDTH) for name in hooks]
    expected = write_summaries(tmp_path / "a.zarr", *others, **attrs)
    with open_capture(tmp_path / "a.zarr", 0) as capture:
        np.testing.assert_array_equal(attention_pattern(capture, 0), expected)


@pytest.mark.parametrize(
    ("rotary", "lacks"), [(True, r"q_rot and k_rot \(preset attention\), or"), (False, "q and k, or")]
)
def test_a_store_without_attention_says_what_to_capture(rotary: bool, lacks: str, tmp_path: Path) -> None:
    owner = kit.Store()
    owner.write(tmp_path / "a.zarr", [ArraySpec("q", "float32", (0,), WIDTH)], 5, attrs={"rotary": rotary})
    assert owner.shutdown()
    with open_capture(tmp_path / "a.zarr", 0) as capture, pytest.raises(KeyError, match=f"capture {lacks}"):
        attention_pattern(capture, 0)


def test_residual_norms_of_missing_rows_are_nan(folder: Path) -> None:
    with open_capture(folder / "3.zarr", 0, allow_incomplete=True) as capture:
        norms, labels = residual_norms(capture)
    expected = np.linalg.norm(values(3)["resid_final"], axis=-1)
    expected[:, LOST[0] : LOST[1]] = np.nan
    np.testing.assert_allclose(norms, expected, rtol=1e-6)
    assert labels == ["final"]


def test_heat_has_the_norms_or_one_value_of_each_row_and_missing_rows_are_nan(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heat, "BLOCK", 7)
    with open_capture(folder / "3.zarr", 0, allow_incomplete=True) as capture:
        norms, layers = heat.hook_heat(capture, "mlp_post")
        third, _ = heat.hook_heat(capture, "mlp_post", neuron=3)
        once = heat.hook_heat(capture, "resid_final")
    expected = np.linalg.norm(values(3)["mlp_post"], axis=-1)
    expected[:, LOST[0] : LOST[1]] = np.nan
    np.testing.assert_allclose(norms, expected, rtol=1e-6)
    np.testing.assert_array_equal(third, np.where(np.isnan(expected), np.nan, values(3)["mlp_post"][..., 3]))
    assert layers == ["0", "1"] and once[1] == ["resid_final"] and once[0].shape == (1, TOKENS)
    owner = kit.Store()
    owner.write(tmp_path / "ids.zarr", [ArraySpec("topk_ids", "int32", (0,), 2)], 5, attrs={"num_layers": 1})
    assert owner.shutdown()
    with open_capture(tmp_path / "ids.zarr", 0) as capture:
        with pytest.raises(ValueError, match="'topk_ids' holds integers, whose norm means nothing; name a neuron"):
            heat.hook_heat(capture, "topk_ids")
        second = capture.numpy("topk_ids")[..., 1].astype("f4")
        assert heat.hook_heat(capture, "topk_ids", neuron=1)[0].tolist() == second.tolist()


def test_present_rows_are_those_that_are_not_missing(folder: Path) -> None:
    with open_capture(folder / "3.zarr", 0, allow_incomplete=True) as capture:
        assert np.flatnonzero(present_rows(capture)).tolist() == there(3).tolist()


def test_bad_input_is_refused_with_the_fix(folder: Path, tmp_path: Path) -> None:
    captures = open_captures(folder, incomplete=True)
    with captures[0] as one:
        for call, message in (
            (lambda: drift(one, since="start"), "since 'start' is not valid; use 'prompt' or 'previous'"),
            (lambda: drift(one, "mlp_post"), r"'mlp_post' has the layers \[0, 1\] in .*; name one of them"),
            (lambda: drift(one, "logits"), "logits have a row for each sampled token"),
            (lambda: top_tokens(one, "mlp_post", WIDTH, 0), "neuron 16 does not exist: 'mlp_post' has 0 to 15"),
            (lambda: top_tokens(one, "mlp_post", 0, 0, count=0), "count 0 is not valid; use 1 or more"),
            (lambda: top_tokens(one, "mlp_post", 0, 0, context=-1), "context -1 is not valid; use 0 or more"),
            (lambda: top_tokens(one, "mlp_post", 0), "name one of them"),
            (lambda: mean_difference(one, one, "mlp_post", 0, "first"), "rows 'first' is not valid; use 'all'"),
            (lambda: mean_difference(one, [], "mlp_post", 0), "a set of captures has no row of 'mlp_post'"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        with pytest.raises(KeyError, match="mlp_out"):
            top_tokens(one, "mlp_out", 0, 0)


def test_hooks_that_keep_no_neurons_and_sets_of_other_widths_are_refused(folder: Path, tmp_path: Path) -> None:
    reduction, owner = parse("rp(4)"), kit.Store()
    assert reduction is not None
    settings = {**reduction.settings(), "dtype": "float32", "width": WIDTH}
    width = reduction.stored_width(WIDTH, "float32")
    owner.write(tmp_path / "rp.zarr", [ArraySpec("mlp_post", "uint8", (0, 1), width, reduce=settings)], TOKENS)
    owner.write(tmp_path / "wide.zarr", [ArraySpec("mlp_post", "float32", (0, 1), 8)], TOKENS)
    assert owner.shutdown()
    with open_capture(tmp_path / "rp.zarr", 0) as projected, open_capture(tmp_path / "wide.zarr", 0) as wide:
        with pytest.raises(ValueError, match="was stored as rp, from which this cannot be computed"):
            top_tokens(projected, "mlp_post", 0, 0)
        with open_capture(folder / "0.zarr", 0) as one:
            with pytest.raises(ValueError, match="16 values in one set, 8 in the other"):
                mean_difference(one, wide, "mlp_post", 0)
            with pytest.raises(ValueError, match="8 values in one capture, 16 in others"):
                mean_difference([one, wide], one, "mlp_post", 0)
