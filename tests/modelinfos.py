# SPDX-License-Identifier: Apache-2.0
"""Note what vLLM wants to know of the model classes that tests serve: `python -m tests.modelinfos`, with the directory
of the notes below VLLM_CACHE_ROOT.

vLLM looks at each class it meets first in a process of its own, which takes ten seconds for importing vLLM. One process
looks at all of them here; vLLM then finds its notes and looks at whatever has none by itself.
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
"""Of test_refusals.py."""


def main() -> None:
    load_general_plugins()
    registry._run_in_subprocess = lambda look: look()
    for name in (*ARCHITECTURES, *ALSO, *REFUSED):
        registry.ModelRegistry.models[name].inspect_model_cls()


if __name__ == "__main__":
    main()
