# SPDX-License-Identifier: Apache-2.0
"""Selects the model runner of vLLM for engine tests.

TEST_RUNNER=V1 is the default here, as it is vLLM's on a CPU. V2 is the V2 runner, V2-async adds asynchronous
scheduling, as on a GPU. GPU is the V2 runner with asynchronous scheduling on a GPU, with vLLM's CUDA build. There,
TEST_GRAPHS=1 adds CUDA graphs, which take a minute more per engine.
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
"""Arguments of every engine."""
ATOL = 1e-5
"""Absolute tolerance in float32, for the rounding differences of two programs."""
if GPU:
    # The default block size of the CPU, which tests rely on, and an attention backend that supports float32.
    ENGINE |= {"block_size": 128, "attention_backend": "TRITON_ATTN"}
    # Fixed sizes, with room for two engines. vLLM's measurement would depend on other processes on the GPU.
    ENGINE |= {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1_500_000_000}
    ATOL = 5e-3  # errors of attention without TF32, which `choose` turns off
    if os.environ.get("TEST_GRAPHS"):
        ENGINE["enforce_eager"] = False
INTERPRETED = str(Path(__file__).parent / "interpreted")


def choose() -> None:
    """Set the environment of this process and of processes that it starts. Call it before Triton is imported."""
    if RUNNER not in ("V1", "V2", "V2-async", "GPU"):
        raise ValueError(f"TEST_RUNNER={RUNNER}: choose V1, V2, V2-async or GPU")
    if GPU:
        # A process that has initialised CUDA cannot be forked. Triton uses TF32 for float32 by default.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
        return
    assert "triton" not in sys.modules, "Triton has looked for its backends already"
    # Kernels run in Triton's interpreter. With the V1 runner, vLLM finds no Triton backend, and uses no kernels of its
    # own.
    os.environ["TRITON_INTERPRET"] = "1"
    if V2:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (INTERPRETED, os.environ.get("PYTHONPATH"))))
        sys.path.insert(0, INTERPRETED)
