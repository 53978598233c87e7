# SPDX-License-Identifier: Apache-2.0
"""Parts of `dmi fidelity`, `dmi fit-probe` and `dmi diff`, each compared with whole answers that are worked out here."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dmi_connector.analysis import autoencoder, downstream
from dmi_connector.analysis.autoencoder import Autoencoder
from dmi_connector.analysis.diff import _unlike_forms
from dmi_connector.analysis.downstream import Concepts, Downstream
from dmi_connector.analysis.fidelity import Fidelity, _is_measured, _measure, _unfit, _worst
from dmi_connector.analysis.fit_probe import FittedProbe, _lines, _tested, read_labels
from dmi_connector.reduce import parse
from dmi_connector.reduce.fitted import FittedReduction
from dmi_connector.reduce.sparse_encoder import SparseEncoder

EYE = np.eye(2, dtype="f4")
ENCODER = SparseEncoder(EYE, np.zeros(2, "f4"), np.zeros(2, "f4"))
"""Latents are the positive values of a row."""


# ---- autoencoders ---------------------------------------------------------------------------------------------------


def test_an_autoencoder_finds_the_latents_that_stay_active() -> None:
    """Rows without a latent do not count. The rows' variance is 30, and the decoder leaves -1, or -1 and 4."""
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
    """At most 2,048, as float32, drawn by the seed 0."""
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


def test_what_decoding_leaves_is_a_share_of_the_variance_of_normalised_rows() -> None:
    rows, bias = np.array([[1, 2], [3, 6], [5, 1]], "f4"), np.array([0.5, 0], "f4")
    encoder: Any = SimpleNamespace(encode=lambda x: x[:, :1] * 2, normed=lambda x: x * 10)
    found = Autoencoder("q", 0, encoder, (np.array([[1, 3]], "f4"), bias)).unexplained(rows, rows + 1)
    decoded = (rows[:, :1] + 1) * 2 @ np.array([[1, 3]]) + bias
    wanted = ((10 * rows - decoded) ** 2).sum() / ((10 * rows - 10 * rows.mean(0)) ** 2).sum()
    assert type(found) is float and found == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(ValueError, match=r"^--sae: its files hold no decoder of these rows, so there is no"):
        Autoencoder("q", 0, encoder, None).unexplained(rows, rows)


@pytest.mark.parametrize(
    ("hook", "layer", "layers", "place"),
    [
        ("resid_post", 1, 4, ("resid_pre", 2)),
        ("resid_post", 3, 4, ("resid_final", None)),
        ("resid_pre", 3, 4, ("resid_pre", 3)),
        ("resid_final", None, 4, ("resid_final", None)),
        ("resid_post", None, 4, "resid_post and no layer"),
        ("resid_pre", None, 4, "resid_pre and no layer"),
        ("resid_final", 0, 4, "resid_final and layer 0"),
        ("nothing", 2, 4, "nothing and layer 2"),
    ],
)
def test_an_autoencoder_is_of_one_place(hook: str, layer: int | None, layers: int, place: Any) -> None:
    one = Autoencoder(hook, layer, ENCODER, None)
    if isinstance(place, tuple):
        assert one.place(layers) == place
        return
    with pytest.raises(ValueError, match=rf"^--sae: it is of {place}; add hook=NAME, layer=NUMBER, as in hook="):
        one.place(layers)


# ---- labels and probes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("key,label\n", []),
        (" key , label\na,1\n\nb,0\n", [(2, {"key": "a", "label": "1"}), (3, {"key": "b", "label": "0"})]),
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
def test_a_line_that_is_no_object_is_named(line: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "labels"
    file.write_text(f'{{"key": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match=rf"^--labels {file}: line 2 is no JSON object \(.*{why}") as caught:
        list(_lines(file))
    assert isinstance(caught.value.__cause__, ValueError | TypeError)


def test_the_first_field_that_names_a_capture_counts(tmp_path: Path) -> None:
    """Empty fields do not. A label may be a number, a word in any case, or a value of JSON."""
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
    """A logit of 0 is label 1. Pairs of equal logits count half."""
    held = [np.array([-2.0, -1, 0, 3]), np.array([-1.0, 0, 5])]
    assert _tested([5, 6], held, 7, 2) == FittedProbe(
        captures=7, rows=11, held_out=2, held_rows=7, accuracy=4 / 7, baseline=3 / 7, auc=(1.5 + 2.5 + 4) / 12
    )
    for counts in ([6, 5], [5, 5]):
        assert _tested(counts, held, 7, 2).baseline == 4 / 7
    for empty in ([held[0], np.zeros(0)], [np.zeros(0), held[1]]):
        with pytest.raises(ValueError, match=r"^fit-probe: the captures that were held out have no row that counts; g"):
            _tested([5, 6], empty, 7, 2)


# ---- differences ----------------------------------------------------------------------------------------------------


class Held:
    """A capture of one hook in one array, reduced as the text says, or in full."""

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
        (Held("topk(4)"), Held("topk(5)"), f"it is topk in one and topk in the other{SETTINGS}"),
        (Held("topk(4)"), Held(), f"it is topk in one and full rows in the other{SETTINGS}"),
        (Held("int8"), Held("topk(4)"), f"it is int8 in one and topk in the other{SETTINGS}"),
        (Held(width=8), Held(width=9), "its rows have 8 and 9 values"),
        (Held("int8", width=9), Held(width=8), "its rows have 9 and 8 values"),
    ],
)
def test_hooks_in_forms_that_differ_are_not_compared(one: Any, other: Any, why: str) -> None:
    assert _unlike_forms(one, other, "mlp_out", 3) == why


def test_summaries_of_attention_are_not_compared() -> None:
    nothing: Any = None
    assert _unlike_forms(nothing, nothing, "pattern", 0) == "it is a summary of the largest weights"
