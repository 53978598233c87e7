# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of architectures: models with multi-head latent attention (MLA)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dmi_connector.engine.model.architectures.base import MODELS, Architecture
from dmi_connector.hooks import ModelDims


class Latent(Architecture):
    """A row of a model with MLA, in which one latent and one rotary key give the keys and values of all heads."""

    def fit(self, config: Any) -> Architecture:
        if not getattr(config, "kv_lora_rank", None) or not getattr(config, "qk_rope_head_dim", None):
            raise ValueError(
                f"model: {self.name} without kv_lora_rank or qk_rope_head_dim in its config has no latent attention, "
                "which its row in the table of architectures requires; use another model"
            )
        queries = "q_proj" if getattr(config, "q_lora_rank", None) is None else "q_b_proj"
        row = self._in("self_attn.mla_attn", queries, "mla_attn")
        return replace(row, indexer="self_attn.mla_attn.indexer") if hasattr(config, "index_topk") else row

    def over_heads(self) -> Latent:
        """This row, after `fit`, for a model that vLLM runs with multi-head attention (VLLM_MLA_DISABLE=1)."""
        return self._in("self_attn", self.qkv.rpartition(".")[2], "attn")

    def _in(self, parent: str, queries: str, attn: str) -> Latent:
        """This row with the attention modules in `parent`. queries: the projection in `parent` that returns q."""
        return replace(
            self,
            qkv=f"{parent}.{queries}",
            kv_norm=f"{parent}.kv_a_layernorm",
            attn=f"{parent}.{attn}",
            o_proj=f"{parent}.o_proj",
        )

    @property
    def attn_name(self) -> str:
        return "self_attn.attn"

    @property
    def features(self) -> frozenset[str]:
        return super().features | {"latent"} | ({"indexer"} if self.indexer else set())

    def dims(self, config: Any) -> ModelDims:
        return replace(
            super().dims(config),
            head_dim=config.qk_nope_head_dim + config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            kv_lora_rank=config.kv_lora_rank,
            qk_rope_head_dim=config.qk_rope_head_dim,
            index_topk=config.index_topk if self.indexer else 0,
            indexer_layers=_with_indexer(config) if self.indexer else (),
        )


def _with_indexer(config: Any) -> tuple[int, ...]:
    """The layers with their own indexer, as vLLM builds them. Others use the choice of the last one before them."""
    layers, pattern = range(config.num_hidden_layers), getattr(config, "index_topk_pattern", None)
    if pattern is not None:
        return tuple(i for i in layers if i >= len(pattern) or pattern[i] != "S")
    every, offset = getattr(config, "index_topk_freq", 1), getattr(config, "index_skip_topk_offset", 2)
    return tuple(i for i in layers if max(i - offset + 1, 0) % every == 0)


_INDEXED = "vllm.models.deepseek_v32"
"""vLLM's Python module for models with an indexer. On a GPU its classes compute norms and rotary embeddings in fused
kernels. On other platforms its classes are those of `deepseek_v2`.
"""
_SCALED: dict[str, Any] = {"float16_divisor": "routed_scaling_factor"}

LATENT: tuple[Architecture, ...] = (
    Latent("DeepseekV2ForCausalLM", f"{MODELS}.deepseek_v2:DeepseekV2ForCausalLM", **_SCALED),
    Latent("DeepseekV3ForCausalLM", f"{MODELS}.deepseek_v2:DeepseekV3ForCausalLM", **_SCALED),
    Latent(
        "MistralLarge3ForCausalLM",
        f"{MODELS}.mistral_large_3:MistralLarge3ForCausalLM",
        **_SCALED,
    ),
    Latent("Glm4MoeLiteForCausalLM", f"{MODELS}.glm4_moe_lite:Glm4MoeLiteForCausalLM", **_SCALED),
    Latent(
        "DeepseekV32ForCausalLM",
        f"{MODELS}.deepseek_v2:DeepseekV3ForCausalLM",
        f"{_INDEXED}:DeepseekV32ForCausalLM",
        **_SCALED,
    ),
    Latent(
        "GlmMoeDsaForCausalLM",
        f"{MODELS}.deepseek_v2:GlmMoeDsaForCausalLM",
        f"{_INDEXED}:GlmMoeDsaForCausalLM",
        **_SCALED,
    ),
)
