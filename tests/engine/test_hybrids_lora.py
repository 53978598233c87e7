# SPDX-License-Identifier: Apache-2.0
"""LoRA on hybrid models, including the projections of their mixers: each request gets the values of its own adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dmi_connector import capture_args, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle, largest
from tests.adapters import RANK, make_adapter
from tests.engine import delta_cpu, latent_cpu
from tests.engine.check import relative_errors
from tests.engine.harness import ALL_HOOKS, SMALL, Ask, Run, engine, generate, prompt
from tests.engine.test_hybrids import DELTA, make
from tests.engine.test_models import MOST
from tests.runner import GPU

SLOTS = 2
"""Number of adapter slots. One stays empty, because vLLM uses the last slot for tokens without an adapter on a CPU."""
SOAK = ("qwen3_5-text", "granitemoehybrid-dense", "lfm2")


@pytest.mark.skipif(GPU, reason="vLLM's kernels of adapters for GPUs do not support float32")
@pytest.mark.parametrize("name", ["nemotron_h", *(pytest.param(name, marks=pytest.mark.soak) for name in SOAK)])
def test_each_request_of_a_batch_has_the_values_of_its_adapter(name: str, known_models: None, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    run, model, merged = Run(tmp_path / "stores"), make(name, tmp_path / "model"), tmp_path / "merged"
    make_adapter(model, tmp_path / "adapter", merged, 0)
    args: dict[str, Any] = capture_args(ALL_HOOKS, run.store_dir, "pool", pool_bytes=48 << 20, **SMALL)
    args |= {"enable_lora": True, "max_loras": SLOTS, "max_lora_rank": RANK}
    args |= latent_cpu.ROTARY if name.startswith("lfm2") else {}
    lora = LoRARequest("first", 1, str(tmp_path / "adapter"))
    with pytest.MonkeyPatch.context() as patch:
        if name in DELTA:
            delta_cpu.stand_in(patch)
        with engine(model, enforce_eager=True, **args) as llm:
            asks = {"none": Ask(prompt(40)), "first": Ask(prompt(40), lora=lora), "long": Ask(prompt(200), lora=lora)}
            generate(llm, run, asks)
    for weights, names in ((model, ("none",)), (merged, ("first", "long"))):
        twin, lengths = Oracle(weights, torch.float32), {one: len(asks[one].prompt) for one in names}
        worst = largest(relative_errors(run.store(one), twin, run.tokens(one), n) for one, n in lengths.items())
        assert {hook: error for hook, error in worst.items() if not error <= MOST} == {}
        assert {open_capture(run.store(one)).attrs["adapter"] for one in names} == {
            None if weights == model else "first"
        }
    hook = "attn_out" if "mix_core" not in open_capture(run.store("none")) else "mix_core"
    first, none = (open_capture(run.store(one)).numpy(hook, layer=0)[:40] for one in ("first", "none"))
    assert abs(first - none).max() > 0.01, "the adapter does not change the first mixer"
