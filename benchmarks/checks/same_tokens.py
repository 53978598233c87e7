# SPDX-License-Identifier: Apache-2.0
"""Whether an engine gives the tokens of stock vLLM, but for ties that rounding decides.

Two engines of stock vLLM already differ on a GPU: sums are added in another order, and the largest two logits of a row
may lie within the rounding of bfloat16. So a greedy request is compared up to its first other token. Until there both
engines had the same input, and the row of our store that this token was taken from says how near the two tokens were.

Of a seeded request nothing exact can be said. Its token is the largest of logits / temperature + noise, and the store
has no noise: any difference of two logits may be what the noise made up for. These requests are counted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

UNIT = 2.0**-8
"""What one rounding to bfloat16 changes at most, in parts of the value."""
MOST_TIE = 12 * UNIT
"""Largest gap of two tokens that rounding explains, in parts of the row's largest absolute logit.

Transformers in bfloat16 takes another token than in float32 over gaps of up to 8.2 units (docs/ENGINEERING.md).
In a small Qwen3 the second largest logit of a row lies so near in 38 of 100 rows, any other one in 1 of 900.
"""
MOST_TIE_OF_ARCH = {arch: 24 * UNIT for arch in ("gemma2", "gemma3_text", "gemma4_text", "bloom")}
"""The same for families whose residual stream is large: up to 19.3 units there, 35.5 in Gemma 4."""
LEAST_SEEDED = 0.5
"""Part of the seeded requests that must have stock's tokens. Two stock engines had 26 of 30 on an H100, 10 of them
seeded: 6 of 10 at least. Wrong logits or a wrong seed leave none."""
MOST_BEYOND_OF_EXPERTS = 0.25
"""Part of the greedy requests of a model with experts that may differ by more than a tie: where rounding changes the
experts of a row, its logits change by far more. On an H100 at most 2 of 30 requests of such a model differed at all."""


def first_difference(ours: Sequence[int], stock: Sequence[int]) -> int | None:
    """Index of the first token that differs; None where none does. Raises ValueError where one ends before."""
    return next((i for i, (a, b) in enumerate(zip(ours, stock, strict=True)) if a != b), None)


def gap(row: np.ndarray, ours: int, stock: int) -> float:
    """By how much the lower logit of two tokens is below the largest one, in parts of the largest absolute logit.

    row: float32 [vocab], of the step that took the tokens. Our token has the largest logit, or something is wrong.
    """
    return float((row.max() - min(row[ours], row[stock])) / max(float(np.abs(row).max()), 1e-30))


def compare_tokens(
    ours: Sequence[Sequence[int]],
    stock: Sequence[Sequence[int]],
    seeded: Sequence[bool],
    logits: Callable[[int], np.ndarray | None],
    most_tie: float = MOST_TIE,
) -> dict[str, Any]:
    """Compare the generated tokens of requests with stock's.

    ours, stock: tokens of each request. seeded: which requests are not greedy. logits: of a request by its number,
    float32 [tokens, vocab], row i gave token i; None where the store has none.

    same_tokens_as_stock, greedy_same, seeded_same: "28 of 30", of all, of greedy and of seeded requests. largest_tie:
    the largest `gap` of a greedy request, None where none differs. beyond_tie: greedy requests with a gap above
    most_tie. unexplained: greedy requests that differ and have no logits. Raises ValueError for unequal lengths.
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
    """What of `compare_tokens` is not as it should be. experts: whether the model has experts."""
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
