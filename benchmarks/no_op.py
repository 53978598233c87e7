# SPDX-License-Identifier: Apache-2.0
"""A KV connector that does nothing: what vLLM's own path of connectors costs, without ours."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class NoOpConnector(KVConnectorBase_V1):
    """Loads nothing and saves nothing."""

    def start_load_kv(self, *_args: Any, **_named: Any) -> None:
        pass

    def wait_for_layer_load(self, *_args: Any, **_named: Any) -> None:
        pass

    def save_kv_layer(self, *_args: Any, **_named: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, *_args: Any, **_named: Any) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, *_args: Any, **_named: Any) -> None:
        pass

    def build_connector_meta(self, *_args: Any, **_named: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()
