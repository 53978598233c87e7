# SPDX-License-Identifier: Apache-2.0
"""Which steps take the answers of all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.utils.import_utils import resolve_obj_by_qualname

from dmi_connector.engine.messages import StepMetadata
from dmi_connector.flags import EXECUTOR


@pytest.mark.parametrize(
    ("metadata", "all_ranks"),
    [(StepMetadata(), False), (StepMetadata(report=True), True), (SimpleNamespace(), True), (None, True)],
)
def test_all_ranks_answer_in_steps_in_which_they_report_and_for_other_connectors(
    monkeypatch: pytest.MonkeyPatch, metadata: Any, all_ranks: bool
) -> None:
    executor_class = resolve_obj_by_qualname(EXECUTOR)
    asked: list[Any] = []
    monkeypatch.setattr(executor_class, "collective_rpc", lambda self, method, **more: asked.append((method, more)))
    executor = object.__new__(executor_class)
    executor.parallel_config = SimpleNamespace(world_size=4)
    executor.output_rank, executor.ec_output_aggregator = 0, None
    executor.init_kv_output_aggregator(SimpleNamespace(get_finished_count=lambda: None))
    for before in (StepMetadata(), StepMetadata(report=True)):
        executor.execute_model(SimpleNamespace(kv_connector_metadata=before))
        asked.clear()
        executor.execute_model(SimpleNamespace(kv_connector_metadata=metadata))
        executor.sample_tokens(None)
        assert [method for method, _ in asked] == ["execute_model", "sample_tokens"]
        for _, more in asked:
            assert more["unique_reply_rank"] == 0
            assert isinstance(more["kv_output_aggregator"], KVOutputAggregator) == all_ranks
