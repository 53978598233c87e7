# SPDX-License-Identifier: Apache-2.0
"""Computes the logit lens of one token: the next tokens that the residual stream predicts, layer by layer."""

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
    """The final norm and unembedding of a model directory. Two models are cached. Raises as `Unembedding.load` does."""
    return Unembedding.load(model)


def lacking(capture: Capture, model: Path | None) -> str | None:
    """Why the logit lens of a store cannot be computed; None if it can. model: directory of the model."""
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
    """(names of places, the residual stream of one token at these places, float32 [places, hidden]).

    The places are those that were captured. A place is named by the number of the layer that the residual stream
    enters, or "final" after the last layer. row: row of the token in the store. Raises ValueError if neither resid_pre
    nor resid_final was captured.
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
    """(names of places, ids of the likeliest next tokens, their probabilities). Both arrays are [places, count].

    Places and `row` are as in `residual_rows`. A place whose row is not finite has ids of -1 and probabilities of NaN.
    end: the result of `end_of`. Raises ValueError if the model's hidden size is not the width of the rows.
    """
    places, rows = residual_rows(capture, row)
    return places, *likeliest(log_softmax(end.logits(rows)), count)
