# SPDX-License-Identifier: Apache-2.0
"""Pictures of `dmi plot` where there is much or little: many stores, few attributes, one token, values not finite."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage, imread
from matplotlib.patches import Rectangle
from tokenizers import Tokenizer, models

from dmi_connector import open_capture
from dmi_connector.analysis.labels import name_of_values
from dmi_connector.analysis.lens import Uncertainty, uncertainty
from dmi_connector.analysis.neurons import top_tokens
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.analysis.patterns import attention_pattern
from dmi_connector.analysis.pictures import canvas, plot_sets
from dmi_connector.analysis.pictures import plot as plot_module
from dmi_connector.analysis.pictures.plot_sets import draw_top_tokens
from dmi_connector.analysis.pictures.plot_text import colour_map
from dmi_connector.analysis.unembedding import Unembedding
from dmi_connector.cli.main import main
from dmi_connector.cli.plots import KINDS
from dmi_connector.hooks import HOOKS
from dmi_connector.store.format.schema import ATTR_KEY
from tests import analysiskit, picturekit
from tests.unit.analysis.test_plot import OPTIONS, PROMPT, TOKENS, folder, plot

__all__ = ["folder"]  # a fixture


def svg_texts(path: Path) -> set[str]:
    return {"".join(e.itertext()).strip() for e in ElementTree.parse(path).iter() if e.tag.endswith("}text")}


def rewritten(store: Path, out: Path, attrs: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a store whose attributes a function has changed."""
    shutil.copytree(store, out)
    document = json.loads((out / "zarr.json").read_text())
    attrs(document["attributes"][ATTR_KEY])
    (out / "zarr.json").unlink()
    (out / "zarr.json").write_text(json.dumps(document))
    return out


OPTIONAL = ("versions", "architecture", "dtype", "model", "num_layers", "dims", "key", "created", "request_id")


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_without_the_attributes_of_this_package_is_drawn_or_the_error_says_what_lacks(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = rewritten(folder / "one.zarr", tmp_path / "bare.zarr", lambda a: [a.pop(n, None) for n in OPTIONAL])
    options = [o.format(b=folder / "two.zarr") for o in OPTIONS[kind]]
    options = options[1:] if options and not options[0].startswith("--") else options  # that store is of a named model
    lacks = {"attention": "has no attribute 'dims'", "lens": "bare.zarr names no model", "attribution": "names no mo"}
    status = main(["plot", str(bare), "--kind", kind, "-o", str(tmp_path / "x.svg"), *options])
    if kind not in lacks:
        assert status == 0 and not any("vLLM" in text or "None" in text for text in svg_texts(tmp_path / "x.svg"))
        return
    assert status == 2 and lacks[kind] in capsys.readouterr().err
    if kind != "attention":
        model = ["--model", str(folder / "model")]
        status = main(["plot", str(bare), "--kind", kind, "-o", str(tmp_path / "x.svg"), *options, *model])
        assert status == (0 if kind == "lens" else 2)
        assert status == 0 or "has no attribute 'num_layers'" in capsys.readouterr().err


def test_the_title_has_what_the_store_says(folder: Path, tmp_path: Path) -> None:
    some = rewritten(folder / "one.zarr", tmp_path / "some.zarr", lambda a: [a.pop(n) for n in ("versions", "dtype")])
    assert main(["plot", str(some), "-o", str(tmp_path / "x.svg")]) == 0
    assert "Qwen3ForCausalLM: residual norms by layer and token" in svg_texts(tmp_path / "x.svg")


def test_a_drift_has_a_name_that_begins_with_an_underscore(folder: Path, tmp_path: Path) -> None:
    store = rewritten(folder / "one.zarr", tmp_path / "one.zarr", lambda a: a.update(key="_one"))
    assert main(["plot", str(store), "--kind", "drift", "-o", str(tmp_path / "x.svg")]) == 0
    assert "_one" in svg_texts(tmp_path / "x.svg")


def test_many_drifts_have_a_mean_in_place_of_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[tuple[np.ndarray, np.ndarray]] = []
    line = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, x, y, *a, **k: lines.append((x, y)) or line(self, x, y, *a, **k))
    drawn = picturekit.figures(monkeypatch)
    stores = [str(folder / f"{name}.zarr") for name in ("one", "two")] * 6
    for count, words in ((10, {"one", "two"}), (12, {"mean of 12 captures"})):
        assert main(["plot", *stores[:count], "--kind", "drift", "-o", str(tmp_path / "x.svg")]) == 0
        assert words <= svg_texts(tmp_path / "x.svg")
    assert not {"one", "two"} & svg_texts(tmp_path / "x.svg")
    picturekit.check("many drifts", drawn[1])
    with open_capture(folder / "one.zarr", 0) as capture:
        plot_module.draw_drift([capture], tmp_path / "x.svg")
    picturekit.check("drift of one store", drawn[2])
    assert len(lines) == 10 + 12 + 1 + 1
    positions, mean = lines[-2]
    assert positions.tolist() == list(range(TOKENS))
    np.testing.assert_allclose(mean, (lines[0][1] + lines[1][1]) / 2, rtol=1e-6)


def test_many_norms_are_one_picture_of_a_fixed_size_and_too_many_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = picturekit.figures(monkeypatch)
    stores = [str(folder / f"{name}.zarr") for name in ("one", "two")] * 5
    for count in (9, 10):
        assert main(["plot", *stores[:count], "-o", str(tmp_path / "x.png")]) == 0
        assert imread(tmp_path / "x.png").shape[:2] == (1560, 2340)
    assert main(["plot", *stores, "-o", str(tmp_path / "x.svg")]) == 0
    assert {
        "one",
        "two",
        "Qwen3ForCausalLM: residual norms of 10 captures, by layer and token (float32, vLLM 0.32.0)",
    } <= (svg_texts(tmp_path / "x.svg"))
    picturekit.check("many norms", drawn[2])
    with open_capture(folder / "one.zarr", 0) as capture:
        for draw in (plot_module.draw_residual_norms, lambda c, out: plot_module.draw_heat(c, out, "q")):
            with pytest.raises(ValueError, match="401 stores are more than the 400 of one picture; give fewer"):
                draw([capture] * 401, tmp_path / "y.png")


def test_the_axis_of_uncertainty_ends_where_its_values_do(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    panels: list[Axes] = []
    monkeypatch.setattr(canvas, "save", lambda figure, out: panels.append(figure.axes[0]))
    with open_capture(folder / "one.zarr", 0) as capture:
        plot_module.draw_uncertainty(capture, uncertainty(capture), tmp_path / "x.png")
        plot_module.draw_uncertainty(capture, uncertainty(capture, Unembedding.of(capture)), tmp_path / "x.png")
        assert [panel.get_xlim() for panel in panels] == [(PROMPT - 1.5, TOKENS - 0.5), (-0.5, TOKENS - 0.5)]
        assert [len(panel.get_xticks()) for panel in panels] == [TOKENS - PROMPT + 1, TOKENS]
        with pytest.raises(ValueError, match="holds no logits; give --model"):
            none = np.zeros(0, int)
            plot_module.draw_uncertainty(capture, Uncertainty(none, none, none), tmp_path / "x.png")


def test_attention_has_the_square_root_scale_and_blocks_where_there_are_more_tokens_than_pixels(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[AxesImage] = []
    image = Axes.imshow
    monkeypatch.setattr(Axes, "imshow", lambda self, v, **k: shown.append(image(self, v, **k)) or shown[-1])
    assert plot(folder, "attention", tmp_path / "x.png") == 0
    assert [float(shown[0].norm(value)) for value in (0, 0.25, 1)] == [0, 0.5, 1]
    monkeypatch.setattr(plot_module, "_MOST_CELLS", 5)
    drawn = picturekit.figures(monkeypatch)
    assert plot(folder, "attention", tmp_path / "x.svg") == 0
    picturekit.check("attention in blocks", drawn[0])
    assert "attention weight (largest of 3 x 3; square root scale)" in svg_texts(tmp_path / "x.svg")
    with open_capture(folder / "one.zarr", 0) as capture:
        weights = attention_pattern(capture, 1, 0)
    blocks = shown[4].get_array()
    assert blocks.shape == (5, 5) and shown[4].get_extent() == [-0.5, TOKENS - 0.5, TOKENS - 0.5, -0.5]
    for i, k in ((0, 0), (2, 1), (4, 4)):
        assert blocks[i, k] == weights[3 * i : 3 * i + 3, 3 * k : 3 * k + 3].max()


def test_values_that_are_not_finite_are_crossed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells: list[list[tuple[float, ...]]] = []
    cross = canvas.cross_out

    def crossed(panel: Axes, some: list[tuple[float, float, float, float]]) -> None:
        cells.append([tuple(map(float, c)) for c in some])
        cross(panel, some)

    monkeypatch.setattr(canvas, "cross_out", crossed)
    drawn = picturekit.figures(monkeypatch)
    spoilt = np.zeros((4, TOKENS), bool)
    spoilt[1, 3:6] = spoilt[1, 9] = spoilt[3, 0] = True
    read = plot_module.residual_norms
    monkeypatch.setattr(
        plot_module,
        "residual_norms",
        lambda capture: (np.where(spoilt, np.float32(np.nan), read(capture)[0]), read(capture)[1]),
    )
    assert plot(folder, "norms", tmp_path / "x.svg") == 0
    assert cells[0] == [(2.5, 0.5, 3, 1), (8.5, 0.5, 1, 1), (-0.5, 2.5, 1, 1)]
    assert canvas.CROSSED in svg_texts(tmp_path / "x.svg")
    cells.clear()
    weights = np.full((1, TOKENS, TOKENS), 1 / TOKENS, "f4")
    weights[0, 2] = np.nan
    monkeypatch.setattr(plot_module, "attention_pattern", lambda _capture, _layer: weights)
    assert plot(folder, "attention", tmp_path / "x.svg") == 0
    assert cells == [[(-0.5, 1.5, 3, 1)]]
    picturekit.check("crossed norms", drawn[0])
    picturekit.check("crossed attention", drawn[1])


def test_a_neuron_is_drawn_over_whole_words_each_with_its_value(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {f"word-of-many-letters-{i}": i for i in range(512)}
    Tokenizer(models.WordLevel(words, unk_token="word-of-many-letters-0")).save(str(tmp_path / "tokenizer.json"))
    patches: list[Rectangle] = []
    add = Axes.add_patch
    monkeypatch.setattr(Axes, "add_patch", lambda self, patch: patches.append(patch) or add(self, patch))
    with open_capture(folder / "one.zarr", 0) as capture:
        found = top_tokens(capture, "mlp_post", 3, layer=0, count=2, context=1)
    drawn = picturekit.figures(monkeypatch)
    draw_top_tokens(found, tmp_path / "x.svg", tokenizer=tmp_path)
    picturekit.check("long words around a neuron", drawn[0])
    wanted = [f"word-of-many-letters-{i}" for one in found for i in one.context]
    assert set(wanted) <= svg_texts(tmp_path / "x.svg"), "no word is cut"
    cells = [patch for patch in patches if patch.get_fill() and patch.get_height() == pytest.approx(0.84)]
    values = np.concatenate([one.values for one in found])
    assert len(cells) == len(values)
    shade = colour_map(bool(values.min() < 0 < values.max()))
    largest = np.abs(values).max()
    assert values.min() < 0 < values.max(), "of both signs, so that 0 has the colour of the page"
    np.testing.assert_allclose(
        [cell.get_facecolor() for cell in cells], shade((values + largest) / (2 * largest)), atol=0.01
    )
    frames = [patch for patch in patches if not patch.get_fill() and patch.get_height() == pytest.approx(0.92)]
    assert [frame.get_x() for frame in frames] == [0.0, 0.0], "the tokens themselves stand below each other"


def test_a_token_without_letters_is_drawn_by_its_id_around_a_neuron() -> None:
    """Here one that no font has. Line feeds and tabs are drawn as arrows."""
    texts: Any = SimpleNamespace(of=lambda _ids: ["ab", "\u2603", "c\n", "\td"])
    one: Any = SimpleNamespace(context=[5, 70, 8, 9], before=2)
    pieces = plot_sets._pieces(one, texts, frozenset(map(ord, "abcd\n\t")))
    assert ["".join(word for _, word in piece.words) for piece in pieces] == ["ab", "⟨70⟩", "c↵", "→d"]
    assert [piece.start for piece in pieces] == [-6, -4, 0, 2] and pieces[-1].stop == 4
    known = plot_sets._pieces(one, texts, None)
    assert ["".join(word for _, word in piece.words) for piece in known][1] == "\u2603"
    texts.of = lambda _ids: None
    assert [piece.words[0][1] for piece in plot_sets._pieces(one, texts, None)] == ["5", "70", "8", "9"]


def test_a_value_has_the_name_of_what_computes_it() -> None:
    names = {hook: name_of_values(hook) for hook in (*HOOKS, "probe.p")}
    neurons = {hook for hook, name in names.items() if name == "neuron"}
    assert neurons == {"mlp_pre", "mlp_pre_linear", "mlp_post"} and names.pop("probe.p") == "output"
    assert set(names.values()) == {"neuron", "dimension"}


@pytest.mark.parametrize(("hook", "name"), [("resid_pre", "dimension"), ("mlp_post", "neuron")])
def test_values_are_neurons_of_an_mlp_alone(hook: str, name: str, folder: Path, tmp_path: Path) -> None:
    one, two, out = (str(path) for path in (folder / "one.zarr", folder / "two.zarr", tmp_path / "x.svg"))
    where = ["--hook", hook, "--layer", "1", "-o", out]
    assert main(["plot", one, "--kind", "difference", "--against", two, *where]) == 0
    assert name in svg_texts(tmp_path / "x.svg")
    assert main(["plot", one, "--kind", "neuron", "--neuron", "3", *where]) == 0
    assert f"{hook}, layer 1, {name} 3" in svg_texts(tmp_path / "x.svg")


@pytest.fixture(scope="module")
def short(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of one token."""
    path = tmp_path_factory.mktemp("short") / "one.zarr"
    return analysiskit.write_store(path, Oracle(folder / "model"), [7], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_of_one_token_is_drawn_or_refused_with_the_fix(
    kind: str, short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = short
    options = [option.format(b=one) for option in OPTIONS[kind] if option != "generated"]
    options = options[:-1] if kind == "difference" else options
    status = main(["plot", str(one), *options, "--kind", kind, "-o", str(tmp_path / "x.png")])
    assert status == (2 if kind == "drift" else 0)
    assert status == 0 or "no row can be compared with another; give" in capsys.readouterr().err


def test_a_panel_begins_at_the_first_position_that_was_captured() -> None:
    later: Any = SimpleNamespace(positions=np.arange(5, 9), prompt_len=7)
    panel = Figure().add_subplot()
    image = canvas.heat(panel, later, np.ones((3, 4)))
    canvas.token_axis(panel, later, list("abcd"))
    assert image.get_extent() == [4.5, 8.5, -0.5, 2.5]
    assert panel.get_xticks().tolist() == [5, 6, 7, 8] and panel.lines[0].get_xdata() == [6.5, 6.5]
    for prompt_len, lines in ((5, 0), (6, 2), (8, 2), (9, 0)):
        later.prompt_len, panel = prompt_len, Figure().add_subplot()
        canvas.token_axis(panel, later, list("abcd"))
        assert len(panel.lines) == lines, "a mark stands between tokens of the prompt and generated ones"


@pytest.mark.parametrize(("tokens", "named"), [(48, True), (49, False)])
def test_an_axis_has_words_for_as_many_tokens_as_fit(tokens: int, named: bool) -> None:
    capture: Any = SimpleNamespace(positions=np.arange(tokens), prompt_len=0)
    panel = Figure().add_subplot()
    canvas.token_axis(panel, capture, ["word"] * tokens)
    assert (panel.get_xlabel() == "token position") is not named
    assert (len(panel.get_xticks()) == tokens) is named
    sizes = {"words": (canvas.token_width(48), canvas.token_width(49)), "many": canvas.token_width(47)}
    assert sizes == {"words": (pytest.approx(15.96), 11.0), "many": pytest.approx(15.69)}


@pytest.mark.parametrize(("layers", "shown"), [(1, [0]), (14, [*range(14)]), (15, [*range(0, 13, 2), 14]), (29, None)])
def test_an_axis_names_the_last_layer_and_some_of_many(layers: int, shown: list[int] | None) -> None:
    panel = Figure().add_subplot()
    canvas.layer_axis(panel, [f"L{i}" for i in range(layers)], "layer")
    wanted = [*range(0, 26, 3), 28] if shown is None else shown
    assert panel.get_yticks().tolist() == wanted and panel.get_ylabel() == "layer"
    assert [label.get_text() for label in panel.get_yticklabels()] == [f"L{i}" for i in wanted]
    assert canvas.layer_height(layers) == pytest.approx(min(9.0, 1.9 + 0.3 * layers))
