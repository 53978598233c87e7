# SPDX-License-Identifier: Apache-2.0
"""vLLM's executor of several GPUs, with fewer answers to wait for."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from dmi_connector.engine.messages import StepMetadata

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBase
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


class CaptureExecutor(MultiprocExecutor):
    """Takes the answers of all ranks only in steps in which they report to the scheduler.

    With a KV connector vLLM waits in each step for two answers of every rank, and unpickles the output of each. That
    takes the engine's loop about 0.1 ms an answer. In the other steps this takes the answers of one rank, as vLLM does
    without a connector.

    Use it with `--distributed-executor-backend dmi_connector.engine.executor.CaptureExecutor`, or the same argument of
    `vllm.LLM`. `dmi serve` and `dmi run` do so by themselves.
    """

    def init_kv_output_aggregator(self, connector: KVConnectorBase) -> None:
        super().init_kv_output_aggregator(connector)
        self._of_all_ranks: KVOutputAggregator | None = self.kv_output_aggregator

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        metadata = scheduler_output.kv_connector_metadata
        alone = isinstance(metadata, StepMetadata) and not metadata.report
        # `sample_tokens` of the same step follows, and takes the same.
        self.kv_output_aggregator = None if alone else self._of_all_ranks
        return super().execute_model(scheduler_output, non_block)
