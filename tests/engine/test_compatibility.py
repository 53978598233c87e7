# SPDX-License-Identifier: Apache-2.0
"""Features of vLLM that may be combined with capture. Each works or is refused at start (docs/COMPATIBILITY.md)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from dmi_connector import capture_args, find_captures, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.args import OWNERS
from dmi_connector.cli.tiny_models import make_model
from tests import runner
from tests.engine.check import check_header, check_store, hooks_of, reference, same
from tests.engine.harness import ALL_HOOKS, SMALL, Ask, Run, engine, finish, generate, prompt, step, submit
from tests.probekit import check_inline, save_encoder, save_probe

if TYPE_CHECKING:
    from vllm import LLM

HOOKS = hooks_of("qwen3")
NO_DRAFT = ["target", pytest.param("pool", marks=pytest.mark.soak)]
CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector", "ExampleConnector")
"""Connectors of vLLM that load keys and values of earlier computations."""


def beside(other: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Engine arguments for our connector together with another one of vLLM."""

    def both(transfer: dict[str, Any]) -> dict[str, Any]:
        extra = {"connectors": [transfer, {"kv_connector": other, "kv_role": "kv_both"}]}
        return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}

    return both


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"enable_prompt_embeds": True}, r"enable_prompt_embeds: True .*; remove --enable-prompt-embeds"),
        ({"kv_offloading_size": 0.1}, r"kv_offloading_size: it puts OffloadingConnector .*; remove --kv-offloading"),
        *(
            (
                {"kv_transfer_config": beside(name)},
                rf"kv_connector: MultiConnector runs DMI(Pool)?Connector beside {name}",
            )
            for name in CONNECTORS
        ),
        ({"kv_sharing_fast_prefill": True}, r"kv_sharing_fast_prefill: True .*; remove --kv-sharing-fast-prefill"),
        (
            {"runner": "pooling"},
            r"runner: ('pooling' computes no logits; take them|with 'pooling', vLLM skips .* use owner='target')",
        ),
    ],
    ids=["prompt-embeds", "offloading-size", *CONNECTORS, "fast-prefill", "pooling-logits"],
)
def test_a_feature_that_would_lose_rows_is_refused_with_the_fix(
    tiny_model: Callable[..., Path], tmp_path: Path, owner: str, args: dict[str, Any], reason: str
) -> None:
    given: dict[str, Any] = capture_args("hidden-states,logits", tmp_path, owner)
    for name, value in args.items():
        given[name] = value(given[name]) if callable(value) else value
    with pytest.raises(Exception, match=reason), engine(tiny_model("qwen3"), enforce_eager=True, **given):
        pytest.fail("the engine started")


@pytest.mark.parametrize("owner", NO_DRAFT)
def test_an_embedding_engine_captures_all_rows_of_its_prompts(
    tiny_model: Callable[..., Path], oracle: Callable[..., Oracle], tmp_path: Path, owner: str
) -> None:
    args: dict[str, Any] = capture_args(f"{ALL_HOOKS},-logits", tmp_path, owner, **SMALL)
    prompts = [prompt(100), prompt(33)]
    with engine(tiny_model("qwen3"), runner="pooling", enforce_eager=True, **args) as llm:
        replies = llm.embed([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
    assert [len(reply.outputs.embedding) for reply in replies] == [64, 64]
    captures = [open_capture(found.store, timeout=300) for found in find_captures(tmp_path)]
    assert sorted(len(capture.token_ids) for capture in captures) == [33, 100]
    for capture in captures:
        ids = prompt(len(capture.token_ids))
        check_header(capture, ids, len(ids), 0, len(ids), capture.path.name)
        want = reference(oracle("qwen3"), ids)
        for hook in set(HOOKS) - {"logits"}:
            value = capture.numpy(hook)
            same(value, want[hook] if value.ndim == 3 else want[hook][0], hook)


@pytest.mark.parametrize("owner", NO_DRAFT)
def test_structured_output_and_priorities_change_no_row(
    tiny_model: Callable[..., Path], oracle: Callable[..., Oracle], tmp_path: Path, owner: str
) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    run, twin = Run(tmp_path), oracle("qwen3")
    args: dict[str, Any] = capture_args(ALL_HOOKS, tmp_path, owner, **SMALL)
    choice = {"structured_outputs": StructuredOutputsParams(choice=["hello", "world"]), "ignore_eos": False}
    with engine(tiny_model("qwen3"), enforce_eager=True, scheduling_policy="priority", **args) as llm:
        generate(llm, run, {"choice": Ask(prompt(40), sampling=choice), "free": Ask(prompt(50))})
    assert run.replies["choice"].outputs[0].text in ("hello", "world")
    check_store(run.store("choice"), twin, run.tokens("choice"), 40, HOOKS, greedy=False)
    check_store(run.store("free"), twin, run.tokens("free"), 50, HOOKS)


@pytest.mark.parametrize("owner", NO_DRAFT)
def test_weights_that_are_loaded_while_serving_give_their_own_values(
    known_models: None, tmp_path: Path, owner: str
) -> None:
    """Trainers for reinforcement learning reload weights between rounds. With tied embeddings, vLLM reloads only one of
    them on a CPU.

    A request without capture fills the cache again. Its blocks must not be combined with rows from before the reload.
    """
    run, silent = Run(tmp_path / "captures"), {"dmi": {"enabled": False}}
    one, other = (make_model("qwen3", tmp_path / f"{i}", seed=i, tie_word_embeddings=False) for i in (0, 7))
    args: dict[str, Any] = capture_args(ALL_HOOKS, run.store_dir, owner, **SMALL)
    with engine(one, enforce_eager=True, **args) as llm:
        generate(llm, run, {"before": Ask(prompt(300))})
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        llm.reset_prefix_cache()
        generate(llm, run, {"silent": Ask(prompt(300), silent)})
        generate(llm, run, {"after": Ask(prompt(300))})
    check_store(run.store("before"), Oracle(one), run.tokens("before"), 300, HOOKS)
    check_store(run.store("after"), Oracle(other), run.tokens("after"), 300, HOOKS)
    first, second = (open_capture(run.store(name)).numpy("resid_final") for name in ("before", "after"))
    assert np.abs(first[:40] - second[:40]).max() > 0.1


NEEDS_GPU = pytest.mark.skipif(not runner.GPU, reason="vLLM's sleep mode needs a GPU")
SLEEPERS = ("target", "pool")
REDUCE = {"resid_pre": "rp(16,seed=3)", "resid_mid": "int8", "mlp_post": "topk(8)", "k": "cs(6,exact,seed=5)"}
"""Reductions that keep matrices, orders or signs on the GPU, or that reduce buffered values at the end of a step."""
POOL_BYTES = 4 << 30


def asleep(llm: LLM, level: int, mode: str = "abort", by_tags: bool = False) -> None:
    """Sleep and wake up with the same weights. by_tags: allocate the caches only after the weights are loaded."""
    llm.sleep(level, mode=mode)
    llm.wake_up(["weights"] if by_tags else None)
    if level == 2:
        llm.collective_rpc("reload_weights")
    if by_tags:
        llm.wake_up(["kv_cache"])


@NEEDS_GPU
@pytest.mark.parametrize("owner", SLEEPERS)
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("by_tags", [False, True])
def test_rows_before_and_after_sleep_are_true(
    tiny_model: Callable[..., Path],
    oracle: Callable[..., Oracle],
    tmp_path: Path,
    owner: str,
    level: int,
    by_tags: bool,
) -> None:
    """Captures that ended before sleep are exported before the engine frees its memory."""
    run, twin = Run(tmp_path), oracle("qwen3")
    args: dict[str, Any] = capture_args(ALL_HOOKS, tmp_path, owner, **SMALL)
    asks = {f"{length}": Ask(prompt(length)) for length in (40, 130, 200)}
    with engine(tiny_model("qwen3"), in_process=False, enforce_eager=True, enable_sleep_mode=True, **args) as llm:
        generate(llm, run, {f"before-{name}": ask for name, ask in asks.items()})
        for number in range(2):
            asleep(llm, level, by_tags=by_tags)
            generate(llm, run, {f"after{number}-{name}": ask for name, ask in asks.items()})
    for name in run.replies:
        check_store(run.store(name), twin, run.tokens(name), int(name.partition("-")[2]), HOOKS)


@NEEDS_GPU
@pytest.mark.parametrize("owner", SLEEPERS)
@pytest.mark.parametrize("level", [1, 2])
def test_a_request_that_sleep_keeps_has_all_its_rows(
    tiny_model: Callable[..., Path], oracle: Callable[..., Oracle], tmp_path: Path, owner: str, level: int
) -> None:
    """Sleep discards the request's cache, so vLLM computes its tokens again. Level 2 reloads the same weights."""
    run = Run(tmp_path)
    args: dict[str, Any] = capture_args(ALL_HOOKS, tmp_path, owner, **SMALL)
    with engine(tiny_model("qwen3"), in_process=False, enforce_eager=True, enable_sleep_mode=True, **args) as llm:
        submit(llm, {"kept": Ask(prompt(130), sampling={"max_tokens": 250})})
        for _ in range(5):
            step(llm, run)
        assert llm.llm_engine.has_unfinished_requests(), "the request ended before sleep"
        # with level 2, the request must not continue before the weights are loaded
        asleep(llm, level, mode="keep", by_tags=level == 2)
        finish((llm, run))
    check_store(run.store("kept"), oracle("qwen3"), run.tokens("kept"), 130, HOOKS)


@NEEDS_GPU
@pytest.mark.parametrize("owner", SLEEPERS)
@pytest.mark.parametrize("level", [1, 2])
def test_reduced_rows_and_scores_are_the_same_after_sleep(
    tiny_model: Callable[..., Path], tmp_path: Path, owner: str, level: int
) -> None:
    """The first step has too many tokens to defer reductions to its end. The other steps defer them."""
    probe = save_probe(tmp_path / "risk.safetensors", "mlp_out", (1,), 64, 3)
    one = save_probe(tmp_path / "one.safetensors", "attn_out", (2,), 64, 1)
    encoder = save_encoder(tmp_path / "sae", 64, 300)
    probes = {"risk": str(probe), "one": str(one), "norm": "norm(resid_pre)", "top": "top(mlp_post)"}
    probes["sae"] = f"{encoder}, hook=resid_post, layer=1, k=5"
    hooks = "resid_pre,resid_mid,mlp_post,k,probe.*"
    run = Run(tmp_path / "captures")
    args: dict[str, Any] = capture_args(hooks, run.store_dir, owner, reduce=REDUCE, probes=probes, **SMALL)
    asked = {"dmi": {"probes": {"risk": {"inline": ["max", "mean"]}}, "keep_if": "max(one) > -1e9"}}
    asks = {f"{length}": Ask(prompt(length), {"include_output_tokens": True, **asked}) for length in (40, 130, 200)}
    args |= {"enable_sleep_mode": True, "max_num_batched_tokens": 512}
    with engine(tiny_model("qwen3"), in_process=False, enforce_eager=True, **args) as llm:
        generate(llm, run, {f"before-{name}": ask for name, ask in asks.items()})
        asleep(llm, level)
        generate(llm, run, {f"after-{name}": ask for name, ask in asks.items()})
    for length in asks:
        before, after = (open_capture(run.store(f"{when}-{length}"), timeout=300) for when in ("before", "after"))
        assert before.complete and after.complete and before.token_ids.tolist() == after.token_ids.tolist()
        check_inline(after, "risk", run.replies[f"after-{length}"].kv_transfer_params["dmi_probe"]["risk"])
        for hook in before.hooks:
            was, found = before.numpy(hook), after.numpy(hook)
            assert np.abs(was).max() > 0
            assert np.linalg.norm(found - was) <= 0.01 * np.linalg.norm(was), f"{hook} of {length}"


@NEEDS_GPU
def test_sleep_frees_the_rows_of_a_pool(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    args: dict[str, Any] = capture_args(ALL_HOOKS, tmp_path, "pool", pool_bytes=POOL_BYTES, **SMALL)
    with engine(tiny_model("qwen3"), in_process=False, enforce_eager=True, enable_sleep_mode=True, **args) as llm:
        awake, _ = torch.cuda.mem_get_info()
        llm.sleep(1)
        there, _ = torch.cuda.mem_get_info()
        llm.wake_up()
        again, _ = torch.cuda.mem_get_info()
    assert there - awake > POOL_BYTES + 1_000_000_000, "sleep frees the rows and the caches of 1.5 GB"
    assert abs(again - awake) < POOL_BYTES // 2


def test_redundant_experts_have_logical_expert_ids(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like expert load balancing, the patched mapping passes other expert numbers to the kernel."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    run, seen = Run(tmp_path), []

    def elsewhere(self: Any, topk_ids: torch.Tensor) -> torch.Tensor:
        seen.append(topk_ids.flip(-1))
        return seen[-1]

    monkeypatch.setattr(BaseRouter, "_apply_eplb_mapping", elsewhere)
    args: dict[str, Any] = capture_args("router_logits,topk_ids", tmp_path, "target", **SMALL)
    with engine(tiny_model("qwen3_moe"), enforce_eager=True, **args) as llm:
        generate(llm, run, {"one": Ask(prompt(100))})
    capture = open_capture(run.store("one"), timeout=300)
    ids, scores = capture.numpy("topk_ids"), capture.numpy("router_logits")
    assert seen and ids.shape[-1] > 1
    assert np.array_equal(ids, np.argsort(-scores, axis=-1, kind="stable")[..., : ids.shape[-1]])


@pytest.mark.skipif(not runner.V2, reason="vLLM gives routed experts on its V2 runner")
@pytest.mark.parametrize("owner", OWNERS)
def test_chosen_experts_are_those_that_vllm_returns(
    tiny_model: Callable[..., Path], tmp_path: Path, owner: str
) -> None:
    run = Run(tmp_path)
    args: dict[str, Any] = capture_args("hidden-states,topk_ids", tmp_path, owner, **SMALL)
    asks = {f"{length}": Ask(prompt(length)) for length in (40, 130, 200)}
    asks["part"] = Ask(prompt(40, seed=1), sampling={"routed_experts_prompt_start": 33})
    with engine(tiny_model("qwen3_moe"), enforce_eager=True, enable_return_routed_experts=True, **args) as llm:
        generate(llm, run, asks)
    for name in asks:
        returned = run.replies[name].outputs[0].routed_experts
        capture = open_capture(run.store(name), timeout=300)
        found = capture.routed_experts(33 if name == "part" else 0)
        assert found.dtype == returned.dtype and found.shape == returned.shape, name
        assert np.array_equal(found, returned), name
        assert np.array_equal(capture.numpy("topk_ids")[:, -len(found) :], found.transpose(1, 0, 2)), name
