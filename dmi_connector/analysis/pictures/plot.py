# SPDX-License-Identifier: Apache-2.0
"""Pictures of captures by token: norms, heat maps, lens, attribution, attention, uncertainty, drift, as PNG or SVG.

Each function writes the file `out`, whose extension selects the format, and returns its path. tokenizer: directory of
tokenizer.json, for the tokens on the axis; None: the model directory that the store names, if that exists. All
functions need matplotlib (the extra `plot`). They raise ValueError without matplotlib, for another extension, and for a
store without rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dmi_connector.analysis.heat import hook_heat
from dmi_connector.analysis.labels import labeller, token_labels
from dmi_connector.analysis.lens import Lens, Uncertainty
from dmi_connector.analysis.patterns import attention_pattern
from dmi_connector.analysis.pictures import canvas
from dmi_connector.analysis.pictures.plot_text import colour_map
from dmi_connector.analysis.residual import drift, residual_norms
from dmi_connector.captures.capture import Capture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PathLike = str | os.PathLike[str]
_LOG_RATIO = 20
"""Ratio of the largest to the smallest value above which the colour scale is logarithmic."""
_WORDS_IN_CELLS = 32
"""Maximum number of tokens for which the cells of the lens contain words."""
_LARGE_PANELS, MOST_PANELS = 8, 400
"""Maximum number of panels of a picture with tokens on the axes, and maximum number of panels of any picture."""
_SMALL_SIZE = (18.0, 12.0)
"""Size of a picture of small panels, in inches."""
_MOST_CELLS = 400
"""Maximum number of cells on each side of an attention pattern. A panel has about as many pixels."""
_MOST_NAMED = 10
"""Maximum number of lines with names. With more lines, no line has a name, and their mean is drawn too."""


def draw_residual_norms(captures: Sequence[Capture], out: PathLike, tokenizer: PathLike | None = None) -> Path:
    """Draw residual norms by layer and token, with one panel per capture and a shared colour scale.

    Raises ValueError for a store without a residual stream.
    """
    check_panels(len(captures))
    maps = [residual_norms(capture) for capture in captures]
    return _draw_maps(captures, maps, out, tokenizer, "residual norms", "norm of the residual stream", "layer input")


def draw_heat(
    captures: Sequence[Capture], out: PathLike, hook: str, neuron: int | None = None, tokenizer: PathLike | None = None
) -> Path:
    """Draw the norms of a hook by layer and token, or value `neuron` of its rows.

    Each capture has a panel. The panels share a colour scale.

    Raises as `hook_heat` does.
    """
    check_panels(len(captures))
    maps = [hook_heat(capture, hook, neuron) for capture in captures]
    what, bar = (f"norms of {hook}", f"norm of {hook}") if neuron is None else (f"value {neuron} of {hook}", "value")
    return _draw_maps(captures, maps, out, tokenizer, what, bar, "layer")


def _draw_maps(
    captures: Sequence[Capture],
    maps: Sequence[tuple[np.ndarray, list[str]]],
    out: PathLike,
    tokenizer: PathLike | None,
    what: str,
    bar: str,
    axis: str,
) -> Path:
    """Draw one heat map per capture. maps: (values [layers, tokens], labels of the layers) of each capture.

    what: the subject of the title. bar: label of the colour scale. axis: label of the vertical axis.
    """
    if len(captures) > _LARGE_PANELS:
        return _draw_small_maps(captures, maps, out, what, bar, axis)
    canvas.check_rows(captures)
    columns = 1 if len(captures) == 1 else 2
    lines = -(-len(captures) // columns)
    wide = canvas.token_width(max(values.shape[1] for values, _ in maps)) * (0.75 if columns > 1 else 1.0)
    tall = canvas.layer_height(max(values.shape[0] for values, _ in maps))
    figure = canvas.new_figure(columns * wide + 1.2, lines * tall + 0.7, out)
    panels = [figure.add_subplot(lines, columns, i + 1) for i in range(len(captures))]
    look, name = _scale(np.concatenate([values.ravel() for values, _ in maps]))
    image: Any = None
    for panel, capture, (values, layers) in zip(panels, captures, maps, strict=True):
        image = canvas.heat(panel, capture, values, **look)
        if canvas.cross_cells(panel, capture, ~np.isfinite(values)):
            panel.set_title(canvas.CROSSED, fontsize=8, loc="right", pad=14)
        canvas.layer_axis(panel, layers, axis)
        canvas.token_axis(panel, capture, token_labels(capture, tokenizer))
        canvas.name_panel(panel, capture)
    canvas.colour_bar(figure, image, panels, f"{bar}{name}")
    canvas.title(figure, captures[0], f"{what} by layer and token")
    return canvas.save(figure, out)


def _draw_small_maps(
    captures: Sequence[Capture],
    maps: Sequence[tuple[np.ndarray, list[str]]],
    out: PathLike,
    what: str,
    bar: str,
    axis: str,
) -> Path:
    """Draw the maps of `_draw_maps` in small panels, without tokens on their axes."""
    canvas.check_rows(captures)
    columns = math.ceil(math.sqrt(len(captures)))
    lines = -(-len(captures) // columns)
    figure = canvas.new_figure(*_SMALL_SIZE, out)
    figure.set_layout_engine("none")  # layout takes a minute for 200 panels
    ends = {"left": 0.03, "right": 0.92, "bottom": 0.04, "top": 0.91, "wspace": 0.08, "hspace": 0.35}
    grid = figure.add_gridspec(lines, columns, **ends)
    look, name = _scale(np.concatenate([values.ravel() for values, _ in maps]))
    letters = int(250 / columns)
    image: Any = None
    for i, (capture, (values, _)) in enumerate(zip(captures, maps, strict=True)):
        panel = figure.add_subplot(grid[i // columns, i % columns], xticks=[], yticks=[])
        image = canvas.heat(panel, capture, values, **look)
        canvas.cross_cells(panel, capture, ~np.isfinite(values))
        canvas.clean(panel)
        if capture.positions[0] < capture.prompt_len <= capture.positions[-1]:
            panel.axvline(capture.prompt_len - 0.5, color="crimson", linewidth=0.8)
        title = canvas.capture_name(capture)
        panel.set_title(title if len(title) <= letters else f"{title[: letters - 1]}…", fontsize=7, loc="left", pad=2)
    bar_axes = figure.add_axes((0.94, 0.2, 0.012, 0.6))
    figure.colorbar(image, cax=bar_axes, label=f"{bar}{name}").outline.set_visible(False)
    figure.supxlabel("token position; generated tokens are right of the line", fontsize=9)
    figure.supylabel(axis, fontsize=9)
    canvas.title(figure, captures[0], f"{what} of {len(captures)} captures, by layer and token")
    return canvas.save(figure, out)


def check_panels(count: int) -> None:
    """Raise ValueError for more captures than MOST_PANELS."""
    if count > MOST_PANELS:
        raise ValueError(f"plot: {count} stores are more than the {MOST_PANELS} of one picture; give fewer")


def _scale(values: np.ndarray) -> tuple[dict[str, Any], str]:
    """(arguments of matplotlib for the colours, a note about the scale).

    The scale is symmetric around 0 if values have both signs. It is logarithmic if all values are positive, and the
    ratio of the largest to the smallest is above _LOG_RATIO.
    """
    from matplotlib.colors import CenteredNorm, LogNorm, Normalize

    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if low < 0 < high:
        return {"norm": CenteredNorm(0, max(-low, high)), "cmap": "RdBu_r"}, ""
    if low > 0 and high / low > _LOG_RATIO:
        return {"norm": LogNorm(low, high)}, " (log scale)"
    return {"norm": Normalize(low, high)}, ""


def draw_lens(capture: Capture, lens: Lens, out: PathLike, tokenizer: PathLike | None = None) -> Path:
    """Draw a logit lens, with a cell for each layer and token. A cell shows the layer's likeliest next token.

    The colour of a cell is the probability that the layer gives to the model's choice (`Lens.chance`).
    """
    canvas.check_rows([capture])
    count = len(capture.token_ids)
    words = count <= _WORDS_IN_CELLS
    wide = 3.0 + 0.8 * count if words else canvas.token_width(count)
    figure = canvas.new_figure(wide + 1.2, canvas.layer_height(len(lens.layers)) + 0.7, out)
    panel = figure.add_subplot()
    image = canvas.heat(panel, capture, lens.chance, vmin=0, vmax=1, cmap="Blues")
    if canvas.cross_cells(panel, capture, lens.ids[:, :, 0] < 0):
        panel.set_title(canvas.CROSSED, fontsize=8, loc="right")
    if words:
        _write_words(panel, capture, lens, tokenizer)
    canvas.layer_axis(panel, lens.layers, "layer input")
    canvas.token_axis(panel, capture, token_labels(capture, tokenizer))
    canvas.name_panel(panel, capture)
    canvas.colour_bar(figure, image, [panel], "probability of the model's choice")
    canvas.title(figure, capture, "logit lens")
    return canvas.save(figure, out)


def _write_words(panel: Axes, capture: Capture, lens: Lens, tokenizer: PathLike | None) -> None:
    """Write the likeliest next token into each cell."""
    label = labeller(capture.attrs.get("model"), tokenizer)
    for line, ids in enumerate(lens.ids[:, :, 0]):
        for position, token, chance in zip(capture.positions, ids.tolist(), lens.chance[line], strict=True):
            if token >= 0:
                colour = "white" if chance > 0.5 else "black"
                panel.text(position, line, label(token), ha="center", va="center", fontsize=7, color=colour)


def draw_attribution(
    capture: Capture, shares: np.ndarray, labels: Sequence[str], out: PathLike, tokenizer: PathLike | None = None
) -> Path:
    """Draw the result of `logit_attribution`, (shares, labels), by part and token.

    Red is a positive share, and blue is a negative share. Shares that are not finite are crossed out.
    """
    canvas.check_rows([capture])
    figure = canvas.new_figure(
        canvas.token_width(len(capture.token_ids)) + 1.2, canvas.layer_height(len(labels)) + 0.7, out
    )
    panel = figure.add_subplot()
    largest = float(np.abs(shares[np.isfinite(shares)]).max(initial=0.0)) or 1.0
    image = canvas.heat(panel, capture, shares, vmin=-largest, vmax=largest, cmap="RdBu_r")
    if canvas.cross_cells(panel, capture, ~np.isfinite(shares)):
        panel.set_title(canvas.CROSSED, fontsize=8, loc="right", pad=14)
    canvas.layer_axis(panel, labels, "part of the residual stream")
    canvas.token_axis(panel, capture, token_labels(capture, tokenizer))
    canvas.name_panel(panel, capture)
    canvas.colour_bar(figure, image, [panel], "share of the logit")
    canvas.title(figure, capture, "direct logit attribution")
    return canvas.save(figure, out)


def draw_attention(capture: Capture, layer: int, out: PathLike, tokenizer: PathLike | None = None) -> Path:
    """Draw the attention pattern of one layer with one panel per head. Rows are queries, columns are keys.

    Raises as `attention_pattern` does.
    """
    canvas.check_rows([capture])
    weights = attention_pattern(capture, layer)
    columns = int(np.ceil(np.sqrt(len(weights))))
    lines = -(-len(weights) // columns)
    side = min(4.0, 1.6 + 0.12 * weights.shape[1])
    figure = canvas.new_figure(columns * side + 1.5, lines * side + 1.0, out)
    from matplotlib.colors import PowerNorm

    # A square root scale, as in `dmi view`, because most weights of many keys are small.
    scale = PowerNorm(0.5, 0, 1)
    labels = token_labels(capture, tokenizer)
    panels, image, crossed = [], None, False
    tokens, step = weights.shape[1], -(-weights.shape[1] // _MOST_CELLS)
    look: dict[str, Any] = {"cmap": colour_map(False), "interpolation": "nearest"}
    if step > 1:
        look["extent"] = (-0.5, tokens - 0.5, tokens - 0.5, -0.5)
    for head, values in enumerate(weights):
        panel = figure.add_subplot(lines, columns, head + 1)
        image = panel.imshow(_largest_of(values, step), norm=scale, **look)
        lost = np.flatnonzero(~np.isfinite(values).all(1))
        canvas.cross_out(panel, [(-0.5, query - 0.5, query + 1, 1) for query in lost])
        crossed |= len(lost) > 0
        panel.set_title(f"head {head}", fontsize=9)
        canvas.clean(panel)
        _label_square(panel, labels)
        panels.append(panel)
    of = f"largest of {step} x {step}; " if step > 1 else ""
    canvas.colour_bar(figure, image, panels, f"attention weight ({of}square root scale)")
    note = f"; {canvas.CROSSED}" if crossed else ""
    canvas.title(figure, capture, f"attention of layer {layer}, {canvas.capture_name(capture)}{note}")
    return canvas.save(figure, out)


def _largest_of(values: np.ndarray, step: int) -> np.ndarray:
    """Max pooling of values [n, n] over `step` x `step` cells, so that a few large weights stay visible."""
    if step == 1:
        return values
    short = -len(values) % step
    whole = np.pad(values, (0, short), constant_values=-np.inf)  # completes the last cells of each side
    side = len(whole) // step
    return np.asarray(whole.reshape(side, step, side, step).max((1, 3)))


def _label_square(panel: Axes, labels: Sequence[str]) -> None:
    """Label both axes with tokens, if they fit."""
    if len(labels) > canvas.MAX_LABELS // 2:
        return
    look: dict[str, Any] = {"fontsize": 5, "family": canvas.MONOSPACE}
    panel.set_xticks(range(len(labels)), labels, rotation=90, **look)
    panel.set_yticks(range(len(labels)), labels, **look)


def draw_uncertainty(capture: Capture, found: Uncertainty, out: PathLike, tokenizer: PathLike | None = None) -> Path:
    """Draw the result of `uncertainty`: entropy and surprisal of the next token, at each token.

    The axis spans the tokens with values. Raises ValueError if no token has a value.
    """
    canvas.check_rows([capture])
    if not len(found.rows):
        raise ValueError(f"plot: {capture.path} holds no logits; give --model to compute them from resid_final")
    shown = slice(int(found.rows.min()), int(found.rows.max()) + 1)
    figure = canvas.new_figure(canvas.token_width(shown.stop - shown.start) + 0.5, 4.0, out)
    panel = figure.add_subplot()
    positions = found.rows + int(capture.attrs["start"])
    panel.plot(positions, found.entropy, "o-", markersize=3, label="entropy")
    panel.plot(positions, found.surprisal, "s--", markersize=3, label="surprisal of the actual next token")
    panel.set_ylim(bottom=0)
    panel.set_ylabel("nats")
    panel.legend(frameon=False, fontsize=8)
    canvas.token_axis(panel, capture, token_labels(capture, tokenizer), shown)
    panel.set_xlim(positions.min() - 0.5, positions.max() + 0.5)
    canvas.name_panel(panel, capture)
    canvas.title(figure, capture, "uncertainty by token")
    return canvas.save(figure, out)


def draw_drift(
    captures: Sequence[Capture],
    out: PathLike,
    hook: str = "resid_final",
    layer: int | None = None,
    since: str = "prompt",
) -> Path:
    """Draw the drift of the rows of each capture, with one line per capture. Raises as `drift` does.

    With more than ten captures, the lines are thin and have no names, and their mean at each position is drawn too.
    """
    canvas.check_rows(captures)
    lines = [drift(capture, hook, layer, since) for capture in captures]
    if not any(np.isfinite(values).any() for values in lines):
        raise ValueError("plot: no row can be compared with another; give captures with more rows that are finite")
    figure = canvas.new_figure(9.0, 4.0, out)
    panel = figure.add_subplot()
    many = len(captures) > _MOST_NAMED
    look: dict[str, Any] = {"linewidth": 0.5, "color": "tab:blue", "alpha": 0.25}
    drawn = []
    for capture, values in zip(captures, lines, strict=True):
        named = {"markersize": 2, "linewidth": 1, "label": canvas.capture_name(capture)}
        drawn += panel.plot(capture.positions, values, "-" if many else "o-", **(look if many else named))
    if many:
        positions, mean = _mean_line(captures, lines)
        drawn = panel.plot(positions, mean, color="black", linewidth=1.5, label=f"mean of {len(captures)} captures")
    panel.set(xlabel="token position", ylabel="1 - cosine")
    # Labels are given, because matplotlib leaves out of a legend those that begin with "_".
    names = [str(line.get_label()) for line in drawn]
    figure.legend(drawn, names, frameon=False, fontsize=8, loc="outside lower left", ncols=1 if many else 2)
    where = hook if layer is None else f"{hook}, layer {layer}"
    other = "the prompt's mean row" if since == "prompt" else "the row before"
    canvas.title(figure, captures[0], f"drift of {where} from {other}")
    return canvas.save(figure, out)


def _mean_line(captures: Sequence[Capture], lines: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(positions at which a capture has a finite value, the mean of the finite values at each of these positions).

    lines: values [tokens] of each capture.
    """
    total, count = np.zeros((2, 1 + max(int(capture.positions[-1]) for capture in captures)))
    for capture, values in zip(captures, lines, strict=True):
        there = np.isfinite(values)
        total[capture.positions[there]] += values[there]
        count[capture.positions[there]] += 1
    positions = np.flatnonzero(count)
    return positions, total[positions] / count[positions]
