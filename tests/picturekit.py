# SPDX-License-Identifier: Apache-2.0
"""Describes a picture as text: sizes, positions, colours and labels. `check` compares it with data/pictures.json.

recorded.py explains how to write that file again after an intended change of a picture.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation, Text

from tests.recorded import recorded

_SHOWN = 4
"""Maximum number of described artists of one kind per panel: the first ones and the last one."""


def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """A list of every saved figure."""
    found: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: found.append(self) or save(self, *args, **kw))
    return found


def check(name: str, figure: Figure) -> None:
    """Fail unless the figure equals the recorded picture `name`. Numbers may differ by a thousandth."""
    found = list(_figure(figure))
    wanted = recorded("pictures.json", name, found)
    assert [_split(line)[0] for line in found] == [_split(line)[0] for line in wanted], name
    for line, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            _split(line)[1], _split(other)[1], 1e-3, 1e-5, err_msg=f"{name}: {line}, not {other}"
        )


def _split(line: str) -> tuple[list[str], list[float]]:
    """(text between the numbers, numbers). Numbers within labels and colours count as text."""
    words, numbers = [], []
    for part in re.split(r"('(?:[^'\\]|\\.)*'|#\w+)", line):
        if part[:1] in ("'", "#"):
            words.append(part)
        else:
            words += re.split(_NUMBER, part)
            numbers += [float(number) for number in re.findall(_NUMBER, part)]
    return words, numbers


_NUMBER = r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]\d+)?"


def _figure(figure: Figure) -> Iterator[str]:
    layout = figure.get_layout_engine()
    yield f"figure {_numbers(figure.get_size_inches())} at {figure.dpi} dots, {type(layout).__name__}"
    yield from _some(map(_text, figure.texts))
    yield from _legends(figure.legends)
    for panel in figure.axes:
        yield from _panel(panel, layout is None or type(layout).__name__ == "PlaceHolderLayoutEngine")


def _panel(panel: Axes, placed: bool) -> Iterator[str]:
    cell = panel.get_subplotspec()
    place = " " + _numbers(panel.get_position().bounds) if placed else f" {cell.get_geometry()}" if cell else ""
    yield f"panel{place}, drawn {panel.axison}"
    yield f" limits {_numbers((*panel.get_xlim(), *panel.get_ylim()))}"
    yield f" frame {[side for side, spine in panel.spines.items() if spine.get_visible()]}"
    yield f" edge {[to_hex(spine.get_edgecolor(), True) for name, spine in panel.spines.items() if name == 'outline']}"
    texts = (panel._left_title, panel.title, panel._right_title, panel.xaxis.label, panel.yaxis.label)  # type: ignore[attr-defined]
    yield from (f" {_text(text, text in texts[:3])}" for text in texts if text.get_text())
    for axis in (panel.xaxis, panel.yaxis):
        labels = [label for label in axis.get_ticklabels() if label.get_text() and label.get_visible()]
        length = {tick.tick1line.get_markersize() for tick in axis.get_major_ticks()}
        if labels and panel.axison:
            yield f" ticks of {_numbers(sorted(length))} points: {_numbers(axis.get_ticklocs())}"
            yield from (f" {_text(label)}" for label in (labels[0], labels[-1]))
    kinds: dict[type, Any] = {AxesImage: _image, Line2D: _line, Collection: _collection, Rectangle: _box, Text: _text}
    for kind, say in kinds.items():
        yield from (f" {line}" for line in _some(say(one) for one in panel.get_children() if _is(one, kind, panel)))
    boxes = [box.get_bbox().bounds for box in panel.patches if isinstance(box, Rectangle)]
    yield f" {len(boxes)} boxes: {_numbers(np.sum(boxes, 0))}" if boxes else " no box"
    legend = panel.get_legend()
    yield from (f" {line}" for line in _legends([legend] if legend else []))


def _is(artist: Artist, kind: type, panel: Axes) -> bool:
    own = (panel.patch, panel.title, panel._left_title, panel._right_title)  # type: ignore[attr-defined]
    return isinstance(artist, kind) and artist not in own


def _some(lines: Iterable[str]) -> list[str]:
    every = list(lines)
    return every if len(every) <= _SHOWN else [*every[: _SHOWN - 1], f"... of {len(every)}", every[-1]]


def _numbers(values: Any) -> str:
    return " ".join(f"{float(value):.6g}" for value in np.ravel(values))


def _shown(values: Any) -> str:
    """The first three values, the last one, and the sum. Values that are not finite are left out."""
    values = np.ma.filled(np.ma.asarray(values, dtype=float), np.nan).ravel()
    finite = values[np.isfinite(values)]
    return f"{len(finite)} of {len(values)}: {_numbers([*finite[:3], *finite[-1:], finite.sum()])}"


def _text(text: Text, placed: bool = True) -> str:
    """placed: whether to describe the position. The position of an axis label depends on the font."""
    place = f" at {_numbers(text.get_position())}" if placed else ""
    moved = f", by {_numbers(text.get_position())} from {_numbers(text.xy)}" if isinstance(text, Annotation) else place
    look = f"{text.get_fontsize():.4g} points, {text.get_fontfamily()}, {to_hex(text.get_color(), True)}"
    turned = f"{text.get_rotation():.4g} degrees, {text.get_ha()} {text.get_va()}, mathematics {text.get_parse_math()}"
    return f"text {text.get_text()!r}{moved}, {look}, {turned}"


def _line(line: Line2D) -> str:
    marker = f"{line.get_marker()!r} of {line.get_markersize():.4g}"
    look = f"{to_hex(line.get_color(), True)}, width {line.get_linewidth():.4g}, alpha {line.get_alpha()}"
    name = "" if str(line.get_label()).startswith("_") else f" {line.get_label()!r}"
    where = f"x {_shown(line.get_xdata())}, y {_shown(line.get_ydata())}"
    return f"line{name} {line.get_linestyle()!r} {marker}, {look}, {where}"


def _image(image: AxesImage) -> str:
    look = (
        f"{image.get_cmap().name!r} {image.get_interpolation()!r} {image.origin!r}, aspect {image.axes.get_aspect()!r}"
    )
    scale = f"{type(image.norm).__name__} {_numbers(image.get_clim())}"
    return f"image {look}, {scale}, extent {_numbers(image.get_extent())}, {_shown(image.get_array())}"


def _collection(some: Collection) -> str:
    colours = [sorted({to_hex(colour, True) for colour in f()})[:4] for f in (some.get_facecolor, some.get_edgecolor)]
    boxes = np.array([path.get_extents().bounds for path in some.get_paths()]).reshape(-1, 4)
    kind = type(some).__name__
    scale = f"{colours[0]}"
    if some.get_array() is not None:  # a colour map: its colours may differ in the last digit
        scale = f"{some.get_cmap().name!r} {_numbers(some.get_clim())}, {_shown(some.get_array())}"
    where = f"{len(boxes)} at {_numbers(boxes[0])}" if len(boxes) else "none"
    return f"{kind} {where}, {scale} {colours[1]}, {some.get_hatch()!r}, width {_numbers(some.get_linewidth())}"


def _box(box: Rectangle) -> str:
    colours = f"{to_hex(box.get_facecolor(), True)} {to_hex(box.get_edgecolor(), True)}"
    look = f"{box.get_hatch()!r}, width {box.get_linewidth():.4g}"
    return f"box {_numbers(box.get_bbox().bounds)}, filled {box.get_fill()}, {colours}, {look}"


def _legends(legends: Iterable[Any]) -> Iterator[str]:
    for legend in legends:
        texts = [text.get_text() for text in legend.get_texts()]
        size = legend.get_texts()[0].get_fontsize()
        place = f"{legend._loc} {legend._outside_loc!r}, {legend._ncols} columns"
        yield f"legend {texts}, {size:.4g} points, framed {legend.get_frame_on()}, {place}"
