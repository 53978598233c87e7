# SPDX-License-Identifier: Apache-2.0
"""Warns of a request option for vLLM's ExampleHiddenStatesConnector that has no effect here."""

from __future__ import annotations

from collections.abc import Mapping

from dmi_connector.wording import show

_PATH = "hidden_states_path"


def ignored_path(params: object) -> str:
    """A warning if `kv_transfer_params` of a request have a path to which vLLM's connector would write; else ""."""
    path = params.get(_PATH) if isinstance(params, Mapping) else None
    if path is None:
        return ""
    return (
        f"{_PATH}: {show(path)} is ignored, dmi_store names the store; for another directory set dmi.save_path "
        "(docs/FROM_VLLM.md)"
    )
