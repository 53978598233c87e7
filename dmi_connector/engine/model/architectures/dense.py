# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of architectures: dense text models (without experts) for which vLLM has a class."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from dmi_connector.engine.model.architectures.base import MODELS, QK_NORM, Architecture, MayNorm, ungated


class Opt(Architecture):
    """OPT, except OPT-350m, in which the output of a norm becomes the residual stream. Some old models lack the final
    norm.
    """

    def fit(self, config: Any) -> Architecture:
        if not config.do_layer_norm_before:
            raise ValueError(
                "model: OPT with do_layer_norm_before=False is not supported, because outputs of its norms become the "
                "residual stream; use another size"
            )
        old = getattr(config, "_remove_final_layer_norm", False)
        return replace(self, final_norm="", lacks=("final_ln",)) if old else self


class Bloom(Architecture):
    """Bloom, except models in which the output of a norm becomes the residual stream."""

    def fit(self, config: Any) -> Architecture:
        if config.apply_residual_connection_post_layernorm:
            raise ValueError(
                "model: Bloom with apply_residual_connection_post_layernorm=True is not supported, because outputs of "
                "its norms become the residual stream; use another model"
            )
        return self


class MiniCPM(Architecture):
    """MiniCPM, except models with experts. No module of vLLM's class returns their routing."""

    def fit(self, config: Any) -> Architecture:
        if getattr(config, "num_experts", 0):
            raise ValueError(
                "model: MiniCPM with experts (num_experts) is not supported, because no module returns their routing; "
                "use a model without experts"
            )
        return self

    def block_scale(self, config: Any) -> float:
        return config.scale_depth / math.sqrt(config.num_hidden_layers)


_GEMMA: dict[str, Any] = {
    "embed_scaled": True,
    "attn_norm": "post_attention_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}

_LLAMA = ("InternLM3ForCausalLM", "LLaMAForCausalLM", "IQuestCoderForCausalLM", "TeleChat3ForCausalLM")
"""Architectures that vLLM serves with its class for Llama."""
_COHERE: dict[str, Any] = {
    "base": f"{MODELS}.commandr:CohereForCausalLM",
    "plain_norms": True,
    "ln2": "",
    "parallel": True,
    "one_rank": ("attn_out", "mlp_out"),
}

DENSE: tuple[Architecture, ...] = (
    Architecture("Qwen3ForCausalLM", f"{MODELS}.qwen3:Qwen3ForCausalLM", **QK_NORM),
    MayNorm("Qwen2ForCausalLM", f"{MODELS}.qwen2:Qwen2ForCausalLM", **QK_NORM),
    Architecture("LlamaForCausalLM", f"{MODELS}.llama:LlamaForCausalLM"),
    *(Architecture(name, f"{MODELS}.llama:LlamaForCausalLM") for name in _LLAMA),
    Architecture("MistralForCausalLM", f"{MODELS}.mistral:MistralForCausalLM"),
    Architecture("Ministral3ForCausalLM", f"{MODELS}.mistral:MistralForCausalLM"),
    Architecture("Phi3ForCausalLM", f"{MODELS}.phi3:Phi3ForCausalLM"),
    Architecture("GraniteForCausalLM", f"{MODELS}.granite:GraniteForCausalLM", scale="residual_multiplier"),
    Architecture("GraniteSWAForCausalLM", f"{MODELS}.granite:GraniteForCausalLM", scale="residual_multiplier"),
    Architecture("GemmaForCausalLM", f"{MODELS}.gemma:GemmaForCausalLM", embed_scaled=True),
    Architecture("Gemma2ForCausalLM", f"{MODELS}.gemma2:Gemma2ForCausalLM", **_GEMMA),
    Architecture("Gemma3ForCausalLM", f"{MODELS}.gemma3:Gemma3ForCausalLM", **QK_NORM, **_GEMMA),
    Architecture(
        "Glm4ForCausalLM",
        f"{MODELS}.glm4:Glm4ForCausalLM",
        attn_norm="post_self_attn_layernorm",
        mlp_norm="post_mlp_layernorm",
    ),
    MayNorm("CohereForCausalLM", **_COHERE, **QK_NORM),
    Architecture("Cohere2ForCausalLM", **_COHERE),
    Architecture("Ernie4_5ForCausalLM", f"{MODELS}.ernie45:Ernie4_5ForCausalLM"),
    Architecture(
        "Exaone4ForCausalLM",
        f"{MODELS}.exaone4:Exaone4ForCausalLM",
        **QK_NORM,
        stream_at=1,
        ln1="",
        attn_norm="post_attention_layernorm",
        ln2="",
        mlp_norm="post_feedforward_layernorm",
    ),
    Architecture(
        "ApertusForCausalLM",
        f"{MODELS}.apertus:ApertusForCausalLM",
        **QK_NORM,
        ln1="attention_layernorm",
        ln2="feedforward_layernorm",
        **ungated("mlp.up_proj"),
    ),
    Architecture("TeleFLMForCausalLM", f"{MODELS}.teleflm:TeleFLMForCausalLM"),
    MayNorm(
        "PanguEmbeddedForCausalLM",
        f"{MODELS}.openpangu:PanguEmbeddedForCausalLM",
        float16_divisor="routed_scaling_factor",
    ),
    Architecture("OrionForCausalLM", f"{MODELS}.orion:OrionForCausalLM"),
    Architecture("StableLmForCausalLM", f"{MODELS}.stablelm:StablelmForCausalLM"),
    MiniCPM("MiniCPMForCausalLM", f"{MODELS}.minicpm:MiniCPMForCausalLM"),
    Architecture(
        "InternLM2ForCausalLM",
        f"{MODELS}.internlm2:InternLM2ForCausalLM",
        embed="model.tok_embeddings",
        ln1="attention_norm",
        qkv="attention.wqkv",
        qkv_by_head=True,
        attn="attention.attn",
        o_proj="attention.wo",
        ln2="ffn_norm",
        mlp="feed_forward",
        up_proj="feed_forward.gate_up_proj",
        down_proj="feed_forward.w2",
        one_rank=("q", "k", "v"),
    ),
    Architecture(
        "ExaoneForCausalLM",
        f"{MODELS}.exaone:ExaoneForCausalLM",
        layers="transformer.h",
        embed="transformer.wte",
        final_norm="transformer.ln_f",
        ln1="ln_1",
        qkv="attn.attention.qkv_proj",
        attn="attn.attention.attn",
        o_proj="attn.attention.out_proj",
        ln2="ln_2",
        down_proj="mlp.c_proj",
    ),
    Architecture(
        "Plamo3ForCausalLM",
        f"{MODELS}.plamo3:Plamo3ForCausalLM",
        layers="model.layers.layers",
        ln1="pre_mixer_norm",
        qkv="mixer.qkv_proj",
        attn="mixer.attn",
        o_proj="mixer.o_proj",
        attn_norm="post_mixer_norm",
        ln2="pre_mlp_norm",
        mlp_norm="post_mlp_norm",
        lacks=("q", "k"),  # vLLM computes the norms of q and k without calling their modules
    ),
    Architecture("NemotronForCausalLM", f"{MODELS}.nemotron:NemotronForCausalLM", **ungated("mlp.up_proj")),
    Architecture(
        "HyperCLOVAXForCausalLM",
        f"{MODELS}.hyperclovax:HyperCLOVAXForCausalLM",
        attn_norm="post_norm1",
        mlp_norm="post_norm2",
        scale="residual_multiplier",
    ),
    Architecture(
        "GPT2LMHeadModel",
        f"{MODELS}.gpt2:GPT2LMHeadModel",
        layers="transformer.h",
        embed="transformer.wte",
        final_norm="transformer.ln_f",
        positions="transformer.wpe",
        ln1="ln_1",
        qkv="attn.c_attn",
        attn="attn.attn",
        o_proj="attn.c_proj",
        ln2="ln_2",
        **ungated("mlp.c_fc"),
        down_proj="mlp.c_proj",
        rotary=False,
    ),
    Architecture(
        "GPTJForCausalLM",
        f"{MODELS}.gpt_j:GPTJForCausalLM",
        layers="transformer.h",
        embed="transformer.wte",
        final_norm="transformer.ln_f",
        ln1="ln_1",
        qkv="attn.qkv_proj",
        attn="attn.attn",
        o_proj="attn.out_proj",
        ln2="",
        **ungated("mlp.fc_in"),
        down_proj="mlp.fc_out",
        parallel=True,
    ),
    Opt(
        "OPTForCausalLM",
        f"{MODELS}.opt:OPTForCausalLM",
        layers="model.decoder.layers",
        embed="model.decoder.embed_tokens",
        final_norm="model.decoder.final_layer_norm",
        positions="model.decoder.embed_positions",
        ln1="self_attn_layer_norm",
        o_proj="self_attn.out_proj",
        ln2="final_layer_norm",
        mlp="fc2",
        **ungated("fc1"),
        down_proj="fc2",
        rotary=False,
    ),
    Bloom(
        "BloomForCausalLM",
        f"{MODELS}.bloom:BloomForCausalLM",
        layers="transformer.h",
        embed="transformer.word_embeddings",
        final_norm="transformer.ln_f",
        qkv="self_attention.query_key_value",
        attn="self_attention.attn",
        o_proj="self_attention.dense",
        **ungated("mlp.dense_h_to_4h"),
        down_proj="mlp.dense_4h_to_h",
        rotary=False,
    ),
)
