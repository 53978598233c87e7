# SPDX-License-Identifier: Apache-2.0
"""Determines which features of vLLM an engine uses. contract_names.py groups vLLM's names by these features."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dmi_connector.args import EXTRACT_HIDDEN_STATES
from dmi_connector.engine.owners import owner_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from dmi_connector.engine.model.architectures import Architecture

ROUTING = frozenset({"topk_ids", "topk_weights"})
"""Hooks that are tapped inside the router of an expert layer."""


def may_sleep(model: ModelConfig) -> bool:
    """Whether vLLM's sleep() may discard the caches: with sleep mode, or with only its memory allocator enabled."""
    return model.enable_sleep_mode or model.enable_cumem_allocator


def features_of(vllm_config: VllmConfig) -> list[str]:
    """The features of an engine that follow from its configuration, keys of NAMES."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    gpu = vllm_config.device_config.device_type != "cpu"
    used = {
        "several ranks": max(parallel.tensor_parallel_size, parallel.pipeline_parallel_size) > 1,
        "pipeline stages": parallel.pipeline_parallel_size > 1,
        "pipeline stages on the V2 runner": parallel.pipeline_parallel_size > 1 and vllm_config.use_v2_model_runner,
        "expert parallelism": parallel.enable_expert_parallel,
        "compilation": not model.enforce_eager,
        "CUDA graphs": gpu and not model.enforce_eager,
        "GPU": gpu,
        "latent attention": model.use_mla,
        "M-RoPE": model.uses_mrope,
        "Transformers backend": model.using_transformers_backend(),
        "sleep": may_sleep(model),
    }
    return [*owner_of(vllm_config).features(vllm_config), *(feature for feature, uses in used.items() if uses)]


def features_of_hooks(vllm_config: VllmConfig, arch: Architecture, hooks: Iterable[str]) -> list[str]:
    """The features that these hooks of a model use."""
    chosen, cpu = set(hooks), vllm_config.device_config.device_type == "cpu"
    drafts, v2 = vllm_config.speculative_config, vllm_config.use_v2_model_runner
    drafted = "logits" in chosen and drafts is not None and drafts.method != EXTRACT_HIDDEN_STATES
    used = {
        f"logits beside drafts on the V{2 if v2 else 1} runner": drafted,
        "vision tower": bool(arch.language),
        "attention summaries": "pattern" in chosen,
        "attention summaries on a CPU": "pattern" in chosen and cpu,
        "indexer": "indexer_topk" in chosen,
        "routing of experts": not ROUTING.isdisjoint(chosen),
    }
    return [feature for feature, uses in used.items() if uses]
