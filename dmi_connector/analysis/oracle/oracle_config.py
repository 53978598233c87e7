# SPDX-License-Identifier: Apache-2.0
"""What the oracle reads from a model's config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, DeepseekV32Config, PreTrainedConfig


def is_heterogeneous(config: Any) -> bool:
    """Whether transformers has sizes per layer in this config, and no common size."""
    return bool(getattr(config, "is_heterogeneous", False))


def attention_layers(config: Any) -> list[int]:
    """The layers whose attention hooks are captured: those with their own keys, in the most common size."""
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
    """The config of a model, with which transformers computes what vLLM does.

    vLLM registers the class of V3 for DeepSeek V3.2, whose indexer that class does not know. A model of V3 that is
    saved later also says that it is V3.2.
    """
    given, _ = PreTrainedConfig.get_config_dict(model_dir, local_files_only=True)
    indexed = given.get("model_type") == "deepseek_v32" and "index_topk" in given
    auto = DeepseekV32Config if indexed else AutoConfig
    config = auto.from_pretrained(model_dir, local_files_only=True)
    if config.model_type in ("cohere2", "cohere2_moe"):
        config.sliding_window += 1  # a window of vLLM has the token itself and this many earlier tokens
    return config
