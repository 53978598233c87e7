# SPDX-License-Identifier: Apache-2.0
"""Parts of pictures, exports and differences, compared with expected values."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from dmi_connector.analysis.diff import _errors
from dmi_connector.analysis.directions import MeanDifference
from dmi_connector.analysis.export import residual_stream, webdataset
from dmi_connector.analysis.lens import Lens, Uncertainty
from dmi_connector.analysis.pictures import canvas, plot, plot_sets
from dmi_connector.analysis.pictures.plot_text import ink_on
from dmi_connector.store.format.remote_path import place_of

NAN = float("nan")


# ---- pictures -------------------------------------------------------------------------------------------------------


def linear(c: float) -> float:
    return c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4


@pytest.mark.parametrize(("red", "blue"), [(0.0, 0.0), (0.04, 0.04), (0.041, 0.03), (0.3, 0.9), (0.8, 0.05)])
def test_ink_is_black_on_light_colours_and_white_on_dark_ones(red: float, blue: float) -> None:
    """The threshold is a relative luminance of 0.179 in sRGB. Without a background, the paper is white."""
    for luminance, ink in ((0.17902, "#000000"), (0.17898, "#ffffff")):
        green = 1.055 * ((luminance - 0.2126 * linear(red) - 0.0722 * linear(blue)) / 0.7152) ** (1 / 2.4) - 0.055
        assert green > 0.04045 and ink_on(np.array([red, green, blue, 1.0])) == ink
        assert ink_on(np.array([red, green, blue, 0.0])) == "#000000"
    assert [ink_on(np.array([c, c, c, 0.5])) for c in (1.0, 0.0)] == ["#000000", "#ffffff"]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that would be saved."""
    found: list[Figure] = []
    monkeypatch.setattr(canvas, "save", lambda figure, out: (found.append(figure), Path(out))[1])
    return found


@pytest.mark.parametrize("finite", ["all", "some", "none"])
def test_a_difference_says_where_nothing_is_finite(finite: str, figures: list[Figure], tmp_path: Path) -> None:
    first, second = np.array([3.0, NAN, -1.0]), np.array([1.0, 0.0, 4.0])
    scores = np.array([0.5, 1.5, NAN]), np.array([0.0, 0.25])
    if finite == "all":
        first[1], scores[0][2] = 2.0, 1.0
    if finite == "none":
        first[:] = NAN
        scores = np.full(3, NAN), np.full(2, NAN)
    assert (
        plot_sets.draw_mean_difference(MeanDifference(first, second, scores), tmp_path / "x.png") == tmp_path / "x.png"
    )
    left, right = figures[0].axes
    words = [(text.get_text(), text.get_position(), text.get_ha()) for panel in (left, right) for text in panel.texts]
    none = [("no score is finite", (0.5, 0.5), "center"), ("no value is finite", (0.5, 0.6), "center")]
    assert words == (none if finite == "none" else [])
    assert all(t.get_transform() == panel.transAxes for panel in (left, right) for t in panel.texts)
    assert (left.get_xlabel(), left.get_ylabel()) == ("score: 1 at the first mean, 0 at the second", "share of rows")
    assert (right.get_xlabel(), right.get_ylabel()) == ("dimension", "first mean - second mean")
    if finite != "none":
        labels = [text.get_text() for text in left.get_legend().get_texts()]
        assert labels == ["first (3 rows)", "second (2 rows)"]
        shares = sum(box.get_height() for box in left.patches)
        assert shares == pytest.approx(2), "each set must sum to 1"
        order = [2, 0, 1]
        heights = [bar.get_height() for bar in right.patches]
        np.testing.assert_allclose(heights, (first - second)[order])
        assert [label.get_text() for label in right.get_xticklabels()] == [str(i) for i in order]


def test_words_on_the_axis_are_those_of_the_given_tokenizer(
    figures: list[Figure], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of picture must pass the tokenizer on."""
    given: list[Any] = []
    monkeypatch.setattr(plot, "token_labels", lambda capture, tokenizer: (given.append(tokenizer), list("abcd"))[1])
    monkeypatch.setattr(plot, "labeller", lambda model, tokenizer: (given.append(tokenizer), str)[1])
    for name in ("name_panel", "title", "check_rows"):
        monkeypatch.setattr(canvas, name, lambda *_: None)
    monkeypatch.setattr(plot, "attention_pattern", lambda capture, layer: np.full((1, 4, 4), layer / 4))
    monkeypatch.setattr(plot, "residual_norms", lambda capture: (np.ones((1, 4)), ["0"]))
    monkeypatch.setattr(plot, "hook_heat", lambda capture, hook, neuron: (np.ones((1, 4)), ["0"]))
    attrs = {"start": 0, "model": "m", "num_tokens": 4, "missing": []}
    ids = np.arange(4)
    capture: Any = SimpleNamespace(token_ids=ids, positions=ids, prompt_len=2, attrs=attrs, path=Path("a"))
    capture.complete = True
    values, out = np.full((1, 4), 0.25, "f4"), tmp_path / "x.png"
    lens = Lens(["final"], np.zeros((1, 4, 1), int), values[..., None], values, values, values)
    plot.draw_residual_norms([capture], out, "a")
    plot.draw_heat([capture], out, "q", tokenizer="b")
    plot.draw_lens(capture, lens, out, "c")
    plot.draw_attribution(capture, values, ["embed"], out, "d")
    plot.draw_attention(capture, 1, out, "e")
    plot.draw_uncertainty(capture, Uncertainty(np.arange(3), values[0, :3], values[0, :3]), out, "f")
    assert given == ["a", "b", "c", "c", "d", "e", "f"] and len(figures) == 6
    for bad in (np.inf, -np.inf, NAN):
        plot.draw_attribution(capture, np.array([[0.25, bad, -0.5, 0.1]], "f4"), ["embed"], out)
        panel = figures[-1].axes[0]
        assert panel.images[0].get_clim() == (-0.5, 0.5) and panel.get_title("right") == canvas.CROSSED
    labels = [text.get_text() for text in figures[3].axes[0].get_xticklabels()]
    assert labels == list("abcd")


@pytest.mark.parametrize(
    ("values", "kind", "limits", "words"),
    [
        ([1.0, 20.0], "Normalize", (1, 20), ""),
        ([1.0, 20.1, NAN], "LogNorm", (1, 20.1), " (log scale)"),
        ([10.0, 20.0], "Normalize", (10, 20), ""),
        ([0.1, 2.1], "LogNorm", (0.1, 2.1), " (log scale)"),
        ([0.0, 500.0], "Normalize", (0, 500), ""),
        ([-1.0, 3.0], "CenteredNorm", (-3, 3), ""),
        ([-4.0, 3.0, np.inf], "CenteredNorm", (-4, 4), ""),
        ([-4.0, 0.0], "Normalize", (-4, 0), ""),
        ([-40.0, -1.0], "Normalize", (-40, -1), ""),
        ([NAN, np.inf], "Normalize", (0, 1), ""),
    ],
)
def test_the_scale_of_colours(values: list[float], kind: str, limits: tuple[float, float], words: str) -> None:
    look, name = plot._scale(np.array(values))
    norm = look["norm"]
    assert (type(norm).__name__, (norm.vmin, norm.vmax), name) == (kind, limits, words)
    assert look.get("cmap") == ("RdBu_r" if kind == "CenteredNorm" else None)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 7])
def test_each_cell_of_many_weights_shows_the_largest(step: int) -> None:
    values = np.random.default_rng(0).random((5, 5)) - 2
    found = plot._largest_of(values, step)
    at = range(0, 5, step)
    assert found.tolist() == [[values[i : i + step, j : j + step].max() for j in at] for i in at]


def test_the_mean_of_lines_is_over_those_that_have_a_value() -> None:
    captures: Any = [SimpleNamespace(positions=np.arange(3, 6)), SimpleNamespace(positions=np.arange(4, 8))]
    lines = [np.array([1.0, NAN, 3.0]), np.array([NAN, 5.0, 7.0, NAN])]
    positions, mean = plot._mean_line(captures, lines)
    assert positions.tolist() == [3, 5, 6] and mean.tolist() == [1.0, 4.0, 7.0]


# ---- differences ----------------------------------------------------------------------------------------------------


def test_the_error_of_each_row_is_its_own() -> None:
    """Equal rows have the error 0, even if not finite. Other rows that are not finite have an infinite error."""
    inf = float("inf")
    a = np.array([[3, 4], [3, 4], [NAN, inf], [NAN, 1], [inf, 1], [0, 0], [1, NAN]], "f4")
    b = np.array([[3, 4], [0, 0], [NAN, inf], [NAN, 2], [-inf, 1], [0, 0], [1, 2]], "f4")
    for one, other in ((a, b), (b, a)):
        found = _errors(one, other, "q")
        assert found.dtype == np.float64 and found.tolist() == [0, 1, 0, inf, inf, 0, inf]
    assert _errors(np.array([[3.0, 4]]), np.array([[6.0, 8]]), "q").tolist() == [0.5]
    ids, others = np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), np.array([[4, 3, 2, 1], [5, 6, 7, 9]])
    assert _errors(ids, others, "topk_ids").tolist() == [0.0, 0.25]
    assert _errors(ids, others, "mrope_positions").tolist() == [1.0, 0.25]
    assert _errors(ids.astype("u4"), others.astype("u4"), "x").tolist() == [1.0, 0.25]


# ---- exports --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "shards"),
    [
        (1, [1, 1, 1, 1, 1]),
        (29, [1, 1, 1, 2]),
        (30, [2, 1, 2]),
        (50, [2, 2, 1]),
        (80, [4, 1]),
        (79, [2, 3]),
        (10**9, [5]),
    ],
)
def test_stores_go_into_a_shard_up_to_its_size(most: int, shards: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger store gets a shard of its own. Rows here have 10 bytes, 8 of which are columns."""
    monkeypatch.setattr(webdataset, "_TOKEN_BYTES", 2)
    captures: Any = type("Captures", (), {"__len__": lambda self: 5})()
    captures.infos = [SimpleNamespace(num_tokens=n) for n in (2, 1, 5, None, 2)]
    columns: Any = [SimpleNamespace(width=1), SimpleNamespace(width=1)]
    found = list(webdataset._shards(captures, columns, most))
    assert [len(part) for part in found] == shards and [i for part in found for i in part] == [0, 1, 2, 3, 4]
    captures.infos = []
    type(captures).__len__ = lambda self: 0
    assert list(webdataset._shards(captures, columns, most)) == [range(0, 0)]


@pytest.mark.parametrize("remote", [False, True])
def test_layer_ids_are_read_in_as_many_threads_as_the_stores_allow(
    remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    def threads(name: str) -> Any:
        return lambda look, numbers: (used.append(name), [look(number) for number in numbers])

    monkeypatch.setattr(residual_stream, "in_threads", threads("few"))
    monkeypatch.setattr(residual_stream, "in_fetch_threads", threads("many"))
    held = {"a": [0, 1, 2], "b": [0, 1], "c": [9], "s3": [0, 1]}
    monkeypatch.setattr(residual_stream, "read_attrs", lambda store: {"start": 4} if store == Path("c") else {})
    stores = [Path("a"), Path("b"), Path("c"), *([place_of("s3://bucket/x")] if remote else [])]
    captures: Any = type("Captures", (), {"__len__": lambda self: len(stores)})()
    captures.infos = [SimpleNamespace(store=store) for store in stores]

    def ids_of(store: Any, attrs: Any) -> list[int]:
        return held.get(str(store), [0, 1])

    other = "stores have other layers: b has"
    count = "2 of 3" if remote else "1 of 2"
    fix = "give --layers 0,1, which all have, or name fewer stores"
    with pytest.raises(ValueError) as caught:
        residual_stream.ids_of_all(captures, ids_of, None)
    assert str(caught.value) == f"export: {count} {other} [0, 1], not [0, 1, 2]; {fix}"
    with pytest.raises(ValueError, match=rf"{other} \[0, 1\], not \[2\]; give --layers 0,1"):
        residual_stream.ids_of_all(captures, ids_of, [2])
    assert residual_stream.ids_of_all(captures, ids_of, [1, 0, 1]) == [1, 0]
    assert residual_stream.ids_of_all(captures, ids_of, [7]) == [7], "another function reports the missing layer"
    assert used == ["many" if remote else "few"] * 4
    held["a"], held["b"] = [5], [6]
    with pytest.raises(ValueError, match=r"b has \[6\], not \[5\]; name fewer stores$"):
        residual_stream.ids_of_all(captures, ids_of, None)


def test_an_empty_choice_of_layers_is_named() -> None:
    capture: Any = SimpleNamespace(path="a", attrs={"hooks": {"resid_pre": {"layers": [0, 1]}}})
    with pytest.raises(ValueError, match=r"layer ids: none is named; a has \[0, 1\]"):
        residual_stream.chosen_ids(capture, [])


def test_small_maps_have_short_names_and_a_line_before_what_was_generated(
    figures: list[Figure], tmp_path: Path
) -> None:
    """Each of four panels has room for a name of 125 letters. A panel without generated tokens has no line."""
    names = ["a", "b" * 125, "c" * 126, "d"]
    prompts = [2, 9, 10, 5]  # captures have positions 5 to 9
    captures: Any = [
        SimpleNamespace(
            positions=np.arange(5, 10),
            prompt_len=prompt,
            complete=True,
            missing=[],
            attrs={"key": name, "start": 5, "missing": []},
            path=Path(name),
            token_ids=np.arange(5),
        )
        for name, prompt in zip(names, prompts, strict=True)
    ]
    for capture in captures:
        capture.attrs["num_tokens"] = 5
    maps = [(np.arange(15, dtype="f4").reshape(3, 5), [""] * 5)] * 4
    plot._draw_small_maps(captures, maps, tmp_path / "x.png", "norms", "norm", "layer")
    panels = figures[0].axes[:4]
    assert [panel.get_title("left") for panel in panels] == ["a", "b" * 125, "c" * 124 + "…", "d"]
    lines = [[float(line.get_xdata()[0]) for line in panel.lines] for panel in panels]  # type: ignore[index]
    assert lines == [[], [8.5], [], []]
