# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages of eager models on a CPU.

On a GPU, vLLM profiles each model, which on the V1 runner allocates the tensors that a later stage receives. On a CPU,
it only profiles compiled models, and an eager one fails on the V1 runner with an AssertionError in its first step.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker


class StageWorker(CPUWorker):
    """vLLM's worker, which also profiles eager models."""

    def determine_available_memory(self) -> int:
        """Bytes available for the cache."""
        self.model_runner.profile_run()
        return super().determine_available_memory()
