# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point. It only registers: an engine without our connector runs as before."""

from __future__ import annotations


def register() -> None:
    """Register the tapped model classes and the cache-only draft by name; none is imported until vLLM loads one."""
    from vllm.model_executor.models import ModelRegistry

    from dmi_connector.engine.architectures import ARCHITECTURES

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"dmi_connector.engine.models:{name}")
    ModelRegistry.register_model("ExtractHiddenStatesModel", "dmi_connector.engine.rows:ExtractHiddenStatesModel")
