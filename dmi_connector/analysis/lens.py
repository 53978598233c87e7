# SPDX-License-Identifier: Apache-2.0
"""Next-token predictions of each layer and of the model: logit lens, entropy and surprisal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dmi_connector.analysis.training.rows import known_tokens
from dmi_connector.analysis.unembedding import Unembedding, entropy_of, log_softmax
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.own_values import check_own_values
from dmi_connector.option_values import whole_number


@dataclass(frozen=True)
class Lens:
    """Next-token predictions of the residual stream at each layer. `logit_lens` makes it.

    layers: a label per layer; "final" is the stream after the last layer, from which the model computes its output.
    ids: int32 [layers, tokens, top], the likeliest next tokens, in descending order of probability. probabilities:
    float32, same shape. chance: float32 [layers, tokens], the probability that each layer gives to the likeliest token
    of "final". entropy: float32 [layers, tokens], in nats. divergence: float32 [layers, tokens], KL(final || layer) in
    nats. Missing rows, and rows with a NaN or an infinity, have NaN values and ids of -1.
    """

    layers: list[str]
    ids: np.ndarray
    probabilities: np.ndarray
    chance: np.ndarray
    entropy: np.ndarray
    divergence: np.ndarray


@dataclass(frozen=True)
class Uncertainty:
    """The entropy and surprisal of each next token. `uncertainty` makes it.

    rows: int64 [n], the rows of the store whose next token is predicted. entropy: float32 [n], of the predicted
    distribution at temperature 1, in nats. surprisal: float32 [n], -log p of the actual next token, in nats; NaN
    if that token is not in the store, or has no logit.
    """

    rows: np.ndarray
    entropy: np.ndarray
    surprisal: np.ndarray


def logit_lens(capture: Capture, unembedding: Unembedding, top: int = 5) -> Lens:
    """The logit lens (nostalgebraist, 2020): the next token that each layer's residual stream predicts.

    Applies the final norm and the unembedding to `resid_pre` of each captured layer and to `resid_final`. top: number
    of tokens per row. Only a block of logits is in memory at a time (`Unembedding.block` rows).

    Raises KeyError without `resid_final`. Raises ValueError if the rows have another width than the model or are
    projections, or if `top` is below 1 or above the vocabulary size.
    """
    number = whole_number(top)
    if number is None or not 1 <= number <= len(unembedding.weight):
        raise ValueError(f"top {top!r} is not valid; use 1 to {len(unembedding.weight)}, the vocabulary")
    layers: list[int | None] = [*capture.layers.get("resid_pre", []), None]
    for hook in ("resid_pre", "resid_final") if len(layers) > 1 else ("resid_final",):
        check_own_values(capture, hook)
    tokens = len(capture.token_ids)
    ids = np.full((len(layers), tokens, top), -1, np.int32)
    probabilities = np.full(ids.shape, np.nan, np.float32)
    chance, entropy, divergence = np.full((3, len(layers), tokens), np.nan, np.float32)
    for rows in capture.runs(unembedding.block):
        final = log_softmax(unembedding.logits(capture.numpy("resid_final", tokens=rows)))
        best, known = final.argmax(-1)[:, None], ~np.isnan(final).any(-1)
        for i, layer in enumerate(layers):
            own = final
            if layer is not None:
                own = log_softmax(unembedding.logits(capture.numpy("resid_pre", layer, rows)))
            ids[i, rows], probabilities[i, rows] = likeliest(own, top)
            chance[i, rows] = np.where(known, np.exp(np.take_along_axis(own, best, -1))[:, 0], np.float32(np.nan))
            entropy[i, rows] = entropy_of(own)
            divergence[i, rows] = divergence_of(final, own)
    labels = ["final" if layer is None else str(layer) for layer in layers]
    return Lens(labels, ids, probabilities, chance, entropy, divergence)


def divergence_of(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(one || other) in nats, over the last axis of log-probabilities. A token that `one` excludes adds nothing."""
    with np.errstate(invalid="ignore"):  # minus infinity minus minus infinity
        terms = np.exp(one) * (one - other)
    return np.asarray(np.where(one == -np.inf, 0, terms).sum(-1))


def likeliest(log_probabilities: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids of the `count` likeliest tokens of each row, int64; their probabilities, float32), both [n, count].

    Tokens are in descending order of probability. A row with a NaN gets ids of -1 and probabilities of NaN.

    log_probabilities: float32 [n, vocabulary]. count: at most the size of the vocabulary.
    """
    found = np.argpartition(-log_probabilities, count - 1, axis=-1)[:, :count]
    order = np.argsort(-np.take_along_axis(log_probabilities, found, -1), axis=-1, kind="stable")
    ids = np.take_along_axis(found, order, -1)
    shares = np.exp(np.take_along_axis(log_probabilities, ids, -1))
    lost = np.isnan(log_probabilities).any(-1)
    ids[lost], shares[lost] = -1, np.nan
    return ids, shares


def uncertainty(capture: Capture, unembedding: Unembedding | None = None) -> Uncertainty:
    """Entropy of the next token's distribution, and surprisal of the actual next token, for each row.

    Without `unembedding`, the captured `logits` are read, and the result has a row for each captured sample. With
    `unembedding`, the logits are computed from `resid_final`, and the result has each row that is not missing.

    Raises KeyError if the hook that is read was not captured, and ValueError if `resid_final` was stored as a
    projection.
    """
    ids = capture.token_ids
    there = known_tokens(capture)
    rows: list[np.ndarray] = [np.zeros(0, np.int64)]
    entropy: list[np.ndarray] = [np.zeros(0, np.float32)]
    surprisal: list[np.ndarray] = [np.zeros(0, np.float32)]
    for own_rows, logits in _outputs(capture, unembedding):
        own = log_softmax(logits)
        known = own_rows + 1 < len(ids)
        following = np.where(known, own_rows + 1, 0)
        known &= there[following] & (ids[following] >= 0) & (ids[following] < own.shape[1])
        chosen = np.where(known, ids[following], 0)
        rows.append(own_rows)
        entropy.append(entropy_of(own))
        surprisal.append(np.where(known, -np.take_along_axis(own, chosen[:, None], -1)[:, 0], np.float32(np.nan)))
    return Uncertainty(np.concatenate(rows), np.concatenate(entropy), np.concatenate(surprisal))


_SAMPLES = 128
"""Number of rows of captured logits to read at a time."""


def _outputs(capture: Capture, unembedding: Unembedding | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (rows of the store, their logits [rows, vocabulary]) in blocks."""
    if unembedding is None:
        positions = capture.logits_positions
        there = np.flatnonzero(positions >= 0)  # a missing sample has -1
        for first in range(0, len(there), _SAMPLES):
            samples = there[first : first + _SAMPLES]
            yield (
                positions[samples].astype(np.int64) - int(capture.attrs["start"]),
                capture.numpy("logits", None, samples),
            )
        return
    check_own_values(capture, "resid_final")
    for rows in capture.runs(unembedding.block):
        yield np.arange(rows.start, rows.stop), unembedding.logits(capture.numpy("resid_final", tokens=rows))
