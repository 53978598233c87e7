# SPDX-License-Identifier: Apache-2.0
"""The modules that are tapped, by model architecture. docs/HOOKS.md says how to add one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dmi_connector.hooks import USUAL, ModelDims

_MODELS = "vllm.model_executor.models"
TRANSFORMERS = f"{_MODELS}.transformers"
"""The module of vLLM's Transformers backend, which builds models of transformers and puts its own layers into them."""
TRANSFORMERS_CLASSES = ("TransformersForCausalLM", "TransformersMoEForCausalLM")
"""Its classes of text models."""

FORWARD = "forward"
"""As a path: the model's own forward."""


@dataclass(frozen=True)
class Architecture:
    """Module paths of one vLLM model class. Paths of a layer's modules are relative to the layer; "": there is none.

    base: ``module:Class`` of vLLM's model. positions: the module that gets the position ids, "" for the layers, FORWARD
    where only the model does; positions_at: the number of that argument; positions_as: its keyword. ln1, ln2,
    final_norm: a fused add-and-norm returns (normed, residual stream), a plain norm gets the residual stream as input;
    taps tell them apart by the output. plain_norms: norms return something else behind the normed values, and get the
    stream as input. Without ln1 the stream is the layer's input, without ln2 the MLP's, without final_norm the last
    layer's output. qkv: the projection that returns q, k and v side by side; qkv_by_head: it returns those of one head
    side by side. q_norm, k_norm: norms of q and k; heads_first: these get [heads, tokens, head_dim]. kv_norm: norm of
    the latent in latent attention. attn_norm, mlp_norm: norms of a block's output, before it is added to the stream.
    moe_gate, moe_experts: router and experts, in layers that have them. rotary: whether q and k are rotated. parallel:
    attention and MLP read the same stream, and both are added to it.

    language: path of the language model, where the model has other parts, such as a vision tower. Token ids and
    embeddings then both enter the forward; embeddings are made before it.

    scale: field of the config by which a block's output is multiplied before it is added. embed_scaled: embeddings are
    multiplied by the root of their width. one_rank: hooks that a rank does not have whole or as its slice under tensor
    parallelism. float16_divisor: field of the config by which vLLM divides the residual stream in float16. only: the
    hooks that can be captured; (): all.
    """

    name: str
    base: str
    language: str = ""
    layers: str = "model.layers"
    embed: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    positions: str = ""
    positions_at: int = 0
    positions_as: str = "positions"
    ln1: str = "input_layernorm"
    plain_norms: bool = False
    qkv: str = "self_attn.qkv_proj"
    qkv_by_head: bool = False
    q_norm: str = ""
    k_norm: str = ""
    kv_norm: str = ""
    heads_first: bool = False
    attn: str = "self_attn.attn"
    o_proj: str = "self_attn.o_proj"
    attn_norm: str = ""
    ln2: str = "post_attention_layernorm"
    mlp: str = "mlp"
    down_proj: str = "mlp.down_proj"
    mlp_norm: str = ""
    moe_gate: str = "mlp.gate"
    moe_experts: str = "mlp.experts"
    rotary: bool = True
    parallel: bool = False
    scale: str = ""
    embed_scaled: bool = False
    one_rank: tuple[str, ...] = ()
    float16_divisor: str = ""
    only: tuple[str, ...] = ()

    def fit(self, config: Any) -> Architecture:
        """The row for a model with this Hugging Face text config, where some of it depends on that.

        Raises ValueError for a model of this architecture that cannot be captured, with the reason.
        """
        if self.q_norm and not getattr(config, "use_qk_norm", True):
            return replace(self, q_norm="", k_norm="")
        return self

    @property
    def attn_name(self) -> str:
        """The name of a layer's attention in vLLM's table of cache layers, relative to the layer."""
        return self.attn

    @property
    def in_transformers(self) -> bool:
        """Whether vLLM's Transformers backend serves the model: with the modules of transformers."""
        return self.base.startswith(f"{TRANSFORMERS}:")

    @property
    def layer(self) -> str:
        """The path of a layer in itself."""
        return "."

    @property
    def before_mlp(self) -> str:
        """The module that gets the input of the MLP."""
        return self.mlp

    def path(self, index: int, module: str) -> str:
        """The path in the model of a module of a layer. module: an attribute."""
        return f"{self.layers}.{index}.{getattr(self, module)}".rstrip(".")

    @property
    def features(self) -> frozenset[str]:
        """What models of this row have, of `hooks.FEATURES`."""
        lacks = {
            "rotary": not self.rotary,
            "sequential": self.parallel,
            "input_norm": not self.ln1,
            "mlp_norm": not self.ln2,
        }
        has = {"post_norms": bool(self.attn_norm)}
        return USUAL - {name for name, absent in lacks.items() if absent} | {
            name for name, there in has.items() if there
        }

    def dims(self, config: Any) -> ModelDims:
        """The sizes in a Hugging Face text config."""
        layers = config.num_hidden_layers
        heads = config.num_attention_heads
        hidden = config.hidden_size
        experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts") or 0
        return ModelDims(
            architecture=self.name,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or hidden // heads,
            intermediate=_first(config, "intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner")
            or 4 * hidden,
            vocab=config.vocab_size,
            experts=experts,
            top_k=getattr(config, "num_experts_per_tok", 0) or 0 if experts else 0,
            moe_layers=_moe_layers(config, layers) if experts else (),
            features=self.features,
            only=frozenset(self.only) or None,
        )

    def block_scale(self, config: Any) -> float:
        """By what a block's output is multiplied before it is added to the residual stream."""
        return float(getattr(config, self.scale)) if self.scale else 1.0

    def visual_layers(self, config: Any) -> int:
        """First layers behind which visual features are added, as the config of the whole model says (deepstack)."""
        vision = getattr(config, "vision_config", None) if self.language else None
        return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def _first(config: Any, *names: str) -> Any:
    """The first of these fields that a config has a value for; None without one."""
    return next((value for name in names if (value := getattr(config, name, None))), None)


def _moe_layers(config: Any, layers: int) -> tuple[int, ...]:
    """Layers with experts, as a config tells: all that it does not say to be dense."""
    if listed := getattr(config, "moe_layers", None):  # Llama 4
        return tuple(listed)
    step = getattr(config, "decoder_sparse_step", 1)  # Qwen
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    first = getattr(config, "first_k_dense_replace", 0) or 0  # DeepSeek, GLM
    every = getattr(config, "moe_layer_freq", 1)
    return tuple(
        i for i in range(first, layers) if i not in dense and (i + 1) % step == 0 and (every == 1 or i % every == 0)
    )


class Opt(Architecture):
    """OPT, but for its model of 350 million parameters, which norms the residual stream itself."""

    def fit(self, config: Any) -> Architecture:
        if not config.do_layer_norm_before:
            raise ValueError("model: OPT with do_layer_norm_before=False norms its residual stream; use another size")
        return self


class Bloom(Architecture):
    """Bloom, but for models whose residual stream is the output of a norm."""

    def fit(self, config: Any) -> Architecture:
        if config.apply_residual_connection_post_layernorm:
            raise ValueError(
                "model: Bloom with apply_residual_connection_post_layernorm=True adds to the output of its norms; "
                "use another model"
            )
        return self


class Latent(Architecture):
    """Multi-head latent attention (MLA): keys and values of all heads are made of one latent and one rotary key."""

    def fit(self, config: Any) -> Architecture:
        if not getattr(config, "kv_lora_rank", None) or not getattr(config, "qk_rope_head_dim", None):
            raise ValueError(
                f"model: {self.name} without kv_lora_rank or qk_rope_head_dim in its config has plain attention, which "
                "its row of hooks does not describe; use another model"
            )
        queries = "q_proj" if getattr(config, "q_lora_rank", None) is None else "q_b_proj"
        return self._in("self_attn.mla_attn", queries, "mla_attn")

    def over_heads(self) -> Latent:
        """This fitted row where vLLM attends over keys and values of heads, as with VLLM_MLA_DISABLE=1."""
        return self._in("self_attn", self.qkv.rpartition(".")[2], "attn")

    def _in(self, parent: str, queries: str, attn: str) -> Latent:
        """The row whose attention modules are in `parent`. queries: the projection that returns q."""
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
        return super().features | {"latent"}

    def dims(self, config: Any) -> ModelDims:
        return replace(
            super().dims(config),
            head_dim=config.qk_nope_head_dim + config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            kv_lora_rank=config.kv_lora_rank,
            qk_rope_head_dim=config.qk_rope_head_dim,
        )


class NeoX(Architecture):
    """GPT-NeoX, whose blocks run side by side or one after the other."""

    def fit(self, config: Any) -> Architecture:
        return replace(self, parallel=config.use_parallel_residual)


class Phi(Architecture):
    """Phi-1 and 2, which may norm q and k."""

    def fit(self, config: Any) -> Architecture:
        if config.qk_layernorm:
            return replace(self, q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm", heads_first=True)
        return self


_QK_NORM: dict[str, Any] = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_DEEPSEEK: dict[str, Any] = {"float16_divisor": "routed_scaling_factor"}
_GEMMA: dict[str, Any] = {
    "embed_scaled": True,
    "attn_norm": "post_attention_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}
_BACKEND: dict[str, Any] = {"base": f"{TRANSFORMERS}:TransformersForCausalLM", "positions_as": "position_ids"}
_OLMO: dict[str, Any] = {
    **_BACKEND,
    **_QK_NORM,
    "ln1": "",
    "attn_norm": "post_attention_layernorm",
    "ln2": "",
    "mlp_norm": "post_feedforward_layernorm",
}

ARCHITECTURES: dict[str, Architecture] = {
    a.name: a
    for a in (
        Architecture("Qwen3ForCausalLM", f"{_MODELS}.qwen3:Qwen3ForCausalLM", **_QK_NORM),
        Architecture("Qwen2ForCausalLM", f"{_MODELS}.qwen2:Qwen2ForCausalLM"),
        Architecture("LlamaForCausalLM", f"{_MODELS}.llama:LlamaForCausalLM"),
        Architecture("InternLM3ForCausalLM", f"{_MODELS}.llama:LlamaForCausalLM"),
        Architecture("MistralForCausalLM", f"{_MODELS}.mistral:MistralForCausalLM"),
        Architecture("Ministral3ForCausalLM", f"{_MODELS}.mistral:MistralForCausalLM"),
        Architecture("Phi3ForCausalLM", f"{_MODELS}.phi3:Phi3ForCausalLM"),
        Architecture("Qwen3MoeForCausalLM", f"{_MODELS}.qwen3_moe:Qwen3MoeForCausalLM", **_QK_NORM),
        Architecture("Qwen2MoeForCausalLM", f"{_MODELS}.qwen2_moe:Qwen2MoeForCausalLM"),
        Architecture(
            "MixtralForCausalLM",
            f"{_MODELS}.mixtral:MixtralForCausalLM",
            mlp="block_sparse_moe",
            moe_gate="block_sparse_moe.gate",
            moe_experts="block_sparse_moe.experts",
        ),
        Architecture("OlmoeForCausalLM", f"{_MODELS}.olmoe:OlmoeForCausalLM", **_QK_NORM, one_rank=("q", "k")),
        Architecture("Glm4MoeForCausalLM", f"{_MODELS}.glm4_moe:Glm4MoeForCausalLM", **_QK_NORM),
        Latent("DeepseekV2ForCausalLM", f"{_MODELS}.deepseek_v2:DeepseekV2ForCausalLM", **_DEEPSEEK),
        Latent("DeepseekV3ForCausalLM", f"{_MODELS}.deepseek_v2:DeepseekV3ForCausalLM", **_DEEPSEEK),
        Latent("Glm4MoeLiteForCausalLM", f"{_MODELS}.glm4_moe_lite:Glm4MoeLiteForCausalLM"),
        Architecture("GraniteForCausalLM", f"{_MODELS}.granite:GraniteForCausalLM", scale="residual_multiplier"),
        Architecture("GemmaForCausalLM", f"{_MODELS}.gemma:GemmaForCausalLM", embed_scaled=True),
        Architecture("Gemma2ForCausalLM", f"{_MODELS}.gemma2:Gemma2ForCausalLM", **_GEMMA),
        Architecture("Gemma3ForCausalLM", f"{_MODELS}.gemma3:Gemma3ForCausalLM", **_QK_NORM, **_GEMMA),
        Architecture(
            "Glm4ForCausalLM",
            f"{_MODELS}.glm4:Glm4ForCausalLM",
            attn_norm="post_self_attn_layernorm",
            mlp_norm="post_mlp_layernorm",
        ),
        Architecture(
            "Cohere2ForCausalLM",
            f"{_MODELS}.commandr:CohereForCausalLM",
            plain_norms=True,
            ln2="",
            parallel=True,
            one_rank=("attn_out", "mlp_out"),
        ),
        Architecture(
            "GptOssForCausalLM",
            f"{_MODELS}.gpt_oss:GptOssForCausalLM",
            embed="model.embedding",
            positions_at=1,
            qkv="attn.qkv_proj",
            attn="attn.attn",
            o_proj="attn.o_proj",
            moe_gate="mlp.router",
        ),
        Architecture(
            "Llama4ForCausalLM",
            f"{_MODELS}.llama4:Llama4ForCausalLM",
            mlp="feed_forward",
            down_proj="feed_forward.down_proj",
            moe_gate="feed_forward.router",
            moe_experts="feed_forward.experts",
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
        Architecture(
            "GPTJForCausalLM",
            f"{_MODELS}.gpt_j:GPTJForCausalLM",
            layers="transformer.h",
            embed="transformer.wte",
            final_norm="transformer.ln_f",
            ln1="ln_1",
            qkv="attn.qkv_proj",
            attn="attn.attn",
            o_proj="attn.out_proj",
            ln2="",
            down_proj="mlp.fc_out",
            parallel=True,
        ),
        Opt(
            "OPTForCausalLM",
            f"{_MODELS}.opt:OPTForCausalLM",
            layers="model.decoder.layers",
            embed="model.decoder.embed_tokens",
            final_norm="model.decoder.final_layer_norm",
            positions="model.decoder.embed_positions",
            ln1="self_attn_layer_norm",
            o_proj="self_attn.out_proj",
            ln2="final_layer_norm",
            mlp="fc2",
            down_proj="fc2",
            rotary=False,
        ),
        Bloom(
            "BloomForCausalLM",
            f"{_MODELS}.bloom:BloomForCausalLM",
            layers="transformer.h",
            embed="transformer.word_embeddings",
            final_norm="transformer.ln_f",
            qkv="self_attention.query_key_value",
            attn="self_attention.attn",
            o_proj="self_attention.dense",
            down_proj="mlp.dense_4h_to_h",
            rotary=False,
        ),
        NeoX(
            "GPTNeoXForCausalLM",
            **_BACKEND,
            embed="model.embed_in",
            final_norm="model.final_layer_norm",
            qkv="attention.query_key_value",
            qkv_by_head=True,
            attn="attention.attn",
            o_proj="attention.dense",
            down_proj="mlp.dense_4h_to_h",
        ),
        Phi(
            "PhiForCausalLM",
            **_BACKEND,
            final_norm="model.final_layernorm",
            o_proj="self_attn.dense",
            ln2="",
            down_proj="mlp.fc2",
            parallel=True,
        ),
        Architecture("Olmo2ForCausalLM", **_OLMO),
        Architecture("Olmo3ForCausalLM", **_OLMO),
        Architecture("SmolLM3ForCausalLM", **_BACKEND),
        Architecture("Starcoder2ForCausalLM", **_BACKEND, down_proj="mlp.c_proj"),
    )
}


def _add_wrapper(name: str, module: str, inner: str) -> None:
    """Add a model with a vision tower whose language model has the row `inner`."""
    row = ARCHITECTURES[inner]
    paths: dict[str, Any] = {
        field: f"language_model.{getattr(row, field)}" for field in ("layers", "embed", "final_norm")
    }
    base = f"{_MODELS}.{module}:{name}"
    ARCHITECTURES[name] = replace(row, name=name, base=base, language="language_model", **paths)


for _name, _module, _inner in (
    ("Gemma3ForConditionalGeneration", "gemma3_mm", "Gemma3ForCausalLM"),
    ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "Qwen2ForCausalLM"),
    ("Qwen3VLForConditionalGeneration", "qwen3_vl", "Qwen3ForCausalLM"),
    ("Mistral3ForConditionalGeneration", "mistral3", "MistralForCausalLM"),
    ("Llama4ForConditionalGeneration", "mllama4", "Llama4ForCausalLM"),
):
    _add_wrapper(_name, _module, _inner)


OWN_CLASSES: dict[str, Architecture] = {
    a.name: a
    for a in (
        NeoX(
            "GPTNeoXForCausalLM",
            f"{_MODELS}.gpt_neox:GPTNeoXForCausalLM",
            layers="gpt_neox.layers",
            embed="gpt_neox.embed_in",
            final_norm="gpt_neox.final_layer_norm",
            qkv="attention.query_key_value",
            attn="attention.attn",
            o_proj="attention.dense",
            down_proj="mlp.dense_4h_to_h",
        ),
        Architecture(
            "PhiForCausalLM",
            f"{_MODELS}.phi:PhiForCausalLM",
            final_norm="model.final_layernorm",
            o_proj="self_attn.dense",
            ln2="",
            down_proj="mlp.fc2",
            parallel=True,
        ),
    )
}
"""Rows in the place of those above for classes that vLLM 0.31 has, and 0.32 no more (`engine/plugin.py`)."""


def register_architecture(row: Architecture) -> None:
    """Add or replace an architecture. Call it in a `vllm.general_plugins` entry point of your own."""
    from vllm.model_executor.models import ModelRegistry

    ARCHITECTURES[row.name] = row
    ModelRegistry.register_model(row.name, f"dmi_connector.engine.models:{row.name}")
