# SPDX-License-Identifier: Apache-2.0
"""Hybrid models on two tensor-parallel ranks with owner pool: every hook compared with transformers.

`mix_proj` is refused under tensor parallelism, because each rank has a slice of each of its parts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmi_connector import capture_args, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle, largest
from dmi_connector.cli.tiny_models import make_model
from tests.engine import latent_cpu
from tests.engine.check import relative_errors
from tests.engine.harness import ALL_HOOKS, SMALL, Ask, Run, engine, generate, prompt
from tests.engine.test_hybrids import DELTA, MODELS
from tests.engine.test_models import MOST
from tests.runner import GPU
from tests.shorter import soak

pytestmark = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="each rank needs a core")

_EVEN: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
FIELDS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {**_EVEN, "mamba_n_heads": 8},
    "lfm2": {**_EVEN, "conv_dim": 128, "block_dim": 128},
    "lfm2_moe": _EVEN,
}
"""Fields of the configs of models whose default numbers of heads cannot be divided between two ranks."""
SHORT = "granitemoehybrid"
"""The model of `make test`. It has mixers, attention and experts."""
NAMES = ("qwen3_5-text", "qwen3_next", "qwen3_5_moe-text", "nemotron_h", "lfm2", "lfm2_moe")


class _Oracle(Oracle):
    """The oracle without the refused hook."""

    def run(
        self, token_ids: Sequence[int], images: Mapping[str, Any] | None = None, image_blocks: bool = False
    ) -> dict[str, np.ndarray]:
        found = super().run(token_ids, images, image_blocks)
        return {hook: rows for hook, rows in found.items() if hook != "mix_proj"}


@pytest.fixture(scope="module", params=[SHORT, *soak(*NAMES)])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str, known_models: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if GPU and name in DELTA:
        pytest.skip("vLLM's kernels of gated delta nets for GPUs do not support float32")
    arch, fields = MODELS[name]
    return make_model(arch, tmp_path_factory.mktemp(name), **{**fields, **FIELDS.get(name, {})})


@pytest.fixture(scope="module")
def run(name: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("hybrids_tp2"))
    hooks = ALL_HOOKS if name.startswith("lfm2") else f"{ALL_HOOKS},-mix_proj"
    args: dict[str, Any] = capture_args(hooks, run.store_dir, "pool", pool_bytes=48 << 20, **SMALL)
    args |= latent_cpu.ROTARY if name.startswith("lfm2") else {}
    args |= {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    args |= {"worker_extension_cls": "tests.engine.delta_worker.Extension"} if name in DELTA else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        with engine(model, in_process=False, fork=True, enforce_eager=True, **args) as llm:
            run.block_size = llm.llm_engine.vllm_config.cache_config.block_size
            generate(llm, run, {f"len{n}": Ask(prompt(n)) for n in (5, 33, 300)})
            generate(llm, run, {"hit": Ask(prompt(300)[:280] + prompt(9, 4))})
    return run


def test_every_hook_is_that_of_transformers(model: Path, run: Run) -> None:
    twin = _Oracle(model, torch.float32)
    lengths = {name: len(reply.prompt_token_ids or ()) for name, reply in run.replies.items()}
    worst = largest(relative_errors(run.store(name), twin, run.tokens(name), n) for name, n in lengths.items())
    assert {hook: error for hook, error in worst.items() if not error <= MOST} == {}


def test_both_ranks_wrote(run: Run) -> None:
    """The slices of `z` and of the outputs of mixers come from both ranks."""
    capture = open_capture(run.store("len33"))
    assert capture.attrs["tp"] == 2
    for hook in (hook for hook in ("z", "mix_core", "mix_z") if hook in capture):
        assert len(list((run.store("len33") / hook / "c").glob("*/0/*"))) == 2, hook
