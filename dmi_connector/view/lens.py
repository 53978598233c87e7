# SPDX-License-Identifier: Apache-2.0
"""Computes the logit lens of one token: predictions of the residual stream before each layer and after the last one."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from dmi_connector.analysis.lens import likeliest
from dmi_connector.analysis.unembedding import Unembedding, log_softmax
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.own_values import check_own_values


@functools.lru_cache(maxsize=2)
def end_of(model: Path) -> Unembedding:
    """The final norm and unembedding of a model directory, cached for later requests. Raises ValueError like `load`."""
    return Unembedding.load(model)


def lacking(capture: Capture, model: Path | None) -> str | None:
    """Why the logit lens of a store cannot be computed; None if it can."""
    held = [hook for hook in ("resid_pre", "resid_final") if hook in capture]
    if not held:
        return "The store has no residual stream. Capture the hooks resid_pre and resid_final (preset hidden-states)."
    try:
        for hook in held:
            check_own_values(capture, hook)
    except ValueError as error:
        return str(error)
    if model is None:
        return (
            "The final norm and the unembedding are not known. Start dmi view with --model DIR, the model's directory."
        )
    return None


def residual_rows(capture: Capture, row: int) -> tuple[list[str], np.ndarray]:
    """(names of places, rows of the residual stream of one token at these places, float32 [places, hidden]).

    A place is named by the number of the layer that the residual stream enters, or "final" after the last layer.
    """
    one = slice(row, row + 1)
    places, rows = [], []
    if "resid_pre" in capture:
        places += [str(layer) for layer in capture.layers["resid_pre"]]
        rows.append(capture.numpy("resid_pre", tokens=one)[:, 0])
    if "resid_final" in capture:
        places.append("final")
        rows.append(capture.numpy("resid_final", tokens=one))
    return places, np.concatenate(rows)


def predictions(capture: Capture, end: Unembedding, row: int, count: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """(names of places, likeliest next tokens, their probabilities); the last two are arrays [places, count].

    Raises ValueError if the model's hidden size is not the width of the rows.
    """
    places, rows = residual_rows(capture, row)
    return places, *likeliest(log_softmax(end.logits(rows)), count)
