# SPDX-License-Identifier: Apache-2.0
"""The setting of a request for vLLM's ExampleHiddenStatesConnector that chooses nothing here. Responses and the log say
so.
"""

from __future__ import annotations

from collections.abc import Mapping

from dmi_connector.wording import show

_PATH = "hidden_states_path"


def ignored_path(params: object) -> str:
    """A sentence on a path in a request's `kv_transfer_params` to which vLLM's connector would write, or ""."""
    path = params.get(_PATH) if isinstance(params, Mapping) else None
    if path is None:
        return ""
    return (
        f"{_PATH}: {show(path)} is ignored, dmi_store names the store; for another directory set dmi.save_path "
        "(docs/FROM_VLLM.md)"
    )
