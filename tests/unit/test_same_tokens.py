# SPDX-License-Identifier: Apache-2.0
"""benchmarks.checks.check_gpu distinguishes ties that rounding decides from wrong tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from benchmarks.checks import check_gpu
from benchmarks.checks.same_tokens import (
    LEAST_SEEDED,
    MOST_BEYOND_OF_EXPERTS,
    MOST_TIE,
    UNIT,
    compare_tokens,
    first_difference,
    gap,
    own_gap,
    token_failures,
)
from dmi_connector.cli.tiny_models import ARCHS, FAMILIES
from dmi_connector.engine.model.architectures import ARCHITECTURES
from dmi_connector.hooks import HOOKS, parse_selection
from dmi_connector.layout import ArraySpec
from tests import storekit

pytestmark = pytest.mark.soak

ROWS = np.array([[4.0, 1.0, -8.0, 0.0], [1.0, 3.0, 2.8125, -4.0], [0.0, 2.0, 1.0, 0.0]], np.float32)
"""Logits of three tokens. Greedy decoding gives 0, 1, 1. In row 1, tokens 1 and 2 differ by 12 * UNIT * 4, where 4 is
the largest magnitude.
"""
OURS = [0, 1, 1]
FIELDS = {**ARCHS, **FAMILIES}


def one(stock: list[int], rows: np.ndarray | None = ROWS, ours: list[int] = OURS, seeded: bool = False) -> dict:
    """Compare the tokens of one request."""
    return compare_tokens([ours], [stock], [seeded], lambda _number: rows)


def test_the_first_other_token_counts() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 5]) == 1
    with pytest.raises(ValueError, match="longer"):
        first_difference([1, 2], [1, 2, 3])


def test_a_gap_is_a_part_of_the_largest_logit_of_either_sign() -> None:
    assert gap(ROWS[0], 0, 1) == 3 / 8
    assert gap(ROWS[1], 1, 2) == 0.1875 / 4 == MOST_TIE
    assert gap(ROWS[1], 2, 2) == MOST_TIE, "if both tokens are 2, the gap must still be counted from the largest logit"


def test_a_token_outside_the_vocabulary_is_not_a_tie() -> None:
    wrong = one([4, 1, 1])
    assert wrong["largest_tie"] == float("inf") and wrong["beyond_tie"] == 1


def test_our_own_tokens_have_the_largest_stored_logits() -> None:
    assert own_gap(ROWS, OURS) == 0.0
    assert own_gap(ROWS, [0, 2, 1]) == MOST_TIE
    assert own_gap(ROWS, [0, 4, 1]) == float("inf")
    assert np.isnan(own_gap(np.array([[1.0, 0.0], [np.nan, 0.0]], np.float32), [0, 1]))


def test_only_drafts_that_are_accepted_at_random_may_lack_the_largest_logits() -> None:
    steps = {"scheduled_tokens": 1, "expected_tokens": 1, "largest_decode_step": 1, "draft_tokens": 0}
    for value in (0.5, float("nan")):
        (message,) = check_gpu._failures({"steps": steps, "largest_own_gap": value})
        assert "stored logit" in message
    accepted = {"steps": {**steps, "largest_decode_step": 2, "draft_tokens": 1}, "largest_own_gap": 0.5}
    assert check_gpu._failures({**accepted, "drafts_of": "eagle3"}) == []
    assert len(check_gpu._failures({**accepted, "drafts_of": "ngram"})) == 1


def test_a_tie_is_explained_and_a_wrong_token_is_not() -> None:
    tied = one([0, 2, 3])  # after the first differing token, all tokens may differ
    assert tied["same_tokens_as_stock"] == "0 of 1" and tied["greedy_same"] == "0 of 1"
    assert tied["largest_tie"] == MOST_TIE and tied["beyond_tie"] == 0 and not token_failures(tied)
    more = ROWS.copy()
    more[1, 2] -= 4 * UNIT
    assert one([0, 2, 3], more)["beyond_tie"] == 1
    wrong = one([0, 1, 2])
    assert wrong["largest_tie"] == 0.5 and wrong["beyond_tie"] == 1
    assert "1 of 1 greedy requests got other tokens" in token_failures(wrong)[0]
    assert "up to 0.5000 of the largest" in token_failures(wrong)[0]


def test_the_gap_is_looked_for_in_the_row_that_gave_the_token() -> None:
    """Tokens 1 and 2 are a tie only in row 1."""
    assert one([2, 1, 1])["beyond_tie"] == 1
    assert one([0, 1, 2])["beyond_tie"] == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_logits_explain_no_difference(bad: float) -> None:
    rows = ROWS.copy()
    rows[1, 2] = bad
    with np.errstate(invalid="ignore"):
        assert token_failures(one([0, 2, 1], rows))


def test_without_logits_no_other_token_is_explained() -> None:
    found = one([0, 2, 1], None)
    assert found["largest_tie"] is None and found["unexplained"] == 1
    assert "add logits to --hooks" in token_failures(found)[0]
    assert not token_failures(one(OURS, None))


def test_seeded_requests_are_counted_apart() -> None:
    ours = [OURS] * 5
    stock = [OURS, OURS, [0, 3, 3], [0, 3, 3], [0, 2, 2]]
    found = compare_tokens(ours, stock, [True, True, True, True, False], lambda _number: ROWS)
    assert found["same_tokens_as_stock"] == "2 of 5"
    assert found["seeded_same"] == "2 of 4" and found["greedy_same"] == "0 of 1"
    assert found["largest_tie"] == MOST_TIE, "only the greedy request must count"
    assert LEAST_SEEDED == 0.5 and not token_failures(found)
    fewer = compare_tokens(ours, [[0, 3, 3], *stock[1:]], [True] * 4 + [False], lambda _number: ROWS)
    assert token_failures(fewer) == ["1 of 4 seeded requests got the tokens of stock vLLM, fewer than 50%"]


def test_with_experts_some_requests_may_differ_by_more() -> None:
    """At most the allowed number may differ, and no request whose logits are missing."""
    ours, greedy = [OURS] * 8, [False] * 8
    most = int(MOST_BEYOND_OF_EXPERTS * 8)
    for wrong in (most, most + 1):
        found = compare_tokens(ours, [[3, 1, 1]] * wrong + [OURS] * (8 - wrong), greedy, lambda _number: ROWS)
        assert found["beyond_tie"] == wrong and token_failures(found)
        assert bool(token_failures(found, experts=True)) == (wrong > most)
    lacking = compare_tokens(ours, [[3, 1, 1], *ours[1:]], greedy, lambda _number: None)
    assert token_failures(lacking, experts=True)


def test_the_logits_come_from_the_store_of_the_request(tmp_path: Path) -> None:
    stores = storekit.Store()
    path = tmp_path / "a.zarr"
    logits = ArraySpec("logits", "float32", (), 4, per_sample=True)
    hooks = [ArraySpec("q", "float32", (0,), 8), logits]
    values = stores.write(path, hooks, 20, samples=3, values={"q": np.zeros((1, 20, 8), np.float32), "logits": ROWS})
    stores.write(tmp_path / "b.zarr", hooks[:1], 20)
    assert stores.shutdown()
    found = check_gpu.stored_logits(str(path), 3)
    assert found is not None and np.array_equal(found, values["logits"])
    assert check_gpu.stored_logits(str(path), 4) is None, "a store with 3 rows of logits must not count for 4 tokens"
    assert check_gpu.stored_logits(str(tmp_path / "b.zarr"), 3) is None, "a store without logits must give None"


@pytest.mark.parametrize("arch", [arch for arch in FIELDS if CLASSES[arch] in ARCHITECTURES])
def test_the_default_hooks_are_those_of_the_family(arch: str) -> None:
    row = ARCHITECTURES[CLASSES[arch]]
    config = AutoConfig.for_model(arch, **{"num_hidden_layers": 3, "vocab_size": 512, **FIELDS[arch]})
    dims = row.fit(config).dims(config)
    every = {name for name, hook in HOOKS.items() if dims.layers_of(hook)} - {"pattern", "indexer_topk"}
    assert set(parse_selection(check_gpu.parser().get_default("hooks"), dims).hooks) == every
