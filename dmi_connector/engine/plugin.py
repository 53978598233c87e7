# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point. It only registers names; without our connector nothing else changes."""

from __future__ import annotations


def register() -> None:
    """Register the tapped model classes and the draft by name. vLLM imports one when it loads it."""
    from vllm.model_executor.models import ModelRegistry

    from dmi_connector.engine.architectures import ARCHITECTURES

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"dmi_connector.engine.models:{name}")
    ModelRegistry.register_model("ExtractHiddenStatesModel", "dmi_connector.engine.row_cache:ExtractHiddenStatesModel")
