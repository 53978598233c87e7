# SPDX-License-Identifier: Apache-2.0
"""The method of vLLM's V2 runner that runs without the speculator, where our draft is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from dmi_connector.engine import contract

Seen = list[tuple[Any, int, Any]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """(speculator, its steps, argument) of each call of vLLM's own method, which fails for the argument "fails"."""
    calls: Seen = []

    def sample_tokens(self: Any, grammar: Any) -> str:
        calls.append((self.speculator, self.num_speculative_steps, grammar))
        if grammar == "fails":
            raise RuntimeError("out of memory")
        return "tokens"

    monkeypatch.setattr(GPUModelRunner, "sample_tokens", sample_tokens)
    contract.sample_without_drafts()
    return calls


def runner(speculator: Any) -> GPUModelRunner:
    made = GPUModelRunner.__new__(GPUModelRunner)
    made.speculator, made.num_speculative_steps = speculator, 1
    made.execute_model_state = drafts(0)
    return made


def drafts(count: int) -> Any:
    """What a runner knows of its step, which has so many draft tokens."""
    return SimpleNamespace(input_batch=SimpleNamespace(num_draft_tokens=count))


def test_sampling_sees_no_speculator_where_our_draft_is_loaded(seen: Seen) -> None:
    ours = SimpleNamespace(model=SimpleNamespace(dmi_active=True))
    made = runner(ours)
    assert made.sample_tokens("a grammar") == "tokens"
    with pytest.raises(RuntimeError, match="out of memory"):
        made.sample_tokens("fails")
    assert seen == [(None, 0, "a grammar"), (None, 0, "fails")]
    assert made.speculator is ours and made.num_speculative_steps == 1


@pytest.mark.parametrize(
    "speculator",
    [
        None,
        SimpleNamespace(),
        SimpleNamespace(model=SimpleNamespace(dmi_active=False)),
        SimpleNamespace(model=SimpleNamespace()),
    ],
    ids=["none", "without a model", "ours without capture", "another draft"],
)
def test_other_speculators_stay(seen: Seen, speculator: Any) -> None:
    runner(speculator).sample_tokens(None)
    assert seen == [(speculator, 1, None)]


@pytest.mark.parametrize("state", [drafts(3), None], ids=["drafts, as in vLLM's warm-up", "no step"])
def test_steps_with_drafts_keep_the_speculator(seen: Seen, state: Any) -> None:
    ours = SimpleNamespace(model=SimpleNamespace(dmi_active=True))
    made = runner(ours)
    made.execute_model_state = state
    made.sample_tokens(None)
    assert seen == [(ours, 1, None)]


def test_a_second_engine_replaces_the_method_no_more(seen: Seen) -> None:
    replaced = GPUModelRunner.sample_tokens
    contract.sample_without_drafts()
    assert GPUModelRunner.sample_tokens is replaced
