# SPDX-License-Identifier: Apache-2.0
"""Pictures of many captures: the top tokens of a neuron, the difference of two sets. As in `plot`, PNG or SVG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dmi_connector.analysis import canvas
from dmi_connector.analysis.directions import MeanDifference
from dmi_connector.analysis.labels import labeller
from dmi_connector.analysis.neurons import Activation
from dmi_connector.store.read.metadata import read_attrs

_BARS = 20
"""Neurons that are shown of a difference."""


def draw_top_tokens(
    found: Sequence[Activation],
    out: str | os.PathLike[str],
    name: str = "neuron",
    tokenizer: str | os.PathLike[str] | None = None,
) -> Path:
    """Draw the value of each activation as a bar beside its tokens; the token itself stands in brackets.

    found: of `top_tokens`. name: what the axis says. tokenizer: as in `plot`. Raises ValueError where nothing was
    found.
    """
    if not found:
        raise ValueError("plot: no token was found; give captures with rows")
    label = labeller(read_attrs(found[0].store)["model"], tokenizer)
    figure = canvas.new_figure(11.0, 1.2 + 0.28 * len(found), out)
    panel = figure.add_subplot()
    places = range(len(found))
    panel.barh(places, [one.value for one in found], color="tab:blue")
    texts = []
    for one in found:
        words = [label(token) for token in one.context]
        words[one.before] = f"[{words[one.before]}]"
        texts.append(" ".join(words))
    panel.set_yticks(places, texts, fontsize=8, family=canvas.MONOSPACE)
    panel.invert_yaxis()
    panel.axvline(0, color="black", linewidth=0.8)
    panel.set_xlabel(name)
    canvas.clean(panel)
    return canvas.save(figure, out)


def draw_mean_difference(
    found: MeanDifference, out: str | os.PathLike[str], names: tuple[str, str] = ("first", "second")
) -> Path:
    """Draw the scores of both sets as histograms, and the largest values of the difference.

    names: of the sets.
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
    left.axvline(0.5, color="black", linewidth=0.8)
    left.set(xlabel="score: 1 at the first mean, 0 at the second", ylabel="share of rows")
    left.set_title(f"separation {found.separation:.2f}", fontsize=10)
    left.legend(frameon=False, fontsize=8)
    vector = found.vector
    largest = np.argsort(-np.abs(vector), kind="stable")[:_BARS]
    right.bar(range(len(largest)), vector[largest], color="tab:blue")
    right.set_xticks(range(len(largest)), [str(i) for i in largest], rotation=90, fontsize=8)
    right.set(xlabel="neuron", ylabel="first mean - second mean")
    right.axhline(0, color="black", linewidth=0.8)
    return canvas.save(figure, out)
