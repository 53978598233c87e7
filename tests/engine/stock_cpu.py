# SPDX-License-Identifier: Apache-2.0
"""vLLM's ExampleHiddenStatesConnector without a GPU. Only its copy on a CUDA stream is replaced."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class StockOnCPU(ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: PendingSave) -> None:
        """Extract and write the file as vLLM does, but synchronously."""
        assert self._kv_cache is not None
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (torch.arange(self._block_size)[None] + blocks[:, None] * self._block_size).flatten()
        rows = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0])
        tensors = {"hidden_states": rows.contiguous(), "token_ids": pending.token_ids.clone()}
        done = SimpleNamespace(synchronize=lambda: None)
        self._write_tensors(tensors, done, pending.filename, self._lock_fds.pop(pending.req_id, None))
