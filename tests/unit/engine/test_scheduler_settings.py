# SPDX-License-Identifier: Apache-2.0
"""The connector under vLLM's own scheduler, with settings that change the requests of a step or their tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.v1.core.sched.interface import PauseState

from dmi_connector.engine.owners import pool_limits
from tests.schedulerkit import BLOCK, Engine
from tests.shorter import seeds

Make = Callable[..., Engine]


@pytest.fixture
def make(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # vLLM reads it with the configuration
    return lambda **more: Engine(tiny_model("qwen3"), tmp_path, monkeypatch, **more)


def live(engine: Engine, steps: int = 100, longest: int = 120, resets: float = 0.03, pauses: float = 0.0) -> None:
    """Arrivals of several priorities, prefix hits, aborts, preemptions, resets of the prefix cache, pauses.

    longest: prompts have fewer tokens. resets, pauses: how often a step has one.
    """
    random = engine.random
    for _ in range(steps):
        if random.random() < 0.5 and len(engine.requests) - len(engine.replies) < 12:
            prompt = [random.choice([3, 4, 5]) + n % 20 for n in range(random.randrange(1, longest))]
            most = min(random.choice([1, 2, random.randrange(1, 120)]), 256 - len(prompt))
            tokens = {"tokens": [random.choice([0, 5, 20, 300]), None]} if random.random() < 0.3 else None
            engine.add(prompt, most, tokens, outputs=random.random() < 0.7, priority=random.randrange(4))
        running = [name for name, request in engine.requests.items() if not request.is_finished()]
        if running and random.random() < 0.05:
            engine.abort(random.choice(running))
        if random.random() < resets:
            engine.scheduler.reset_prefix_cache(reset_running_requests=random.random() < 0.5)
        if random.random() < pauses:
            engine.scheduler.set_pause_state(random.choice([*PauseState]))
        engine.step()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.drain()


@pytest.mark.parametrize("seed", seeds(8))
@pytest.mark.parametrize("kind", [{}, {"pages": 20}, {"drafts": 3, "hooks": "q,logits"}], ids=str)
def test_every_row_comes_from_its_slot_with_priorities(make: Make, kind: dict[str, Any], seed: int) -> None:
    """With the policy "priority", the scheduler may preempt any running request, even one that is already scheduled in
    the step. `long_prefill_token_threshold` limits the tokens of a long prompt per step.
    """
    scheduling = {"policy": "priority", "long_prefill_token_threshold": (0, 5, 17)[seed % 3]}
    kind = {**kind, "pages": kind.get("pages", 0), "on_gpu": seed % 2 == 0, "ahead": seed % 4 != 0}
    engine = make(seed=seed, blocks=(18, 20, 24)[seed % 3], scheduling=scheduling, **kind)
    live(engine, longest=(120, 250)[seed % 2], pauses=(0, 0.05)[seed // 4])
    assert engine.faults() == [] and engine.stored
    if kind["ahead"] and not kind["on_gpu"]:  # the thread of the lane decides when memory is freed
        assert any(request.num_preemptions for request in engine.requests.values())


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("pages", [0, 20])
@pytest.mark.parametrize("stages", [False, True])
def test_resumed_requests_of_the_v1_runner_get_other_blocks(make: Make, stages: bool, pages: int, seed: int) -> None:
    """The scheduler reports a resumed request to the V1 runner like a running request, but with new blocks.

    stages: two steps are in flight without asynchronous scheduling.
    """
    engine = make(seed=seed, v1=True, stages=stages, pages=pages, blocks=24, on_gpu=seed % 2 == 0, hooks="q,logits")
    live(engine, resets=0.05)
    assert engine.faults() == [] and engine.stored
    if seed % 2:  # without the thread of the lane, which decides when memory is freed
        assert any(request.num_preemptions for request in engine.requests.values())


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("hybrid", ["window", "states", "parts"])
def test_rows_come_from_a_pool_beside_layers_with_other_blocks(
    make: Make, monkeypatch: pytest.MonkeyPatch, hybrid: str, seed: int
) -> None:
    """vLLM frees blocks behind a window, and keeps states of some blocks only. The tracker limits the tokens of steps
    with prompts, so that their rows fit in the pool.
    """
    monkeypatch.setattr(pool_limits, "_PROMPT_TOKENS", BLOCK)
    drafts = 2 * (seed == 3 and hybrid == "parts")
    kind = {"borrows": seed % 2 == 0, "on_gpu": seed // 2 == 0, "drafts": drafts, "pages": 11 + 2 * drafts}
    engine = make(seed=seed, hybrid=hybrid, blocks=(40, 60, 120)[seed % 3], ahead=seed != 1, **kind)
    assert getattr(engine.scheduler.kv_cache_manager.coordinator, "enable_partial_hash_hits", False) == (
        hybrid == "parts"
    )
    sizes = set[int]()
    schedule, limits = engine.scheduler.schedule, engine.tracker.slots.limits  # type: ignore[attr-defined]

    def noted(*more: Any) -> Any:
        sizes.add(limits.scheduler.max_num_batched_tokens)
        return schedule(*more)

    engine.scheduler.schedule = noted  # type: ignore[method-assign]
    live(engine)
    assert engine.faults() == [] and engine.stored
    assert kind["on_gpu"] or min(sizes) < limits.stock
