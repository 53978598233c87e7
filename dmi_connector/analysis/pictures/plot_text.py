# SPDX-License-Identifier: Apache-2.0
"""Draws the text of a capture, each token with the colour of a statistic, as PNG or SVG."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dmi_connector.analysis.pictures import canvas
from dmi_connector.analysis.pictures.text_layout import Piece, lay_out, lay_out_ids
from dmi_connector.analysis.stats import of_layer, statistics
from dmi_connector.analysis.texts import Texts, shown
from dmi_connector.analysis.training.rows import check_layer, present_rows
from dmi_connector.captures.capture import Capture
from dmi_connector.reduce.statistic import Statistic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

MOST_ROWS = 1024
"""Maximum number of tokens per picture."""
_MOST_LINES = 1024
"""Maximum number of lines per picture. Such a PNG needs 130 MB of memory; matplotlib refuses more than about 2,200
lines.
"""
_COLUMNS = 100
"""Columns per line, each one monospaced character wide."""
COLUMN, _LINE = 10 / 130, 29 / 130
"""Width of a column and height of a line, in inches. DejaVu Sans Mono advances 10 pixels at SIZE points."""
SIZE = 9.2
FONTS = {".png": [canvas.MONOSPACE, "sans-serif"], ".svg": ["monospace"]}
"""{file name extension: font families}. The first font that has a character draws it. In a PNG, "sans-serif" stands for
the fonts of matplotlib's settings. In an SVG, "monospace" stands for the font of the browser.
"""
_SIDE, _HEAD, _FOOT = 0.35, 1.6, 0.25
"""Margins beside, above and below the text, in inches. Title, colour bar and name are above."""
ONE_SIGN = ("#ffffff", "#fde3b5", "#f79d5c", "#c8426b", "#5a1f6e")
TWO_SIGNS = ("#1d5a9e", "#9cc3e6", "#ffffff", "#f3b590", "#b0361f")
"""Colours from the lowest value to the highest, as in `dmi view`."""


def draw_text(
    capture: Capture,
    out: str | os.PathLike[str],
    hook: str,
    statistic: Statistic | None = None,
    index: int = 0,
    layer: int | None = None,
    rows: slice = slice(None),
    tokenizer: str | os.PathLike[str] | None = None,
) -> Path:
    """Draw the text of a capture, each token with the colour of a statistic of its row.

    Generated tokens are underlined. Missing tokens are hatched. Tokens whose value is not finite are crossed out.
    Colours go from the 1st to the 99th percentile of the values.

    statistic: one of `statistics(capture, hook)`; None: the first of them. index: the neuron, head or token id, for
    statistics that take one. layer: required if several layers were captured. rows: rows of the store, a slice with
    step 1. tokenizer: as in `plot`. Without a tokenizer, token ids are drawn.

    Raises KeyError for a hook or layer that was not captured. Raises ValueError as `of_layer` does, if no row has a
    value (such as logits of a prompt), and for more than MOST_ROWS rows.
    """
    canvas.check_rows([capture])
    window = _window(capture, rows)
    check_layer(capture, hook, layer)
    layer = capture.sources(hook, layer)[0].layer
    statistic = statistics(capture, hook)[0] if statistic is None else statistic
    values = of_layer(capture, hook, layer, statistic, index, window)
    lost = _rows_with_value(capture, hook, window) & ~np.isfinite(values)
    if lost.any() and not np.isfinite(values).any():
        raise ValueError(
            f"plot: rows {window.start}:{window.stop} of {capture.path} have no finite value of {hook!r}; give other"
            " rows"
        )
    if not np.isfinite(values).any():
        raise ValueError(
            f"plot: rows {window.start}:{window.stop} of {capture.path} have no value of {hook!r}; give other rows"
        )
    figure = canvas.new_figure(2 * _SIDE + (_COLUMNS + 1) * COLUMN, _HEAD, out)
    figure.set_layout_engine("none")  # each character is placed
    ending = Path(out).suffix.lower()
    text = _Text.of(capture, window, tokenizer, drawn=None if ending == ".svg" else characters())
    panel = _panel(figure, text.lines)
    colours = _paint(panel, text, values, statistic.signed)
    crossed = [piece for piece in text.pieces if lost[piece.token]]
    canvas.cross_out(panel, [(p.start, p.line + 0.08, p.stop - p.start, 0.84) for p in crossed])
    where = hook if layer is None else f"{hook}, layer {layer}"
    _colour_bar(figure, colours, values, f"{where}: {statistic.words(index)}")
    notes = [canvas.CROSSED] if crossed else []
    _write(panel, text, colours.to_rgba(text.spread(values)), FONTS[ending], notes)
    canvas.name_panel(panel, capture)
    height = figure.get_figheight()
    canvas.title(figure, capture, f"text of rows {window.start} to {window.stop - 1}", 1 - 0.12 / height)
    return canvas.save(figure, out)


def _window(capture: Capture, rows: slice) -> slice:
    """The slice `rows` with its ends as numbers. Raises ValueError for no row, and for more than MOST_ROWS rows."""
    tokens = len(capture.token_ids)
    first, stop, _ = rows.indices(tokens)
    if first >= stop:
        asked = f"{rows.start or 0}:{'' if rows.stop is None else rows.stop}"
        raise ValueError(f"plot: rows {asked} are not in the store; give some of its rows, 0:{tokens}")
    if stop - first > MOST_ROWS:
        raise ValueError(
            f"plot: rows {first}:{stop} are more than the {MOST_ROWS} of one picture; give fewer, as in "
            f"--rows {first}:{first + MOST_ROWS}"
        )
    return slice(first, stop)


def _rows_with_value(capture: Capture, hook: str, window: slice) -> np.ndarray:
    """Which rows have a value, bool [tokens]. For logits, these are the rows whose output was sampled."""
    there = present_rows(capture)
    if hook == "logits":
        sampled = capture.logits_positions - int(capture.attrs["start"])
        there &= np.isin(np.arange(len(there)), sampled)
    return there[window]


@dataclass(frozen=True)
class _Text:
    """The text of a window of rows.

    pieces: the laid out text. odd: tokens drawn as an id in brackets, bool [tokens]. made: generated tokens, bool
    [tokens]. lost: missing tokens, bool [tokens].
    """

    pieces: list[Piece]
    odd: np.ndarray
    made: np.ndarray
    lost: np.ndarray

    @classmethod
    def of(
        cls, capture: Capture, window: slice, tokenizer: str | os.PathLike[str] | None, drawn: frozenset[int] | None
    ) -> _Text:
        """Lay out the text. drawn: code points that can be drawn; None: all.

        Raises ValueError for more than _MOST_LINES lines.
        """
        ids = capture.token_ids[window].tolist()
        texts = Texts(tokenizer, capture.attrs.get("model")).of(ids)
        odd = np.zeros(len(ids), bool)
        if texts is None:
            pieces = lay_out_ids([str(i) for i in ids], _COLUMNS)
        else:
            known = [text if drawn is None or drawn.issuperset(map(ord, text)) else "" for text in texts]
            looks = [shown(text, i) for text, i in zip(known, ids, strict=True)]
            pieces, odd = lay_out([text for text, _ in looks], _COLUMNS), np.array([is_odd for _, is_odd in looks])
        found = cls(pieces, odd, capture.positions[window] >= capture.prompt_len, ~present_rows(capture)[window])
        if found.lines > _MOST_LINES:
            raise ValueError(
                f"plot: rows {window.start}:{window.stop} are {found.lines} lines, more than the {_MOST_LINES} of one "
                "picture; give fewer rows"
            )
        return found

    @property
    def lines(self) -> int:
        return self.pieces[-1].line + 1

    def spread(self, values: np.ndarray) -> np.ma.MaskedArray:
        """The value of the token of each piece, [pieces], masked if it is not finite. values: [tokens]."""
        return np.ma.masked_invalid(values[[piece.token for piece in self.pieces]])


@functools.cache
def characters() -> frozenset[int]:
    """Code points that can be drawn in a PNG: those of the fonts, line feed and tab.

    Line feed and tab are drawn as other characters.
    """
    from matplotlib.font_manager import FontProperties, findfont, get_font

    fonts = [get_font(findfont(FontProperties(family=[name]))) for name in FONTS[".png"]]
    return frozenset(map(ord, "\n\t")).union(*(font.get_charmap() for font in fonts))


# ---- drawing --------------------------------------------------------------------------------------------------------


def _panel(figure: Figure, lines: int) -> Axes:
    """Add a panel whose coordinates are columns and lines from the upper left corner. Set the height of the figure."""
    width, height = figure.get_figwidth(), _HEAD + lines * _LINE + _FOOT
    figure.set_figheight(height)
    ends = (_SIDE / width, _FOOT / height, 1 - 2 * _SIDE / width, lines * _LINE / height)
    panel = figure.add_axes(ends, xlim=(0, _COLUMNS + 1), ylim=(lines, 0))
    panel.set_axis_off()
    return panel


def _box(piece: Piece, **look: Any) -> Rectangle:
    from matplotlib.patches import Rectangle

    return Rectangle((piece.start, piece.line + 0.08), piece.stop - piece.start, 0.84, linewidth=0, **look)


def _paint(panel: Axes, text: _Text, values: np.ndarray, signed: bool) -> PatchCollection:
    """Fill each piece with the colour of its value. Hatch pieces of missing rows. Returns the filled boxes.

    signed: whether values may be below 0. If both signs occur, the colours are symmetric around 0.
    """
    from matplotlib.collections import PatchCollection

    known = np.sort(values[np.isfinite(values)])
    low, high = (float(known[int(share * (len(known) - 1) + 0.5)]) for share in (0.01, 0.99))
    two = signed and low < 0 < high
    if two:
        high = max(high, -low)
        low = -high
    colours = PatchCollection([_box(piece) for piece in text.pieces], cmap=colour_map(two))
    colours.set_array(text.spread(values))
    colours.set_clim(low, high if high > low else low + (abs(low) or 1))
    panel.add_collection(colours, autolim=False)
    for piece in text.pieces:
        if text.lost[piece.token]:
            panel.add_patch(_box(piece, fill=False, hatch="////", edgecolor="#b0b0b8"))
    return colours


def colour_map(two_signs: bool) -> Colormap:
    """The colour map of `dmi view`. two_signs: whether values have both signs."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("dmi", TWO_SIGNS if two_signs else ONE_SIGN)


def _colour_bar(figure: Figure, colours: PatchCollection, values: np.ndarray, label: str) -> None:
    """Put the colour bar above the panel. The bar has a triangle at each end that values exceed."""
    low, high = colours.get_clim()
    ends = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
    finite = values[np.isfinite(values)]
    below, above = bool(finite.min() < low), bool(finite.max() > high)
    width, height = figure.get_figwidth(), figure.get_figheight()
    place = figure.add_axes((_SIDE / width, 1 - 0.62 / height, 0.5, 0.13 / height))
    bar = figure.colorbar(colours, cax=place, orientation="horizontal", extend=ends[below, above])
    bar.set_label(label)
    bar.outline.set_edgecolor("#dedee3")  # the lowest colour is white, like the page


def _write(panel: Axes, text: _Text, backgrounds: np.ndarray, fonts: list[str], more: Sequence[str]) -> None:
    """Write the words, and underline generated tokens. The title of the panel explains the marks.

    backgrounds: colours of the pieces, RGBA [pieces, 4]. fonts: font families. more: further sentences for the title.
    """
    inks = [ink_on(background) for background in backgrounds]
    for piece, ink in zip(text.pieces, inks, strict=True):
        size = SIZE * (0.82 if text.odd[piece.token] else 1)
        for column, word in piece.words:
            panel.text(column, piece.line + 0.64, word, color=ink, fontsize=size, family=fonts, parse_math=False)
    notes = []
    made = [(piece, ink) for piece, ink in zip(text.pieces, inks, strict=True) if text.made[piece.token]]
    if made:
        lines, starts, stops = zip(*((piece.line + 0.84, piece.start, piece.stop) for piece, _ in made), strict=True)
        panel.hlines(lines, starts, stops, colors=[ink for _, ink in made], linewidth=0.7)
        notes.append("generated tokens are underlined")
    if text.lost.any():
        notes.append("missing tokens are hatched")
    panel.set_title("; ".join([*notes, *more]), fontsize=8, loc="right", pad=14)


def ink_on(background: np.ndarray) -> str:
    """Black or white, whichever has more contrast with an RGBA colour, as in `dmi view`."""
    red, green, blue, opaque = background.tolist()
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 or not opaque else "#ffffff"
