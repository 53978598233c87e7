# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of architectures: text models with experts, except hybrids and models with latent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dmi_connector.engine.model.architectures.base import MODELS, QK_NORM, Architecture, MayNorm


class Laguna(Architecture):
    """Laguna, whose layers may have different numbers of query heads.

    A hook has the same width in all layers. Models with such layers therefore lack the hooks whose width depends on
    the number of query heads.
    """

    def fit(self, config: Any) -> Architecture:
        heads = {*(getattr(config, "num_attention_heads_per_layer", None) or ())}
        if len(heads) > 1:
            return replace(self, lacks=("q", "q_rot", "pattern", "z"))
        return self


_BLOCK: dict[str, Any] = {
    "mlp": "block_sparse_moe",
    "moe_gate": "block_sparse_moe.gate",
    "moe_experts": "block_sparse_moe.experts",
}
_GRANITE_SHARED: dict[str, Any] = {
    **_BLOCK,
    "scale": "residual_multiplier",
    "lacks": ("mlp_out",),  # the layer itself adds the outputs of the shared expert and of the routed experts
}
_SEPARATE: dict[str, Any] = {"gate_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj"}
_BAILING: dict[str, Any] = {
    "embed": "model.word_embeddings",
    "positions_at": 1,
    "qkv": "attention.query_key_value",
    "q_norm": "attention.query_layernorm",
    "k_norm": "attention.key_layernorm",
    "attn": "attention.attn",
    "o_proj": "attention.dense",
}

EXPERTS: tuple[Architecture, ...] = (
    Architecture("Qwen3MoeForCausalLM", f"{MODELS}.qwen3_moe:Qwen3MoeForCausalLM", **QK_NORM),
    Architecture("Qwen2MoeForCausalLM", f"{MODELS}.qwen2_moe:Qwen2MoeForCausalLM"),
    Architecture("MixtralForCausalLM", f"{MODELS}.mixtral:MixtralForCausalLM", **_BLOCK),
    Architecture("PhiMoEForCausalLM", f"{MODELS}.phimoe:PhiMoEForCausalLM", **_BLOCK),
    Architecture(
        "GraniteMoeForCausalLM",
        f"{MODELS}.granitemoe:GraniteMoeForCausalLM",
        **_BLOCK,
        scale="residual_multiplier",
    ),
    Architecture(
        "MiniMaxM2ForCausalLM",
        f"{MODELS}.minimax_m2:MiniMaxM2ForCausalLM",
        **_BLOCK,
        lacks=("q", "k"),  # vLLM computes the norms of q and k without calling their modules
    ),
    Architecture("Ernie4_5_MoeForCausalLM", f"{MODELS}.ernie45_moe:Ernie4_5_MoeForCausalLM"),
    MayNorm("HYV3ForCausalLM", f"{MODELS}.hy_v3:HYV3ForCausalLM", **QK_NORM),
    Architecture("ExaoneMoeForCausalLM", f"{MODELS}.exaone_moe:ExaoneMoeForCausalLM", **QK_NORM),
    Architecture("ExaoneMoEForCausalLM", f"{MODELS}.exaone_moe:ExaoneMoeForCausalLM", **QK_NORM),
    Architecture(
        "AfmoeForCausalLM",
        f"{MODELS}.afmoe:AfmoeForCausalLM",
        **QK_NORM,
        attn_norm="post_attention_layernorm",
        ln2="pre_mlp_layernorm",
        mlp_norm="post_mlp_layernorm",
    ),
    Architecture(
        "Cohere2MoeForCausalLM",
        f"{MODELS}.cohere2_moe:Cohere2MoeForCausalLM",
        plain_norms=True,
        ln2="",
        parallel=True,
    ),
    MayNorm("BailingMoeForCausalLM", f"{MODELS}.bailing_moe:BailingMoeForCausalLM", **_BAILING),
    MayNorm("BailingMoeV2ForCausalLM", f"{MODELS}.bailing_moe:BailingMoeV2ForCausalLM", **_BAILING),
    MayNorm("SarvamMoEForCausalLM", f"{MODELS}.sarvam:SarvamMoEForCausalLM", **_BAILING),
    Architecture(
        "GraniteMoeSharedForCausalLM",
        f"{MODELS}.granitemoeshared:GraniteMoeSharedForCausalLM",
        **_GRANITE_SHARED,
    ),
    Architecture(
        "GraniteMoeSWAForCausalLM",
        f"{MODELS}.granitemoeshared:GraniteMoeSharedForCausalLM",
        **_GRANITE_SHARED,
    ),
    Laguna(
        "LagunaForCausalLM",
        f"{MODELS}.laguna:LagunaForCausalLM",
        **QK_NORM,
        **_SEPARATE,
        float16_divisor="moe_routed_scaling_factor",
    ),
    Architecture("OlmoeForCausalLM", f"{MODELS}.olmoe:OlmoeForCausalLM", **QK_NORM, one_rank=("q", "k")),
    Architecture(
        "Glm4MoeForCausalLM",
        f"{MODELS}.glm4_moe:Glm4MoeForCausalLM",
        **QK_NORM,
        float16_divisor="routed_scaling_factor",
    ),
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
        up_proj="feed_forward.gate_up_proj",
        down_proj="feed_forward.down_proj",
        moe_gate="feed_forward.router",
        moe_experts="feed_forward.experts",
    ),
)
