# SPDX-License-Identifier: Apache-2.0
"""Configurations of tiny hybrid models. Some layers have a Mamba mixer, gated delta net or convolution, not attention.

`tiny_models.make_model` writes the models.
"""

from __future__ import annotations

from typing import Any

_ODD: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "tie_word_embeddings": False,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
AXES = {**_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rms_norm_eps": 1e-3,  # the norm must not scale up outputs that are rounding errors (nearly orthogonal q and k)
}
"""Sizes of gated delta nets. vLLM's CPU kernel does not support them: see ON_CPU."""
ON_CPU = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
}
"""Sizes that vLLM's CPU kernel for gated delta nets supports. The kernel takes only bfloat16."""
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}
_MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
_CONV = {
    **_ODD,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_ODD, **DELTA, **EXPERTS, "rope_parameters": _ROPE, "mlp_only_layers": [2]},
    "qwen3_5_text": {**_ODD, **DELTA, "rope_parameters": AXES},
    "qwen3_5_moe_text": {**_ODD, **DELTA, **EXPERTS, "rope_parameters": AXES},
    "nemotron_h": {
        **_ODD,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 6,
        "mamba_head_dim": 40,
        "n_groups": 2,
        "ssm_state_size": 24,
        "chunk_size": 64,
        "time_step_min": 1e-9,  # transformers clamps time steps (dt) to this minimum, vLLM does not
    },
    "granitemoehybrid": {
        **_ODD,
        **_MAMBA,
        "mamba_n_groups": 1,  # with more groups, vLLM normalises each group, transformers all groups together
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "shared_intermediate_size": 80,
        "position_embedding_type": "rope",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "lfm2": {
        **_CONV,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 8,
        "conv_dim": 96,  # vLLM reads this field of published configs
        "block_dim": 96,
    },
    "lfm2_moe": {
        **_CONV,
        "num_dense_layers": 2,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "routed_scaling_factor": 1.5,
    },
}
"""`model_type` -> configuration of a tiny hybrid model."""
CENTRED = ("gemma", "step3p5", "qwen3_next", "qwen3_5")
"""Prefixes of the `model_type`s whose norms multiply by 1 + weight."""
