# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks write slices of one store, which reads like the tensors of the whole model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from vllm.v1.engine.exceptions import EngineDeadError

from dmi_connector import capture_args, find_captures, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.hooks import HOOKS
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.write.finish.repair import repair
from tests.engine.check import check_store, hooks_of
from tests.engine.faults import Live, check_rows, gone, kill, many, processes, until
from tests.engine.harness import ALL_HOOKS, SMALL, Ask, Run, engine, generate, prompt
from tests.runner import GPU

pytestmark = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="each rank needs a core")

TWO_GPUS = torch.cuda.device_count() > 1
LENGTHS = (1, 33, 128, 300)
ONE_RANK = ("resid_pre", "resid_final")
"""Hooks that one rank writes alone. The other rank writes nothing for a request that selects only these."""
ALL = {"include_output_tokens": True}
LATE = [1, 2]
"""Layers, one on each rank if the ranks divide the layers of a hook. The first rank also has layer 0."""
SELECTIONS = {
    "all": (ALL_HOOKS, hooks_of("qwen3"), "draft"),
    "all, target": (ALL_HOOKS, hooks_of("qwen3"), "target"),
    "all, pool": (ALL_HOOKS, hooks_of("qwen3"), "pool"),
    "shared": ("hidden-states,z", ["resid_pre", "resid_final", "z"], "draft"),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("all", marks=pytest.mark.soak),
        pytest.param("all, target", marks=pytest.mark.soak),
        pytest.param("all, pool", marks=pytest.mark.soak),
        "shared",
    ],
)
def run(
    request: pytest.FixtureRequest,
    tiny_model: Callable[..., Path],
    oracle: Callable[..., Oracle],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """Responses of an engine whose rank 1 is killed at the end, while captures are in progress."""
    run = Run(tmp_path_factory.mktemp("tp2"))
    hooks, run.facts["hooks"], owner = SELECTIONS[request.param]
    run.facts["owner"] = owner
    args = capture_args(hooks, run.store_dir, owner, **SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        with engine(
            tiny_model("qwen3"),
            in_process=False,
            fork=True,
            end_seconds=10,  # the other rank waits forever for the killed one
            enforce_eager=True,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            **args,
        ) as llm:
            generate(llm, run, {f"len{n}": Ask(prompt(n)) for n in LENGTHS})
            generate(llm, run, {"again": Ask(prompt(300)), "only": Ask(prompt(40), kv=None)})
            generate(llm, run, {hook: Ask(prompt(40), kv={**ALL, "dmi": {"hooks": hook}}) for hook in ONE_RANK})
            late = {**ALL, "dmi": {"hooks": "resid_pre", "layers": LATE}}
            generate(llm, run, {"late": Ask(prompt(200), kv=late)})
            live = Live(llm, run, oracle("qwen3"))
            answers = live.begin(many("killed", 8, tokens=370))
            until(lambda: any(both_wrote(path) for path in live.partials("killed")), "a rank has written nothing")
            writing = processes("dmi-")  # processes() does not find them after the engine has ended
            kill(processes("Worker_TP1"))
            with pytest.raises(EngineDeadError):
                answers.result(120)
            gone(writing, 120)
    return run


def both_wrote(partial: Path) -> bool:
    """Whether both ranks have written chunks of each hook that they share."""
    files = [path for path in partial.glob("*/c/*/0/*") if path.stat().st_size]
    found = {(path.parts[-5], path.parts[-3], path.parts[-1]) for path in files}
    return {("z", "0", "0"), ("z", "0", "1"), ("resid_pre", "0", "0")} <= found and (
        ("resid_pre", "1", "0") in found or ("q", "0", "1") in found
    )


def test_a_store_of_two_ranks_reads_like_that_of_the_whole_model(run: Run, oracle: Callable[..., Oracle]) -> None:
    for name in ("len1", "len33", "len128", "len300", "again"):
        length = len(run.replies[name].prompt_token_ids)
        check_store(run.store(name), oracle("qwen3"), run.tokens(name), length, run.facts["hooks"])
    borrowed = {256} if run.facts["owner"] == "pool" else {0}
    if GPU:  # the scheduler is in a spawned process, where `borrowers_wait` has no effect
        borrowed.add(0)
    assert read_attrs(run.store("again")).get("borrowed_tokens", 0) in borrowed
    tokens = run.tokens("only")
    check_store(run.store("only"), oracle("qwen3"), tokens, 40, run.facts["hooks"], rows=(0, 40))


def test_the_rows_of_a_killed_rank_are_salvaged_with_those_of_the_other(
    run: Run, oracle: Callable[..., Oracle]
) -> None:
    """The engine ended with an error. No store is complete, because the rows that the killed rank had are unknown. If
    the killed rank had written nothing of a request, hooks that both ranks share are lost.
    """
    killed = [info for info in find_captures(run.store_dir) if str(info.key).startswith("killed")]
    assert [info.state for info in killed] == ["unfinished"] * 8
    outcomes = repair(run.store_dir)
    assert len(outcomes) == 8 and {outcome.state for outcome in outcomes} <= {"salvaged", "empty"}
    stores = [outcome.store for outcome in outcomes if outcome.store is not None]
    captures = [open_capture(store, timeout=0, allow_incomplete=True) for store in stores]
    assert not any(capture.complete for capture in captures)
    assert sum(check_rows(capture, oracle("qwen3")) for capture in captures) > 0


def test_a_rank_may_have_nothing_to_write_of_a_request(run: Run, oracle: Callable[..., Oracle]) -> None:
    for hook in ONE_RANK:
        check_store(run.store(hook), oracle("qwen3"), run.tokens(hook), 40, [hook])


def test_ranks_share_the_layers_of_a_hook_that_both_have_whole(run: Run, oracle: Callable[..., Oracle]) -> None:
    """The first two of the three layers are on one rank. A request for the last two layers has a file for each."""
    check_store(run.store("late"), oracle("qwen3"), run.tokens("late"), 200, ["resid_pre"], layers={"resid_pre": LATE})
    for name, parts in (("len300", 2), ("late", 1)):
        found = read_attrs(run.store(name))["hooks"]["resid_pre"].get("part_layers", 0)
        assert found == (parts if run.facts["hooks"] == SELECTIONS["shared"][1] else 0)


def test_sharded_hooks_are_written_by_both_ranks(run: Run) -> None:
    attrs = read_attrs(run.store("len300"))
    assert attrs["tp"] == 2
    for name, hook in attrs["hooks"].items():
        slices = 2 if HOOKS[name].sharded else 1
        assert hook["shards"] == slices, f"{name} has {hook['shards']} shards"
        files = [path.split("/") for path in attrs["files"] if path.startswith(f"{name}/c/")]
        assert {path[-1] for path in files} == {str(part) for part in range(slices)}, f"{name} is in {files}"
        runs = -(-len(hook["layers"]) // hook["part_layers"]) if "part_layers" in hook else 1
        assert {path[2] for path in files} == {str(part) for part in range(runs)}, f"{name} is in {files}"


@pytest.mark.parametrize(
    "spread",
    [
        pytest.param(False, id="sliced", marks=pytest.mark.soak),
        pytest.param(True, id="spread", marks=pytest.mark.skipif(not TWO_GPUS, reason="vLLM's CPU kernels crash")),
    ],
)
def test_routing_is_that_of_the_whole_model_however_experts_are_spread(
    tiny_model: Callable[..., Path],
    oracle: Callable[..., Oracle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spread: bool,
) -> None:
    """With expert parallelism, each rank has half of the experts."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    run = Run(tmp_path)
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "enable_expert_parallel": spread}
    args = capture_args(ALL_HOOKS, run.store_dir, "target", **SMALL)
    with engine(tiny_model("qwen3_moe"), in_process=False, fork=True, enforce_eager=True, **parallel, **args) as llm:
        generate(llm, run, {f"len{n}": Ask(prompt(n)) for n in (33, 200)})
    for name in run.replies:
        length = len(run.replies[name].prompt_token_ids)
        check_store(run.store(name), oracle("qwen3_moe"), run.tokens(name), length, hooks_of("qwen3_moe"))
