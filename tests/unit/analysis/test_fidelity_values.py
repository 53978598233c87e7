# SPDX-License-Identifier: Apache-2.0
"""Parts of `dmi fidelity`, `dmi fit-probe` and `dmi diff`, compared with expected values."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dmi_connector.analysis import autoencoder, downstream
from dmi_connector.analysis.autoencoder import Autoencoder
from dmi_connector.analysis.diff import _unlike_forms
from dmi_connector.analysis.downstream import Concepts, Downstream
from dmi_connector.analysis.fidelity import Fidelity, _is_measured, _measure, _unfit, _worst
from dmi_connector.analysis.fit_probe import FittedProbe, _lines, _tested, read_labels
from dmi_connector.reduce import parse
from dmi_connector.reduce.fitted import FittedReduction
from dmi_connector.reduce.measures import ReducedRows, of_values, probes
from dmi_connector.reduce.sparse_encoder import SparseEncoder

EYE = np.eye(2, dtype="f4")
ENCODER = SparseEncoder(EYE, np.zeros(2, "f4"), np.zeros(2, "f4"))
"""An encoder whose latents are the positive values of a row."""


# ---- autoencoders ---------------------------------------------------------------------------------------------------


def test_an_autoencoder_finds_the_latents_that_stay_active() -> None:
    """Rows without an active latent do not count. The rows' variance is 30. The decoder leaves -1, or -1 and 4."""
    rows = np.array([[1, 2], [5, 0], [-1, -1], [3, 3]], "f8")
    restored = np.array([[1, -2], [4, 5], [1, 1], [3, 3]], "f8")
    whole = Autoencoder("resid_pre", 0, ENCODER, (EYE, np.zeros(2, "f4")))
    spread = float(((rows - rows.mean(0)) ** 2).sum())
    before, after = 2 / spread, (4 + 1 + 25 + 4 + 4) / spread
    assert whole.agreement(rows, restored) == {
        "latents": pytest.approx((0.5 + 1 + 1) / 3),
        "sae_error": pytest.approx(after - before),
    }
    assert whole.agreement(rows, rows) == {"latents": 1.0, "sae_error": 0.0}
    assert Autoencoder("resid_pre", 0, ENCODER, None).agreement(rows, restored) == {
        "latents": pytest.approx((0.5 + 1 + 1) / 3)
    }


def test_rows_without_a_latent_have_no_share() -> None:
    found = Autoencoder("resid_pre", 0, ENCODER, None).agreement(-np.ones((3, 2)), np.ones((3, 2)))
    assert list(found) == ["latents"] and math.isnan(found["latents"])


def test_an_autoencoder_takes_the_same_rows_of_both_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample has at most 2,048 rows, which are drawn with seed 0 and read as float32."""
    assert autoencoder._ROWS == 2048
    monkeypatch.setattr(autoencoder, "_ROWS", 3)
    seen: list[np.ndarray] = []

    def encode(rows: np.ndarray) -> np.ndarray:
        seen.append(rows)
        return rows

    encoder: Any = SimpleNamespace(encode=encode)
    rows, restored = np.arange(1, 11.0).reshape(5, 2), -np.arange(1, 11.0).reshape(5, 2)
    assert Autoencoder("q", 0, encoder, None).agreement(rows, restored) == {"latents": 0.0}
    chosen = np.random.default_rng(0).permutation(5)[:3]
    for one, all_of in zip(seen, (rows, restored), strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, all_of[chosen])


def test_unexplained_is_the_fraction_of_the_variance_of_normalised_rows() -> None:
    rows, bias = np.array([[1, 2], [3, 6], [5, 1]], "f4"), np.array([0.5, 0], "f4")
    encoder: Any = SimpleNamespace(encode=lambda x: x[:, :1] * 2, normed=lambda x: x * 10)
    found = Autoencoder("q", 0, encoder, (np.array([[1, 3]], "f4"), bias)).unexplained(rows, rows + 1)
    decoded = (rows[:, :1] + 1) * 2 @ np.array([[1, 3]]) + bias
    wanted = ((10 * rows - decoded) ** 2).sum() / ((10 * rows - 10 * rows.mean(0)) ** 2).sum()
    assert type(found) is float and found == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(ValueError, match=r"^--sae: the files hold no decoder of these rows, so there is no"):
        Autoencoder("q", 0, encoder, None).unexplained(rows, rows)


@pytest.mark.parametrize(
    ("hook", "layer", "layers", "place"),
    [
        ("resid_post", 1, 4, ("resid_pre", 2)),
        ("resid_post", 3, 4, ("resid_final", None)),
        ("resid_pre", 3, 4, ("resid_pre", 3)),
        ("resid_final", None, 4, ("resid_final", None)),
        ("resid_post", None, 4, "resid_post and no layer; add layer=NUMBER"),
        ("resid_pre", None, 4, "resid_pre and no layer; add layer=NUMBER"),
        ("resid_final", 0, 4, "resid_final and layer 0; leave the layer out"),
        ("nothing", 2, 4, "nothing and layer 2; name a hook"),
    ],
)
def test_an_autoencoder_has_one_hook_and_layer(hook: str, layer: int | None, layers: int, place: Any) -> None:
    one = Autoencoder(hook, layer, ENCODER, None)
    if isinstance(place, tuple):
        assert one.place(layers) == place
        return
    with pytest.raises(ValueError, match=f"^--sae: the autoencoder is of {place}"):
        one.place(layers)


# ---- labels and probes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("key,label\n", []),
        (" key , label\na,1\n\nb,0\n", [(2, {"key": "a", "label": "1"}), (4, {"key": "b", "label": "0"})]),
        ("key,label\na\n", [(2, {"key": "a", "label": None})]),
        ('key,label\n"{a",1', [(2, {"key": "{a", "label": "1"})]),
        (
            '\n  {"key": "a"}\n\n \n{"label": 1, "n": [2]}',
            [(2, {"key": "a"}), (5, {"label": 1, "n": [2]})],
        ),
    ],
)
def test_lines_of_labels_have_numbers(text: str, lines: Any, tmp_path: Path) -> None:
    (tmp_path / "labels").write_text(text)
    assert list(_lines(tmp_path / "labels")) == lines


@pytest.mark.parametrize(("line", "why"), [("{", "Expecting"), ("7", "'int' object is not"), ("[1]", "cannot convert")])
def test_a_line_that_is_not_an_object_is_named(line: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "labels"
    file.write_text(f'{{"key": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match=rf"^--labels {file}: line 2 is not a JSON object \(.*{why}") as caught:
        list(_lines(file))
    assert isinstance(caught.value.__cause__, ValueError | TypeError)


def test_the_first_field_that_names_a_capture_counts(tmp_path: Path) -> None:
    """Empty fields are skipped. A label may be a number, a word in upper or lower case, or a JSON value."""
    file = tmp_path / "labels"
    file.write_text("store,request_id,key,label\ns,r,k,TRUE\ns,r,,False\ns,,,1\nx,,,0\n")
    named = {("key", "k"): True, ("request_id", "r"): False, ("store", "s"): True, ("store", "x"): False}
    assert read_labels(str(file)) == named
    file.write_text('{"key": 0, "label": true}\n{"key": null, "store": 5, "label": 0}\n{"key": 0, "label": 1}')
    assert read_labels(file) == {("key", "0"): True, ("store", "5"): False}
    for text, line in (("key,label\na,1\n,0\n", 3), ("key,label\na,2\n", 2), ("key\na\n", 2)):
        file.write_text(text)
        with pytest.raises(ValueError, match=rf"^--labels .*: line {line} is .*; give key, request_id or store, and"):
            read_labels(file)


def test_a_probe_is_tested_on_rows_of_both_labels() -> None:
    """A logit of 0 predicts label 1. Pairs of equal logits count half."""
    held = [np.array([-2.0, -1, 0, 3]), np.array([-1.0, 0, 5])]
    assert _tested([5, 6], held, 7, 2) == FittedProbe(
        captures=7, rows=11, held_out=2, held_rows=7, accuracy=4 / 7, baseline=3 / 7, auc=(1.5 + 2.5 + 4) / 12
    )
    for counts in ([6, 5], [5, 5]):
        assert _tested(counts, held, 7, 2).baseline == 4 / 7
    for empty in ([held[0], np.zeros(0)], [np.zeros(0), held[1]]):
        with pytest.raises(ValueError, match=r"^fit-probe: held-out captures of a label have no row that --rows sel"):
            _tested([5, 6], empty, 7, 2)


# ---- differences ----------------------------------------------------------------------------------------------------


class Held:
    """A fake capture of one hook in one array. reduce: the text of its reduction; None: not reduced."""

    def __init__(self, reduce: str | None = None, width: int = 8, array: str = "mlp_out") -> None:
        settings = {} if reduce is None else {"reduce": {"kind": reduce.partition("(")[0], "text": reduce}}
        self.attrs = {"hooks": {array: settings}}
        self._reduce, self._width, self._array = reduce, width, array

    def sources(self, hook: str, layer: int | None) -> Any:
        assert (hook, layer) == ("mlp_out", 3)
        return [SimpleNamespace(array=self._array)]

    def reduction(self, hook: str, layer: int | None) -> Any:
        assert (hook, layer) == ("mlp_out", 3)
        return None if self._reduce is None else parse(self._reduce)

    def shape(self, hook: str) -> tuple[int, ...]:
        assert hook == "mlp_out"
        return (2, 5, self._width)


SETTINGS = ", or with other settings"


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        (Held(), Held(), ""),
        (Held(), Held("int8"), ""),
        (Held("int8"), Held("fp8", array="mlp_out.2"), ""),
        (Held("topk(4)"), Held("topk(4)"), ""),
        (Held("topk(4)"), Held("topk(5)"), f"it is stored as topk in one and as topk in the other{SETTINGS}"),
        (Held("topk(4)"), Held(), f"it is stored as topk in one and as full rows in the other{SETTINGS}"),
        (Held("int8"), Held("topk(4)"), f"it is stored as int8 in one and as topk in the other{SETTINGS}"),
        (Held(width=8), Held(width=9), "its rows have 8 and 9 values"),
        (Held("int8", width=9), Held(width=8), "its rows have 9 and 8 values"),
    ],
)
def test_hooks_in_forms_that_differ_are_not_compared(one: Any, other: Any, why: str) -> None:
    assert _unlike_forms(one, other, "mlp_out", 3) == why


def test_summaries_of_attention_are_not_compared() -> None:
    nothing: Any = None
    assert _unlike_forms(nothing, nothing, "pattern", 0) == "it holds only the largest weights"


# ---- one reduction of one layer -------------------------------------------------------------------------------------


class Halved:
    """A fake reduction to half of the values, which records its calls. counts: whether it stores integers."""

    def __init__(self, counts: bool = False) -> None:
        self.counts, self.asked, self.both = counts, list[tuple[Any, ...]](), list[Any]()

    def bind(self, *given: Any) -> Halved:
        self.asked.append(("bind", *given))
        return self

    def prepare(self, *given: Any) -> None:
        self.asked.append(("prepare", *given))

    def encode(self, values: torch.Tensor, layer: int) -> torch.Tensor:
        self.asked.append(("encode", values.dtype, layer))
        return values[:, ::2].to(torch.uint8) if self.counts else values[:, ::2]

    def decode(self, raw: np.ndarray, width: int, dtype: str) -> np.ndarray:
        self.asked.append(("decode", raw.dtype, width, dtype))
        return np.repeat(raw, 2, axis=1).astype("f4")

    def stored_dtype(self, dtype: str) -> str:
        return "uint8" if self.counts else dtype

    def measures(self, both: Any) -> dict[str, float]:
        self.both.append(both)
        return {"error": 0.12345678, "importance": 1.0}

    def restored(self, both: Any) -> str:
        assert both is self.both[-1]
        return "restored"


ROWS = np.arange(12, dtype="f4").reshape(3, 4)
IDS = np.array([4, 5, 6])


def downstream_of(decoded: np.ndarray) -> Any:
    """A fake of measures that checks that rows were decoded to `decoded`. Its `importance` is 2 / 3."""

    def measures(found: np.ndarray, restored: Any) -> dict[str, float]:
        np.testing.assert_array_equal(found, decoded)
        assert restored == "restored"
        return {"importance": 2 / 3, "lens_top": 0.5}

    return SimpleNamespace(measures=measures)


@pytest.mark.parametrize("layer", [None, 3])
@pytest.mark.parametrize(
    ("counts", "dtype", "size"), [(False, "float32", 0.5), (False, "bfloat16", 0.5), (True, "float32", 2 / 16)]
)
def test_rows_are_reduced_as_the_tap_would_and_compared(layer: int | None, counts: bool, dtype: str, size: Any) -> None:
    reduction: Any = Halved(counts)
    decoded = np.repeat(ROWS[:, ::2], 2, axis=1)
    found = _measure("half", reduction, "q", layer, ROWS, IDS, dtype, downstream_of(decoded))
    measures = {"error": 0.123457, "importance": 0.666667, "lens_top": 0.5}
    assert found == Fidelity("q", layer, "half", 3, 4, size, measures)
    number, stored = layer or 0, np.dtype("u1") if counts else np.dtype("f4")
    assert reduction.asked == [
        ("bind", "q", [number], 4, 1),
        ("prepare", 4, torch.device("cpu"), number, 0),
        ("encode", getattr(torch, dtype), number),
        ("decode", stored, 4, dtype),
    ]
    [both] = reduction.both
    assert both.rows is ROWS and both.tokens is IDS and (both.layer, both.dtype) == (number, dtype)
    np.testing.assert_array_equal(both.decoded, decoded)
    np.testing.assert_array_equal(both.stored, ROWS[:, ::2])


@pytest.mark.parametrize("needs", [False, True])
def test_a_fitted_reduction_that_reads_by_its_file_is_read_by_its_own_part(needs: bool) -> None:
    class Fitted(Halved, FittedReduction):
        needs_file = needs

        def own_part(self, layer: int) -> Any:
            return f"part {layer}"

        def read(self, values: np.ndarray, part: Any) -> np.ndarray:
            assert part == "part 3"
            return values + 1

    reduction: Any = object.__new__(Fitted)
    reduction.__dict__.update(counts=False, asked=[], both=[])
    decoded = np.repeat(ROWS[:, ::2], 2, axis=1) + needs
    assert _measure("x", reduction, "q", 3, ROWS, IDS, "float32", downstream_of(decoded)).size == 0.5


def test_the_worst_layer_is_the_largest_error_and_the_least_share() -> None:
    """NaN is worse than any number."""
    for name in ("error", "lens_kl", "sae_error"):
        assert _worst(name, [0.1, 0.3, 0.2]) == 0.3 and math.isnan(_worst(name, [0.1, math.nan]))
    assert _worst("lens_top", [0.3, 0.1, 0.2]) == 0.1 and math.isnan(_worst("lens_top", [math.nan, 0.1]))


def test_hooks_and_layers_to_measure() -> None:
    layers: Any = {"q": [0, 2], "resid_final": [None]}
    for place, wanted, found in (
        (("q", 2), None, True),
        (("q", 2), {0, 2}, True),
        (("q", 2), {0}, False),
        (("q", 1), None, False),
        (("k", 0), None, False),
        (("resid_final", None), {7}, True),
        (("resid_final", None), None, True),
    ):
        assert _is_measured(place, layers, wanted) is found, (place, wanted)
    reduction = parse("topk(64)")
    assert reduction is not None and _unfit(reduction, 96) == "" and "64" in _unfit(reduction, 32)


# ---- measures of analyses -------------------------------------------------------------------------------------------


def test_scores_of_concepts_are_those_of_a_ridge_regression_on_unit_rows() -> None:
    """The expected values use the primal form. The penalty is a hundredth of the sum of squared norms."""
    rng = np.random.default_rng(0)
    rows, fit, test = rng.normal(size=(40, 5)).astype("f4"), np.arange(0, 40, 2), np.arange(1, 40, 2)
    rows[3] = 0
    targets = rng.random((40, 2)) < 0.5
    exact = rows.astype("f8")
    unit = exact / np.maximum(np.linalg.norm(exact, axis=1, keepdims=True), 1e-30)
    centred = unit[fit] - unit[fit].mean(0)
    wanted = targets[fit] - targets[fit].mean(0)
    inverse = np.linalg.inv(centred.T @ centred + 0.01 * (centred**2).sum() * np.eye(5))
    found = downstream._scores(rows, Concepts(fit, test, targets))
    np.testing.assert_allclose(found, (unit[test] - unit[fit].mean(0)) @ inverse @ centred.T @ wanted, rtol=1e-8)


def test_the_agreement_of_scores_is_the_least_of_the_labels() -> None:
    a, b = np.array([[1.0, 1, 3], [2, 5, 3], [3, 2, 3]]), np.array([[2.0, 0, 1], [4, 1, 2], [6, 0, 9]])
    assert downstream._agreement(a[:, :1], b[:, :1]) == pytest.approx(1)
    correlation = float(np.corrcoef(a[:, 1], b[:, 1])[0, 1])
    assert 0.5 < correlation < 0.99 and downstream._agreement(a[:, :2], b[:, :2]) == pytest.approx(correlation)
    assert downstream._agreement(a, b) == 0, "equal scores must not correlate"
    assert downstream._agreement(a[:, :1], -b[:, :1]) == pytest.approx(-1)


@pytest.mark.parametrize("block", [2, 3, 100])
def test_the_lens_of_restored_rows_is_compared_on_some_rows(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert downstream._ROWS == 2048
    monkeypatch.setattr(downstream, "_ROWS", 7)
    rng = np.random.default_rng(2)
    rows, restored = rng.normal(size=(10, 4)), rng.normal(size=(10, 4))
    restored[:6] = rows[:6] * 1.1
    chosen = np.random.default_rng(0).permutation(10)[:7]

    def p(x: np.ndarray) -> np.ndarray:
        return np.exp(x[chosen]) / np.exp(x[chosen]).sum(1, keepdims=True)

    full, reduced = p(rows), p(restored)
    same = (full.argmax(1) == reduced.argmax(1)).mean()
    assert 0 < same < 1
    unembedding: Any = SimpleNamespace(block=block, logits=lambda x: x)
    assert downstream._lens_agreement(rows, restored, unembedding) == {
        "lens_top": pytest.approx(same),
        "lens_kl": pytest.approx((full * np.log(full / reduced)).sum(1).mean()),
    }


def test_only_measures_that_can_be_computed_are_given() -> None:
    """Scores of concepts do not need full rows. All other measures do."""
    seen: list[Any] = []

    def measuring(name: str) -> Any:
        return lambda *given: (seen.append((name, *given)), {name: 1.0})[1]

    autoencoder_: Any = SimpleNamespace(agreement=measuring("latents"))
    attention: Any = SimpleNamespace(measures=measuring("attention"))
    rows, restored, decoded = ROWS, ROWS + 1, ROWS[:, :2]
    both = Downstream(rows, None, None, autoencoder_, attention)
    assert both.measures(decoded, None) == {} and seen == []
    assert both.measures(decoded, restored) == {"latents": 1.0, "attention": 1.0}
    assert [one[0] for one in seen] == ["latents", "attention"]
    assert all(given[0] is rows and given[1] is restored for _, *given in seen)
    assert Downstream(rows, None, None).measures(decoded, restored) == {}
    concepts = Concepts(np.arange(2), np.arange(1, 3), np.array([[True], [False], [True]]))
    assert Downstream(rows, concepts, None).measures(rows, None) == {"concepts": pytest.approx(1)}


def test_constant_probe_scores_have_no_correlation() -> None:
    """Here, all rows belong to one token. With two tokens, an exact reduction has the correlation 1."""
    rows = np.random.default_rng(0).standard_normal((6, 4)).astype("f4")
    one = ReducedRows(rows, rows, rows, np.zeros(6, "i4"), 0, "float32")
    assert math.isnan(probes(one, lambda probe: probe))
    two = ReducedRows(rows, rows, rows, np.array([0, 0, 0, 1, 1, 1], "i4"), 0, "float32")
    assert probes(two, lambda probe: probe) == pytest.approx(1)


def test_a_row_that_becomes_zero_has_the_cosine_0() -> None:
    """Rows that were zero before have no cosine, and neither do rows that are not finite."""
    rows = np.random.default_rng(0).standard_normal((6, 4)).astype("f4")
    rows[4, 0], rows[5] = np.nan, 0
    decoded = rows.copy()
    decoded[2] = 0
    found = of_values(ReducedRows(rows, rows, decoded, np.zeros(6, "i4"), 0, "float32"))
    assert found["cosine_least"] == 0 and found["cosine_median"] == pytest.approx(1)


def test_rows_that_are_all_zero_have_no_measures() -> None:
    rows = np.zeros((6, 4), "f4")
    found = of_values(ReducedRows(rows, rows, rows, np.zeros(6, "i4"), 0, "float32"))
    assert all(map(math.isnan, found.values())) and len(found) == 4


def test_a_probe_without_a_correlation_is_not_hidden_by_others() -> None:
    """The probe of the second token is zero for decoded rows."""
    rows = np.array([[1, 0], [2, 0], [3, 0], [0, 1], [0, 4], [5, 5]], "f4")
    decoded = rows[:, :1]
    found = ReducedRows(rows, rows, decoded, np.array([0, 0, 0, 1, 1, 2], "i4"), 0, "float32")
    given = iter([np.ones(1), np.zeros(1), np.ones(1)])
    with np.errstate(invalid="ignore", divide="ignore"):
        assert math.isnan(probes(found, lambda _: next(given)))
