# SPDX-License-Identifier: Apache-2.0
"""Pictures of sets of captures: the top tokens of a neuron, the difference of two sets. Files are as in `plot`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dmi_connector.analysis.directions import MeanDifference
from dmi_connector.analysis.neurons import Activation
from dmi_connector.analysis.pictures import canvas
from dmi_connector.analysis.pictures.plot_text import COLUMN, FONTS, SIZE, characters, colour_map, ink_on
from dmi_connector.analysis.pictures.text_layout import Piece, lay_out, lay_out_ids
from dmi_connector.analysis.texts import Texts, shown
from dmi_connector.store.read.metadata import read_attrs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

_BARS = 20
"""Number of dimensions of the difference that are drawn."""
_BEFORE, _AFTER, _LEAST = 46, 54, 10
"""Maximum number of columns of text before the token, maximum number from the token on, and minimum number of each.
Tokens that do not fit are left out.
"""
_ONE_LINE = 1 << 30
"""More columns than any context has, so that lines do not break."""
_LINE, _BAR_WIDTH, _SIDE, _HEAD, _FOOT = 0.28, 2.6, 0.25, 0.75, 0.75
"""Height of a line, width of the bars, and margins at the side, above and below, in inches."""


def draw_top_tokens(
    found: Sequence[Activation],
    out: str | os.PathLike[str],
    name: str = "neuron",
    tokenizer: str | os.PathLike[str] | None = None,
) -> Path:
    """Draw one line per activation: the token in a frame, the text around it, and the neuron's value as a bar.

    Each token has the colour of the neuron's value in its row. found: the result of `top_tokens`. name: title of the
    picture. tokenizer: as in `plot`. Raises ValueError if `found` is empty.
    """
    if not found:
        raise ValueError("plot: no token was found; give captures with rows")
    figure = canvas.new_figure(1, 1, out)
    ending = Path(out).suffix.lower()
    texts = Texts(tokenizer, read_attrs(found[0].store).get("model"))
    lines = [_pieces(one, texts, None if ending == ".svg" else characters()) for one in found]
    before = max(_LEAST, -min(piece.start for line in lines for piece in line))
    after = max(_LEAST, max(piece.stop for line in lines for piece in line))
    width, height = 3 * _SIDE + (before + after) * COLUMN + _BAR_WIDTH, _HEAD + _LINE * len(found) + _FOOT
    figure.set_size_inches(width, height)
    figure.set_layout_engine("none")  # letters are placed by this function
    low, tall = _FOOT / height, _LINE * len(found) / height
    text = figure.add_axes((_SIDE / width, low, (before + after) * COLUMN / width, tall))
    text.set(xlim=(-before, after), ylim=(len(found), 0))
    text.set_axis_off()
    colours = _write_contexts(text, found, lines, FONTS[ending])
    place = figure.add_axes((_SIDE / width, 0.42 / height, min(3.5, width / 2) / width, 0.13 / height))
    bar = figure.colorbar(colours, cax=place, orientation="horizontal")
    bar.set_label("value at each token", fontsize=8)
    bar.outline.set_edgecolor("#dedee3")  # the lowest colour is the background of the page
    bars = figure.add_axes((1 - (_BAR_WIDTH + _SIDE) / width, low, _BAR_WIDTH / width, tall))
    bars.barh(np.arange(len(found)) + 0.5, [one.value for one in found], color="tab:blue", height=0.7)
    bars.set(ylim=(len(found), 0), yticks=[], xlabel="value")
    bars.axvline(0, color="black", linewidth=0.8)
    canvas.clean(bars)
    figure.suptitle(name, fontsize=12, y=1 - 0.2 / height)
    return canvas.save(figure, out)


def _write_contexts(
    panel: Axes, found: Sequence[Activation], lines: Sequence[Sequence[Piece]], fonts: Sequence[str]
) -> ScalarMappable:
    """Write a line of text for each activation. Returns the colour scale, which has the colours of `dmi view`."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    values = np.concatenate([one.values for one in found])
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    two = low < 0 < high
    largest = max(high, -low)
    colours = ScalarMappable(Normalize(-largest, largest) if two else Normalize(low, high), colour_map(two))
    for line, (one, pieces) in enumerate(zip(found, lines, strict=True)):
        for piece in pieces:
            value, wide = one.values[piece.token], piece.stop - piece.start
            cell = (piece.start, line + 0.08, wide, 0.84)
            colour = colours.to_rgba(np.array(value)) if np.isfinite(value) else (0, 0, 0, 0)
            panel.add_patch(Rectangle(cell[:2], wide, 0.84, facecolor=colour, linewidth=0))
            if np.isinf(value) or (np.isnan(value) and piece.token == one.before):
                canvas.cross_out(panel, [cell])
            if piece.token == one.before:
                frame: dict[str, Any] = {"fill": False, "edgecolor": "black", "linewidth": 1.2}
                panel.add_patch(Rectangle((piece.start, line + 0.04), wide, 0.92, **frame))
            look: dict[str, Any] = {"color": ink_on(np.array(colour)), "fontsize": SIZE, "family": fonts}
            for column, word in piece.words:
                panel.text(column, line + 0.66, word, parse_math=False, **look)
    return colours


def _pieces(one: Activation, texts: Texts, drawn: frozenset[int] | None) -> list[Piece]:
    """Lay out the tokens of a context on one line. The token of the activation begins in column 0.

    Other tokens that do not fit are left out. If the token of the activation holds only combining marks, it is shown as
    its id in brackets. drawn: code points that can be drawn; None: all.
    """
    known = texts.of(one.context)
    if known is None:
        pieces = lay_out_ids([str(i) for i in one.context], _ONE_LINE)
    else:
        fit = [text if drawn is None or drawn.issuperset(map(ord, text)) else "" for text in known]
        looks = [shown(text, i)[0] for text, i in zip(fit, one.context, strict=True)]
        pieces = _laid_out(looks)
        if all(piece.token != one.before for piece in pieces):  # a mark, which is joined to the token before it
            looks[one.before] = shown("", one.token_id)[0]
            pieces = _laid_out(looks)
    start = next(piece.start for piece in pieces if piece.token == one.before)
    moved = [
        replace(
            piece,
            start=piece.start - start,
            stop=piece.stop - start,
            words=tuple((column - start, word) for column, word in piece.words),
        )
        for piece in pieces
    ]
    return [p for p in moved if p.token == one.before or (p.start >= -_BEFORE and p.stop <= _AFTER)]


def _laid_out(texts: Sequence[str]) -> list[Piece]:
    """Lay out texts on one line, with visible line feeds and tabs."""
    return lay_out([text.replace("\n", "↵").replace("\t", "→") for text in texts], _ONE_LINE)


def draw_mean_difference(
    found: MeanDifference,
    out: str | os.PathLike[str],
    names: tuple[str, str] = ("first", "second"),
    of_values: str = "dimension",
) -> Path:
    """Draw the scores of both sets as histograms, and the largest values of the difference as bars.

    names: names of the sets. of_values: the word for one value of a row.
    """
    figure = canvas.new_figure(11.0, 4.2, out)
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    every = np.concatenate(found.scores)
    every = every[np.isfinite(every)]
    edges = np.histogram_bin_edges(every, 40).tolist()
    for scores, name in zip(found.scores, names, strict=True):
        kept = scores[np.isfinite(scores)]
        if len(kept):
            weights = np.full(len(kept), 1 / len(kept))
            left.hist(kept, bins=edges, weights=weights, alpha=0.6, label=f"{name} ({len(scores)} rows)")
    left.set(xlabel="score: 1 at the first mean, 0 at the second", ylabel="share of rows")
    left.set_title(f"separation {found.separation:.2f}", fontsize=10)
    if len(every):
        left.axvline(0.5, color="black", linewidth=0.8)
        left.legend(frameon=False, fontsize=8)
    else:
        left.text(0.5, 0.5, "no score is finite", transform=left.transAxes, ha="center")
    vector = found.vector
    largest = np.argsort(-np.abs(vector), kind="stable")[:_BARS]
    right.bar(range(len(largest)), vector[largest], color="tab:blue")
    right.set_xticks(range(len(largest)), [str(i) for i in largest], rotation=90, fontsize=8)
    right.set(xlabel=of_values, ylabel="first mean - second mean")
    if not np.isfinite(vector).any():
        right.text(0.5, 0.6, "no value is finite", transform=right.transAxes, ha="center")
    right.axhline(0, color="black", linewidth=0.8)
    return canvas.save(figure, out)
