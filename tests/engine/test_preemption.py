# SPDX-License-Identifier: Apache-2.0
"""Requests that lose their blocks and begin again still give whole stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmi_connector import capture_args
from dmi_connector.oracle import Oracle
from tests.engine.check import check_store, hooks_of
from tests.engine.harness import ALL_HOOKS, CHUNK, SEGMENT, Ask, Run, engine, generate, prompt

# Each ends in its second or third block of 128, and there are six for all of them (one more is never used).
ASKS = {f"request{n}": Ask(prompt(n), sampling={"max_tokens": 80}) for n in (90, 100, 110, 200)}
BLOCKS = 7


@pytest.fixture(scope="module", params=[True, False], ids=["prefix caching", "no prefix caching"])
def run(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    run = Run(tmp_path_factory.mktemp("preemption"))
    args = capture_args(ALL_HOOKS, run.store_dir, chunk_tokens=CHUNK, segment_tokens=SEGMENT)
    args |= {"num_gpu_blocks_override": BLOCKS, "enable_prefix_caching": request.param}
    run.facts["preempted"] = []
    with engine(tiny_model("qwen3"), enforce_eager=True, **args) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def recorded(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            run.facts["preempted"] += output.preempted_req_ids or ()
            return output

        scheduler.schedule = recorded
        generate(llm, run, ASKS)
    return run


def test_preempted_requests_have_whole_stores(run: Run, oracle: Callable[..., Oracle]) -> None:
    assert run.facts["preempted"], "nothing was preempted: this test shows nothing"
    for name, ask in ASKS.items():
        check_store(run.store(name), oracle("qwen3"), run.tokens(name), len(ask.prompt), hooks_of("qwen3"))
