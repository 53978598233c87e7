# SPDX-License-Identifier: Apache-2.0
"""LoRA: vLLM puts layers of its own in the place of tapped ones. Each request's values are those of its own adapter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from dmi_connector import capture_args, open_capture
from dmi_connector.analysis.transformers_oracle import Oracle
from tests import runner
from tests.adapters import RANK, make_adapter
from tests.engine.check import check_store, cosines, hooks_of
from tests.engine.harness import ALL_HOOKS, SMALL, Ask, Run, engine, generate, prompt

ARCH = "qwen2"
ADAPTERS = ("first", "second")
REQUESTS = {"none": None, "first": "first", "second": "second", "first-long": "first", "none-long": None}
"""One batch: the adapter of each request."""
LEAST_COSINE = 0.999
"""Of a row in bfloat16 with transformers' in float32."""
SLOTS = 3
"""One is empty: on a CPU vLLM takes the last slot for tokens that have no adapter."""


@pytest.fixture(scope="session")
def adapters(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """The adapters' folders by name, and their models' by name and "-merged"."""
    root, model = tmp_path_factory.mktemp("adapters"), tiny_model(ARCH)
    for seed, name in enumerate(ADAPTERS):
        make_adapter(model, root / name, root / f"{name}-merged", seed)
    return {None: model, **{name: root / name for name in ADAPTERS}}


@pytest.fixture(scope="session")
def oracles(adapters: dict[str | None, Path]) -> dict[str | None, Oracle]:
    merged = {name: folder if name is None else Path(f"{folder}-merged") for name, folder in adapters.items()}
    return {name: Oracle(model) for name, model in merged.items()}


@pytest.mark.parametrize("owner", ["draft", "target"])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_each_request_of_a_batch_has_the_values_of_its_adapter(
    mode: str, owner: str, adapters: dict[str | None, Path], oracles: dict[str | None, Oracle], tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    run = Run(tmp_path)
    args: dict[str, Any] = capture_args(ALL_HOOKS, run.store_dir, owner, **SMALL)
    wanted = {name: LoRARequest(name, 1 + i, str(adapters[name])) for i, name in enumerate(ADAPTERS)}
    lora = {"enable_lora": True, "max_loras": SLOTS, "max_lora_rank": RANK, "enforce_eager": mode == "eager"}
    asks = {
        name: Ask(prompt(200 if name.endswith("long") else 40), lora=adapter and wanted[adapter])
        for name, adapter in REQUESTS.items()
    }
    if runner.GPU:
        lora["dtype"] = "bfloat16"  # vLLM's kernels for adapters take no float32
    with engine(adapters[None], **args, **lora) as llm:
        generate(llm, run, asks)
    for name, adapter in REQUESTS.items():
        store = run.store(name), oracles[adapter], run.tokens(name), len(asks[name].prompt), hooks_of(ARCH)
        if runner.GPU:
            found = cosines(*store)
            assert min(found.values()) >= LEAST_COSINE, f"{name}: {found}"
        else:
            check_store(*store)
        assert open_capture(run.store(name)).attrs["adapter"] == adapter
    streams = [open_capture(run.store(name)).numpy("q", layer=0)[:40] for name in ("none", "first", "second")]
    assert all(abs(a - b).max() > 0.1 for a, b in combinations(streams, 2)), "adapters that change little show less"
