# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's model runners the engine tests run on.

TEST_RUNNER=V1 (the default here, as vLLM's own on a CPU), V2, V2-async: with asynchronous scheduling, as on a GPU; or
GPU: the V2 runner with it on a GPU, where vLLM has its CUDA build. TEST_GRAPHS=1: with CUDA graphs there, which take a
minute more for each engine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

RUNNER = os.environ.get("TEST_RUNNER", "V1")
GPU = RUNNER == "GPU"
V2 = RUNNER in ("V2", "V2-async", "GPU")
ASYNC = RUNNER in ("V2-async", "GPU")
ENGINE: dict[str, Any] = {}
"""Arguments that every engine takes."""
ATOL = 1e-5
"""Absolute, in float32: two programs differ by rounding only."""
if GPU:
    # The block size vLLM chooses on a CPU, which tests count on; room for two engines; an attention that takes float32.
    ENGINE |= {"block_size": 128, "attention_backend": "TRITON_ATTN"}
    # Given, not found by measuring, which other processes on the GPU would disturb.
    ENGINE |= {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1_500_000_000}
    ATOL = 5e-3  # of attention; in TF32, from which `choose` keeps it, it was 7e-3
    if os.environ.get("TEST_GRAPHS"):
        ENGINE["enforce_eager"] = False
INTERPRETED = str(Path(__file__).parent / "interpreted")


def choose() -> None:
    """Set the environment of this process and those it starts. Call it before anything imports Triton."""
    if RUNNER not in ("V1", "V2", "V2-async", "GPU"):
        raise ValueError(f"TEST_RUNNER={RUNNER}: choose V1, V2, V2-async or GPU")
    if GPU:
        # A parent in which something has asked for the GPU cannot be forked; float32 is to be float32.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
        return
    assert "triton" not in sys.modules, "Triton has looked for its backends already"
    # Kernels run in Triton's interpreter. On the V1 runner vLLM sees no backend, and uses no Triton of its own.
    os.environ["TRITON_INTERPRET"] = "1"
    if V2:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (INTERPRETED, os.environ.get("PYTHONPATH"))))
        sys.path.insert(0, INTERPRETED)
