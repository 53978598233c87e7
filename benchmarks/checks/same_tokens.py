# SPDX-License-Identifier: Apache-2.0
"""Compares the tokens of an engine with those of stock vLLM. They may differ where rounding decides a tie.

Even two engines of stock vLLM differ on a GPU: sums are added in another order, and the largest two logits of a row may
differ by less than the rounding of bfloat16. So a greedy request is compared up to its first token that differs. Up to
there, both engines had the same input. The row of logits in our store from which this token was sampled says how close
the two tokens were.

Seeded requests cannot be judged in this way. Their token is the largest of logits / temperature + noise, and the store
does not have the noise: it may compensate any difference of two logits. These requests are counted separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

UNIT = 2.0**-8
"""Maximum relative error of one rounding to bfloat16."""
MOST_TIE = 12 * UNIT
"""Largest gap of two tokens that rounding explains, relative to the row's largest absolute logit.

transformers in bfloat16 chooses another token than in float32 for gaps of up to 8.2 units (docs/ENGINEERING.md). In a
small Qwen3, the second largest logit is within this gap in 38 of 100 rows, and any other logit in 1 of 900 rows.
"""
MOST_TIE_OF_ARCH = {arch: 24 * UNIT for arch in ("gemma2", "gemma3_text", "gemma4_text", "bloom")}
"""MOST_TIE of families with a large residual stream. There, transformers in bfloat16 chooses another token than in
float32 for gaps of up to 19.3 units, and of up to 35.5 units in Gemma 4.
"""
LEAST_SEEDED = 0.5
"""Minimum fraction of seeded requests with the tokens of stock. Two stock engines had 26 of 30 requests in common on an
H100. 10 of the 30 had seeds, so at least 6 of these 10 were the same. With wrong logits or a wrong seed, none would be.
"""
MOST_BEYOND_OF_EXPERTS = 0.5
"""Maximum fraction of greedy requests that may differ by more than a tie in a model with experts. If rounding changes
the experts of a row, its logits change by far more. With a small `exaone_moe`, transformers in bfloat16 and in float32
differ by more than a tie in 4 of 10 requests.
"""


def first_difference(ours: Sequence[int], stock: Sequence[int]) -> int | None:
    """Index of the first token that differs, or None. Raises ValueError if one list is only the start of the other."""
    return next((i for i, (a, b) in enumerate(zip(ours, stock, strict=True)) if a != b), None)


def gap(row: np.ndarray, ours: int, stock: int) -> float:
    """How far the lower logit of two tokens is below the largest one, relative to the largest absolute logit.

    row: float32 [vocab], from which the tokens were sampled. Our token should have the largest logit. Infinite for a
    token that is not in the vocabulary.
    """
    if max(ours, stock) >= len(row):
        return float("inf")
    return float((row.max() - min(row[ours], row[stock])) / max(float(np.abs(row).max()), 1e-30))


def own_gap(rows: np.ndarray, tokens: Sequence[int]) -> float:
    """The largest `gap` of the tokens of a greedy request, from the rows of logits in its store: 0 without rounding."""
    return float(np.max([gap(row, token, token) for row, token in zip(rows, tokens, strict=True)]))


def compare_tokens(
    ours: Sequence[Sequence[int]],
    stock: Sequence[Sequence[int]],
    seeded: Sequence[bool],
    logits: Callable[[int], np.ndarray | None],
    most_tie: float = MOST_TIE,
) -> dict[str, Any]:
    """Compare the generated tokens of requests with those of stock.

    ours, stock: tokens of each request. seeded: which requests are not greedy. logits: a function from the number of a
    request to float32 [tokens, vocab], where row i gave token i, or to None if the store has none.

    The result has: same_tokens_as_stock, greedy_same, seeded_same: "28 of 30", of all, of greedy and of seeded
    requests. largest_tie: the largest `gap` of a greedy request, None if none differs. beyond_tie: greedy requests with
    a gap above most_tie. unexplained: greedy requests that differ and have no logits. Raises ValueError for unequal
    lengths.
    """
    at = [first_difference(a, b) for a, b in zip(ours, stock, strict=True)]
    greedy = [number for number, one in enumerate(seeded) if not one]
    gaps, unexplained = [], 0
    for number in greedy:
        index = at[number]
        if index is None:
            continue
        rows = logits(number)
        if rows is None:
            unexplained += 1
        else:
            gaps.append(gap(rows[index], ours[number][index], stock[number][index]))
    same_greedy = sum(at[number] is None for number in greedy)
    return {
        "same_tokens_as_stock": f"{at.count(None)} of {len(at)}",
        "greedy_same": f"{same_greedy} of {len(greedy)}",
        "seeded_same": f"{at.count(None) - same_greedy} of {len(at) - len(greedy)}",
        "largest_tie": max(gaps, default=None),
        "beyond_tie": sum(not one <= most_tie for one in gaps),
        "unexplained": unexplained,
    }


def token_failures(found: dict[str, Any], experts: bool = False) -> list[str]:
    """The failures in a result of `compare_tokens`, as messages. experts: whether the model has experts."""
    wrong = []
    total = int(found["greedy_same"].split(" of ")[1])
    if found["beyond_tie"] > MOST_BEYOND_OF_EXPERTS * total * experts:
        wrong.append(
            f"{found['beyond_tie']} of {total} greedy requests got other tokens than stock vLLM's, and rounding does "
            f"not explain it: their logits are up to {found['largest_tie']:.4f} of the largest apart"
        )
    if found["unexplained"]:
        wrong.append(
            f"{found['unexplained']} of {total} greedy requests got other tokens than stock vLLM's, and no logits say "
            "how near these were: add logits to --hooks"
        )
    same, total = map(int, found["seeded_same"].split(" of "))
    if same < LEAST_SEEDED * total:
        wrong.append(f"{same} of {total} seeded requests got the tokens of stock vLLM, fewer than {LEAST_SEEDED:.0%}")
    return wrong
