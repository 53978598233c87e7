# SPDX-License-Identifier: Apache-2.0
"""Fills vLLM's cache of model information for the classes that tests serve: `python -m tests.modelinfos`.
VLLM_CACHE_ROOT must name the directory of the cache.

vLLM inspects each new model class in a process of its own, which takes ten seconds to import vLLM. This program
inspects all classes in one process. vLLM still inspects a class that is not in the cache.
"""

from __future__ import annotations

from vllm.model_executor.models import registry
from vllm.plugins import load_general_plugins

from dmi_connector.engine.model.architectures import ARCHITECTURES

ALSO = ("ExtractHiddenStatesModel", "DeepseekV2ForCausalLM", "TransformersForCausalLM", "TransformersMoEForCausalLM")
REFUSED = (
    "FalconH1ForCausalLM",
    "Gemma3nForCausalLM",
    "Gemma4ForCausalLM",
)
"""Architectures that test_refusals.py serves."""


def main() -> None:
    load_general_plugins()
    registry._run_in_subprocess = lambda look: look()
    for name in (*ARCHITECTURES, *ALSO, *REFUSED):
        registry.ModelRegistry.models[name].inspect_model_cls()


if __name__ == "__main__":
    main()
