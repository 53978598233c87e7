# SPDX-License-Identifier: Apache-2.0
"""Owner pool with vLLM's hybrid cache manager, where layers with a sliding window keep only the blocks of their window.

One engine enables the manager, as by default. In `make soak` one disables it. Both have captured requests batched with
others, prompts that are prefilled in several steps, prefix hits and preemptions. test_v2_runner.py runs the tests of
`make test` again on the V2 runner with asynchronous scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector import capture_args, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.cli.tiny_models import make_model
from tests.engine.check import relative_errors
from tests.engine.harness import ALL_HOOKS, SMALL, Ask, Run, engine, generate, prompt, watch_scheduler
from tests.engine.test_models import MOST

UNCAPTURED: dict[str, Any] = {"include_output_tokens": True, "dmi": {"enabled": False}}
_GROUPS = ["SlidingWindowSpec", "FullAttentionSpec"]
STEP = 80
BLOCKS = {False: 15, True: 7}
"""Number of cache blocks, too few for all of CROWD. With the manager, each of two groups has its own blocks."""
CROWD = {f"crowd{n}": Ask(prompt(n, 1), sampling={"max_tokens": 80}) for n in (90, 100, 110, 200)}


def requests(llm: Any, run: Run) -> None:
    """Run requests alone, batched with an uncaptured one, with a common prefix, and more than fit in the cache."""
    generate(llm, run, {"alone": Ask(prompt(300))})
    generate(llm, run, {"beside": Ask(prompt(200, 2)), "uncaptured": Ask(prompt(290, 3), UNCAPTURED)})
    generate(llm, run, {"hit": Ask(prompt(290, 3)[:280] + prompt(9, 4))})
    generate(llm, run, {"uncaptured hit": Ask(prompt(290, 3)[:280] + prompt(9, 5), UNCAPTURED)})
    generate(llm, run, CROWD)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3. Every second layer attends only to the last 32 tokens."""
    return make_model("gemma3_text", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def run_of(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Run]:
    """run_of(off): the responses of an engine whose hybrid cache manager is disabled (True) or enabled (False)."""
    done: dict[bool, Run] = {}

    def get(off: bool) -> Run:
        if off not in done:
            run = Run(tmp_path_factory.mktemp("off" if off else "on"))
            args: dict[str, Any] = capture_args(ALL_HOOKS, run.store_dir, "pool", pool_bytes=16 << 20, **SMALL)
            args |= {"disable_hybrid_kv_cache_manager": True} if off else {}
            args |= {"num_gpu_blocks_override": BLOCKS[off], "max_num_batched_tokens": STEP, "enforce_eager": True}
            with engine(model, **args) as llm:
                watch_scheduler(llm, run)
                scheduler = llm.llm_engine.engine_core.engine_core.scheduler
                groups = scheduler.kv_cache_config.kv_cache_groups
                run.facts["groups"] = [type(group.kv_cache_spec).__name__ for group in groups]
                run.facts["group"] = run.facts["groups"][scheduler.connector.tracker.slots.group]
                requests(llm, run)
            done[off] = run
        return done[off]

    return get


@pytest.fixture(scope="module")
def twin(model: Path) -> Oracle:
    return Oracle(model)


def captured(run: Run) -> list[str]:
    return [name for name in run.replies if "uncaptured" not in name]


@pytest.mark.parametrize("off", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["manager on", "manager off"])
def test_every_hook_is_that_of_transformers(run_of: Callable[[bool], Run], twin: Oracle, off: bool) -> None:
    run = run_of(off)
    assert run.facts["groups"] == (["FullAttentionSpec"] if off else _GROUPS)
    assert run.facts["group"] == "FullAttentionSpec", "vLLM may reuse other blocks before their rows are exported"
    assert run.preempted, "no request was preempted"
    assert max(len(step) for step in run.steps) > 1 and max(map(max, map(dict.values, filter(None, run.steps)))) == STEP
    assert len(captured(run)) == 7
    for name in captured(run):
        errors = relative_errors(run.store(name), twin, run.tokens(name), len(run.replies[name].prompt_token_ids))
        assert {hook: error for hook, error in errors.items() if not error <= MOST} == {}, name


def test_captured_requests_compute_cached_tokens_again_and_others_reuse_them(run_of: Callable[[bool], Run]) -> None:
    run = run_of(False)
    assert run.replies["uncaptured hit"].num_cached_tokens == 256, "no prefix-cache hit"
    assert run.replies["hit"].num_cached_tokens == 0
    assert open_capture(run.store("hit")).attrs["recomputed_tokens"] == 256


@pytest.mark.soak
def test_values_do_not_depend_on_the_cache_manager(run_of: Callable[[bool], Run]) -> None:
    """Only requests that are not preempted run in the same batches."""
    for name in ("alone", "beside", "hit"):
        on, off = (open_capture(run_of(off).store(name)) for off in (False, True))
        assert on.token_ids.tolist() == off.token_ids.tolist() and set(on.hooks) == set(off.hooks)
        for hook in on.hooks:
            assert np.array_equal(on.numpy(hook), off.numpy(hook)), (name, hook)
