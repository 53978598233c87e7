# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks in bfloat16. Hooks equal transformers'. Tokens equal those of stock vLLM. On GPUs they may
differ at ties.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TWO_GPUS = torch.cuda.device_count() > 1
RANKS: dict[str, Any] = {"tensor_parallel_size": 2}
CPU = {**RANKS, "distributed_executor_backend": "mp", "max_num_batched_tokens": 2048}


@pytest.mark.parametrize(
    ("engine_args", "env", "owners"),
    [
        pytest.param(
            {**RANKS, "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 8_000_000_000},
            {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"},
            ["target", "draft"],
            marks=pytest.mark.skipif(not TWO_GPUS, reason="needs two GPUs"),
            id="gpu",
        ),
        pytest.param(CPU, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, ["target"], marks=pytest.mark.soak, id="cpu"),
    ],
)
def test_two_ranks_give_the_tokens_of_stock_and_right_values(
    tmp_path: Path, engine_args: dict[str, Any], env: dict[str, str], owners: list[str]
) -> None:
    out = tmp_path / "found.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.checks.check_gpu",
        "--out",
        str(out),
        "--model",
        str(tmp_path / "model"),
    ]
    command += ["--store-dir", str(tmp_path / "stores"), "--owners", ",".join(owners)]
    command += ["--engine-args", json.dumps(engine_args)]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(out.read_text())
    for owner in owners:
        assert TWO_GPUS or found[owner]["same_tokens_as_stock"] == "30 of 30"
        assert found[owner]["rows_missing"] == 0
        assert found[owner]["rows"] > 5000 and min(found[owner]["least_cosine"].values()) > 0.998
