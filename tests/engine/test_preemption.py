# SPDX-License-Identifier: Apache-2.0
"""Preempted requests have complete stores. So do the remaining requests when many others are aborted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dmi_connector import capture_args, find_captures, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from tests.engine.check import check_store, hooks_of
from tests.engine.drafts import K, make_pair
from tests.engine.harness import (
    ALL_HOOKS,
    CHUNK,
    SMALL,
    Ask,
    Run,
    engine,
    finish,
    generate,
    prompt,
    step,
    submit,
    watch_scheduler,
)
from tests.runner import ASYNC

if TYPE_CHECKING:
    from vllm import LLM

# Each request needs two or three blocks of 128. There are six for all of them; vLLM never uses the seventh.
LENGTHS = (90, 100, 110, 200)
ASKS = {f"request{n}": Ask(prompt(n), sampling={"max_tokens": 80}) for n in LENGTHS}
# The same load again. The first preempted request is aborted while it waits for blocks.
AGAIN = {
    f"again{n}": Ask(prompt(n, 1), {"include_output_tokens": True, "dmi": {"key": f"again{n}"}}, {"max_tokens": 80})
    for n in LENGTHS
}
BLOCKS = 7
CONFIGURATIONS = {
    "draft, prefix caching": ("draft", True),
    "draft, no prefix caching": ("draft", False),
    "target, prefix caching": ("target", True),
    "pool, prefix caching": ("pool", True),
    "target beside a draft model, chunks of 1": ("target", True),
}


STORM = {
    f"storm{n}": Ask(prompt(60 + n, 2), {"include_output_tokens": True, "dmi": {"key": f"storm{n}"}}) for n in range(30)
}
SPARED = [*STORM][::6]
# The last two requests have two cached blocks. Next to BESIDE, there is room for one more block of each.
TWINS = {f"twin{n}": Ask(prompt(260, 6), sampling={"max_tokens": 120}) for n in range(3)}
BESIDE = {"beside": Ask(prompt(200, 7), sampling={"max_tokens": 80})}


def storm(llm: LLM, run: Run) -> None:
    """Abort most of many requests, most of them in the queue. Three requests have the same id at once."""
    tracker, counts = llm.llm_engine.engine_core.engine_core.scheduler.connector.tracker, Counter[str]()
    take = tracker.take_counts

    def noted() -> dict[str, int]:
        taken = take()
        counts.update(taken)
        return taken

    tracker.take_counts = noted
    submit(llm, STORM)
    for _ in range(3):
        step(llm, run)
    llm.llm_engine.abort_request([name for name in STORM if name not in SPARED])
    for _ in range(3):
        submit(llm, {"same": Ask(prompt(40, 3), {"include_output_tokens": True, "dmi": {"key": "same"}})})
    finish((llm, run))
    noted()
    run.facts["counts"] = dict(counts)


_DRAFTS = "target beside a draft model, chunks of 1"
LONG = ("draft, prefix caching", "target, prefix caching", _DRAFTS)
"""Configurations of `make soak`. Owners draft and target handle preemption and prefix hits alike."""


@pytest.fixture(scope="module")
def zeroed_blocks() -> Iterator[None]:
    """vLLM zeroes new blocks before their first step, as it does with an FP8 cache."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True)
        yield


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.soak if name in LONG else ()) for name in CONFIGURATIONS],
)
def run(
    request: pytest.FixtureRequest,
    tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    zeroed_blocks: None,
) -> Run:
    run = Run(tmp_path_factory.mktemp("preemption"))
    owner, caching = CONFIGURATIONS[request.param]
    run.facts["owner"], run.facts["caching"] = owner, caching
    drafts = request.param == _DRAFTS
    run.facts["chunk"] = 1 if drafts else CHUNK
    args: dict[str, Any] = capture_args(
        ALL_HOOKS, run.store_dir, owner, **{**SMALL, "chunk_tokens": run.facts["chunk"]}
    )
    if drafts:
        args["speculative_config"] = make_pair("draft_model", tiny_model, run.store_dir).config
    args |= {"num_gpu_blocks_override": BLOCKS, "enable_prefix_caching": caching}
    run.facts["preempted"] = []
    with engine(tiny_model("qwen3"), enforce_eager=True, **args) as llm:
        watch_scheduler(llm, run)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def recorded(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            run.facts["preempted"] += output.preempted_req_ids or ()
            return output

        scheduler.schedule = recorded
        generate(llm, run, ASKS)
        before = len(run.facts["preempted"])
        submit(llm, AGAIN)
        while len(run.facts["preempted"]) == before:
            step(llm, run)
        victim = run.facts["preempted"][before].rsplit("-", 1)[0]
        llm.llm_engine.abort_request([victim])
        run.facts["victim"] = victim
        finish((llm, run))
        storm(llm, run)
        generate(llm, run, {"twin0": TWINS["twin0"]})
        while not run.store("twin0").exists():  # otherwise its borrowers begin when it does, and not while BESIDE runs
            step(llm, run)
        before = len(run.facts["preempted"])
        submit(llm, BESIDE | {name: TWINS[name] for name in ("twin1", "twin2")})
        finish((llm, run))
        run.facts["twins preempted"] = run.facts["preempted"][before:]
    assert bool(run.drafts) == drafts
    return run


def test_preempted_requests_have_whole_stores(run: Run, oracle: Callable[..., Oracle]) -> None:
    assert run.facts["preempted"], "no request was preempted"
    for name, ask in ASKS.items():
        check_store(run.store(name), oracle("qwen3"), run.tokens(name), len(ask.prompt), hooks_of("qwen3"))


def test_preempted_requests_with_borrowed_rows_have_whole_stores(run: Run, oracle: Callable[..., Oracle]) -> None:
    """With owner pool, rows of cached blocks are borrowed from the first request."""
    if run.facts["caching"]:
        assert any(name.startswith("twin") for name in run.facts["twins preempted"]), "no borrower was preempted"
    for name in TWINS:
        check_store(run.store(name), oracle("qwen3"), run.tokens(name), 260, hooks_of("qwen3"))
        borrows = run.facts["owner"] == "pool" and name != "twin0"
        assert open_capture(run.store(name)).attrs.get("borrowed_tokens", 0) == (256 if borrows else 0)


def test_a_request_aborted_while_preempted_keeps_its_whole_chunks(run: Run, oracle: Callable[..., Oracle]) -> None:
    """With owner pool, the rest of the rows is stored too.

    With asynchronous scheduling and drafts, the request is preempted before the scheduler knows which rows of its last
    step are of accepted tokens. Rows of this step are missing then.
    """
    for name, ask in AGAIN.items():
        [capture] = find_captures(run.store_dir, key=name)
        tokens, options = run.tokens(name), {}
        if name == run.facts["victim"]:
            known, chunk = len(tokens) - 1, run.facts["chunk"]
            rows = (known - (1 + K if ASYNC and chunk == 1 else 0)) // chunk * chunk
            assert not run.replies[name].finished and len(ask.prompt) < known, "the request was not aborted in decode"
            assert rows < known or chunk == 1, "the request was aborted at the end of a chunk"
            if run.facts["owner"] != "pool":
                options = {"rows": (0, rows), "missing": [[rows, known]] if rows < known else []}
        check_store(capture.store, oracle("qwen3"), tokens, len(ask.prompt), hooks_of("qwen3"), **options)


def test_a_storm_of_aborts_leaves_the_others_whole(run: Run, oracle: Callable[..., Oracle]) -> None:
    for name in SPARED:
        check_store(run.store(name), oracle("qwen3"), run.tokens(name), len(STORM[name].prompt), hooks_of("qwen3"))
    stored = sum(len(find_captures(run.store_dir, key=name)) for name in STORM)
    assert len(SPARED) < stored < len(STORM) // 2, "some aborted requests ran, most did not"
    assert run.facts["counts"] == {"cancelled": len(STORM) - stored}


def test_requests_of_one_id_at_once_have_a_store_each(run: Run, oracle: Callable[..., Oracle]) -> None:
    captures = find_captures(run.store_dir, key="same")
    assert len({capture.request_id for capture in captures}) == 3
    for capture in captures:
        check_store(capture.store, oracle("qwen3"), run.tokens("same"), 40, hooks_of("qwen3"))
