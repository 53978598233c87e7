# SPDX-License-Identifier: Apache-2.0
"""`hidden-states` exported to safetensors equals the output of vLLM's own connector for all layer ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dmi_connector import capture_args
from dmi_connector.analysis.export.safetensors import export_safetensors
from tests.engine.check import same
from tests.engine.harness import Ask, Run, engine, generate, prompt

ALL_IDS = [0, 1, 2, 3]  # the inputs of the three layers, and the output of the last one
# All prompts run in one step. The stock proposer schedules two tokens per decode step, so later steps have other
# batches, in which kernels round differently.
ONE_STEP = {"max_num_batched_tokens": 512}
ASKS = {
    "prompt": Ask(prompt(33), kv={"include_output_tokens": False}),
    "short": Ask(prompt(20)),
    "block": Ask(prompt(128)),
    "long": Ask(prompt(300)),
}


@pytest.fixture(scope="module")
def stock(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("stock"))
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ALL_IDS}},
    }
    transfer = {
        "kv_connector": "StockOnCPU",
        "kv_connector_module_path": "tests.engine.stock_cpu",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(run.store_dir)},
    }
    args = {"speculative_config": speculative, "kv_transfer_config": transfer, **ONE_STEP}
    with engine(tiny_model("qwen3"), enforce_eager=True, **args) as llm:
        generate(llm, run, ASKS)
    return run


@pytest.fixture(scope="module")
def ours(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("ours"))
    args = capture_args("hidden-states", run.store_dir)
    with engine(tiny_model("qwen3"), enforce_eager=True, **args, **ONE_STEP) as llm:
        generate(llm, run, ASKS)
    return run


@pytest.mark.parametrize("name", ASKS)
def test_export_equals_the_stock_file(stock: Run, ours: Run, name: str, tmp_path: Path) -> None:
    assert ours.tokens(name) == stock.tokens(name)
    theirs = stock.replies[name].kv_transfer_params["hidden_states_path"]
    exported = tmp_path / "ours.safetensors"
    assert export_safetensors(ours.store(name), exported) == ALL_IDS
    with safe_open(theirs, framework="pt") as a, safe_open(exported, framework="pt") as b:
        assert sorted(a.keys()) == sorted(b.keys()) == ["hidden_states", "token_ids"]
        assert a.metadata() == b.metadata()
        tokens, theirs_tokens = b.get_tensor("token_ids"), a.get_tensor("token_ids")
        got, want = b.get_tensor("hidden_states"), a.get_tensor("hidden_states")
    assert (got.dtype, got.shape, tokens.dtype) == (want.dtype, want.shape, theirs_tokens.dtype), name
    assert tokens.tolist() == theirs_tokens.tolist() == ours.tokens(name)[: 33 if name == "prompt" else -1]
    length = len(ASKS[name].prompt)
    assert torch.equal(got[:length], want[:length]), f"{name}: prompt rows are not bit-equal"
    same(got[length:].numpy(), want[length:].numpy(), f"{name}: generated rows")
