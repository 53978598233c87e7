# SPDX-License-Identifier: Apache-2.0
"""Two pipeline stages write their layers to the same store. Several batches are in flight at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from dmi_connector import capture_args, find_captures, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.hooks import HOOKS
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.write.finish.repair import repair
from tests.engine.check import check_store, cosines, hooks_of
from tests.engine.faults import Live, check_rows, gone, kill, many, processes
from tests.engine.harness import (
    ALL_HOOKS,
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

pytestmark = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="each stage needs a core")

LENGTHS = (1, 33, 128, 300)
HOOKS_OF_STAGES = f"{ALL_HOOKS},-pattern"
ALL = {"include_output_tokens": True}
LATE = [1, 2]
"""One layer of each stage."""
ONE_STAGE = {"first": {"hooks": "embed"}, "second": {"hooks": "resid_final"}, "layer": {"hooks": "q", "layers": [0]}}
"""{request: its options}. One stage has nothing to write for these requests."""
CAPTURED = ("len1", "len33", "len128", "len300", "again")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("target", True, "qwen3"), id="target"),
        pytest.param(("pool", True, "qwen3"), marks=pytest.mark.soak, id="pool"),
        pytest.param(("target", True, "qwen3_moe"), marks=pytest.mark.soak, id="target, experts"),
        pytest.param(("target", False, "qwen3"), marks=pytest.mark.soak, id="target, compiled"),
    ],
)
def run(
    request: pytest.FixtureRequest,
    tiny_model: Callable[..., Path],
    oracle: Callable[..., Oracle],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """Responses of an engine whose second stage's worker is killed at the end, while captures are in progress."""
    run = Run(tmp_path_factory.mktemp("stages"))
    run.facts["owner"], eager, arch = request.param
    run.facts["arch"], run.facts["hooks"] = arch, hooks_of(arch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        with engine(tiny_model(arch), **options(run, run.facts["owner"], eager)) as llm:
            generate(llm, run, {f"len{n}": Ask(prompt(n)) for n in LENGTHS} | {"plain": Ask(prompt(50), kv=None)})
            generate(llm, run, {"again": Ask(prompt(300)), "only": Ask(prompt(40), kv={})})
            asked = ONE_STAGE | {"late": {"hooks": "resid_pre", "layers": LATE}}
            generate(llm, run, {name: Ask(prompt(200), kv={**ALL, "dmi": dmi}) for name, dmi in asked.items()})
            run.facts["metrics"] = [metric for metric in llm.get_metrics() if metric.name.startswith("vllm:dmi_")]
            live = Live(llm, run, oracle(arch))
            answers = live.begin(many("killed", 8, tokens=370))
            writing = processes("dmi-")  # processes() does not find them after the engine has ended
            kill(processes("Worker_PP1"))
            with pytest.raises(EngineDeadError):
                answers.result(120)
            gone(writing, 120)
    return run


def options(run: Run, owner: str, eager: bool) -> dict[str, Any]:
    """Options of an engine with two stages."""
    stages: dict[str, Any] = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    stages |= {"enforce_eager": eager, "disable_log_stats": False}
    if eager:
        stages["worker_cls"] = "tests.engine.stage_cpu.StageWorker"
    args = capture_args(HOOKS_OF_STAGES, run.store_dir, owner, **SMALL)
    return {"in_process": False, "fork": eager, "end_seconds": 10, **stages, **args}


def test_a_store_of_two_stages_reads_like_that_of_the_whole_model(run: Run, oracle: Callable[..., Oracle]) -> None:
    for name in CAPTURED:
        length = len(run.replies[name].prompt_token_ids)
        check_store(run.store(name), oracle(run.facts["arch"]), run.tokens(name), length, run.facts["hooks"])
    borrowed = 256 if run.facts["owner"] == "pool" else 0
    assert read_attrs(run.store("again")).get("borrowed_tokens", 0) == borrowed
    check_store(run.store("only"), oracle(run.facts["arch"]), run.tokens("only"), 40, run.facts["hooks"], rows=(0, 40))


def test_each_stage_writes_the_layers_that_it_has(run: Run) -> None:
    """vLLM gives two of the three layers to the first stage."""
    attrs = read_attrs(run.store("len300"))
    assert attrs["tp"] == 2
    for name, hook in attrs["hooks"].items():
        files = [path.split("/") for path in attrs["files"] if path.startswith(f"{name}/c/")]
        parts = {"0", "1"} if HOOKS[name].scope == "layer" else {"0"}
        assert {path[2] for path in files} == parts, f"{name} is in {files}"
        assert hook.get("part_layers", 0) == (2 if HOOKS[name].scope == "layer" else 0), name


def test_metrics_have_a_backlog_of_each_stage(run: Run) -> None:
    metrics = run.facts["metrics"]
    assert {metric.labels["rank"] for metric in metrics if metric.name == "vllm:dmi_backlog_bytes"} == {"0", "1"}
    assert [metric.value > 0 for metric in metrics if metric.name == "vllm:dmi_exported_bytes"] == [True]


def test_a_stage_may_have_nothing_to_write_of_a_request(run: Run, oracle: Callable[..., Oracle]) -> None:
    twin = oracle(run.facts["arch"])
    for name, dmi in ONE_STAGE.items():
        layers = {"q": [0]} if name == "layer" else None
        check_store(run.store(name), twin, run.tokens(name), 200, [dmi["hooks"]], layers=layers)
    check_store(run.store("late"), twin, run.tokens("late"), 200, ["resid_pre"], layers={"resid_pre": LATE})


def test_the_rows_of_a_killed_stage_are_salvaged_with_those_of_the_other(
    run: Run, oracle: Callable[..., Oracle]
) -> None:
    """The engine ended with an error. No store is complete, because the rows that the killed stage had are unknown."""
    killed = [info for info in find_captures(run.store_dir) if str(info.key).startswith("killed")]
    assert [info.state for info in killed] == ["unfinished"] * 8
    outcomes = repair(run.store_dir)
    assert len(outcomes) == 8 and {outcome.state for outcome in outcomes} <= {"salvaged", "empty"}
    stores = [outcome.store for outcome in outcomes if outcome.store is not None]
    captures = [open_capture(store, timeout=0, allow_incomplete=True) for store in stores]
    assert not any(capture.complete for capture in captures)
    assert sum(check_rows(capture, oracle(run.facts["arch"])) for capture in captures) > 0


@pytest.mark.soak
@pytest.mark.parametrize("owner", ["target", "pool"])
def test_batches_that_overlap_preemptions_and_aborts_leave_whole_stores(
    owner: str, tiny_model: Callable[..., Path], oracle: Callable[..., Oracle], tmp_path: Path
) -> None:
    """Six blocks for four requests that need two or three each. The scheduler runs in this process."""
    run = Run(tmp_path)
    asks = {f"r{n}": Ask(prompt(n), sampling={"max_tokens": 80}) for n in (90, 100, 110, 200)}
    again = {f"again{n}": Ask(prompt(n, 1), sampling={"max_tokens": 80}) for n in (90, 100, 110, 200)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        args = {**options(run, owner, False), "in_process": True, "num_gpu_blocks_override": 7}
        with engine(tiny_model("qwen3"), **args) as llm:
            watch_scheduler(llm, run)
            queue, most = llm.llm_engine.engine_core.engine_core.batch_queue, 0
            generate(llm, run, asks)
            preempted = len(run.preempted)
            submit(llm, again)
            while len(run.preempted) == preempted:
                step(llm, run)
                most = max(most, len(queue))
            victim = run.preempted[preempted].rsplit("-", 1)[0]
            running = next(name for name in again if name != victim)
            llm.llm_engine.abort_request([victim, running])
            finish((llm, run))
    assert preempted, "no request was preempted"
    assert most, "no batch was in flight while another was scheduled"
    for name, ask in (asks | again).items():
        if name not in (victim, running):
            check_store(run.store(name), oracle("qwen3"), run.tokens(name), len(ask.prompt), hooks_of("qwen3"))


@pytest.mark.soak
def test_stages_reduce_the_rows_of_their_layers(
    tiny_model: Callable[..., Path], oracle: Callable[..., Oracle], tmp_path: Path
) -> None:
    run = Run(tmp_path)
    reduce = {"mlp_post": "topk(64)", "*": "int8"}
    args = options(run, "target", False)
    args |= capture_args("hidden-states,resid_mid,mlp_post,q", tmp_path, "target", reduce=reduce, **SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        with engine(tiny_model("qwen3"), **args) as llm:
            generate(llm, run, {f"len{n}": Ask(prompt(n)) for n in (33, 300)})
    for length in (33, 300):
        name = f"len{length}"
        hooks = list(open_capture(run.store(name), timeout=300).attrs["hooks"])
        least = cosines(run.store(name), oracle("qwen3"), run.tokens(name), length, hooks)
        assert set(least) == {"resid_pre", "resid_final", "resid_mid", "mlp_post", "q"}
        assert least.pop("mlp_post") > 0.9 and min(least.values()) > 0.999, least
