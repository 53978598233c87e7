# SPDX-License-Identifier: Apache-2.0
"""Drafts with gated delta nets: values of rows are those of transformers, and `mix_core` can be captured.

The model runs in bfloat16 on vLLM's CPU kernels, and in the order of its forward on a GPU (`delta_cpu.order_of_gpu`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.drafts import NGRAM, K
from dmi_connector import capture_args, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from tests.engine import delta_cpu
from tests.engine.drafts import Pair, drafting
from tests.engine.harness import ALL_HOOKS, SMALL, Ask, Run, generate, prompt
from tests.engine.test_hybrids import check_rounded, make
from tests.runner import GPU, V2

MODEL = "qwen3_5-bf16"
MODES = ["eager", pytest.param("compiled", marks=pytest.mark.soak)]


def draft_always(llm: Any) -> None:
    """Give each request K draft tokens in each step: those of the n-gram method, then the last token again.

    vLLM 0.32's convolution on a CPU fails if the requests of a step have different numbers of draft tokens. With the V2
    runner, `drafting` gives K already.
    """
    drafter = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
    propose: Callable[..., list[list[int]]] = drafter.propose

    def padded(count: int, sampled: Any, lengths: Any, tokens: Any, **more: Any) -> list[list[int]]:
        found = propose(count, sampled, lengths, tokens, **more)
        last = [int(tokens[i, lengths[i] - 1]) for i in range(len(found))]
        return [[*d, *[last[i]] * (count - len(d))] if sampled[i] else [] for i, d in enumerate(found)]

    drafter.propose = padded


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_accepted_tokens_are_those_of_transformers(mode: str, known_models: None, tmp_path: Path) -> None:
    run, model = Run(tmp_path / "stores"), make(MODEL, tmp_path / "model")
    pair = Pair(MODEL, model, {**NGRAM, "method": "ngram_gpu" if V2 else "ngram"})
    args: dict[str, Any] = capture_args(ALL_HOOKS, run.store_dir, "pool", pool_bytes=48 << 20, **SMALL)
    args |= {"dtype": "bfloat16", "enforce_eager": mode == "eager", "enable_prefix_caching": False}
    args |= {"gdn_prefill_backend": "triton"} if GPU else {}
    with pytest.MonkeyPatch.context() as patch:
        delta_cpu.order_of_gpu(patch)
        with drafting(pair, **args) as llm:
            if not V2:
                draft_always(llm)
            generate(
                llm,
                run,
                {
                    "repeated": Ask(prompt(12) * 6, sampling={"max_tokens": 60}),
                    "plain": Ask(prompt(40), sampling={"max_tokens": 60}),
                    "len300": Ask(prompt(300), sampling={"max_tokens": 40}),
                },
            )
    counts = open_capture(run.store("repeated")).attrs["draft_tokens"]
    assert counts["scheduled"] > counts["accepted"] > K
    lengths = {name: len(reply.prompt_token_ids) for name, reply in run.replies.items()}
    check_rounded(run, lengths, Oracle(model, torch.float32), Oracle(model, torch.bfloat16))
