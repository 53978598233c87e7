# SPDX-License-Identifier: Apache-2.0
"""What the oracle reads from a model's config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, DeepseekV32Config, PreTrainedConfig


def is_heterogeneous(config: Any) -> bool:
    """Whether the config has sizes of attention per layer, instead of common sizes."""
    return bool(getattr(config, "is_heterogeneous", False))


def attention_layers(config: Any) -> list[int]:
    """The layers whose attention hooks are captured: layers that compute keys, with the most common attention sizes."""
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    sizes: list[Any] = [None] * own
    if config.model_type == "mimo_v2_flash":
        sizes = config.layer_types
    elif is_heterogeneous(config):
        layers = [config.per_layer_config[i] for i in range(own)]
        sizes = [(layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) for layer in layers]
    usual = max(dict.fromkeys(sizes), key=sizes.count)
    return [i for i, size in enumerate(sizes) if size == usual]


def config_of(model_dir: str | Path) -> Any:
    """The config of a model, adapted so that transformers computes what vLLM computes.

    For the `model_type` of DeepSeek V3.2, vLLM registers the config class of V3 with transformers. That class has no
    fields for the indexer, so V3.2 is loaded with its own class. Once vLLM has registered the class, transformers saves
    models of V3 with that `model_type` too. Only a config with `index_topk` is of V3.2.
    """
    given, _ = PreTrainedConfig.get_config_dict(model_dir, local_files_only=True)
    indexed = given.get("model_type") == "deepseek_v32" and "index_topk" in given
    auto = DeepseekV32Config if indexed else AutoConfig
    config = auto.from_pretrained(model_dir, local_files_only=True)
    if config.model_type in ("cohere2", "cohere2_moe"):
        config.sliding_window += 1  # in vLLM, a token attends to this many earlier tokens and to itself
    return config
