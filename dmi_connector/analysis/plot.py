# SPDX-License-Identifier: Apache-2.0
"""Pictures of a store. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dmi_connector.analysis.residual import residual_norms
from dmi_connector.store.read.capture import Capture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LABELS = 48
"""With more tokens the axis has no label for each."""
_LONGEST_LABEL = 10
"""Characters of a token's label."""
_LOG_RATIO = 20
"""Ratio of the largest to the smallest norm."""


def token_labels(capture: Capture, tokenizer: str | os.PathLike[str] | None = None) -> list[str]:
    """One short label for each row: the text of its token, or its id without a tokenizer.

    tokenizer: directory of tokenizer.json; None: the model directory that the store names, if it exists. Raises
    ValueError for a directory without tokenizer.json.
    """
    ids = capture.token_ids.tolist()
    path = Path(tokenizer if tokenizer is not None else capture.attrs["model"]) / "tokenizer.json"
    if not path.is_file() or importlib.util.find_spec("tokenizers") is None:
        if tokenizer is not None:
            raise ValueError(
                f"tokenizer: {path} is no file, or the package tokenizers is missing; leave the option out"
            )
        return [str(i) for i in ids]
    from tokenizers import Tokenizer

    core = Tokenizer.from_file(str(path))
    return [_label_of(i, core.decode([i], skip_special_tokens=False)) for i in ids]


def _label_of(token: int, text: str) -> str:
    """`text` short enough for an axis, spaces visible; the token's id where it is not all printable."""
    if not text or "\N{REPLACEMENT CHARACTER}" in text or not text.isprintable():
        return f"[{token}]"
    shown = text.replace(" ", "·").replace("$", r"\$")  # matplotlib reads mathematics between two dollars
    return shown if len(shown) <= _LONGEST_LABEL else shown[: _LONGEST_LABEL - 1] + "…"


def draw_residual_norms(
    captures: Sequence[Capture], out: str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None
) -> Path:
    """Draw residual norms by layer and token, a panel a capture under one colour scale, as a PNG in `out`.

    Raises ValueError without matplotlib, or for a store without residual stream or rows.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot: matplotlib is not installed; install dmi_connector[plot]")
    from matplotlib.figure import Figure

    norms = [residual_norms(capture) for capture in captures]
    if any(values.size == 0 for values, _ in norms):
        raise ValueError(f"plot: {[str(c.path) for c in captures if not len(c.token_ids)]} hold no rows")
    # Sizes are in inches.
    columns = 1 if len(captures) == 1 else 2
    lines = -(-len(captures) // columns)
    longest = max(values.shape[1] for values, _ in norms)
    wide = min(16.0, 3.0 + 0.27 * longest) if longest <= MAX_LABELS else 11.0
    tall = min(9.0, 1.9 + 0.3 * max(values.shape[0] for values, _ in norms))
    figure = Figure(figsize=(columns * wide * (0.75 if columns > 1 else 1.0) + 1.2, lines * tall + 0.7), dpi=130)
    figure.set_layout_engine("constrained")
    panels = [figure.add_subplot(lines, columns, i + 1) for i in range(len(captures))]
    scale, name = _scale(np.concatenate([values.ravel() for values, _ in norms]))
    image: Any = None
    for panel, capture, (values, layers) in zip(panels, captures, norms, strict=True):
        ends = (capture.positions[0] - 0.5, capture.positions[-1] + 0.5, -0.5, len(layers) - 0.5)
        image = panel.imshow(values, extent=ends, aspect="auto", origin="lower", norm=scale, interpolation="nearest")
        _label(panel, capture, layers, token_labels(capture, tokenizer))
    bar = figure.colorbar(image, ax=panels, pad=0.015, fraction=0.04)
    bar.set_label(f"norm of the residual stream{name}")
    bar.outline.set_visible(False)
    _title(figure, captures)
    path = Path(out)
    figure.savefig(path)
    return path


def _scale(values: np.ndarray) -> tuple[Any, str]:
    """A colour scale over `values`. It is logarithmic from a ratio of _LOG_RATIO on."""
    from matplotlib.colors import LogNorm, Normalize

    low, high = float(values.min()), float(values.max())
    if low > 0 and high / low > _LOG_RATIO:
        return LogNorm(low, high), " (log scale)"
    return Normalize(low, high), ""


def _label(panel: Axes, capture: Capture, layers: list[str], tokens: list[str]) -> None:
    step = max(1, -(-len(layers) // 14))
    shown = [*range(0, len(layers) - step, step), len(layers) - 1]
    panel.set_yticks(shown, [layers[i] for i in shown])
    panel.set_ylabel("layer input")
    if len(tokens) <= MAX_LABELS:
        panel.set_xticks(capture.positions, tokens, rotation=90, fontsize=8, family="DejaVu Sans Mono")
    else:
        panel.set_xlabel("token position")
    panel.tick_params(length=0)
    for side in panel.spines.values():
        side.set_visible(False)
    first = capture.prompt_len
    if capture.positions[0] < first <= capture.positions[-1]:
        panel.axvline(first - 0.5, color="white", linewidth=2.5)
        panel.axvline(first - 0.5, color="crimson", linewidth=1.2)
        mark: dict[str, Any] = {
            "xytext": (0, 3),
            "textcoords": "offset points",
            "fontsize": 8,
            "color": "crimson",
        }
        panel.annotate("generated →", (first - 0.4, 1.0), xycoords=("data", "axes fraction"), **mark)
    name = capture.attrs.get("key") or capture.path.stem
    state = "" if capture.complete else " (incomplete)"
    panel.set_title(name + state, fontsize=10, loc="left", pad=14)  # above the mark of generated tokens


def _title(figure: Figure, captures: Sequence[Capture]) -> None:
    first = captures[0].attrs
    version = first["versions"].get("vllm", "?")
    figure.suptitle(
        f"{first['architecture']}: residual norms by layer and token ({first['dtype']}, vLLM {version})",
        fontsize=12,
    )
