# SPDX-License-Identifier: Apache-2.0
"""Configurations of tiny models: parts of `tiny_models.FAMILIES`. `tiny_models.make_model` writes the models.

Fields have the names of the transformers configuration of each family.
"""

from __future__ import annotations

from typing import Any

ODD: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "tie_word_embeddings": False,
}
"""Sizes of most families: the number of heads is not a power of two, and heads x head_dim is more than hidden_size."""
EXPERTS = {**ODD, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
WINDOWS = {"sliding_window": 32, "num_hidden_layers": 4}
FULL = {"hidden_size": 96, "num_attention_heads": 3, "intermediate_size": 160, "tie_word_embeddings": False}
"""Sizes of older families, in which all heads together are as wide as the residual stream."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_HALF = {**ROPE, "partial_rotary_factor": 0.5}
_HALVES = {"rope_parameters": _HALF}
_QUARTER = {**ROPE, "partial_rotary_factor": 0.25}
_SHARED = {**EXPERTS, "num_experts": 6, "num_shared_experts": 1}
del _SHARED["norm_topk_prob"]
_SCALED = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0}
_LAYERS = ["sliding_attention", "full_attention"] * 2
_FIRST_DENSE = ["dense", "sparse", "sparse", "sparse"]
_GEMMA4 = {
    **ODD,
    "num_hidden_layers": 5,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 64,
    "final_logit_softcapping": 15.0,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16,
}
_GRANITE_MOE = {**FULL, **_SCALED, "num_local_experts": 6, "num_experts_per_tok": 2}

DENSE: dict[str, dict[str, Any]] = {
    "granite": {**ODD, **_SCALED, "num_attention_heads": 3, "num_key_value_heads": 1},
    "gemma2": {
        **ODD,
        **WINDOWS,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 15.0,
        "tie_word_embeddings": True,
    },
    "cohere": {**FULL, "num_key_value_heads": 1, "logit_scale": 0.5, "use_qk_norm": True, "tie_word_embeddings": True},
    "ernie4_5": {**ODD, "tie_word_embeddings": True},
    "exaone4": {**ODD, **WINDOWS, "sliding_window_pattern": 2},
    "apertus": {**FULL, "num_key_value_heads": 1},
    "nemotron": {**ODD, **_HALVES},
    "stablelm": {**FULL, "num_key_value_heads": 1, "use_qkv_bias": True, "rope_parameters": _QUARTER},
    "granite_swa": {**ODD, **_SCALED, **WINDOWS, "layer_types": _LAYERS, "layer_rope_theta": [10000.0, 0.0] * 2},
    "hyperclovax": {**ODD, **_SCALED},
}
"""`model_type` -> configuration of a tiny model with an MLP in each layer."""
_MIMO = {
    **EXPERTS,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "v_head_dim": 32,
    "n_routed_experts": 6,
    "sliding_window": 32,
    "layer_types": ["full_attention", *["sliding_attention"] * 3],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "rope_parameters": {"full_attention": _HALF, "sliding_attention": _HALF},
    # vLLM reads the following fields, which published configs have.
    "hybrid_layer_pattern": [0, 1, 1, 1],
    "moe_layer_freq": [0, 1, 1, 1],
    "rope_theta": 10000.0,
    "swa_rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 32,
    "swa_v_head_dim": 32,
    "sliding_window_size": 32,
    "add_swa_attention_sink_bias": True,
    "layernorm_epsilon": 1e-5,
}
MIXED: dict[str, dict[str, Any]] = {"gemma4_text": _GEMMA4, "mimo_v2_flash": _MIMO}
"""`model_type` -> configuration of a tiny model whose attention sizes differ between layers."""
BACKEND: dict[str, dict[str, Any]] = {
    "arcee": {**ODD, "num_key_value_heads": 1},
    "cwm": {**ODD, **WINDOWS, "layer_types": _LAYERS},
    "glm": {**ODD, "attention_bias": True, "partial_rotary_factor": 0.5},
    "hunyuan_v1_dense": {**ODD},
    "hunyuan_v1_moe": {**ODD, "num_experts": 6, "moe_topk": 2, "num_experts_per_tok": 2},
    "mellum": {**EXPERTS, **WINDOWS, "num_experts": 6, "layer_types": _LAYERS, "mlp_layer_types": _FIRST_DENSE},
    "seed_oss": {**ODD, "attention_bias": True},
}
"""`model_type` -> configuration of a tiny model that vLLM serves through its Transformers backend."""
SPARSE: dict[str, dict[str, Any]] = {
    "afmoe": {
        **_SHARED,
        **WINDOWS,
        "num_dense_layers": 1,
        "global_attn_every_n_layers": 2,
        "route_scale": 1.5,
        "mup_enabled": True,
        # Only vLLM reads the following fields.
        "route_norm": True,
        "score_func": "sigmoid",
        "n_group": 1,
        "topk_group": 1,
    },
    "cohere2_moe": {
        **_SHARED,
        **WINDOWS,
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 128,
        "sliding_window_pattern": 2,
        "logit_scale": 0.5,
        "tie_word_embeddings": True,
    },
    "ernie4_5_moe": {
        **ODD,
        "moe_intermediate_size": 48,
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
    },
    "exaone_moe": {**_SHARED, **WINDOWS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": {**_GRANITE_MOE, "shared_intermediate_size": 80},
    "granitemoe_swa": {
        **_GRANITE_MOE,
        **WINDOWS,
        "shared_intermediate_size": 80,
        "layer_types": _LAYERS,
        "layer_rope_theta": [10000.0, 0.0] * 2,
    },
    "hy_v3": {
        **_SHARED,
        "router_scaling_factor": 1.5,
        # Only vLLM reads the following fields.
        "expert_hidden_dim": 48,
        "first_k_dense_replace": 1,
        "route_norm": True,
        "qk_norm": True,
    },
    "laguna": {
        **_SHARED,
        **WINDOWS,
        "shared_expert_intermediate_size": 80,
        "layer_types": _LAYERS,
        "mlp_layer_types": _FIRST_DENSE,
        "moe_routed_scaling_factor": 1.5,
    },
    "minimax_m2": {
        **ODD,
        **_HALVES,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        # Only vLLM reads the following fields.
        "rotary_dim": 16,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "phimoe": {
        **FULL,
        "num_key_value_heads": 1,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "attention_bias": True,
    },
}
"""`model_type` -> configuration of a tiny model with experts."""
