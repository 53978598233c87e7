# SPDX-License-Identifier: Apache-2.0
"""Measures of `dmi fidelity` that run an analysis on reduced rows: linear probes, the logit lens, latents of a sparse
autoencoder, and attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dmi_connector.analysis.attention_overlap import MEANINGS as OF_ATTENTION
from dmi_connector.analysis.attention_overlap import AttentionOverlap
from dmi_connector.analysis.autoencoder import MEANINGS as OF_AUTOENCODER
from dmi_connector.analysis.autoencoder import Autoencoder
from dmi_connector.analysis.fit_probe import NAMES, Labels
from dmi_connector.analysis.unembedding import Unembedding, log_softmax
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.reduce.measures import PROBES
from dmi_connector.store.format.remote_path import Given, place_of

MEANINGS: Mapping[str, str] = {
    "concepts": "correlation, on held-out rows, of the scores of two ridge regressions on a label: one fitted on full"
    " rows, one on reduced rows; the lowest correlation of all labels",
    "lens_top": "share of the rows for which the logit lens gives the same likeliest next token",
    "lens_kl": "mean KL divergence of the next token's distribution in the logit lens, full || reduced, in nats",
    **OF_AUTOENCODER,
    **OF_ATTENTION,
}
"""{measure: its meaning}, for measures that need more than the rows of a hook. A larger `lens_kl` or `sae_error` is
worse.
"""
LENS_HOOKS = ("resid_pre", "resid_mid", "resid_final")
"""Hooks of the residual stream, to which the logit lens is applied."""
TOKENS = "tokens"
"""A value of `labels`. Each of the most frequent tokens is then a label: whether it is the token of the row."""
_ROWS = 2048
"""Maximum number of rows to fit on, and of rows to score."""
_LEAST = 8
"""Minimum number of rows with a label, and of rows without the label, both to fit on and to score."""
_RIDGE = 0.01
"""Weight of the penalty, relative to the sum of the squared norms of the rows."""


@dataclass(frozen=True)
class Concepts:
    """Labels of rows.

    fit, test: indexes of the rows to fit on and of the rows to score, int64. targets: whether a row has a label, bool
    [rows, labels].
    """

    fit: np.ndarray
    test: np.ndarray
    targets: np.ndarray


def concepts_of(stores: Sequence[Given], labels: Labels | str) -> Concepts:
    """Label the rows of `stores`, and choose at random which rows to fit on and which to score.

    labels: labels of captures (`read_labels`), or TOKENS. Captures without a label are left out. With labels of
    captures, half of the captures of each label are fitted on. With TOKENS, half of the rows are fitted on. Raises
    ValueError if every label has too few rows.
    """
    tokens, own = [], []
    for store in stores:
        with open_capture(store, 0) as capture:
            tokens.append(capture.token_ids)
            own.append(_label_of(capture, labels) if not isinstance(labels, str) else None)
    counts = [len(ids) for ids in tokens]
    rng = np.random.default_rng(0)
    if isinstance(labels, str):
        ids, frequency = np.unique(np.concatenate(tokens), return_counts=True)
        frequent = ids[np.argsort(-frequency, kind="stable")][:PROBES]
        targets = np.concatenate(tokens)[:, None] == frequent
        order = rng.permutation(sum(counts))
        fit, test = order[::2], order[1::2]
    else:
        targets = np.repeat(np.array([bool(label) for label in own]), counts)[:, None]
        side = np.full(len(own), -1)  # 0: fitted on, 1: scored
        for label in (False, True):
            mine = np.array([i for i, found in enumerate(own) if found is label], int)
            side[rng.permutation(mine)] = np.arange(len(mine)) % 2
        sides = np.repeat(side, counts)
        fit, test = (rng.permutation(np.flatnonzero(sides == number)) for number in (0, 1))
    fit, test = fit[:_ROWS], test[:_ROWS]
    sizes = [np.minimum(targets[part].sum(0), (~targets[part]).sum(0)) for part in (fit, test)]
    enough = np.minimum(*sizes) >= _LEAST
    if not enough.any():
        raise ValueError(
            f"--labels: no label has {_LEAST} rows with it and {_LEAST} rows without it in both halves of the captures;"
            " give more captures"
        )
    return Concepts(fit, test, targets[:, enough])


def _label_of(capture: Capture, labels: Labels) -> bool | None:
    names = [(field, str(capture.attrs.get(field))) for field in NAMES[:-1]] + [("store", place_of(capture.path).name)]
    return next((labels[name] for name in names if name in labels), None)


class Downstream:
    """Computes the measures of MEANINGS for one layer of a hook.

    rows: the full rows, float32 [n, width]. concepts: labels of these rows. unembedding: that of the model, if the hook
    is one of LENS_HOOKS. autoencoder: one that encodes rows of this hook and layer. attention: the overlap for this
    hook and layer. None leaves the measures of that argument out.
    """

    def __init__(
        self,
        rows: np.ndarray,
        concepts: Concepts | None,
        unembedding: Unembedding | None,
        autoencoder: Autoencoder | None = None,
        attention: AttentionOverlap | None = None,
    ) -> None:
        self._rows, self._concepts, self._unembedding = rows, concepts, unembedding
        self._autoencoder, self._attention = autoencoder, attention
        self._scores = None if concepts is None else _scores(rows, concepts)

    def measures(self, decoded: np.ndarray, restored: np.ndarray | None) -> dict[str, float]:
        """The measures of MEANINGS that can be computed.

        decoded: the decoded rows of a reduction, [n, any width]. restored: these rows in the space of the hook, [n,
        width]; None if the reduction cannot restore them. Raises ValueError if the width is not that of the model or
        the autoencoder.
        """
        found = {}
        if self._concepts is not None and self._scores is not None:
            found["concepts"] = _agreement(self._scores, _scores(decoded, self._concepts))
        if self._unembedding is not None and restored is not None:
            found |= _lens_agreement(self._rows, restored, self._unembedding)
        if self._autoencoder is not None and restored is not None:
            found |= self._autoencoder.agreement(self._rows, restored)
        if self._attention is not None and restored is not None:
            found |= self._attention.measures(self._rows, restored)
        return found


def _agreement(full: np.ndarray, reduced: np.ndarray) -> float:
    """The lowest correlation of a column of `full` with the same column of `reduced`.

    A column of equal scores has the correlation 0.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        found = [np.corrcoef(a, b)[0, 1] for a, b in zip(full.T, reduced.T, strict=True)]
    return float(np.nan_to_num(found).min())


def _scores(rows: np.ndarray, concepts: Concepts) -> np.ndarray:
    """Scores [test rows, labels] of a ridge regression on rows of norm 1. The dual form is faster for wide rows."""
    fit, test = (_unit(rows[part].astype(np.float64)) for part in (concepts.fit, concepts.test))
    mean, targets = fit.mean(0), concepts.targets[concepts.fit].astype(np.float64)
    fit, test = fit - mean, test - mean
    products = fit @ fit.T
    penalty = _RIDGE * np.trace(products)
    weights = np.linalg.solve(products + penalty * np.eye(len(fit)), targets - targets.mean(0))
    return np.asarray(test @ (fit.T @ weights))


def _unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30))


def _lens_agreement(rows: np.ndarray, restored: np.ndarray, unembedding: Unembedding) -> dict[str, float]:
    """`lens_top` and `lens_kl` of MEANINGS, over at most 2,048 random rows.

    rows, restored: [n, width] of the residual stream.

    Raises ValueError if the width is not that of the model.
    """
    chosen = np.random.default_rng(0).permutation(len(rows))[:_ROWS]
    same, divergence = 0, 0.0
    for first in range(0, len(chosen), unembedding.block):
        part = chosen[first : first + unembedding.block]
        full, reduced = (log_softmax(unembedding.logits(x[part])) for x in (rows, restored))
        same += int((full.argmax(-1) == reduced.argmax(-1)).sum())
        divergence += float((np.exp(full) * (full - reduced)).sum(dtype=np.float64))
    return {"lens_top": same / len(chosen), "lens_kl": divergence / len(chosen)}
