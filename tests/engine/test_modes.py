# SPDX-License-Identifier: Apache-2.0
"""Modes of the option `reduce` on one and two ranks, with wide rows, compared with transformers.

In one engine, each mode reduces other hooks. Two more hooks are stored as 8-bit cs(k).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dmi_connector import capture_args, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.cli.tiny_models import make_model
from dmi_connector.reduce import MODES, parse
from dmi_connector.reduce.modes import rules_of
from dmi_connector.store.read.verify import verify_store
from tests.engine.check import attention_weights, hooks_of, reference
from tests.engine.check_reduced import check, check_summaries, whole_rows
from tests.engine.harness import ALL_HOOKS, SMALL, Ask, Run, engine, generate, prompt

SIZES = {
    "hidden_size": 640,
    "intermediate_size": 1280,
    "num_hidden_layers": 2,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
"""Each of two ranks has more than 512 values of `q`, `z` and `mlp_post`, and 128 of `k`."""
HOOKS_OF = {
    "full8": ("resid_pre", "q"),
    "rp8": ("embed", "mlp_pre", "k"),
    "topk8": ("attn_out", "mlp_pre_linear", "k_rot"),
    "summary": ("resid_mid",),
}
"""{mode: its hooks}. `compact` reduces the others. `summary` reduces `mlp_post` on one rank, `compact` on two."""
SKETCHED = {"final_ln": "cs(48,seed=5)", "v": "cs(20)"}
"""Hooks that are stored whole, and in slices with two ranks."""
CHOSEN = {
    "resid_pre": "int8(32)",
    "q": "int8(32)",
    "embed": "rp(512)",
    "mlp_pre": "rp(512)",
    "k": "int8(32)",
    "attn_out": "topk(64)",
    "mlp_pre_linear": "topk(64)",
    "k_rot": "topk(64)",
    "resid_mid": "rp(512)",
    "z": "rp(256)",
    "ln1": "rp(512)",
    "q_rot": "rp(512)",
    "ln2": "rp(512)",
    "mlp_out": "rp(512)",
    "resid_final": "rp(512)",
    "pattern": "attn(4,half)",
    **SKETCHED,
}
"""The reductions that the modes choose according to docs/REDUCTIONS.md."""
pytestmark = pytest.mark.soak  # test_reduce.py has the reductions, tests/unit/test_hooks.py what modes choose
LENGTHS = (1, 300)
NOISE = 1e-4
"""Rounding differences of two float32 programs. Sums have ten times as many terms as in the other tiny models."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, known_models: None) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("wide"), **SIZES)


@pytest.fixture(scope="module")
def twin(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="module", params=[2, 1], ids=["tp2", "tp1"])
def run(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    tp = request.param
    if tp > (os.cpu_count() or 1):
        pytest.skip("each rank needs a core")
    run = Run(tmp_path_factory.mktemp(f"modes-tp{tp}"))
    reduce = SKETCHED | {",".join(hooks): mode for mode, hooks in HOOKS_OF.items()}
    reduce |= ({"mlp_post": "summary"} if tp == 1 else {}) | rules_of("compact")
    args = capture_args(f"{ALL_HOOKS},pattern", run.store_dir, reduce=reduce, **SMALL)
    with pytest.MonkeyPatch.context() as patch:
        if tp > 1:
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
            args |= {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        with engine(model, in_process=tp == 1, fork=tp > 1, enforce_eager=True, **args) as llm:
            generate(llm, run, {f"len{n}": Ask(prompt(n)) for n in LENGTHS})
    return run


@pytest.mark.parametrize("length", LENGTHS)
def test_modes_choose_what_decodes_to_the_values_of_transformers(run: Run, twin: Oracle, length: int) -> None:
    store, tokens = run.store(f"len{length}"), run.tokens(f"len{length}")
    capture, want = open_capture(store, timeout=300), reference(twin, tokens)
    assert verify_store(store) == []
    chosen = CHOSEN | {"mlp_post": "topk(64)" if capture.attrs["tp"] == 1 else "topk(64,sample=0)"}
    stored = {hook: capture.reduction(hook) for hook in capture.attrs["hooks"]}
    assert stored == {hook: parse(spec) for hook, spec in chosen.items()} | {"logits": None}
    assert {*HOOKS_OF, "compact"} == {*MODES}
    for hook in hooks_of("qwen3"):
        exact = whole_rows(want[hook], hook, length, tokens)
        check(capture, hook, capture.numpy(hook), exact, NOISE)
    cut = [hook for hook in ("q", "k", "v", "z", "mlp_post") if capture.attrs["hooks"][hook]["shards"] == 2]
    assert len(cut) == (5 if capture.attrs["tp"] == 2 else 0)


@pytest.mark.parametrize("length", LENGTHS)
def test_summaries_of_compact_are_those_of_transformers(run: Run, twin: Oracle, length: int) -> None:
    capture, tokens = open_capture(run.store(f"len{length}"), timeout=300), run.tokens(f"len{length}")
    check_summaries(capture, attention_weights(twin, tokens[:-1]), 4)
