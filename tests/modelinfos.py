# SPDX-License-Identifier: Apache-2.0
"""Fills vLLM's cache of model information for the classes that tests serve. VLLM_CACHE_ROOT must name the directory of
the cache.

vLLM inspects each new model class in a process of its own, which takes ten seconds to import vLLM. `fill` inspects all
classes in one process, which is forked from this one. vLLM still inspects a class that is not in the cache.
"""

from __future__ import annotations

import multiprocessing

from tests.runner import GPU

ALSO = ("ExtractHiddenStatesModel", "DeepseekV2ForCausalLM", "TransformersForCausalLM", "TransformersMoEForCausalLM")
REFUSED = (
    "FalconH1ForCausalLM",
    "Gemma3nForCausalLM",
    "Gemma4ForCausalLM",
)
"""Architectures that test_refusals.py serves."""


def _inspect() -> None:
    from vllm.model_executor.models import registry
    from vllm.plugins import load_general_plugins

    from dmi_connector.engine.model.architectures import ARCHITECTURES

    load_general_plugins()
    registry._run_in_subprocess = lambda look: look()
    for name in (*ARCHITECTURES, *ALSO, *REFUSED):
        registry.ModelRegistry.models[name].inspect_model_cls()


def fill() -> None:
    """Inspect all classes. On a GPU the process is spawned, because CUDA may be in use here."""
    process = multiprocessing.get_context("spawn" if GPU else "fork").Process(target=_inspect)
    process.start()
    process.join()
    assert process.exitcode == 0, f"inspecting model classes ended with {process.exitcode}"
