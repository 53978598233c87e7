# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of next tokens, from the captured logits of many stores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dmi_connector.analysis.unembedding import log_softmax
from dmi_connector.captures.row_view import RowView
from dmi_connector.option_values import whole_number

_BYTES = 64 << 20
"""Maximum bytes of float32 logits that are read at a time. At least one row is read."""


@dataclass(frozen=True, eq=False)
class TopLogprobs:
    """The likeliest next tokens of n rows of logits.

    token_ids: int32 [n, k], in descending order of probability. logprobs: float32 [n, k], in nats. next_logprobs:
    float32 [n], of the token that came next, in nats; NaN if the store lacks that token, as for the last sampled token.
    tokens: fields of the tokens of the rows, see `RowView.tokens`.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    next_logprobs: np.ndarray
    tokens: dict[str, np.ndarray]


def top_logprobs(logits: RowView, k: int = 5) -> TopLogprobs:
    """The `k` likeliest next tokens of each row of `captures.rows("logits")`.

    A row with a NaN has log-probabilities of NaN and arbitrary token ids. Logits are read 64 MiB at a time. Raises
    ValueError for rows of another hook, and for a k that is not from 1 to the size of the vocabulary.
    """
    if not logits.sampled:
        raise ValueError(f"top_logprobs: {logits.hook!r} does not hold logits; give captures.rows('logits')")
    number = whole_number(k)
    if number is None or not 1 <= number <= logits.width:
        raise ValueError(f"top_logprobs: k {k!r} is not valid; use 1 to {logits.width}, the size of the vocabulary")
    count, tokens = len(logits), logits.tokens()
    found, values = np.empty((count, k), np.int32), np.empty((count, k), np.float32)
    following = np.full(count, np.nan, np.float32)
    step = max(1, _BYTES // (4 * logits.width))
    for first in range(0, count, step):
        rows = slice(first, min(first + step, count))
        all_of_them = log_softmax(logits.read(rows))
        largest = np.argpartition(all_of_them, -k, axis=1)[:, -k:]
        order = np.argsort(-np.take_along_axis(all_of_them, largest, 1), axis=1, kind="stable")
        found[rows] = np.take_along_axis(largest, order, 1)
        values[rows] = np.take_along_axis(all_of_them, found[rows].astype(np.int64), 1)
        after = tokens["next_token_ids"][rows]
        known = np.flatnonzero((after >= 0) & (after < logits.width))
        following[first + known] = all_of_them[known, after[known]]
    return TopLogprobs(found, values, following, tokens)
