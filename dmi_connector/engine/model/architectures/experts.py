# SPDX-License-Identifier: Apache-2.0
"""Text models with experts, but for those with latent attention."""

from __future__ import annotations

from dmi_connector.engine.model.architectures.base import MODELS, QK_NORM, Architecture

EXPERTS: tuple[Architecture, ...] = (
    Architecture("Qwen3MoeForCausalLM", f"{MODELS}.qwen3_moe:Qwen3MoeForCausalLM", **QK_NORM),
    Architecture("Qwen2MoeForCausalLM", f"{MODELS}.qwen2_moe:Qwen2MoeForCausalLM"),
    Architecture(
        "MixtralForCausalLM",
        f"{MODELS}.mixtral:MixtralForCausalLM",
        mlp="block_sparse_moe",
        moe_gate="block_sparse_moe.gate",
        moe_experts="block_sparse_moe.experts",
    ),
    Architecture("OlmoeForCausalLM", f"{MODELS}.olmoe:OlmoeForCausalLM", **QK_NORM, one_rank=("q", "k")),
    Architecture("Glm4MoeForCausalLM", f"{MODELS}.glm4_moe:Glm4MoeForCausalLM", **QK_NORM),
    Architecture(
        "GptOssForCausalLM",
        f"{MODELS}.gpt_oss:GptOssForCausalLM",
        embed="model.embedding",
        positions_at=1,
        qkv="attn.qkv_proj",
        attn="attn.attn",
        o_proj="attn.o_proj",
        moe_gate="mlp.router",
    ),
    Architecture(
        "Llama4ForCausalLM",
        f"{MODELS}.llama4:Llama4ForCausalLM",
        mlp="feed_forward",
        down_proj="feed_forward.down_proj",
        moe_gate="feed_forward.router",
        moe_experts="feed_forward.experts",
    ),
)
