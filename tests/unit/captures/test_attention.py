# SPDX-License-Identifier: Apache-2.0
"""Attention weights that are computed from stored queries and keys."""

from __future__ import annotations

import numpy as np

from dmi_connector.captures.attention import _How


def test_alibi_lowers_the_scores_of_keys_that_are_further_back() -> None:
    """By the slope of the head for each position, as in the definition of ALiBi."""
    scores = np.zeros((2, 4), np.float32)
    _How(1.0, alibi_slopes=[0.5, 0.25]).finish(scores, head=1, query=2, key=0)
    np.testing.assert_array_equal(scores, [[-0.5, -0.25, 0, -np.inf], [-0.75, -0.5, -0.25, 0]])
