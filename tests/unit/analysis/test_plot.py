# SPDX-License-Identifier: Apache-2.0
"""Every picture of `dmi plot`, as PNG and as SVG, with the numbers that it shows."""

from __future__ import annotations

import functools
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from dmi_connector import open_capture
from dmi_connector.analysis.attribution import logit_attribution
from dmi_connector.analysis.lens import logit_lens, uncertainty
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.analysis.patterns import attention_pattern
from dmi_connector.analysis.pictures import plot as plot_module
from dmi_connector.analysis.residual import drift, residual_norms
from dmi_connector.analysis.unembedding import Unembedding
from dmi_connector.cli.main import main
from dmi_connector.cli.plots import KINDS
from dmi_connector.cli.tiny_models import make_model
from dmi_connector.store.format.completeness import Cause, Loss
from tests import analysiskit, picturekit
from tests.shorter import soak

PROMPT, TOKENS = 6, 14
OPTIONS: dict[str, list[str]] = {
    "norms": ["{b}"],
    "heat": ["{b}", "--hook", "mlp_post", "--neuron", "3"],
    "text": ["--hook", "mlp_post", "--layer", "1", "--values", "largest-value"],
    "lens": [],
    "attribution": ["--token", "9"],
    "attention": ["--layer", "1"],
    "uncertainty": [],
    "drift": ["{b}", "--since", "previous"],
    "neuron": ["{b}", "--hook", "mlp_post", "--layer", "0", "--neuron", "3"],
    "difference": ["--against", "{b}", "--hook", "resid_pre", "--layer", "2", "--rows", "generated"],
}
WORDS = {
    "norms": ["Qwen3ForCausalLM: residual norms by layer and token (float32, vLLM 0.32.0)", "final", "generated →"],
    "heat": ["Qwen3ForCausalLM: value 3 of mlp_post by layer and token (float32, vLLM 0.32.0)", "one", "two"],
    "text": [
        "Qwen3ForCausalLM: text of rows 0 to 13 (float32, vLLM 0.32.0)",
        "mlp_post, layer 1: largest value",
        "generated tokens are underlined",
    ],
    "lens": ["Qwen3ForCausalLM: logit lens (float32, vLLM 0.32.0)", "layer input"],
    "attribution": ["share of the logit", "embed", "bias"],
    "attention": ["head 0", "head 3", "attention weight (square root scale)"],
    "uncertainty": ["entropy", "surprisal of the actual next token", "nats"],
    "drift": ["1 - cosine", "one", "two"],
    "neuron": ["mlp_post, layer 0, neuron 3"],
    "difference": ["stores (8 rows)", "against (8 rows)", "share of rows"],
}
"""Texts that each picture has."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and stores of two sequences of it."""
    root = tmp_path_factory.mktemp("plots")
    oracle = Oracle(make_model("qwen3", root / "model"))
    for seed, name in enumerate(("one", "two")):
        ids = np.random.default_rng(seed).integers(5, 512, TOKENS).tolist()
        analysiskit.write_store(root / f"{name}.zarr", oracle, ids, PROMPT, key=name)
    return root


def plot(folder: Path, kind: str, out: Path) -> int:
    options = [option.format(b=folder / "two.zarr") for option in OPTIONS[kind]]
    return main(["plot", "--kind", kind, "-o", str(out), str(folder / "one.zarr"), *options])


def test_every_kind_of_picture_is_tried() -> None:
    assert set(OPTIONS) == set(KINDS) == set(WORDS)


@pytest.mark.parametrize("kind", ["heat", "text", *soak(*(kind for kind in KINDS if kind not in ("heat", "text")))])
def test_a_png_is_more_than_a_blank_page(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "x.png"
    assert plot(folder, kind, out) == 0 and capsys.readouterr().out == f"{out}\n"
    picture = imread(out)
    assert picture.shape[0] > 200 and picture.shape[1] > 400 and picture[..., :3].std() > 0.05


class Drawn(NamedTuple):
    """An SVG, its figure, and the values of its images and lines."""

    path: Path
    figure: Figure
    values: list[np.ndarray]


@pytest.fixture(scope="module")
def svg(folder: Path) -> Callable[[str], Drawn]:
    """svg(kind): a picture of this kind, drawn once."""

    @functools.cache
    def draw(kind: str) -> Drawn:
        values: list[np.ndarray] = []
        image, line = Axes.imshow, Axes.plot
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Axes, "imshow", lambda self, shown, **kw: values.append(shown) or image(self, shown, **kw))
            patch.setattr(Axes, "plot", lambda self, x, y, *a, **kw: values.append(y) or line(self, x, y, *a, **kw))
            figures = picturekit.figures(patch)
            assert plot(folder, kind, folder / f"{kind}.svg") == 0
        return Drawn(folder / f"{kind}.svg", figures[0], values)

    return draw


@pytest.mark.parametrize("kind", KINDS)
def test_an_svg_has_the_texts_as_text_and_is_the_same_twice(
    kind: str, folder: Path, tmp_path: Path, svg: Callable[[str], Drawn]
) -> None:
    assert plot(folder, kind, tmp_path / "b.svg") == 0
    whole = svg(kind).path.read_bytes()
    assert whole == (tmp_path / "b.svg").read_bytes()
    texts = {"".join(e.itertext()).strip() for e in ElementTree.fromstring(whole).iter() if e.tag.endswith("}text")}
    assert set(WORDS[kind]) <= texts, texts
    picturekit.check(kind, svg(kind).figure)


def test_pictures_show_the_numbers_of_the_functions(folder: Path, svg: Callable[[str], Drawn]) -> None:
    with open_capture(folder / "one.zarr", 0) as one, open_capture(folder / "two.zarr", 0) as two:
        end = Unembedding.of(one)
        sure = uncertainty(one)
        expected = {
            "norms": [residual_norms(one)[0], residual_norms(two)[0]],
            "heat": [one.numpy("mlp_post")[..., 3], two.numpy("mlp_post")[..., 3]],
            "lens": [logit_lens(one, end).chance],
            "attribution": [logit_attribution(one, end, 9)[0]],
            "attention": list(attention_pattern(one, 1)),
            "uncertainty": [sure.entropy, sure.surprisal],
            "drift": [drift(one, since="previous"), drift(two, since="previous")],
        }
    for kind, values in expected.items():
        shown = svg(kind).values
        assert len(shown) == len(values), kind
        for got, want in zip(shown, values, strict=True):
            np.testing.assert_array_equal(got, want, err_msg=kind)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "lens", "--neuron", "3"], "plot: --kind lens takes no --neuron; leave it out"),
        (["--kind", "attention"], "plot: --kind attention needs --layer; give it"),
        (["{b}", "--kind", "lens"], "plot: --kind lens draws one store, 2 were given; name one"),
        (["--kind", "lens", "--model", "nowhere"], "model: nowhere has no readable config.json"),
        (["-o", "x.pdf"], "plot: x.pdf has another extension than .png or .svg; give one of these"),
        (["--kind", "drift", "--hook", "resid_pre"], "name one of them"),
        (
            ["--kind", "heat", "--hook", "mlp_post", "--neuron", "9999"],
            "neuron 9999 does not exist: 'mlp_post' has 0 to",
        ),
        (["--kind", "heat", "--hook", "mlp_pots"], "'mlp_pots' is not in this store"),
        (["--kind", "difference", "--hook", "q", "--layer", "0", "--against", "nowhere"], "nowhere does not exist"),
        (["--kind", "text"], "plot: --kind text needs --hook; give it"),
        (["{b}", "--kind", "text", "--hook", "q"], "plot: --kind text draws one store, 2 were given; name one"),
        (["--kind", "text", "--hook", "q"], "'q' has the layers [0, 1, 2] in"),
        (["--kind", "text", "--hook", "qq"], "'qq' is not in this store"),
        (["--kind", "text", "--hook", "q", "--layer", "3"], "'q' has no layer 3 in this store"),
        (
            ["--kind", "text", "--hook", "logits", "--values", "norm"],
            "plot: --values norm does not exist for 'logits'; use entropy, largest-probability, log-probability-of",
        ),
        (["--kind", "text", "--hook", "logits", "--values", "log-probability of"], "log-probability-of needs --token"),
        (
            ["--kind", "text", "--hook", "resid_final", "--values", "norm", "--neuron", "3"],
            "plot: --values norm takes no --neuron; leave it out",
        ),
        (
            ["--kind", "text", "--hook", "resid_final", "--head", "3"],
            "plot: --values norm takes no --head; leave it out",
        ),
        (
            ["--kind", "text", "--hook", "resid_final", "--neuron", "999"],
            "neuron 999 does not exist: 'resid_final' has",
        ),
        (
            ["--kind", "text", "--hook", "q", "--rows", "prompt"],
            "plot: --rows prompt is not valid; write FIRST:STOP, as in 0:200",
        ),
        (
            ["--kind", "text", "--hook", "resid_final", "--rows", "14:"],
            "plot: rows 14: are not in the store; give some of its rows, 0:14",
        ),
        (["--kind", "text", "--hook", "logits", "--rows", ":5"], "have no value of 'logits'; give other rows"),
        (
            ["--kind", "text", "--hook", "resid_final", "--tokenizer", "nowhere"],
            "tokenizer: nowhere has no tokenizer.json; give a directory that has one, or leave the option out",
        ),
    ],
)
def test_bad_options_are_refused_with_the_fix(
    options: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    given = [option.format(b=folder / "two.zarr") for option in options]
    assert main(["plot", "-o", str(tmp_path / "x.png"), str(folder / "one.zarr"), *given]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_directories_of_stores_are_opened_one_store_at_a_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    seen: list[tuple[float, ...]] = []
    barh = Axes.barh
    monkeypatch.setattr(
        Axes, "barh", lambda self, y, width, **kw: seen.append(tuple(width)) or barh(self, y, width, **kw)
    )
    options = ["--kind", "neuron", "--hook", "mlp_post", "--layer", "0", "--neuron", "3", "-o", str(tmp_path / "x.svg")]
    assert main(["plot", str(folder), *options]) == 0
    with open_capture(folder / "one.zarr", 0) as one, open_capture(folder / "two.zarr", 0) as two:
        values = np.concatenate([capture.numpy("mlp_post", 0)[:, 3] for capture in (one, two)])
    assert seen == [tuple(np.sort(values)[::-1][:20].tolist())]
    capsys.readouterr()
    assert main(["plot", str(tmp_path), *options]) == 2
    assert f"{tmp_path} holds no finished store" in capsys.readouterr().err


def test_an_incomplete_store_is_drawn_without_its_missing_rows_and_one_without_rows_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    oracle, ids = Oracle(folder / "model"), list(range(5, 5 + TOKENS))
    some, none = (Loss.of(Cause.FELL_BEHIND, [rows]) for rows in ([2, 5], [0, TOKENS]))
    for name, loss in (("some", some), ("none", none)):
        analysiskit.write_store(tmp_path / f"{name}.zarr", oracle, ids, PROMPT, losses=[loss])
    for kind in ("norms", "text", "lens", "attribution", "uncertainty", "drift"):
        options = ["--hook", "resid_final"] if kind == "text" else []
        for name, status in (("some", 0), ("none", 2)):
            out = tmp_path / f"{name}-{kind}.svg"
            arguments = ["plot", str(tmp_path / f"{name}.zarr"), "--kind", kind, "-o", str(out), *options]
            assert main(arguments) == status, kind
            assert out.exists() == (status == 0)
        assert "hold no rows" in capsys.readouterr().err
        assert "(incomplete)" in (tmp_path / f"some-{kind}.svg").read_text()


@pytest.mark.parametrize(
    "values, low, high", [([1, np.inf, np.nan, 3], 1, 3), ([-np.inf, -2, 4], -4, 4), ([np.nan, np.inf], 0, 1)]
)
def test_a_scale_spans_what_is_finite(values: list[float], low: float, high: float) -> None:
    norm = plot_module._scale(np.array(values, np.float32))[0]["norm"]
    assert (norm.vmin, norm.vmax) == (low, high)
