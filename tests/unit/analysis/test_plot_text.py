# SPDX-License-Identifier: Apache-2.0
"""The picture of a capture's text has the numbers, colours and texts of `dmi view`."""

from __future__ import annotations

import re
import textwrap
import warnings
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_hex
from tokenizers import Tokenizer, decoders, models

from dmi_connector import open_capture
from dmi_connector.analysis import texts
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.analysis.pictures import canvas, plot_text
from dmi_connector.analysis.pictures.text_layout import Piece
from dmi_connector.analysis.stats import find_statistic, of_layer, statistics
from dmi_connector.analysis.unembedding import log_softmax
from dmi_connector.cli.main import main
from dmi_connector.cli.tiny_models import make_model
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.view import app
from tests import analysiskit, picturekit, viewkit
from tests import storekit as kit

TEXT = "The model reads a prompt and answers. Its lines are longer than a line of the picture, so that they wrap:\n" * 2
LOST = [4, 9]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of TEXT. Some rows of the prompt are missing, and the second half is generated."""
    root = tmp_path_factory.mktemp("text")
    oracle = Oracle(make_model("qwen3", root / "model"))
    ids = Tokenizer.from_file(str(root / "model/tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    assert len(ids) > 80, "the 1st percentile must not be the minimum"
    loss = Loss.of(Cause.FELL_BEHIND, [LOST])
    return analysiskit.write_store(root / "text.zarr", oracle, ids, len(ids) // 2, losses=[loss])


@pytest.mark.parametrize("hook", ["logits", "resid_final", "q"])
def test_any_slice_of_rows_has_their_statistics(store: Path, hook: str) -> None:
    bounds = [(None, None), (-5, None), (80, None), (None, 50), (50, 68, 2), (None, None, -3), (50, 50), (60, 10_000)]
    with open_capture(store, allow_incomplete=True) as capture:
        first = statistics(capture, hook)[0]
        for layer in [*capture.layers[hook]] or [None]:
            whole = of_layer(capture, hook, layer, first, 0, slice(0, len(capture.token_ids)))
            assert np.isfinite(whole[-5])
            for window in (slice(*some) for some in bounds):
                found = of_layer(capture, hook, layer, first, 0, window)
                np.testing.assert_allclose(found, whole[window], 1e-6, err_msg=f"{layer} {window}")


class Drawn:
    """The latest picture. colours: of its pieces. tokens: for each piece, the number of its token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.colours: PatchCollection
        self.tokens: list[int]
        add, lay_out = Axes.add_collection, plot_text.lay_out

        def noted(axes: Axes, collection: object, *args: object, **more: object) -> object:
            if isinstance(collection, PatchCollection) and not collection.get_hatch():
                self.colours = collection
            return add(axes, collection, *args, **more)

        def laid_out(texts: Sequence[str], columns: int) -> list[Piece]:
            pieces = lay_out(texts, columns)
            self.tokens = [piece.token for piece in pieces]
            return pieces

        monkeypatch.setattr(Axes, "add_collection", noted)
        monkeypatch.setattr(plot_text, "lay_out", laid_out)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return Drawn(monkeypatch)


def plot(store: Path, out: Path, hook: str, *options: str) -> None:
    assert main(["plot", str(store), "--kind", "text", "--hook", hook, "-o", str(out), *options]) == 0


def words(svg: Path) -> dict[float, list[tuple[float, str]]]:
    """{y: (x, text)} of the texts in the font of tokens."""
    found = defaultdict(list)
    for e in ElementTree.parse(svg).iter():
        if e.tag.endswith("}text") and "DejaVu Sans Mono" in e.get("style", ""):
            found[float(e.get("y"))].append((float(e.get("x")), "".join(e.itertext())))
    return {y: sorted(line) for y, line in sorted(found.items())}


STATISTICS = [
    ("mlp_post", 1, ["--layer", "1"], "norm", 0),
    ("mlp_post", 2, ["--layer", "-1", "--neuron", "7"], "value", 7),
    ("resid_final", 0, ["--values", "mean"], "mean", 0),
    ("resid_final", 0, ["--values", "largest magnitude"], "largest magnitude", 0),
    ("logits", 0, [], "entropy", 0),
    ("logits", 0, ["--token", "9"], "log-probability of", 9),
]
"""(hook, layer, options, statistic in the page's request, its index)."""


@pytest.mark.parametrize(("hook", "layer", "options", "statistic", "index"), STATISTICS)
def test_the_numbers_are_those_of_the_page(
    hook: str,
    layer: int,
    options: list[str],
    statistic: str,
    index: int,
    store: Path,
    tmp_path: Path,
    drawn: Drawn,
) -> None:
    plot(store, tmp_path / "x.svg", hook, *options)
    with open_capture(store, 0, allow_incomplete=True) as capture:
        of = find_statistic(capture, hook, statistic)
        number = capture.layers[hook][layer] if capture.layers[hook] else None
        expected = of_layer(capture, hook, number, of, index, slice(0, app.MOST_TOKENS))
        assert np.isnan(expected[slice(*LOST)]).all() and np.isfinite(expected).sum() > 30
        if statistic == "log-probability of":
            np.testing.assert_array_equal(expected[np.isfinite(expected)], log_softmax(capture.numpy("logits"))[:, 9])
    np.testing.assert_array_equal(np.ma.filled(drawn.colours.get_array(), np.nan), expected[drawn.tokens])
    known = np.sort(expected[np.isfinite(expected)])
    low, high = (known[int(np.floor(share * (len(known) - 1) + 0.5))] for share in (0.01, 0.99))
    if low < 0 < high:
        low, high = -max(high, -low), max(high, -low)
    assert drawn.colours.get_clim() == (low, high)


def test_a_head_of_an_attention_summary_is_drawn_over_ids_where_the_model_is_gone(
    tmp_path: Path, drawn: Drawn, capsys: pytest.CaptureFixture[str]
) -> None:
    reduced = viewkit.unpack(tmp_path) / "reduced.zarr"
    arguments = ["plot", str(reduced), "--kind", "text", "--hook", "pattern", "--layer", "1", "-o", f"{tmp_path}/x.svg"]
    with open_capture(reduced, 0) as capture:
        _, weights, entropy = capture.attention_summary(1, 2)
        ids = [str(i) for i in capture.token_ids]
    for options, expected in (([], entropy), (["--values", "largest-weight"], weights[:, 0])):
        assert main([*arguments, "--head", "2", *options]) == 0
        np.testing.assert_array_equal(drawn.colours.get_array(), expected)
        assert [text for line in words(tmp_path / "x.svg").values() for _, text in line] == ids
    capsys.readouterr()
    assert main(arguments) == 2
    assert "plot: --values entropy needs --head; give it" in capsys.readouterr().err


def test_the_colours_and_the_rule_for_unprintable_tokens_are_those_of_the_page() -> None:
    light = (app.STATIC / "colour.js").read_text().split("light: {")[1].split("}")[0]
    one, two = (tuple(re.findall(r'"(#\w+)"', line)) for line in light.strip().splitlines())
    assert (one, two) == (plot_text.ONE_SIGN, plot_text.TWO_SIGNS)
    rule = re.search(r"/(\[.*?\])/\.test", (app.STATIC / "text.js").read_text())
    assert rule is not None and rule[1] == texts._CONTROL.pattern
    assert [texts.shown(text, 7) for text in ("", "\r\n", "a\ufffd", "\t\n", None)] == [
        ("⟨7⟩", True),
        ("⟨7⟩", True),
        ("⟨7⟩", True),
        ("\t\n", False),
        ("7", False),
    ]


def test_letters_are_black_where_white_would_have_less_contrast() -> None:
    """The contrast of two colours is (lighter + 0.05) / (darker + 0.05), with their relative luminance (WCAG 2)."""
    colours = np.concatenate([np.mgrid[:6, :6, :6].reshape(3, -1).T / 5, np.arange(256)[:, None].repeat(3, 1) / 255])
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    black = (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05)
    for colour, dark in zip(colours, black, strict=True):
        assert plot_text.ink_on(np.array([*colour, 1.0])) == ("#000000" if dark else "#ffffff"), colour
        assert plot_text.ink_on(np.array([*colour, 0.0])) == "#000000", "the page must use the same colour"


def test_a_piece_has_the_ends_of_the_scale_and_letters_that_can_be_read(
    store: Path, tmp_path: Path, drawn: Drawn
) -> None:
    plot(store, tmp_path / "x.svg", "resid_final")
    pieces = drawn.colours
    values, (low, high) = pieces.get_array(), pieces.get_clim()
    colours = [to_hex(colour) for colour in pieces.get_facecolor()]
    assert colours[int(values.argmin())] == plot_text.ONE_SIGN[0] and values.min() < low
    assert colours[int(values.argmax())] == plot_text.ONE_SIGN[-1] and values.max() > high
    blank = [token for token, colour in zip(drawn.tokens, pieces.get_facecolor(), strict=True) if colour[3] == 0]
    assert blank == list(range(*LOST)), "a token without a value must have no colour"
    inks = [plot_text.ink_on(colour) for colour in pieces.get_facecolor()]
    assert (inks[int(values.argmin())], inks[int(values.argmax())]) == ("#000000", "#ffffff")
    assert inks[LOST[0]] == "#000000"


def test_lines_wrap_and_line_feeds_are_shown(store: Path, tmp_path: Path) -> None:
    plot(store, tmp_path / "x.svg", "resid_final")
    found = ["".join(text for _, text in line) for line in words(tmp_path / "x.svg").values()]
    paragraphs = [textwrap.wrap(f"{line}↵", plot_text._COLUMNS) for line in TEXT.splitlines()]
    assert [len(paragraph) for paragraph in paragraphs] == [2, 2]
    assert found == [line.replace(" ", "") for paragraph in paragraphs for line in paragraph]


def test_generated_tokens_are_underlined_and_missing_ones_hatched(
    store: Path, tmp_path: Path, drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    below: list[tuple[object, object]] = []
    hlines = Axes.hlines

    def noted(self: Axes, y: object, starts: object, stops: object, **look: object) -> object:
        below.append((starts, stops))
        return hlines(self, y, starts, stops, **look)

    monkeypatch.setattr(Axes, "hlines", noted)
    hatched: list[object] = []
    add = Axes.add_patch
    monkeypatch.setattr(Axes, "add_patch", lambda self, p: hatched.append(p) if p.get_hatch() else None or add(self, p))
    pictures = picturekit.figures(monkeypatch)
    plot(store, tmp_path / "x.svg", "resid_final")
    picturekit.check("text with missing rows", pictures[0])
    with open_capture(store, 0, allow_incomplete=True) as capture:
        phase = capture.phase
    boxes = [(token, path.get_extents()) for token, path in zip(drawn.tokens, drawn.colours.get_paths(), strict=True)]
    made = [box for token, box in boxes if phase[token] == 1]
    assert below == [(tuple(box.x0 for box in made), tuple(box.x1 for box in made))]
    assert [p.get_x() for p in hatched] == [box.x0 for token, box in boxes if token in range(*LOST)]
    text = (tmp_path / "x.svg").read_text()
    assert "generated tokens are underlined; missing tokens are hatched" in text


def spoilt(store: Path, folder: Path, rows: slice, value: float) -> Path:
    """A store of resid_final for the tokens of another store. Its `rows` have `value`."""
    with open_capture(store, 0, allow_incomplete=True) as capture:
        values, attrs = capture.numpy("resid_final")[None].copy(), capture.attrs
        ids = capture.token_ids.copy()
    values[0, rows, 3] = value
    owner, spec = kit.Store(1 << 22), ArraySpec("resid_final", "float32", (), values.shape[-1])
    facts = {name: attrs[name] for name in ("model", "num_layers", "architecture", "dtype", "versions", "dims")}
    loss = Loss.of(Cause.FELL_BEHIND, [LOST])
    stored = {"resid_final": kit.bits(values)}
    owner.write(folder / "nan.zarr", [spec], len(ids), values=stored, ids=ids, attrs=facts, losses=[loss])
    assert owner.shutdown()
    return folder / "nan.zarr"


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_values_that_are_not_finite_are_crossed_and_not_blank_alone(
    store: Path, tmp_path: Path, drawn: Drawn, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    crossed: list[Sequence[tuple[float, float, float, float]]] = []
    cross = canvas.cross_out
    monkeypatch.setattr(canvas, "cross_out", lambda panel, cells: crossed.append(cells) or cross(panel, cells))
    pictures = picturekit.figures(monkeypatch)
    plot(spoilt(store, tmp_path, slice(7, 12), value), tmp_path / "x.svg", "resid_final", "--values", "mean")
    boxes = [(token, path.get_extents()) for token, path in zip(drawn.tokens, drawn.colours.get_paths(), strict=True)]
    wanted = [(box.x0, box.y0) for token, box in boxes if 9 <= token < 12]
    np.testing.assert_allclose(
        [cell[:2] for cell in crossed[0]], wanted, err_msg="rows 7 and 8 are missing: these are hatched"
    )
    assert "missing tokens are hatched; values that are not finite are crossed" in (tmp_path / "x.svg").read_text()
    low, high = drawn.colours.get_clim()
    assert np.isfinite([low, high]).all()
    picturekit.check("crossed text", pictures[0])


def test_crosses_have_a_colour_that_is_in_no_scale(store: Path, tmp_path: Path) -> None:
    plot(spoilt(store, tmp_path, slice(20, 25), np.nan), tmp_path / "x.svg", "resid_final")
    assert canvas.NOT_FINITE in (tmp_path / "x.svg").read_text()
    plot(store, tmp_path / "y.svg", "resid_final")
    assert canvas.NOT_FINITE not in (tmp_path / "y.svg").read_text()


def test_a_text_without_a_finite_value_is_refused(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = spoilt(store, tmp_path, slice(None), np.nan)
    assert main(["plot", str(bad), "--kind", "text", "--hook", "resid_final", "-o", str(tmp_path / "x.svg")]) == 2
    assert "have no finite value of 'resid_final'; give other rows" in capsys.readouterr().err


def test_a_range_of_rows_is_drawn_alone(store: Path, tmp_path: Path, drawn: Drawn) -> None:
    plot(store, tmp_path / "x.svg", "resid_final", "--rows", "10:16")
    with open_capture(store, 0, allow_incomplete=True) as capture:
        norms = np.linalg.norm(capture.numpy("resid_final", tokens=slice(10, 16)), axis=1)
    np.testing.assert_array_equal(drawn.colours.get_array(), norms)
    text = (tmp_path / "x.svg").read_text()
    assert "text of rows 10 to 15" in text and "underlined" not in text and "hatched" not in text
    plot(store, tmp_path / "x.svg", "resid_final", "--rows", "10:11")
    assert to_hex(drawn.colours.get_facecolor()[0]) == plot_text.ONE_SIGN[0], "equal values must have the lowest colour"


def test_too_long_a_text_is_refused_with_the_fix(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plot", str(store), "--kind", "text", "--hook", "resid_final", "-o", str(tmp_path / "x.svg")]
    monkeypatch.setattr(plot_text, "MOST_ROWS", 30)
    assert main([*arguments, "--rows", "9:40"]) == 2
    assert (
        "plot: rows 9:40 are more than the 30 of one picture; give fewer, as in --rows 9:39" in capsys.readouterr().err
    )
    assert main([*arguments, "--rows", "9:39"]) == 0
    monkeypatch.setattr(plot_text, "MOST_ROWS", 1024)
    monkeypatch.setattr(plot_text, "_MOST_LINES", 2)
    assert main(arguments) == 2
    assert "are 4 lines, more than the 2 of one picture; give fewer rows" in capsys.readouterr().err


def test_characters_without_a_font_are_ids_in_a_png_and_text_in_an_svg(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_capture(store, 0, allow_incomplete=True) as capture:
        ids = sorted(set(capture.token_ids.tolist()))
    core = Tokenizer(models.WordLevel({"a": 0} | {f"\U000f0000{i}": i for i in ids}, unk_token="a"))
    core.decoder = decoders.Fuse()
    core.save(str(tmp_path / "tokenizer.json"))
    written: list[str] = []
    text = Axes.text
    monkeypatch.setattr(Axes, "text", lambda self, x, y, s, **look: written.append(s) or text(self, x, y, s, **look))
    options = ["--rows", "10:12", "--tokenizer", str(tmp_path)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ending, expected in ((".png", "⟨{}⟩"), (".svg", "\U000f0000{}")):
            written.clear()
            plot(store, tmp_path / f"x{ending}", "resid_final", *options)
            with open_capture(store, 0, allow_incomplete=True) as capture:
                assert written == [expected.format(i) for i in capture.token_ids[10:12]]


@pytest.mark.parametrize(
    ("rows", "asked"), [(slice(None, 0), "0:0"), (slice(5, 5), "5:5"), (slice(7, None), "7:"), (slice(9, 3), "9:3")]
)
def test_rows_without_a_token_are_named_as_they_were_asked_for(rows: slice, asked: str) -> None:
    capture: Any = SimpleNamespace(token_ids=np.zeros(7, np.int32))
    with pytest.raises(ValueError, match=f"plot: rows {asked} are not in the store; give some of its rows, 0:7$"):
        plot_text._window(capture, rows)
    assert plot_text._window(capture, slice(None)) == slice(0, 7)
    assert plot_text._window(capture, slice(-2, None)) == slice(5, 7)


def test_the_first_statistic_is_drawn_where_none_is_named(store: Path, tmp_path: Path, drawn: Drawn) -> None:
    with open_capture(store, 0, allow_incomplete=True) as capture:
        plot_text.draw_text(capture, tmp_path / "x.svg", "resid_final", rows=slice(10, 16))
        wanted = of_layer(capture, "resid_final", None, statistics(capture, "resid_final")[0], 0, slice(10, 16))
    np.testing.assert_array_equal(drawn.colours.get_array(), wanted)
