# SPDX-License-Identifier: Apache-2.0
"""Computes how the model predicted a token from the row before it: probability, entropy, alternatives, attribution."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.analysis.attribution import logit_attribution, output_blocks
from dmi_connector.analysis.lens import likeliest
from dmi_connector.analysis.training.rows import known_tokens, present_rows
from dmi_connector.analysis.unembedding import Outcomes, Unembedding, log_softmax, outcomes_of
from dmi_connector.captures.capture import Capture
from dmi_connector.view import lens
from dmi_connector.view.data import ranges

PREDICTION = "prediction"
"""Name of the entry for predictions in the page's list of hooks. Its values say how each token was predicted."""
STATISTICS = ("log-probability", "entropy")
FINAL = "final"
_SAMPLES = 64
"""Maximum number of rows of captured logits to read at a time."""
_ROWS = 128
"""Maximum number of rows of the residual stream to multiply with the unembedding at a time."""


def lacking(capture: Capture, model: Path | None) -> str | None:
    """Why predictions of a store cannot be computed; None if they can. model: directory of the model, or None."""
    if "logits" in capture or (lens.lacking(capture, model) is None and "resid_final" in capture):
        return None
    return "Predictions need the hook logits, or resid_final and the option --model of dmi view."


def described(capture: Capture, model: Path | None) -> list[dict[str, Any]]:
    """The entry of `PREDICTION` in the list of hooks, as JSON; [] if predictions cannot be computed."""
    if lacking(capture, model) is not None:
        return []
    numbers = [{"name": name, "index": None, "signed": False, "flipped": name == STATISTICS[0]} for name in STATISTICS]
    entry = {"name": PREDICTION, "layers": [], "dtype": "float32", "width": 1, "reduce": None}
    if lens.lacking(capture, model) is None and "resid_final" in capture:
        before = np.flatnonzero(present_rows(capture))
    else:
        before = capture.logits_positions[capture.logits_positions >= 0] - int(capture.attrs["start"])
    rows = before[before < int(capture.attrs["num_tokens"]) - 1] + 1
    return [{**entry, "rows": ranges(rows), "statistics": numbers}]


def places(capture: Capture, model: Path | None) -> list[str]:
    """The places at which the logit lens can be computed: numbers of captured layers, and "final"."""
    if lens.lacking(capture, model) is not None:
        return []
    layers = capture.layers["resid_pre"] if "resid_pre" in capture else []
    return [*map(str, layers), *([FINAL] if "resid_final" in capture else [])]


def predicted(capture: Capture, end: Unembedding | None, place: str, window: slice) -> Outcomes:
    """How the residual stream at a place, in the row before each token of `window`, predicts the token.

    end: the result of `lens.end_of`, or None. place: one of `places`. "final" is the model's own prediction, from
    `resid_final`, or from the captured logits if `end` is None or `resid_final` was not captured. window: rows of the
    tokens. If the row before a token is missing or has no logits, the token's values are NaN, and `best` is -1. Raises
    ValueError if `end` is None and `place` is not "final". Raises KeyError for a hook that was not captured.
    """
    count = window.stop - window.start
    ids, known = capture.token_ids.astype(np.int64), known_tokens(capture)
    logprobs, entropy = np.full((2, count), np.nan, np.float32)
    best = np.full(count, -1, np.int64)
    came = np.where(known, ids, -1)
    for rows, found in _outcomes(capture, end, place, slice(max(window.start - 1, 0), max(window.stop - 1, 0)), came):
        at = rows + 1 - window.start
        logprobs[at], entropy[at], best[at] = found.logprobs, found.entropy, found.best
    return Outcomes(logprobs, entropy, best)


def lens_map(
    capture: Capture, end: Unembedding, names: list[str], window: slice, token: int | None
) -> Iterator[tuple[str | None, int, Outcomes]]:
    """Yield the predictions of all places for a window, in pieces (place, row of the first token, outcomes).

    names: the result of `places`. token: the row of a token, or None. If this token is in the window and has a
    prediction, the first piece is (None, token, its outcomes at all places, in the order of `names`). Then the results
    of `predicted` follow for each place, in pieces of up to _ROWS tokens. Places are in the order of `halving`.
    """
    if token is not None and token in range(max(window.start, 1), window.stop) and present_rows(capture)[token - 1]:
        came = int(capture.token_ids[token]) if known_tokens(capture)[token] else -1
        rows = lens.residual_rows(capture, token - 1)[1]
        yield None, token, end.outcomes(rows, np.full(len(rows), came))
    for at in halving(len(names)):
        for first in range(window.start, window.stop, _ROWS):
            part = slice(first, min(first + _ROWS, window.stop))
            yield names[at], first, predicted(capture, end, names[at], part)


def halving(count: int) -> list[int]:
    """The numbers 0 to count - 1 in the order of bisection: the last, the first, then middles of intervals."""
    order, ranges_left = [count - 1, 0][:count], [(0, count - 1)]
    while ranges_left:
        first, last = ranges_left.pop(0)
        if last - first > 1:
            middle = (first + last) // 2
            order.append(middle)
            ranges_left += [(first, middle), (middle, last)]
    return order


def alternatives(capture: Capture, end: Unembedding | None, row: int, count: int) -> dict[str, Any]:
    """The alternatives to the token of one row: {ids, p, rank, came}.

    ids, p: the `count` likeliest tokens and their probabilities. came: the probability of the token of the row. rank:
    the rank of this token, 1 for the likeliest. If the token is unknown, came and rank are None. If the row before has
    no prediction, came and rank are None, and ids and p are [].
    """
    for _, own in _distributions(capture, end, FINAL, slice(row - 1, row) if row else slice(0, 0)):
        if np.isnan(own).any():
            break
        ids, shares = likeliest(own, min(count, own.shape[1]))
        token = int(capture.token_ids[row])
        mine = own[0, token] if known_tokens(capture)[row] and token < own.shape[1] else np.float32(np.nan)
        rank = int((own[0] > mine).sum()) + 1 if np.isfinite(mine) else None
        came = float(np.exp(mine)) if np.isfinite(mine) else None
        return {"ids": ids[0].tolist(), "p": shares[0].tolist(), "rank": rank, "came": came}
    return {"ids": [], "p": [], "rank": None, "came": None}


def _outcomes(
    capture: Capture, end: Unembedding | None, place: str, rows: slice, came: np.ndarray
) -> Iterator[tuple[np.ndarray, Outcomes]]:
    """Yield (rows of the store, outcomes of the token after each row) in blocks.

    came: token ids of all rows of the store, int64; -1 if unknown.
    """
    if end is not None and not (place == FINAL and "resid_final" not in capture):
        wanted = np.arange(rows.start, rows.stop)
        wanted = wanted[present_rows(capture)[wanted]]
        for first in range(0, len(wanted), _ROWS):
            some = wanted[first : first + _ROWS]
            yield some, end.outcomes(_stream(capture, place, some), came[some + 1])
        return
    for some, own in _distributions(capture, end, place, rows):
        yield some, outcomes_of(own, came[some + 1])


def _stream(capture: Capture, place: str, rows: np.ndarray) -> np.ndarray:
    hook, layer = ("resid_final", None) if place == FINAL else ("resid_pre", int(place))
    return capture.numpy(hook, layer, rows)


def _distributions(
    capture: Capture, end: Unembedding | None, place: str, rows: slice
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (rows of the store, log-probabilities of the next token, float32 [rows, vocabulary]) in blocks."""
    wanted = np.arange(rows.start, rows.stop)
    wanted = wanted[present_rows(capture)[wanted]]
    if end is not None and not (place == FINAL and "resid_final" not in capture):
        for first in range(0, len(wanted), end.block):
            some = wanted[first : first + end.block]
            yield some, log_softmax(end.logits(_stream(capture, place, some)))
        return
    if place != FINAL:
        raise ValueError("the lens needs the option --model of dmi view")
    sampled = capture.logits_positions - int(capture.attrs["start"])
    samples = np.flatnonzero(np.isin(sampled, wanted))
    for first in range(0, len(samples), _SAMPLES):
        some = samples[first : first + _SAMPLES]
        yield sampled[some].astype(np.int64), log_softmax(capture.numpy("logits", tokens=some))


def attribution_lacks(capture: Capture, model: Path | None) -> str | None:
    """Why direct logit attribution of a store cannot be computed; None if it can."""
    layers = range(int(capture.attrs.get("num_layers") or 0))
    needs = [("resid_pre", 0), *output_blocks(capture.attrs, layers)]
    whole = layers and "resid_final" in capture and all(f"{hook}@{layer}" in capture for hook, layer in needs)
    if not whole:
        return "Capture the hooks resid_pre@0, attn_out and mlp_out of all layers, and resid_final."
    return lens.lacking(capture, model)


def attribution(capture: Capture, end: Unembedding, row: int) -> dict[str, Any]:
    """Direct logit attribution of the token after a row, as JSON: {parts, values, logit, target}.

    parts: labels of the parts. values: their shares of the logit, None for a share that is not finite. logit: the sum
    of the shares, or None. target: id of the token after the row, or for the last row of the likeliest token. Raises
    ValueError if the store lacks the token after the row.
    """
    ids = capture.token_ids
    last = row + 1 >= len(ids)
    one = slice(row, row + 1)
    target = int(end.logits(capture.numpy("resid_final", tokens=one)).argmax()) if last else int(ids[row + 1])
    if not last and not known_tokens(capture)[row + 1]:
        raise ValueError(f"the store lacks the token after row {row}")
    shares, parts = logit_attribution(capture, end, target, rows=one)
    values = [float(v) if np.isfinite(v) else None for v in shares[:, 0]]
    logit = float(shares.sum())
    return {"parts": parts, "values": values, "logit": logit if np.isfinite(logit) else None, "target": target}
