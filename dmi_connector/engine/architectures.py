# SPDX-License-Identifier: Apache-2.0
"""The modules that are tapped, by model architecture. docs/HOOKS.md says how to add one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dmi_connector.hooks import ModelDims


@dataclass(frozen=True)
class Architecture:
    """Module paths of one vLLM model class. Paths of a layer's modules are relative to the layer.

    base: ``module:Class`` of vLLM's model. positions: the module whose first argument is the position ids; "": the
    layers. ln1, ln2, final_norm: a fused add-and-norm returns (normed, residual stream); a plain norm gets the residual
    stream as input; taps tell them apart by the output. qkv: the projection that returns q, k and v side by side.
    q_norm, k_norm: norms of q and k; "": the model has none. moe_gate, moe_experts: router and experts, in layers that
    have them. rotary: whether q and k are rotated.
    """

    name: str
    base: str
    layers: str = "model.layers"
    embed: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    positions: str = ""
    ln1: str = "input_layernorm"
    qkv: str = "self_attn.qkv_proj"
    q_norm: str = ""
    k_norm: str = ""
    attn: str = "self_attn.attn"
    o_proj: str = "self_attn.o_proj"
    ln2: str = "post_attention_layernorm"
    mlp: str = "mlp"
    down_proj: str = "mlp.down_proj"
    moe_gate: str = "mlp.gate"
    moe_experts: str = "mlp.experts"
    rotary: bool = True

    def dims(self, config: Any) -> ModelDims:
        """The sizes in a Hugging Face text config."""
        layers = config.num_hidden_layers
        heads = config.num_attention_heads
        hidden = config.hidden_size
        experts = getattr(config, "num_experts", 0) or 0
        intermediate = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
        return ModelDims(
            architecture=self.name,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or hidden // heads,
            intermediate=intermediate,
            vocab=config.vocab_size,
            experts=experts,
            top_k=getattr(config, "num_experts_per_tok", 0) or 0 if experts else 0,
            moe_layers=_moe_layers(config, layers) if experts else (),
            rotary=self.rotary,
        )


def _moe_layers(config: Any, layers: int) -> tuple[int, ...]:
    """Layers with experts, as Qwen3-MoE's config tells (decoder_sparse_step, mlp_only_layers)."""
    step = getattr(config, "decoder_sparse_step", 1)
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    return tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


_MODELS = "vllm.model_executor.models"

ARCHITECTURES: dict[str, Architecture] = {
    a.name: a
    for a in (
        Architecture(
            "Qwen3ForCausalLM",
            f"{_MODELS}.qwen3:Qwen3ForCausalLM",
            q_norm="self_attn.q_norm",
            k_norm="self_attn.k_norm",
        ),
        Architecture("Qwen2ForCausalLM", f"{_MODELS}.qwen2:Qwen2ForCausalLM"),
        Architecture("LlamaForCausalLM", f"{_MODELS}.llama:LlamaForCausalLM"),
        Architecture("MistralForCausalLM", f"{_MODELS}.mistral:MistralForCausalLM"),
        Architecture(
            "Qwen3MoeForCausalLM",
            f"{_MODELS}.qwen3_moe:Qwen3MoeForCausalLM",
            q_norm="self_attn.q_norm",
            k_norm="self_attn.k_norm",
        ),
        Architecture(
            "GPT2LMHeadModel",
            f"{_MODELS}.gpt2:GPT2LMHeadModel",
            layers="transformer.h",
            embed="transformer.wte",
            final_norm="transformer.ln_f",
            positions="transformer.wpe",
            ln1="ln_1",
            qkv="attn.c_attn",
            attn="attn.attn",
            o_proj="attn.c_proj",
            ln2="ln_2",
            down_proj="mlp.c_proj",
            rotary=False,
        ),
    )
}


def register_architecture(row: Architecture) -> None:
    """Add or replace an architecture. Call it in a `vllm.general_plugins` entry point of your own."""
    from vllm.model_executor.models import ModelRegistry

    ARCHITECTURES[row.name] = row
    ModelRegistry.register_model(row.name, f"dmi_connector.engine.models:{row.name}")
