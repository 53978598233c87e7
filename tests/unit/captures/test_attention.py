# SPDX-License-Identifier: Apache-2.0
"""Attention weights that are computed from stored queries and keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dmi_connector.captures import attention as attention_module
from dmi_connector.captures.attention import _How, attention, weights_of_head, window_of_head

HEADS, SIZE, TOKENS = 4, 8, 40


def capture_of(**facts: Any) -> Any:
    """A capture of a model with these parameters of attention."""
    dims = {"heads": HEADS, "kv_heads": 2, "head_dim": SIZE}
    return SimpleNamespace(path="a.zarr", attrs={"num_tokens": TOKENS, "dims": dims, "attention": facts})


def test_alibi_lowers_the_scores_of_keys_that_are_further_back() -> None:
    """By the slope of the head for each position, as in the definition of ALiBi."""
    scores = np.zeros((2, 4), np.float32)
    _How(1.0, alibi_slopes=[0.5, 0.25]).finish(scores, head=1, query=2, key=0)
    np.testing.assert_array_equal(scores, [[-0.5, -0.25, 0, -np.inf], [-0.75, -0.5, -0.25, 0]])


def by_definition(q: np.ndarray, k: np.ndarray, head: int, facts: dict[str, Any]) -> np.ndarray:
    """Weights of layer 1 in float64, [tokens, tokens], one query at a time."""
    window, chunk = (facts.get(name, [None, None])[1] for name in ("windows", "chunks"))
    weights = np.zeros((TOKENS, TOKENS))
    for query in range(TOKENS):
        keys = [key for key in range(query + 1) if window is None or query - key < window]
        keys = [key for key in keys if chunk is None or key // chunk == query // chunk]
        found = k.reshape(TOKENS, 2, SIZE)[keys, head // 2].astype("f8") @ q.reshape(TOKENS, HEADS, SIZE)[query, head]
        found *= facts.get("scale", SIZE**-0.5)
        if cap := facts.get("soft_cap"):
            found = cap * np.tanh(found / cap)
        found -= facts.get("alibi_slopes", [0] * HEADS)[head] * (query - np.array(keys))
        shares = np.exp(found)
        weights[query, keys] = shares / shares.sum()
    return weights


@pytest.mark.parametrize("at_a_time", [256, 7])
@pytest.mark.parametrize(
    "facts",
    [
        {"scale": 0.2},
        {"soft_cap": 1.5},
        {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
        {"windows": [None, 5]},
        {"windows": [3, None]},
        {"chunks": [None, 6]},
        {"windows": [None, 1], "scale": 1.0},
        {"windows": [None, 4], "chunks": [2, 10], "soft_cap": 2.0},
    ],
    ids=str,
)
def test_weights_follow_the_parameters_of_the_layer(
    facts: dict[str, Any], at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_module, "_QUERIES", at_a_time)
    rng, capture = np.random.default_rng(0), capture_of(**facts)
    q = rng.standard_normal((TOKENS, HEADS * SIZE), dtype=np.float32)
    k = rng.standard_normal((TOKENS, 2 * SIZE), dtype=np.float32)
    for head in range(HEADS):
        wanted = by_definition(q, k, head, facts)
        for first in (0, 11, TOKENS - 1):
            found = weights_of_head(capture, 1, head, q[first:], k, first)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, wanted[first:], rtol=1e-4, atol=1e-6)
            found = window_of_head(capture, 1, head, q[first:], k, first)
            sums = np.hstack([wanted[first:, :first].sum(axis=1, keepdims=True), wanted[first:, first:]])
            np.testing.assert_allclose(found, sums, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("fact", "reason"), [("sinks", "has attention sinks"), ("latent", "has latent attention")])
def test_attention_of_models_with_more_than_queries_and_keys_is_refused(fact: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"attention cannot be computed: the model {reason}"):
        attention(capture_of(**{fact: True}), 1)
