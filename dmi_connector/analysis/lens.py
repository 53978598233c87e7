# SPDX-License-Identifier: Apache-2.0
"""What each layer, and the model in the end, predicts: logit lens, entropy, surprise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dmi_connector.analysis.training.rows import known_tokens
from dmi_connector.analysis.unembedding import Unembedding, entropy_of, log_softmax
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.own_values import check_own_values


@dataclass(frozen=True)
class Lens:
    """What the residual stream predicts at each layer. Made by `logit_lens`.

    layers: a label for each; "final" is the stream after the last layer, and so the model's output. ids: int32
    [layers, tokens, top], the likeliest next tokens by falling probability. probabilities: float32 of that shape.
    chance: float32 [layers, tokens], the probability of the token that "final" finds likeliest. entropy: float32
    [layers, tokens], in nats. divergence: float32 [layers, tokens], KL(final || layer) in nats. Values of missing rows
    are NaN, their ids -1. So are those of rows that hold a NaN or an infinity.
    """

    layers: list[str]
    ids: np.ndarray
    probabilities: np.ndarray
    chance: np.ndarray
    entropy: np.ndarray
    divergence: np.ndarray


@dataclass(frozen=True)
class Uncertainty:
    """How sure the model was of each next token. Made by `uncertainty`.

    rows: int64 [n], rows of the store. entropy: float32 [n], of the next token's distribution at temperature 1, in
    nats. surprise: float32 [n], -log of the probability of the token that came next, in nats; NaN where the store lacks
    it.
    """

    rows: np.ndarray
    entropy: np.ndarray
    surprise: np.ndarray


def logit_lens(capture: Capture, unembedding: Unembedding, top: int = 5) -> Lens:
    """Read the residual stream that enters each layer as if it were the last one's (nostalgebraist, 2020).

    Final norm and unembedding are applied to `resid_pre` of each captured layer and to `resid_final`. Memory holds one
    block of logits, not those of all tokens.

    Raises KeyError without `resid_final`. Raises ValueError for rows of another width than the model's, for
    projections, and for `top` outside 1 to the vocabulary.
    """
    if not 1 <= top <= len(unembedding.weight):
        raise ValueError(f"top {top} is not valid; use 1 to {len(unembedding.weight)}, the vocabulary")
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
            divergence[i, rows] = (np.exp(final) * (final - own)).sum(-1)
    labels = ["final" if layer is None else str(layer) for layer in layers]
    return Lens(labels, ids, probabilities, chance, entropy, divergence)


def likeliest(log_probabilities: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(The `count` likeliest tokens of each row, their probabilities), both [n, count], by falling probability. Of a
    row with NaN: -1 and NaN.

    log_probabilities: [n, vocabulary]. count: at most the vocabulary.
    """
    found = np.argpartition(-log_probabilities, count - 1, axis=-1)[:, :count]
    order = np.argsort(-np.take_along_axis(log_probabilities, found, -1), axis=-1, kind="stable")
    ids = np.take_along_axis(found, order, -1)
    shares = np.exp(np.take_along_axis(log_probabilities, ids, -1))
    lost = np.isnan(log_probabilities).any(-1)
    ids[lost], shares[lost] = -1, np.nan
    return ids, shares


def uncertainty(capture: Capture, unembedding: Unembedding | None = None) -> Uncertainty:
    """Entropy of the next token's distribution, and surprise at the token that came, row by row.

    Without `unembedding` they come from the captured `logits`: one row for each sampled token. With it they come from
    `resid_final`: one for each row of the store that is not missing. Raises KeyError when the hook was not captured,
    ValueError for projections.
    """
    ids = capture.token_ids
    there = known_tokens(capture)
    rows: list[np.ndarray] = [np.zeros(0, np.int64)]
    entropy: list[np.ndarray] = [np.zeros(0, np.float32)]
    surprise: list[np.ndarray] = [np.zeros(0, np.float32)]
    for own_rows, logits in _outputs(capture, unembedding):
        own = log_softmax(logits)
        known = own_rows + 1 < len(ids)
        following = np.where(known, own_rows + 1, 0)
        known &= there[following]
        chosen = ids[following]
        rows.append(own_rows)
        entropy.append(entropy_of(own))
        surprise.append(np.where(known, -np.take_along_axis(own, chosen[:, None], -1)[:, 0], np.float32(np.nan)))
    return Uncertainty(np.concatenate(rows), np.concatenate(entropy), np.concatenate(surprise))


_SAMPLES = 128
"""Samples whose logits are read at a time."""


def _outputs(capture: Capture, unembedding: Unembedding | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(rows of the store, their logits [rows, vocabulary]) in blocks."""
    if unembedding is None:
        positions = capture.logits_positions
        there = np.flatnonzero(positions >= 0)  # a lost sample has -1
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
