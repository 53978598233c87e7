# SPDX-License-Identifier: Apache-2.0
"""Captures beside speculative decoding hold the rows of accepted tokens alone, as transformers has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dmi_connector import capture_args, find_captures, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from tests.engine.check import check_store, hooks_of
from tests.engine.drafts import K, speculative_config
from tests.engine.harness import ALL_HOOKS, SMALL, Ask, Run, engine, generate, prompt, watch_scheduler

if TYPE_CHECKING:
    from vllm import LLM

REPEATED = prompt(12) * 6
ASKS = {
    "repeated": Ask(REPEATED, sampling={"max_tokens": 100}),
    "plain": Ask(prompt(40), sampling={"max_tokens": 80}),
    "narrow": Ask(
        REPEATED + prompt(3), {"include_output_tokens": True, "dmi": {"tokens": [70, 110]}}, {"max_tokens": 60}
    ),
    "prompt": Ask(REPEATED, {"include_output_tokens": False}, {"max_tokens": 40}),
    **{f"len{n}": Ask(prompt(n)) for n in (1, 32, 127, 129, 300)},
    "one": Ask(prompt(40, seed=4), sampling={"max_tokens": 1}),
}
THREE = Ask(
    prompt(129, seed=2),
    {"include_output_tokens": True, "dmi": {"key": "three"}},
    {"n": 3, "temperature": 0.8, "max_tokens": 40},
)
PROMPT_ONLY = ("prompt",)
CASES = (
    "ngram",
    pytest.param("ngram-compiled", marks=pytest.mark.soak),
    "draft_model",
    pytest.param("eagle3", marks=pytest.mark.soak),
    "eagle3-compiled",
)


def watch_samples(llm: LLM, run: Run) -> None:
    """Record which tokens each step gave each request, as the worker said it."""
    scheduler, steps = llm.llm_engine.engine_core.engine_core.scheduler, run.facts.setdefault("samples", {})
    update = scheduler.update_from_output

    def recorded(scheduled: Any, output: Any) -> Any:
        for request_id, index in output.req_id_to_index.items():
            if tokens := output.sampled_token_ids[index]:
                steps.setdefault(request_id, []).append(list(tokens))
        return update(scheduled, output)

    scheduler.update_from_output = recorded


@pytest.fixture(scope="module", params=CASES)
def run(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    method, _, compiled = request.param.partition("-")
    run = Run(tmp_path_factory.mktemp("speculative"))
    arch, config = speculative_config(method, tiny_model, tmp_path_factory.mktemp("draft"))
    run.facts |= {"arch": arch, "method": method}
    args: dict[str, Any] = capture_args(ALL_HOOKS, run.store_dir, "target", **SMALL)
    with engine(tiny_model(arch), enforce_eager=not compiled, speculative_config=config, **args) as llm:
        watch_scheduler(llm, run)
        watch_samples(llm, run)
        generate(llm, run, ASKS)
        # Alone: on a CPU, vLLM 0.32 samples greedy requests at random in a batch that has others and drafts.
        generate(llm, run, {"three": THREE})
        stop = run.replies["repeated"].outputs[0].token_ids[20]
        again = run.tokens("repeated")
        generate(
            llm,
            run,
            {
                "stopped": Ask(REPEATED, sampling={"max_tokens": 60, "stop_token_ids": [stop]}),
                "hit": Ask(again, sampling={"max_tokens": 40}),
                "short": Ask(REPEATED, sampling={"max_tokens": 6}),
                "scored": Ask(prompt(300), sampling={"prompt_logprobs": 1}),
            },
        )
    return run


def test_every_store_is_whole_and_right(run: Run, oracle: Callable[..., Oracle]) -> None:
    assert run.drafts, "nothing was drafted: this test shows nothing"
    arch = run.facts["arch"]
    for name, reply in run.replies.items():
        prompt_len = len(reply.prompt_token_ids)
        rows = {"narrow": (70, 110)}.get(name, (0, prompt_len) if name in PROMPT_ONLY else None)
        greedy, stores = True, [run.store(name)]
        if name == "three":
            greedy, stores = False, [capture.store for capture in find_captures(run.store_dir, key="three")]
        outputs = {tuple(one.token_ids[:-1]): [*reply.prompt_token_ids, *one.token_ids] for one in reply.outputs}
        for store in stores:
            generated = tuple(open_capture(store).token_ids.tolist()[prompt_len:])
            tokens = outputs[generated] if name == "three" else run.tokens(name)
            check_store(store, oracle(arch), tokens, prompt_len, hooks_of(arch), rows=rows, greedy=greedy)


def test_draft_index_says_which_tokens_were_drafted(run: Run) -> None:
    most = 0
    for name, reply in run.replies.items():
        if name == "three" or name in PROMPT_ONLY:
            continue
        capture = open_capture(run.store(name))
        steps = run.facts["samples"][reply.kv_transfer_params["dmi_request_id"]]
        # All but the last token of a step were drafts.
        numbers = [number for tokens in steps for number in (*range(1, len(tokens)), 0)]
        start, prompt_len = int(capture.attrs["start"]), capture.prompt_len
        end = start + int(capture.attrs["num_tokens"])
        assert capture.draft_index.tolist() == [*[0] * prompt_len, *numbers][start:end], name
        assert capture.attrs["speculative"] == {"method": run.facts["method"], "num_speculative_tokens": K}
        most = max(most, int(capture.draft_index.max(initial=0)))
        counts = capture.attrs["draft_tokens"]
        assert 0 <= counts["accepted"] <= counts["scheduled"] and counts["accepted"] >= np.count_nonzero(
            capture.draft_index
        )
    assert most == (K if run.facts["method"] != "eagle3" else most), "no step accepted all drafts"
