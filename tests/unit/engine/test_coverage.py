# SPDX-License-Identifier: Apache-2.0
"""What the first forward must write, and what later forwards must not write."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dmi_connector.engine.model.coverage import Coverage
from dmi_connector.layout import RowField

EMBED = RowField("embed", 0, "float32", 8, 64)
FIELDS = [EMBED] + [
    RowField(hook, layer, "float32", 8, 128 + 64 * layer + 32 * i)
    for layer in (0, 1)
    for i, hook in enumerate(("q", "z"))
]
TOKENS = 5


def covered(fields: Sequence[RowField] = FIELDS) -> Coverage:
    coverage = Coverage(fields)
    for row_field in fields:
        coverage.expect(row_field, f"model.layers.{row_field.layer}.{row_field.hook}")
    return coverage


class Context:
    """A fake of vLLM's forward context."""


def forward(coverage: Coverage, tokens: int = TOKENS, **counts: int) -> None:
    """Simulate one forward: embedding, header, layers. counts: tokens of some hooks; 0 leaves a hook out."""
    now = Context()
    coverage.wrote(0, [64], tokens, now)
    coverage.wrote(0, [0, 4], tokens, now)
    for row_field in FIELDS[1:]:
        count = counts.get(f"{row_field.hook}{row_field.layer}", tokens)
        if count:
            coverage.wrote(128, [row_field.offset - 128], count, now)


def test_a_forward_that_writes_every_hook_once_passes() -> None:
    coverage = covered()
    assert not coverage.begun
    forward(coverage)
    assert coverage.begun and not coverage.checked
    coverage.check(TOKENS)
    assert coverage.checked


@pytest.mark.parametrize("header_first", [True, False])
def test_poison_is_put_where_the_first_write_of_a_forward_goes(header_first: bool) -> None:
    """Models whose embeddings are computed before the forward write the header before the embedding."""
    coverage = Coverage(FIELDS, poison=True, header_first=header_first)
    assert coverage.first_at == (0 if header_first else EMBED.offset)
    for _ in range(2):
        for offsets in ([0, 4], [64]) if header_first else ([64], [0, 4]):
            coverage.wrote(0, offsets, TOKENS, coverage)
    assert coverage.tokens == TOKENS
    with pytest.raises(ValueError, match=r"q of layer 0, 1 was not written"):
        coverage.check(TOKENS)


def test_only_the_last_forward_before_the_check_counts() -> None:
    coverage = covered()
    forward(coverage, 3, z1=0)
    forward(coverage, TOKENS)
    coverage.check(TOKENS)


def test_a_hook_that_did_not_fire_is_named_with_its_module_and_the_fix() -> None:
    coverage = covered()
    forward(coverage, z1=0)
    with pytest.raises(ValueError) as caught:
        coverage.check(TOKENS)
    assert str(caught.value) == (
        "hooks: z of layer 1 was not written in a forward of 5 tokens; it is tapped at model.layers.1.z. Leave "
        "these hooks out (as in hooks='vllm-full,-topk_ids'), or turn off the feature of the engine that replaces or "
        "skips the module. docs/COMPATIBILITY.md lists the features"
    )


def test_layers_of_one_hook_are_named_together() -> None:
    coverage = covered()
    forward(coverage, z0=0, z1=0, q1=2)
    with pytest.raises(ValueError, match=r"^hooks: z of layer 0, 1 was .*; hooks: q of layer 1 got values of 2"):
        coverage.check(TOKENS)


def test_a_hook_that_fired_twice_is_named() -> None:
    coverage = covered()
    forward(coverage)
    coverage.wrote(128, [0], TOKENS, coverage)
    with pytest.raises(ValueError, match="hooks: q of layer 0 was written 2 times"):
        coverage.check(TOKENS)


def test_token_ids_must_be_as_many_as_the_forward_has_tokens() -> None:
    coverage = covered()
    forward(coverage, 3)
    with pytest.raises(ValueError, match="hooks: token_ids got values of 3 tokens in a forward of 5 tokens"):
        coverage.check(TOKENS)


def test_without_any_write_every_hook_is_named() -> None:
    with pytest.raises(ValueError, match=r"token_ids was .* positions was .* embed was .* q of layer 0, 1 .* z of"):
        covered().check(TOKENS)


def test_a_hook_without_a_tap_says_so() -> None:
    coverage = Coverage([RowField("q", 0, "float32", 8, 64)])
    coverage.wrote(0, [0, 4], TOKENS, coverage)
    with pytest.raises(ValueError, match=r"q of layer 0 was not written .* tapped at no module of this model"):
        coverage.check()


@pytest.mark.parametrize("tokens", [4, 6])
def test_later_forwards_refuse_another_number_of_tokens(tokens: int) -> None:
    coverage = covered()
    forward(coverage)
    coverage.check(TOKENS)
    forward(coverage, 7)
    now = Context()
    coverage.wrote(0, [64], 5, now)
    with pytest.raises(RuntimeError, match=f"hooks: q of layer 0 got values of {tokens} tokens in a forward of 5"):
        coverage.wrote(128, [0], tokens, now)


def test_a_forward_of_replayed_pieces_has_no_number_of_tokens_to_compare() -> None:
    """A CUDA graph writes the header without Python code. Only attention runs Python code with a number of tokens."""
    coverage = covered()
    forward(coverage)
    coverage.check(TOKENS)
    now = Context()
    coverage.wrote(0, [0, 4], 1, now)
    replayed = Context()
    coverage.wrote(128, [0], 320, replayed)
    with pytest.raises(RuntimeError, match="q of layer 0 got values of 320 tokens in a forward of 1"):
        coverage.wrote(128, [0], 320, now)


def test_logits_must_have_passed() -> None:
    coverage = covered()
    with pytest.raises(ValueError, match="logits are not captured: compute_logits did not run"):
        coverage.check_logits()
    coverage.logits = True
    coverage.check_logits()


@pytest.mark.parametrize(("fields", "first"), [(FIELDS, 64), (FIELDS[1:], 0)])
def test_rows_are_filled_before_the_first_write(fields: list[RowField], first: int) -> None:
    assert Coverage(fields, poison=True).first_at == Coverage(fields).first_at == first
    assert Coverage(fields, poison=True).poisons and not Coverage(fields).poisons
