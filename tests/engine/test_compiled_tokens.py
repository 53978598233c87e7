# SPDX-License-Identifier: Apache-2.0
"""Under torch.compile in bf16, capturing every hook changes neither a token nor the last bit of a probability.

Inductor keeps fused intermediates in float32. A tap that made it round one of them would change what follows, so this
compares the log-probabilities of all generated tokens with plain vLLM's, exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dmi_connector import capture_args
from tests.engine.harness import ALL_HOOKS, Ask, Run, engine, generate, prompt

SAMPLING = {"max_tokens": 32, "logprobs": 1}
ASKS = {f"{n} tokens": Ask(prompt(n), sampling=SAMPLING) for n in (6, 33, 100, 150)} | {
    "seeded": Ask(prompt(9), sampling={**SAMPLING, "temperature": 0.8, "seed": 3})
}


@pytest.fixture(scope="module")
def plain(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("plain-compiled"))
    with engine(tiny_model("qwen3", "bfloat16"), dtype="bfloat16", enforce_eager=False) as llm:
        generate(llm, run, ASKS)
    return run


@pytest.fixture(scope="module")
def captured(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("captured-compiled"))
    args = capture_args(ALL_HOOKS, run.store_dir)
    with engine(tiny_model("qwen3", "bfloat16"), dtype="bfloat16", enforce_eager=False, **args) as llm:
        generate(llm, run, ASKS)
    return run


@pytest.mark.parametrize("name", ASKS)
def test_tokens_and_probabilities_are_those_of_plain_vllm(plain: Run, captured: Run, name: str) -> None:
    assert captured.tokens(name) == plain.tokens(name)
    mine, theirs = (r.replies[name].outputs[0].cumulative_logprob for r in (captured, plain))
    assert mine is not None and mine == theirs, f"{name}: cumulative log-probability {mine}, plain vLLM {theirs}"
