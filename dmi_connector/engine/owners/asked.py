# SPDX-License-Identifier: Apache-2.0
"""Reads the connector's option `owner`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def asked(vllm_config: VllmConfig) -> str:
    """The option `owner`. "" if it is not set: the rest of the configuration then determines the owner."""
    transfer = vllm_config.kv_transfer_config
    extra = None if transfer is None else transfer.kv_connector_extra_config
    return str(extra.get("owner", "")) if isinstance(extra, dict) else ""
