# SPDX-License-Identifier: Apache-2.0
"""Helpers for all pictures: figures, axes of tokens and layers, files. They need matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dmi_connector.analysis.training.rows import present_rows
from dmi_connector.captures.capture import Capture
from dmi_connector.store.format.remote_path import local_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LABELS = 48
"""Maximum number of tokens for which the axis labels each token."""
FORMATS = (".png", ".svg")
"""File name extensions of pictures."""
MONOSPACE = "DejaVu Sans Mono"
"""The font of tokens. matplotlib includes it."""
NOT_FINITE, CROSSED = "#d1208f", "values that are not finite are crossed"
"""The colour of the marks on values that are not finite, and the text that explains the marks. No colour map has this
colour.
"""
_LEAST_WIDTH = 7.5
"""Minimum width of a figure in inches, so that a title of about 70 letters fits."""
_LAYER_LABELS = 14
"""Approximate maximum number of layer labels."""


def new_figure(width: float, height: float, out: str | os.PathLike[str]) -> Figure:
    """Create an empty figure, `width` x `height` inches, or _LEAST_WIDTH inches wide if that is more.

    out: the file that the figure will be saved to. Raises ValueError if matplotlib is not installed, if `out` has an
    extension that is not in FORMATS, or if the directory of `out` does not exist.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot: matplotlib is not installed; install dmi_connector[plot]")
    if Path(out).suffix.lower() not in FORMATS:
        raise ValueError(f"plot: {os.fspath(out)} has another extension than {' or '.join(FORMATS)}; give one of these")
    if not local_path(out).absolute().parent.is_dir():
        raise ValueError(
            f"plot: {os.fspath(out)}: the directory {Path(out).parent} does not exist; create it, or give another"
        )
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(width, _LEAST_WIDTH), height), dpi=130)
    figure.set_layout_engine("constrained")
    return figure


def save(figure: Figure, out: str | os.PathLike[str]) -> Path:
    """Write a figure in the format of the file's extension. The same figure gives the same bytes. Returns the path.

    Raises OSError that names the file.
    """
    import matplotlib

    path = local_path(out)
    svg = path.suffix.lower() == ".svg"
    look = {"svg.hashsalt": "dmi", "svg.fonttype": "none", "font.monospace": [MONOSPACE]}
    with matplotlib.rc_context(look), warnings.catch_warnings():
        if svg:  # the program that shows an SVG draws its text, so glyphs that matplotlib lacks do not matter
            warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        try:
            figure.savefig(path, metadata={"Date": None} if svg else None)
        except OSError as error:
            raise OSError(f"plot: {path} cannot be written ({error.strerror}); give another") from error
    return path


def token_width(tokens: int) -> float:
    """Width in inches of a panel that shows `tokens` tokens."""
    return min(16.0, 3.0 + 0.27 * tokens) if tokens <= MAX_LABELS else 11.0


def layer_height(layers: int) -> float:
    """Height in inches of a panel that shows `layers` layers."""
    return min(9.0, 1.9 + 0.3 * layers)


def check_rows(captures: Sequence[Capture]) -> None:
    """Raise ValueError for a store that has no rows, or whose rows are all missing."""
    empty = [str(capture.path) for capture in captures if not present_rows(capture).any()]
    if empty:
        raise ValueError(f"plot: {empty} hold no rows")


def heat(panel: Axes, capture: Capture, values: np.ndarray, **look: Any) -> Any:
    """Draw values [layers, tokens] as colours, with the first layer at the bottom. Returns matplotlib's image."""
    ends = (capture.positions[0] - 0.5, capture.positions[-1] + 0.5, -0.5, len(values) - 0.5)
    return panel.imshow(values, extent=ends, aspect="auto", origin="lower", interpolation="nearest", **look)


def cross_out(panel: Axes, cells: Sequence[tuple[float, float, float, float]]) -> None:
    """Hatch cells whose value is not finite. cells: (x, y, width, height) of each cell, in coordinates of the panel."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    if not cells:
        return
    boxes = [Rectangle((x, y), width, height) for x, y, width, height in cells]
    look: dict[str, Any] = {"facecolor": "none", "edgecolor": NOT_FINITE, "hatch": "xxxx", "linewidth": 0}
    panel.add_collection(PatchCollection(boxes, **look), autolim=False)


def cross_cells(panel: Axes, capture: Capture, lost: np.ndarray) -> bool:
    """Hatch the cells of `heat` that `lost` selects, except those of missing rows. Returns whether a cell was hatched.

    lost: bool [layers, tokens].
    """
    lost = lost & present_rows(capture)
    edges = np.diff(lost.astype(np.int8), axis=1, prepend=0, append=0)
    starts, stops = (np.argwhere(edges == step) for step in (1, -1))
    left = capture.positions[0] - 0.5
    cross_out(panel, [(left + a, line - 0.5, b - a, 1) for (line, a), (_, b) in zip(starts, stops, strict=True)])
    return bool(len(starts))


def token_axis(panel: Axes, capture: Capture, tokens: Sequence[str], rows: slice = slice(None)) -> None:
    """Label the horizontal axis with tokens, and mark the first generated one. rows: the rows that the panel shows."""
    positions = capture.positions[rows]
    if len(positions) <= MAX_LABELS:
        panel.set_xticks(positions, tokens[rows], rotation=90, fontsize=8, family=MONOSPACE)
    else:
        panel.set_xlabel("token position")
    clean(panel)
    first = capture.prompt_len
    if positions[0] < first <= positions[-1]:
        panel.axvline(first - 0.5, color="white", linewidth=2.5)
        panel.axvline(first - 0.5, color="crimson", linewidth=1.2)
        mark: dict[str, Any] = {
            "xytext": (0, 3),
            "textcoords": "offset points",
            "fontsize": 8,
            "color": "crimson",
        }
        panel.annotate("generated →", (first - 0.4, 1.0), xycoords=("data", "axes fraction"), **mark)


def layer_axis(panel: Axes, labels: Sequence[str], name: str) -> None:
    """Label the vertical axis with layers. If there are many, only some are labelled."""
    step = max(1, -(-len(labels) // _LAYER_LABELS))
    shown = [*range(0, len(labels) - step, step), len(labels) - 1]
    panel.set_yticks(shown, [labels[i] for i in shown])
    panel.set_ylabel(name)


def clean(panel: Axes) -> None:
    """Remove the frame and the ticks."""
    panel.tick_params(length=0)
    for side in panel.spines.values():
        side.set_visible(False)


def colour_bar(figure: Figure, image: Any, panels: Sequence[Axes], label: str) -> None:
    """Put a colour scale beside panels."""
    bar = figure.colorbar(image, ax=panels, pad=0.015, fraction=0.04)
    bar.set_label(label)
    bar.outline.set_visible(False)


def name_panel(panel: Axes, capture: Capture) -> None:
    """Write the name of a capture above a panel."""
    panel.set_title(capture_name(capture), fontsize=10, loc="left", pad=14)  # above the mark of generated tokens


def capture_name(capture: Capture) -> str:
    """The capture's key, or the name of its store; "(incomplete)" follows if rows are missing."""
    # matplotlib parses text between two dollar signs as math.
    name = (capture.attrs.get("key") or capture.path.stem).replace("$", r"\$")
    return name if capture.complete else f"{name} (incomplete)"


def title(figure: Figure, capture: Capture, what: str, top: float | None = None) -> None:
    """Write a title: what the figure shows, and the model, dtype and vLLM version that the store names.

    top: vertical position as a fraction of the figure's height; None: matplotlib's default.
    """
    attrs = capture.attrs
    version = (attrs.get("versions") or {}).get("vllm")
    facts = ", ".join(filter(None, (attrs.get("dtype"), version and f"vLLM {version}")))
    named = f"{attrs['architecture']}: {what}" if attrs.get("architecture") else what
    figure.suptitle(f"{named} ({facts})" if facts else named, fontsize=12, y=top)
