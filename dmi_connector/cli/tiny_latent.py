# SPDX-License-Identifier: Apache-2.0
"""Configurations of tiny models with multi-head latent attention. `tiny_models.make_model` writes the models."""

from __future__ import annotations

from typing import Any

from dmi_connector.cli.tiny_families import EXPERTS

_LATENT = {
    **EXPERTS,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 512,  # vLLM's CPU kernel for latent attention supports only 512 and a rotary size of 64
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 48,
    "v_head_dim": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
del _LATENT["head_dim"]
_INDEXER = {
    "kv_lora_rank": 280,
    "qk_rope_head_dim": 40,
    "qk_nope_head_dim": 20,
    "v_head_dim": 28,
    "index_topk": 48,
    "index_head_dim": 72,
    "index_n_heads": 11,
}
"""Sizes of sparse attention with an indexer. No kernel of vLLM supports them, so tests replace the kernels.

A score of the indexer is exactly 0 if no head has a positive product of query and key. With 11 heads this is rare, so
few scores are equal.
"""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 512,
}
LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **_LATENT,
        "q_lora_rank": 48,
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
    },
    "deepseek_v3": {
        **_LATENT,
        "q_lora_rank": 56,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "glm4_moe_lite": {
        **_LATENT,
        "q_lora_rank": 40,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
    },
    "deepseek_v32": {
        **_LATENT,
        **_INDEXER,
        "q_lora_rank": 56,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "glm_moe_dsa": {
        **_LATENT,
        **_INDEXER,
        "q_lora_rank": 40,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 1.8,
        "indexer_rope_interleave": True,
        "index_topk_freq": 2,
        "num_hidden_layers": 5,
    },
}
"""`model_type` -> configuration of a tiny model with latent attention."""
