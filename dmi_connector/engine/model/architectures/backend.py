# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of architectures: models that vLLM serves through its Transformers backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dmi_connector.engine.model.architectures.base import MODELS, QK_NORM, TRANSFORMERS, Architecture, ungated


class NeoX(Architecture):
    """GPT-NeoX. The config says whether attention and MLP run in parallel or in sequence."""

    def fit(self, config: Any) -> Architecture:
        return replace(self, parallel=config.use_parallel_residual)


class Phi(Architecture):
    """Phi-1 and 2, of which some models have norms of q and k."""

    def fit(self, config: Any) -> Architecture:
        if config.qk_layernorm:
            return replace(self, q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm", heads_first=True)
        return self


_BACKEND: dict[str, Any] = {"base": f"{TRANSFORMERS}:TransformersForCausalLM", "positions_as": "position_ids"}
_OLMO: dict[str, Any] = {
    **_BACKEND,
    **QK_NORM,
    "ln1": "",
    "attn_norm": "post_attention_layernorm",
    "ln2": "",
    "mlp_norm": "post_feedforward_layernorm",
}


_EXPERTS: dict[str, Any] = {
    **_BACKEND,
    "base": f"{TRANSFORMERS}:TransformersMoEForCausalLM",
    "lacks": ("router_logits", "topk_ids", "topk_weights"),  # the backend may replace the modules that route
}
_LLAMA = (
    "SmolLM3ForCausalLM",
    "CwmForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "SeedOssForCausalLM",
)
"""Architectures whose layers have the same module paths as Llama."""

BACKEND: tuple[Architecture, ...] = (
    NeoX(
        "GPTNeoXForCausalLM",
        **_BACKEND,
        embed="model.embed_in",
        final_norm="model.final_layer_norm",
        qkv="attention.query_key_value",
        qkv_by_head=True,
        attn="attention.attn",
        o_proj="attention.dense",
        **ungated("mlp.dense_h_to_4h"),
        down_proj="mlp.dense_4h_to_h",
    ),
    Phi(
        "PhiForCausalLM",
        **_BACKEND,
        final_norm="model.final_layernorm",
        o_proj="self_attn.dense",
        ln2="",
        **ungated("mlp.fc1"),
        down_proj="mlp.fc2",
        parallel=True,
    ),
    Architecture("Olmo2ForCausalLM", **_OLMO),
    Architecture("Olmo3ForCausalLM", **_OLMO),
    *(Architecture(name, **_BACKEND) for name in _LLAMA),
    Architecture("ArceeForCausalLM", **_BACKEND, **ungated("mlp.up_proj")),
    # With tensor parallelism, each rank has the complete values of these hooks instead of a slice.
    Architecture("GlmForCausalLM", **_BACKEND, one_rank=("mlp_pre", "mlp_pre_linear", "mlp_post")),
    Architecture("HunYuanMoEV1ForCausalLM", **_EXPERTS),
    Architecture("MellumForCausalLM", **_EXPERTS, **QK_NORM),
    Architecture("Starcoder2ForCausalLM", **_BACKEND, **ungated("mlp.c_fc"), down_proj="mlp.c_proj"),
)

OWN: tuple[Architecture, ...] = (
    NeoX(
        "GPTNeoXForCausalLM",
        f"{MODELS}.gpt_neox:GPTNeoXForCausalLM",
        layers="gpt_neox.layers",
        embed="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        qkv="attention.query_key_value",
        attn="attention.attn",
        o_proj="attention.dense",
        **ungated("mlp.dense_h_to_4h"),
        down_proj="mlp.dense_4h_to_h",
    ),
    Architecture(
        "PhiForCausalLM",
        f"{MODELS}.phi:PhiForCausalLM",
        final_norm="model.final_layernorm",
        o_proj="self_attn.dense",
        ln2="",
        **ungated("mlp.fc1"),
        down_proj="mlp.fc2",
        parallel=True,
    ),
)
"""Rows for classes of vLLM 0.31. Later versions serve these models through the Transformers backend."""
