# SPDX-License-Identifier: Apache-2.0
"""Capture does not change tokens and adds no steps. An engine without our connector is vLLM's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from dmi_connector import capture_args
from tests.engine.check import check_store, hooks_of
from tests.engine.harness import ALL_HOOKS, BLOCK, Ask, Run, engine, generate, prompt, watch_scheduler
from tests.runner import GPU, V2

GREEDY = {f"greedy{n}": Ask(prompt(n), sampling={"max_tokens": 24}) for n in (5, 40, 130)}
CHOSEN = [5, 6, 7]
GREEDY["greedy-logprobs"] = Ask(prompt(10), sampling={"max_tokens": 24, "logprobs": 3, "logprob_token_ids": CHOSEN})
# These prompts are short and come first in the batch, because vLLM cannot split a seeded prompt over steps on a CPU.
# The V2 runner cannot use top_p, because Triton's interpreter does not support its kernel.
SAMPLED = {"max_tokens": 24, "temperature": 0.8} | ({} if V2 else {"top_p": 0.95})
SEEDED = {f"seeded{n}": Ask(prompt(n), sampling={**SAMPLED, "seed": n}) for n in (6, 7, 8, 9)}
if not V2:
    SEEDED["seeded-top-k"] = Ask(prompt(11), sampling={"max_tokens": 24, "temperature": 0.8, "top_k": 5, "seed": 11})
ASKS = {**SEEDED, **GREEDY}


def look_inside(worker: Any) -> dict[str, Any]:
    """What our package has changed in the model of a worker."""
    model = worker.get_model()
    return {
        "class": [f"{c.__module__}.{c.__qualname__}" for c in type(model).__mro__],
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        "ours": [n for n, _ in [*model.named_modules(), *model.named_buffers()] if "dmi" in n],
        "additional_config": worker.vllm_config.additional_config,
    }


def warm_up(worker: Any) -> None:
    """Run the warm-up that vLLM does on a GPU at the end of its start: mixed steps with and without drafts.

    It is greedy and has no grammar, because Triton's interpreter does not support the other kernels.
    """
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SamplingParams, "for_sampler_warmup", lambda: SamplingParams(temperature=0))
        warmup_kernels(worker.model_runner, worker.execute_model, lambda _grammar: worker.sample_tokens(None))


@pytest.fixture(scope="module")
def plain(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """vLLM in its default processes, with our package installed but not configured."""
    run = Run(tmp_path_factory.mktemp("plain"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # lets vLLM send look_inside
        with engine(tiny_model("qwen3"), in_process=False, fork=True, enforce_eager=True) as llm:
            [run.facts["worker"]] = llm.collective_rpc(look_inside)
            generate(llm, run, ASKS)
    return run


@pytest.fixture(scope="module", params=["draft", pytest.param("target", marks=pytest.mark.soak)])
def captured(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    run = Run(tmp_path_factory.mktemp("captured"))
    args = capture_args(ALL_HOOKS, run.store_dir, request.param)
    with engine(tiny_model("qwen3"), enforce_eager=True, **args) as llm:
        [run.facts["worker"]] = llm.collective_rpc(look_inside)
        if V2 and not GPU:
            llm.collective_rpc(warm_up)
        watch_scheduler(llm, run)
        generate(llm, run, ASKS)
    return run


@pytest.mark.parametrize("name", ASKS)
def test_tokens_are_those_of_plain_vllm(plain: Run, captured: Run, name: str) -> None:
    assert captured.tokens(name) == plain.tokens(name)
    assert len(set(captured.tokens(name)[-24:])) > 4, "the output is nearly constant"


def test_logprobs_of_chosen_tokens_are_those_of_plain_vllm(plain: Run, captured: Run) -> None:
    wanted, found = (
        [
            {token: step[token].logprob for token in CHOSEN}
            for step in run.replies["greedy-logprobs"].outputs[0].logprobs
        ]
        for run in (plain, captured)
    )
    assert len(found) == 24
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_seeded_tokens_are_not_those_of_greedy_decoding(plain: Run, oracle: Callable[..., Any]) -> None:
    for name, ask in SEEDED.items():
        greedy = oracle("qwen3").greedy(list(ask.prompt), 24)
        assert plain.tokens(name)[-24:] != greedy, f"{name}: sampling gave the greedy tokens"


def test_each_request_computes_its_tokens_once_and_at_most_one_more(captured: Run) -> None:
    assert captured.drafts == 0
    for name, reply in captured.replies.items():
        request = reply.kv_transfer_params["dmi_request_id"]
        steps = [step[request] for step in captured.steps if request in step]
        needed = len(reply.prompt_token_ids) + 23  # the last token is never an input
        assert sum(steps) in (needed, needed + 1), f"{name}: {sum(steps)} tokens computed, {needed} needed"
        assert steps[-23:] == [1] * 23, f"{name}: {steps}"


def test_captures_of_greedy_and_sampled_tokens_agree_with_transformers(
    captured: Run, oracle: Callable[..., Any]
) -> None:
    for name, ask in ASKS.items():
        tokens = captured.tokens(name)
        greedy = name.startswith("greedy")
        check_store(captured.store(name), oracle("qwen3"), tokens, len(ask.prompt), hooks_of("qwen3"), greedy=greedy)


def test_an_engine_without_our_connector_has_no_hooks_or_buffers_of_it(plain: Run, captured: Run) -> None:
    worker = plain.facts["worker"]
    assert worker["hooks"] == 0 and worker["ours"] == [], worker
    assert worker["additional_config"] == {}, worker
    assert worker["class"][0] == "dmi_connector.engine.models.Qwen3ForCausalLM", "another class than the test needs"
    assert all(reply.kv_transfer_params is None for reply in plain.replies.values())
    # With our connector, the same function finds hooks and buffers.
    assert captured.facts["worker"]["hooks"] > 0 and captured.facts["worker"]["ours"]


def test_installing_the_package_changes_no_compile_hash(tiny_model: Callable[..., Path]) -> None:
    from vllm import EngineArgs

    def compile_hash(**args: Any) -> str:
        fields = {"model": str(tiny_model("qwen3")), "dtype": "float32", "max_model_len": 512, **args}
        return EngineArgs(**fields).create_engine_config().compute_hash()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "")
        without = compile_hash()
    assert compile_hash() == without
    assert compile_hash(additional_config={"dmi_connector": "x"}) != without


@pytest.mark.skipif(V2, reason="the V2 runner needs the schedule of 0 draft tokens")
def test_a_prompt_that_lacks_one_token_in_the_cache_has_one_row_of_logits(
    tiny_model: Callable[..., Path], oracle: Callable[..., Any], tmp_path: Path
) -> None:
    """vLLM 0.33 turns the schedule off on its V1 runner. Then it may plan a draft token for such a prompt."""
    run, args = Run(tmp_path), capture_args("logits", tmp_path, "draft")
    del args["speculative_config"]["num_speculative_tokens_per_batch_size"]
    again = Ask(prompt(BLOCK + 1), sampling={"max_tokens": 4})
    with engine(tiny_model("qwen3"), enforce_eager=True, **args) as llm:
        watch_scheduler(llm, run)
        generate(llm, run, {"first": again})
        generate(llm, run, {"before": GREEDY["greedy5"], "again": again, "behind": GREEDY["greedy40"]})
    request = run.replies["again"].kv_transfer_params["dmi_request_id"]
    assert run.drafts == 0 and [step[request] for step in run.steps if request in step] == [1] * 4
    for name, reply in run.replies.items():
        check_store(run.store(name), oracle("qwen3"), run.tokens(name), len(reply.prompt_token_ids), ["logits"])
