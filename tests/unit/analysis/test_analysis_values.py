# SPDX-License-Identifier: Apache-2.0
"""Full results of analysis functions, compared with expected values: differences, tables, tensors, figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

from dmi_connector import open_capture, open_captures
from dmi_connector.analysis.diff import NothingToCompare, _tolerance, diff
from dmi_connector.analysis.export import parquet, specforge
from dmi_connector.analysis.export.delphi import _Parts
from dmi_connector.analysis.export.packed import PackedRows
from dmi_connector.analysis.export.progress import LeftOut
from dmi_connector.analysis.heat import hook_heat
from dmi_connector.analysis.labels import _label_of, labeller, name_of_values
from dmi_connector.analysis.logprobs import top_logprobs
from dmi_connector.analysis.neurons import top_tokens
from dmi_connector.analysis.new_file import new_file
from dmi_connector.analysis.oracle.recorder import Recorder
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.analysis.pictures import canvas
from dmi_connector.analysis.residual import drift, residual_norms
from dmi_connector.analysis.stats import find_statistic, of_layer, statistics
from dmi_connector.analysis.training.normalization import Normalization
from dmi_connector.analysis.unembedding import log_softmax
from dmi_connector.captures.finite import FiniteCheck
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce import parse
from dmi_connector.store.format.completeness import Cause, Loss
from tests import storekit as kit

LENGTH, WIDTH, VOCABULARY, HOLE = 20, 8, 12, (13, 15)
RNG = np.random.default_rng(5)
STREAM = RNG.standard_normal((2, LENGTH, WIDTH)).astype("f4")
FINAL = RNG.standard_normal((LENGTH, WIDTH)).astype("f4")
EXPERTS = np.argsort(RNG.random((1, LENGTH, 6)), axis=-1)[..., :2].astype("<i4")
LOGITS = RNG.standard_normal((5, VOCABULARY)).astype("f4")
"""Logits of rows 10 to 14."""
IDS = (np.arange(LENGTH) * 5 % VOCABULARY).astype("<i4")
ARRAYS = (
    ArraySpec("resid_pre", "float32", (0, 3), WIDTH),
    ArraySpec("resid_final", "float32", (), WIDTH),
    ArraySpec("final_ln", "float32", (), WIDTH),
    ArraySpec("topk_ids", "int32", (1,), 2),
    ArraySpec("logits", "float32", (), VOCABULARY),
)
VALUES = {"resid_pre": STREAM, "resid_final": FINAL[None], "final_ln": FINAL[None] * 2, "topk_ids": EXPERTS}
VALUES |= {"logits": LOGITS}


def write(owner: kit.Store, path: Path, dtype: str = "float32", factor: float = 1.0, **options: Any) -> None:
    """Write a store. factor: multiplies row 7 of layer 3."""
    changed = STREAM.copy()
    changed[1, 7] *= factor
    values = {name: kit.bits(np.ascontiguousarray(v)) for name, v in {**VALUES, "resid_pre": changed}.items()}
    attrs = {"dtype": dtype, "num_layers": 4, **options.pop("attrs", {})}
    owner.write(path, ARRAYS, LENGTH, 5, values=values, ids=IDS, attrs=attrs, wait=False, **options)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of 20 tokens: "full"; "near", "half" in bfloat16 and "odd" in a dtype without a tolerance, whose row 7
    differs by a hundredth; "lossy", where rows 13 and 14 are missing.
    """
    root, owner = tmp_path_factory.mktemp("whole"), kit.Store(1 << 22)
    write(owner, root / "full/full.zarr", key="k")
    write(owner, root / "near/near.zarr", factor=1.01)
    write(owner, root / "half/half.zarr", "bfloat16", factor=1.01)
    write(owner, root / "odd/odd.zarr", "float64", factor=1.01)
    write(owner, root / "lossy/lossy.zarr", losses=[Loss.of(Cause.FELL_BEHIND, [HOLE])])
    assert owner.shutdown(kit.PATIENCE)
    return root


@pytest.fixture(scope="module")
def full(root: Path) -> Iterator[Any]:
    with open_capture(root / "full/full.zarr") as capture:
        yield capture


@pytest.fixture(scope="module")
def lossy(root: Path) -> Iterator[Any]:
    with open_capture(root / "lossy/lossy.zarr", allow_incomplete=True) as capture:
        yield capture


# ---- differences ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "given", "tolerance"),
    [("near", None, 1e-3), ("half", None, 5e-2), ("odd", None, 5e-2), ("near", 0.5, 0.5), ("near", 0.0, 0.0)],
)
def test_the_tolerance_is_given_or_the_largest_of_the_two_dtypes(
    other: str, given: float | None, tolerance: float, root: Path
) -> None:
    """Integers have the tolerance 0."""
    with open_capture(root / "full/full.zarr") as a, open_capture(root / f"{other}/{other}.zarr") as b:
        for one, two in ((a, b), (b, a)):
            found = diff(one, two, tolerance=given)
            unlike = tolerance < 0.01 / 1.01
            assert (found.positions, found.tokens_differ, found.left_out) == (LENGTH, None, {})
            names = [hook.name for hook in found.hooks]
            assert names == ["resid_pre@0", "topk_ids@1", "resid_pre@3", "resid_final", "final_ln", "logits"]
            for hook in found.hooks:
                changed = hook.name == "resid_pre@3"
                own = (0.0 if given is None else given) if hook.hook == "topk_ids" else tolerance
                wanted = {"rows": 5 if hook.hook == "logits" else LENGTH, "tolerance": own}
                wanted |= {"unlike": int(changed and unlike), "position": 7 if changed and unlike else None}
                wanted |= {"worst": pytest.approx(0.01 / 1.01, rel=1e-3) if changed else 0.0}
                wanted |= {"worst_position": 7 if changed else None, "hook": hook.hook, "layer": hook.layer}
                assert asdict(hook) == wanted
            assert found.alike is not unlike and (found.first is not None) is unlike
            assert (found.a, found.b) == (str(one.path), str(two.path))


@pytest.mark.parametrize("tolerance", [-0.1, float("inf"), float("nan")])
def test_a_negative_or_infinite_tolerance_is_refused(tolerance: float, root: Path) -> None:
    with open_capture(root / "full/full.zarr") as a:
        with pytest.raises(ValueError, match=rf"^tolerance: {tolerance} is not valid; give a number of at least 0"):
            diff(a, a, tolerance=tolerance)
        with pytest.raises(
            ValueError,
            match=r"^diff: no hook is called 'resid_per': did you mean 'resid_pre'\? the captures hold resid_pre, ",
        ):
            diff(a, a, "resid_per")
        with pytest.raises(NothingToCompare, match=r"have no hook to compare \(mlp_out: it is in neither capture\)"):
            diff(a, a, "mlp_out")
        assert [hook.name for hook in diff(a, a, "topk_ids, resid_f*").hooks] == ["topk_ids@1", "resid_final"]


def test_a_reduced_hook_has_the_tolerance_of_rounded_ones(root: Path) -> None:
    reduction = parse("int8")
    with open_capture(root / "full/full.zarr") as a:
        reduced = SimpleNamespace(attrs=a.attrs, reduction=lambda *_: reduction)
        assert _tolerance(a, a, "resid_pre", 0) == 1e-3
        assert _tolerance(a, reduced, "resid_pre", 0) == _tolerance(reduced, a, "resid_pre", 0) == 5e-2
        assert _tolerance(reduced, reduced, "topk_ids", 1) == 0.0


# ---- statistics -----------------------------------------------------------------------------------------------------


def test_every_statistic_of_a_window_is_that_of_its_rows(full: Any, lossy: Any) -> None:
    window, there = slice(10, 18), np.r_[0:3, 5:8]
    rows = STREAM[1, 10:18]
    wanted = {
        "norm": np.linalg.norm(rows, axis=1),
        "mean": rows.mean(1),
        "largest magnitude": np.abs(rows).max(1),
        "largest value": rows.max(1),
        "value": rows[:, 7],
    }
    every = statistics(lossy, "resid_pre")
    assert [s.name for s in every] == list(wanted) and [s.signed for s in every] == [False, True, False, True, True]
    for statistic in every:
        found = of_layer(lossy, "resid_pre", 3, statistic, 7, window)
        assert found.dtype == np.float32 and np.isnan(found[3:5]).all()
        np.testing.assert_allclose(found[there], wanted[statistic.name][there], rtol=1e-5)
    own = log_softmax(LOGITS)
    logits = {"entropy": -(np.exp(own) * own).sum(1), "largest probability": np.exp(own.max(1))}
    logits |= {"log-probability of": own[:, 11]}
    for name, values in logits.items():
        found = of_layer(full, "logits", None, find_statistic(full, "logits", name), 11, slice(8, 14))
        np.testing.assert_allclose(found, [np.nan, np.nan, *values[:4]], rtol=1e-4)
    assert [s.name for s in statistics(full, "topk_ids")] == ["value"]
    value = find_statistic(full, "resid_pre", "value")
    for index in (-1, 8):
        with pytest.raises(ValueError, match=rf"^neuron {index} does not exist: 'resid_pre' has 0 to 7$"):
            of_layer(full, "resid_pre", 0, value, index, window)
    with pytest.raises(ValueError, match=r"^statistic 'median' does not exist for 'resid_pre'$"):
        find_statistic(full, "resid_pre", "median")


def test_norms_drift_and_heat_have_no_value_where_rows_are_missing(lossy: Any) -> None:
    there = np.r_[0 : HOLE[0], HOLE[1] : LENGTH]
    norms, labels = residual_norms(lossy)
    wanted = np.linalg.norm(np.concatenate([STREAM, FINAL[None]]), axis=-1)
    assert labels == ["0", "3", "final"] and norms.dtype == np.float32 and np.isnan(norms[:, 13:15]).all()
    np.testing.assert_allclose(norms[:, there], wanted[:, there], rtol=1e-5)
    heat, names = hook_heat(lossy, "resid_pre", 7)
    assert (
        names == ["0", "3"] and np.array_equal(heat[:, there], STREAM[:, there, 7]) and np.isnan(heat[:, 13:15]).all()
    )
    assert hook_heat(lossy, "resid_final")[1] == ["resid_final"]

    def angle(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return 1 - (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)

    by_prompt, before = drift(lossy), drift(lossy, "resid_pre", 3, "previous")
    np.testing.assert_allclose(by_prompt[there], angle(FINAL, FINAL[:10].mean(0))[there], rtol=1e-4, atol=1e-6)
    assert np.flatnonzero(np.isnan(by_prompt)).tolist() == [13, 14]
    assert np.flatnonzero(np.isnan(before)).tolist() == [0, 13, 14, 15] and before.dtype == np.float32
    np.testing.assert_allclose(before[1:13], angle(STREAM[1, 1:13], STREAM[1, :12]), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"^since 'start' is not valid; use 'prompt' or 'previous'$"):
        drift(lossy, since="start")


def test_top_tokens_and_logprobs_by_default(full: Any, root: Path) -> None:
    """The defaults are twenty tokens with a context of eight on either side, and five log-probabilities."""
    found = top_tokens(full, "resid_final", 2)
    order = np.argsort(-FINAL[:, 2], kind="stable")
    assert [one.row for one in found] == order.tolist()
    for one in found:
        first = max(0, one.row - 8)
        assert one.before == one.row - first and one.token_id == IDS[one.row] and one.value == FINAL[one.row, 2]
        assert one.context == tuple(IDS[first : one.row + 9].tolist())
        assert one.values == tuple(FINAL[first : one.row + 9, 2].tolist())
    low = top_tokens(full, "resid_pre", 0, 3, 2, 0, lowest=True)
    assert [(one.row, one.context) for one in low] == [(r, (IDS[r],)) for r in np.argsort(STREAM[1, :, 0])[:2]]
    captures = open_captures(root / "full")
    best = top_logprobs(captures.rows("logits"))
    own = log_softmax(LOGITS)
    wanted = np.argsort(-own, axis=1)[:, :5]
    assert best.token_ids.dtype == np.int32 and np.array_equal(best.token_ids, wanted)
    np.testing.assert_allclose(best.logprobs, np.take_along_axis(own, wanted, 1), rtol=1e-5)
    np.testing.assert_allclose(best.next_logprobs, own[np.arange(5), IDS[11:16]], rtol=1e-5)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_table_of_parquet_has_the_tokens_and_a_null_key_where_there_is_none(root: Path, tmp_path: Path) -> None:
    for name, key in (("full", "k"), ("near", None)):
        captures = open_captures(root / name)
        with open_capture(root / f"{name}/{name}.zarr") as capture:
            hook = "resid_pre@3,topk_ids@1"
            parquet.export(captures, tmp_path / name, lambda *_: None, FiniteCheck(), hook)
            stream = capture.numpy("resid_pre", 3)
        table = pq.read_table(tmp_path / name / f"{name}.parquet")
        assert {f.name: f.type for f in table.schema} == {
            "key": pa.string(),
            "token_ids": pa.int32(),
            "positions": pa.int32(),
            "phase": pa.uint8(),
            "resid_pre@3": pa.list_(pa.float32(), WIDTH),
            "topk_ids@1": pa.list_(pa.int32(), 2),
        }
        columns = table.to_pydict()
        assert columns["key"] == [key] * LENGTH and table["key"].null_count == (0 if key else LENGTH)
        assert columns["token_ids"] == IDS.tolist() and columns["positions"] == list(range(LENGTH))
        assert columns["phase"] == [0] * 10 + [1] * 10
        assert np.array_equal(np.array(columns["resid_pre@3"], "f4"), stream)
        assert columns["topk_ids@1"] == EXPERTS[0].tolist()


@pytest.mark.parametrize(
    ("contexts", "last", "dtype"),
    [(65535, 9, "<u2"), (65536, 9, "<u4"), (3, 65545, "<u2"), (3, 65546, "<u4"), (1 << 17, 1 << 17, "<u4")],
)
def test_locations_of_delphi_have_the_smallest_dtype(
    contexts: int, last: int, dtype: str, root: Path, tmp_path: Path
) -> None:
    """All files have the same dtype. A continued run reads the data of an earlier one."""
    bounds, finite = [(0, 9), (10, last)] if last > 9 else [(0, 9)], FiniteCheck()
    parts = _Parts(tmp_path / "grows", contexts, bounds, finite)
    locations = np.array([[0, 1, 9], [contexts - 1, 0, 4], [2, 1, last]])
    for _ in range(2):
        parts.add(locations, np.arange(3, dtype="<f2"), 0, np.ones(2, bool))
        parts = _Parts(tmp_path / "grows", contexts, bounds, finite)
    assert parts._dtype == np.dtype(dtype) and parts.contexts == parts.written == 2
    captures = open_captures(root / "full")
    parts.write(tmp_path, PackedRows(captures, "resid_pre@3", 10))
    first, stop = bounds[-1]
    with safe_open(tmp_path / f"{first}_{stop}.safetensors", "np") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    wanted = [[2, 1, last - first]] if len(bounds) > 1 else locations.tolist()
    assert found["locations"].dtype == np.dtype(dtype) and found["locations"].tolist() == wanted * 2
    assert found["activations"].dtype == np.float16 and len(found["activations"]) == len(wanted) * 2
    assert found["tokens"].dtype == np.int32 and found["tokens"].tolist() == IDS.reshape(2, 10).tolist()
    parts.remove()
    assert not (tmp_path / "grows").exists()


def test_features_of_specforge_are_named_and_shaped(full: Any, lossy: Any) -> None:
    for layers, wanted in (([0], [0]), (None, [0, 3]), ([3, 0], [3, 0]), ([3, 4], [3, None])):
        found = specforge.features(full, layers, "generated", FiniteCheck())
        parts = [FINAL if i is None else STREAM[0 if i == 0 else 1] for i in wanted]
        assert {name: (t.dtype, tuple(t.shape)) for name, t in found.items()} == {
            "input_ids": (torch.int64, (LENGTH,)),
            "loss_mask": (torch.int64, (LENGTH,)),
            "hidden_state": (torch.float32, (1, LENGTH, WIDTH)),
            "aux_hidden_state": (torch.float32, (1, LENGTH, WIDTH * len(wanted))),
        }
        assert np.array_equal(found["aux_hidden_state"][0].numpy(), np.concatenate(parts, axis=1))
        assert np.array_equal(found["hidden_state"][0].numpy(), FINAL * 2)
        assert found["input_ids"].tolist() == IDS.tolist() and found["loss_mask"].tolist() == [0] * 10 + [1] * 10
    assert specforge.features(full, [0], "all", FiniteCheck())["loss_mask"].tolist() == [1] * LENGTH
    with pytest.raises(LeftOut) as error:
        specforge.features(full, [0], "spans", FiniteCheck())
    assert "no loss_spans" in str(error.value)


def test_a_fit_replaces_no_file_and_leaves_no_partial_file(tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    with new_file(out, "fit pca") as partial:
        assert partial.parent == tmp_path and not partial.exists() and not out.exists()
        partial.write_text("x")
    assert out.read_text() == "x" and list(tmp_path.iterdir()) == [out]
    with pytest.raises(FileExistsError, match=rf"^{out} exists; give a new name$"), new_file(out, "fit pca"):
        pass
    there = tmp_path / "no/a"
    says = rf"^fit pca: {there}: the directory {there.parent} does not exist; create it, or give another -o$"
    with pytest.raises(FileNotFoundError, match=says), new_file(there, "fit pca"):
        pass
    with pytest.raises(RuntimeError), new_file(tmp_path / "b", "fit pca") as partial:
        partial.write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == [out]


# ---- normalisation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "seed"), [(LENGTH, 0), (LENGTH + 1, 0), (LENGTH - 1, 0), (12, 3), (1, 1)])
def test_a_normalisation_is_fitted_on_all_rows_or_on_some_that_a_seed_draws(most: int, seed: int, root: Path) -> None:
    chosen = np.random.default_rng(seed).permutation(LENGTH)[:most]
    rows = FINAL[chosen].astype("f8")
    captures = open_captures(root / "full")
    view = captures.rows("resid_final")
    found = Normalization.fit(view, most=most, seed=seed)
    assert found.kind == "mean_norm" and found.matrix is None
    assert found.mean.dtype == np.float32 and found.mean.tolist() == [0] * WIDTH
    assert found.scale == pytest.approx(np.sqrt(WIDTH) / np.linalg.norm(rows, axis=1).mean(), rel=1e-6)
    if most > WIDTH:
        white = Normalization.fit(view, "whiten", most, seed)
        centred = rows - rows.mean(0)
        np.testing.assert_allclose(white.mean, rows.mean(0), atol=1e-5)
        after = centred @ white.matrix.astype("f8")
        covariance = after.T @ after
        np.testing.assert_allclose(covariance, np.eye(WIDTH) * covariance[0, 0], atol=1e-3 * covariance[0, 0])
        assert covariance[0, 0] / len(rows) == pytest.approx(1, abs=0.1)
        assert (white.kind, white.scale, white.matrix.dtype) == ("whiten", 1.0, np.float32)
        assert np.allclose(white.matrix, white.matrix.T, atol=1e-4), "the picture must not rotate"
        given = torch.from_numpy(FINAL[:4]).double()
        back = white.invert(white.apply(given))
        assert back.dtype == torch.float32 and torch.allclose(back, given.float(), atol=1e-4)
    with pytest.raises(ValueError, match=r"^normalize 'mean' is not valid; use one of mean_norm, whiten, or a file$"):
        Normalization.fit(view, "mean")
    with pytest.raises(ValueError, match=r"^normalize: 'resid_pre' has layers \[0, 3\]; name one$"):
        Normalization.fit(captures.rows("resid_pre"))


# ---- pictures -------------------------------------------------------------------------------------------------------


def test_figures_have_the_sizes_of_what_they_show(tmp_path: Path) -> None:
    assert [canvas.token_width(n) for n in (0, 10, 48, 49)] == [3.0, 5.7, pytest.approx(15.96), 11.0]
    assert [canvas.layer_height(n) for n in (1, 10, 24, 100)] == pytest.approx([2.2, 4.9, 9.0, 9.0])
    figure = canvas.new_figure(3.0, 4.0, tmp_path / "a.PNG")
    assert figure.get_size_inches().tolist() == [7.5, 4.0] and figure.dpi == 130
    assert canvas.new_figure(9.0, 4.0, tmp_path / "a.svg").get_size_inches().tolist() == [9.0, 4.0]
    panel = figure.add_subplot()
    image = panel.imshow(np.zeros((2, 3)))
    canvas.colour_bar(figure, image, [panel], "norms")
    (bar,) = (axes for axes in figure.axes if axes is not panel)
    place = bar._colorbar_info
    assert (place["pad"], place["fraction"], place["parents"]) == (0.015, 0.04, [panel])
    assert bar.get_ylabel() == "norms" and not image.colorbar.outline.get_visible()
    for count, shown in ((1, [0]), (14, [*range(14)]), (15, [0, 2, 4, 6, 8, 10, 12, 14]), (29, [*range(0, 26, 3), 28])):
        canvas.layer_axis(panel, [f"L{i}" for i in range(count)], "layer")
        assert panel.get_yticks().tolist() == shown and panel.get_ylabel() == "layer", count
        assert [t.get_text() for t in panel.get_yticklabels()] == [f"L{i}" for i in shown]
    with pytest.raises(ValueError, match=r"a\.pdf has another extension than \.png or \.svg; give one of these$"):
        canvas.new_figure(1, 1, tmp_path / "a.pdf")
    with pytest.raises(ValueError, match=r"the directory .*/no does not exist; create it, or give another$"):
        canvas.new_figure(1, 1, tmp_path / "no/a.png")


def test_the_axis_of_tokens_labels_each_of_a_few_and_marks_the_first_generated_one(full: Any, tmp_path: Path) -> None:
    panel = canvas.new_figure(8, 4, tmp_path / "a.png").add_subplot()
    canvas.token_axis(panel, full, [f"t{i}" for i in range(LENGTH)], slice(5, 15))
    assert panel.get_xticks().tolist() == list(range(5, 15))
    labels = panel.get_xticklabels()
    assert [t.get_text() for t in labels] == [f"t{i}" for i in range(5, 15)]
    assert {(t.get_rotation(), t.get_fontsize(), *t.get_fontfamily()) for t in labels} == {(90, 8, canvas.MONOSPACE)}
    assert [(line.get_xdata()[0], line.get_color(), line.get_linewidth()) for line in panel.lines] == [
        (9.5, "white", 2.5),
        (9.5, "crimson", 1.2),
    ]
    (mark,) = panel.texts
    assert (mark.get_text(), mark.xy, mark.get_fontsize()) == ("generated →", (9.6, 1.0), 8)
    for rows, marked in ((slice(0, 10), 0), (slice(0, 11), 2), (slice(9, 15), 2), (slice(10, 15), 0)):
        panel = canvas.new_figure(8, 4, tmp_path / "a.png").add_subplot()
        canvas.token_axis(panel, full, [""] * LENGTH, rows)
        assert len(panel.lines) == marked, rows
    image = canvas.heat(panel, full, np.zeros((3, LENGTH)))
    assert image.get_extent() == [-0.5, LENGTH - 0.5, -0.5, 2.5] and image.origin == "lower"
    assert image.get_interpolation() == "nearest"


def test_labels_of_tokens_are_short_and_can_be_printed() -> None:
    texts = [" a", "", "\n", "\N{REPLACEMENT CHARACTER}", "a$b", "0123456789", "01234567890"]
    assert [_label_of(7, text) for text in texts] == ["·a", "[7]", "[7]", "[7]", r"a\$b", "0123456789", "012345678…"]
    assert labeller(None)(3) == "3"
    hooks = ("mlp_pre", "mlp_pre_linear", "mlp_post", "probe.p", "resid_pre", "q")
    assert [name_of_values(hook) for hook in hooks] == [*["neuron"] * 3, "output", "dimension", "dimension"]


# ---- the oracle -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sections", "given"), [((1, 2, 1), "three"), ((1, 2, 1), "four"), ((1, 2, 1), ""), ((), "")])
def test_the_oracle_notes_the_positions_of_each_axis(sections: tuple[int, ...], given: str) -> None:
    """transformers may put text positions before those of the axes. Without positions, all axes count tokens."""
    base, tokens = torch.nn.Identity(), 5
    base.forward = lambda **_inputs: None  # type: ignore[method-assign]
    parameters = {"mrope_section": sections} if sections else None
    oracle = SimpleNamespace(config=SimpleNamespace(rope_parameters=parameters), _base=base)
    axes = torch.arange(15).reshape(3, 1, tokens) * 2
    positions = {"three": axes, "four": torch.cat([axes[:1] + 100, axes]), "": None}[given]
    embeds = torch.randn(1, tokens, 4)
    with Recorder(tokens) as recorder:
        Oracle._watch_inputs(oracle, recorder)  # type: ignore[arg-type]
        base(inputs_embeds=embeds, position_ids=positions)
        rows = recorder.rows
    assert torch.equal(rows["embed"][0], embeds[0]) and rows["embed"][0].data_ptr() != embeds.data_ptr()
    assert ("mrope_positions" in rows) is bool(sections)
    if sections:
        wanted = axes[:, 0].T if given else torch.arange(tokens)[:, None].expand(tokens, 3)
        (found,) = rows["mrope_positions"]
        assert torch.equal(found, wanted) and found.shape == (tokens, 3)
