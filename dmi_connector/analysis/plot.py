# SPDX-License-Identifier: Apache-2.0
"""Pictures of captures by token: norms, heat maps, lens, attribution, attention, uncertainty, drift, as PNG or SVG.

Each function writes the file `out`, whose ending says the format, and returns its path. tokenizer: directory of
tokenizer.json, for the words on the axis; None: the model directory that the store names, if it exists. All need
matplotlib (the extra `plot`), and raise ValueError without it, for another ending, and for a store without rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dmi_connector.analysis import canvas
from dmi_connector.analysis.heat import hook_heat
from dmi_connector.analysis.labels import labeller, token_labels
from dmi_connector.analysis.lens import Lens, Uncertainty
from dmi_connector.analysis.patterns import attention_pattern
from dmi_connector.analysis.residual import drift, residual_norms
from dmi_connector.analysis.rows import present_rows
from dmi_connector.store.read.capture import Capture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PathLike = str | os.PathLike[str]
_LOG_RATIO = 20
"""Ratio of the largest to the smallest norm from which the colour scale is logarithmic."""
_WORDS_IN_CELLS = 32
"""With more tokens the lens shows colours alone."""


def draw_residual_norms(captures: Sequence[Capture], out: PathLike, tokenizer: PathLike | None = None) -> Path:
    """Draw residual norms by layer and token, a panel a capture under one colour scale.

    Raises ValueError for a store without residual stream.
    """
    maps = [residual_norms(capture) for capture in captures]
    return _draw_maps(captures, maps, out, tokenizer, "residual norms", "norm of the residual stream", "layer input")


def draw_heat(
    captures: Sequence[Capture], out: PathLike, hook: str, neuron: int | None = None, tokenizer: PathLike | None = None
) -> Path:
    """Draw the norms of a hook by layer and token, or one value of its rows, a panel a capture under one colour scale.

    Raises as `hook_heat` does.
    """
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
    """Draw (numbers [layers, tokens], labels of the layers) of each capture."""
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
        canvas.layer_axis(panel, layers, axis)
        canvas.token_axis(panel, capture, token_labels(capture, tokenizer))
        canvas.name_panel(panel, capture)
    canvas.colour_bar(figure, image, panels, f"{bar}{name}")
    canvas.title(figure, captures[0], f"{what} by layer and token")
    return canvas.save(figure, out)


def _scale(values: np.ndarray) -> tuple[dict[str, Any], str]:
    """Colours over `values`, and what the scale is: logarithmic from a ratio of _LOG_RATIO on,
    even around 0 where there are both signs.
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
    """Draw a logit lens: each cell has the likeliest next token, and as colour the chance of the model's own choice."""
    canvas.check_rows([capture])
    count = len(capture.token_ids)
    words = count <= _WORDS_IN_CELLS
    wide = 3.0 + 0.8 * count if words else canvas.token_width(count)
    figure = canvas.new_figure(wide + 1.2, canvas.layer_height(len(lens.layers)) + 0.7, out)
    panel = figure.add_subplot()
    image = canvas.heat(panel, capture, lens.chance, vmin=0, vmax=1, cmap="Blues")
    lost = np.argwhere((lens.ids[:, :, 0] < 0) & present_rows(capture))
    canvas.cross_out(panel, [(capture.positions[at] - 0.5, line - 0.5, 1, 1) for line, at in lost])
    if len(lost):
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
    label = labeller(capture.attrs["model"], tokenizer)
    for line, ids in enumerate(lens.ids[:, :, 0]):
        for position, token, chance in zip(capture.positions, ids.tolist(), lens.chance[line], strict=True):
            if token >= 0:
                colour = "white" if chance > 0.5 else "black"
                panel.text(position, line, label(token), ha="center", va="center", fontsize=7, color=colour)


def draw_attribution(
    capture: Capture, shares: np.ndarray, labels: Sequence[str], out: PathLike, tokenizer: PathLike | None = None
) -> Path:
    """Draw direct logit attribution, as `logit_attribution` gives it: parts by token, red for, blue against."""
    canvas.check_rows([capture])
    figure = canvas.new_figure(
        canvas.token_width(len(capture.token_ids)) + 1.2, canvas.layer_height(len(labels)) + 0.7, out
    )
    panel = figure.add_subplot()
    largest = float(np.nanmax(np.abs(shares), initial=0.0)) or 1.0
    image = canvas.heat(panel, capture, shares, vmin=-largest, vmax=largest, cmap="RdBu_r")
    canvas.layer_axis(panel, labels, "part of the residual stream")
    canvas.token_axis(panel, capture, token_labels(capture, tokenizer))
    canvas.name_panel(panel, capture)
    canvas.colour_bar(figure, image, [panel], "share of the logit")
    canvas.title(figure, capture, "direct logit attribution")
    return canvas.save(figure, out)


def draw_attention(capture: Capture, layer: int, out: PathLike, tokenizer: PathLike | None = None) -> Path:
    """Draw the attention pattern of one layer, a panel a head: queries downwards, keys to the right.

    Raises as `attention_pattern`.
    """
    canvas.check_rows([capture])
    weights = attention_pattern(capture, layer)
    columns = int(np.ceil(np.sqrt(len(weights))))
    lines = -(-len(weights) // columns)
    side = min(4.0, 1.6 + 0.12 * weights.shape[1])
    figure = canvas.new_figure(columns * side + 1.5, lines * side + 1.0, out)
    labels = token_labels(capture, tokenizer)
    panels, image = [], None
    for head, values in enumerate(weights):
        panel = figure.add_subplot(lines, columns, head + 1)
        image = panel.imshow(values, vmin=0, vmax=1, cmap="magma", interpolation="nearest")
        panel.set_title(f"head {head}", fontsize=9)
        canvas.clean(panel)
        _label_square(panel, labels)
        panels.append(panel)
    canvas.colour_bar(figure, image, panels, "attention weight")
    canvas.title(figure, capture, f"attention of layer {layer}, {canvas.capture_name(capture)}")
    return canvas.save(figure, out)


def _label_square(panel: Axes, labels: Sequence[str]) -> None:
    """Tokens on both axes, if they fit."""
    if len(labels) > canvas.MAX_LABELS // 2:
        return
    look: dict[str, Any] = {"fontsize": 5, "family": canvas.MONOSPACE}
    panel.set_xticks(range(len(labels)), labels, rotation=90, **look)
    panel.set_yticks(range(len(labels)), labels, **look)


def draw_uncertainty(capture: Capture, found: Uncertainty, out: PathLike, tokenizer: PathLike | None = None) -> Path:
    """Draw entropy and surprise by token. Each stands above the token behind which the model predicts."""
    canvas.check_rows([capture])
    figure = canvas.new_figure(canvas.token_width(len(capture.token_ids)) + 0.5, 4.0, out)
    panel = figure.add_subplot()
    positions = found.rows + int(capture.attrs["start"])
    panel.plot(positions, found.entropy, "o-", markersize=3, label="entropy")
    panel.plot(positions, found.surprise, "s--", markersize=3, label="surprise at the token that came")
    panel.set_xlim(capture.positions[0] - 0.5, capture.positions[-1] + 0.5)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("nats")
    panel.legend(frameon=False, fontsize=8)
    canvas.token_axis(panel, capture, token_labels(capture, tokenizer))
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
    """Draw how far the rows of each capture have turned away, a line a capture. Raises as `drift`."""
    canvas.check_rows(captures)
    lines = [drift(capture, hook, layer, since) for capture in captures]
    figure = canvas.new_figure(9.0, 4.0, out)
    panel = figure.add_subplot()
    for capture, values in zip(captures, lines, strict=True):
        panel.plot(capture.positions, values, "o-", markersize=2, linewidth=1, label=canvas.capture_name(capture))
    panel.set(xlabel="token position", ylabel="1 - cosine")
    panel.legend(frameon=False, fontsize=8)
    where = hook if layer is None else f"{hook}, layer {layer}"
    other = "the prompt's mean row" if since == "prompt" else "the row before"
    canvas.title(figure, captures[0], f"drift of {where} from {other}")
    return canvas.save(figure, out)
