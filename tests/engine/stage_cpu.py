# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages of eager models on a CPU.

On a GPU vLLM profiles each model, which allocates what a later stage receives. On a CPU it does so for compiled models
alone, and an eager one ends with an AssertionError in its first step.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker


class StageWorker(CPUWorker):
    """vLLM's worker, which profiles every model."""

    def determine_available_memory(self) -> int:
        """Bytes that the cache may take."""
        self.model_runner.profile_run()
        return super().determine_available_memory()
