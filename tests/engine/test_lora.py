# SPDX-License-Identifier: Apache-2.0
"""LoRA: vLLM replaces tapped layers by its own. Each request gets the values of its own adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from dmi_connector import capture_args, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from tests import runner
from tests.adapters import RANK, make_adapter
from tests.engine.check import check_store, cosines, hooks_of
from tests.engine.drafts import NGRAM
from tests.engine.harness import ALL_HOOKS, SMALL, Ask, Run, engine, generate, prompt, watch_scheduler

ADAPTERS = ("first", "second")
REQUESTS = {"none": None, "first": "first", "second": "second", "first-long": "first", "none-long": None}
"""{request: its adapter}. All requests are in one batch."""
LEAST_COSINE = 0.995
"""Minimum cosine of a bfloat16 row with the float32 row of transformers. In bfloat16 transformers reaches 0.9976."""
SLOTS = 3
"""Number of adapter slots. One stays empty, because vLLM uses the last slot for tokens without an adapter on a CPU."""
ENGINES = [
    ("qwen2", "eager", "draft"),  # the only one of these whose unembedding vLLM does not wrap
    ("llama", "eager", "target"),
    pytest.param("qwen3", "compiled", "target", marks=pytest.mark.soak),
    pytest.param("qwen2", "compiled", "draft", marks=pytest.mark.soak),
    pytest.param("qwen3", "eager", "draft", marks=pytest.mark.soak),
    pytest.param("llama", "compiled", "pool", marks=pytest.mark.soak),
    pytest.param("llama", "eager", "target beside n-gram", marks=pytest.mark.soak),
]
"""Architectures, modes and owners. On a CPU, vLLM compiles no model with LoRA, so all modes run eager there."""


@dataclass(frozen=True)
class Adapters:
    """A tiny model, its adapters, and the oracle of the model with each adapter merged. The key None has no adapter."""

    model: Path
    folders: dict[str, Path]
    oracles: dict[str | None, Oracle]


@pytest.fixture(scope="session")
def adapters(
    tiny_model: Callable[..., Path], oracle: Callable[..., Oracle], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Adapters]:
    """adapters(arch): the adapters of ADAPTERS and "reloaded", made once per session."""
    made: dict[str, Adapters] = {}

    def get(arch: str) -> Adapters:
        if arch not in made:
            root, model = tmp_path_factory.mktemp(f"adapters-{arch}"), tiny_model(arch)
            folders = {name: root / name for name in (*ADAPTERS, "reloaded")}
            for seed, folder in enumerate(folders.values()):
                make_adapter(model, folder, Path(f"{folder}-merged"), seed)
            merged = {name: Oracle(Path(f"{folder}-merged")) for name, folder in folders.items()}
            made[arch] = Adapters(model, folders, {None: oracle(arch), **merged})
        return made[arch]

    return get


def check(run: Run, name: str, oracle: Oracle, arch: str) -> None:
    """Check that a store has the values of `oracle`."""
    reply = run.replies[name]
    store = run.store(name), oracle, run.tokens(name), len(reply.prompt_token_ids), hooks_of(arch)
    if runner.GPU:
        found = cosines(*store)
        assert min(found.values()) >= LEAST_COSINE, f"{name}: {found}"
    else:
        check_store(*store)


@pytest.mark.parametrize(("arch", "mode", "owner"), ENGINES)
def test_each_request_of_a_batch_has_the_values_of_its_adapter(
    arch: str, mode: str, owner: str, adapters: Callable[[str], Adapters], tmp_path: Path
) -> None:
    from vllm.config import CompilationMode
    from vllm.lora.request import LoRARequest

    run, tiny = Run(tmp_path), adapters(arch)
    owner, _, drafts = owner.partition(" beside ")
    args: dict[str, Any] = capture_args(ALL_HOOKS, run.store_dir, owner, **SMALL)
    if drafts:
        args["speculative_config"] = NGRAM
    wanted = {name: LoRARequest(name, 1 + i, str(tiny.folders[name])) for i, name in enumerate(ADAPTERS)}
    lora = {"enable_lora": True, "max_loras": SLOTS, "max_lora_rank": RANK, "enforce_eager": mode == "eager"}
    asks = {
        name: Ask(prompt(200 if name.endswith("long") else 40), lora=adapter and wanted[adapter])
        for name, adapter in REQUESTS.items()
    }
    if runner.GPU:
        lora["dtype"] = "bfloat16"  # vLLM's LoRA kernels do not support float32
    again = LoRARequest("first", 1, str(tiny.folders["reloaded"]), load_inplace=True)
    with engine(tiny.model, **args, **lora) as llm:
        watch_scheduler(llm, run)
        compiled = llm.llm_engine.vllm_config.compilation_config.mode != CompilationMode.NONE
        assert compiled == (runner.GPU and mode == "compiled")
        generate(llm, run, asks)
        generate(llm, run, {"reloaded": Ask(prompt(40), lora=again), "second-still": asks["second"]})
    assert bool(run.drafts) == bool(drafts)
    for name, adapter in REQUESTS.items():
        check(run, name, tiny.oracles[adapter], arch)
        assert open_capture(run.store(name)).attrs["adapter"] == adapter
    check(run, "reloaded", tiny.oracles["reloaded"], arch)
    check(run, "second-still", tiny.oracles["second"], arch)
    assert open_capture(run.store("reloaded")).attrs["adapter"] == "first", "the new weights must have the old name"
    names = ("none", "first", "second", "reloaded")
    streams = [open_capture(run.store(name)).numpy("q", layer=0)[:40] for name in names]
    assert all(abs(a - b).max() > 0.1 for a, b in combinations(streams, 2)), "the adapters change q too little"
