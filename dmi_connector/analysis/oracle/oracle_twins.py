# SPDX-License-Identifier: Apache-2.0
"""Tables of the modules of transformers' models whose inputs or outputs are the hooks.

`transformers_oracle.py` reads the tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

ONCE = ("embed", "resid_final", "final_ln")
"""Hooks of modules outside the layers, except logits. `Oracle.run` returns them with a layer axis of length 1."""


@dataclass(frozen=True)
class Point:
    """Where to read a hook: the input or output of a module.

    name: the hook. module: path of the module in a decoder layer, or in the base model for hooks of ONCE. With "a b",
    the hook is the concatenation of the outputs of the modules a and b. With "a + b", it is their sum. side: "in" for
    the first input, "out" for the output, or for its first element if it is a tuple. part: the part of the output of a
    fused projection that is the hook: "q", "k", "v", "gate" or "up"; "" for the whole output. needs, unless: paths of a
    module that the layer must have, and of one that it must not have, for the point to be used; "" for no condition.
    """

    name: str
    module: str
    side: str = "out"
    part: str = ""
    needs: str = ""
    unless: str = ""


@dataclass(frozen=True)
class Twin:
    """The points of one `model_type` of transformers, and what else the oracle must know of the model.

    points: the points in a layer. A layer uses the points whose module it has, and whose `needs` and `unless` it meets.
    If several of them are of one hook, it uses the last. once: points in the base model. layers: path of the list of
    layers in the base model. attn: path of the attention module in a layer, for `attends`. gate: path of the router in
    a layer (`Recorder.watch_router`). rotary: whether queries and keys are rotated. by_head: whether q, k and v of each
    head are adjacent in the output of the fused projection. norms_heads: whether the norms of queries and keys get
    [heads, tokens, head_dim]. attends: name of the method of the attention module that gets rotated queries and keys;
    "" for models that use transformers' attention interface. latent: whether the model has multi-head latent attention,
    where k_pe is a part of each head's keys.

    The other fields are names of fields of the config that hold a factor; "" for none. scale: factor of the outputs of
    attention and MLP. weights_scale: factor by which transformers multiplies the weights of experts; vLLM multiplies
    the sum of the experts' outputs instead. values_scale: factor of the values before attention, which transformers
    applies after the module of the point.
    """

    points: tuple[Point, ...]
    once: tuple[Point, ...]
    layers: str = "layers"
    attn: str = "self_attn"
    gate: str = "mlp.gate"
    rotary: bool = True
    by_head: bool = False
    norms_heads: bool = False
    attends: str = ""
    scale: str = ""
    weights_scale: str = ""
    latent: bool = False
    values_scale: str = ""

    def but(self, *points: Point, **changes: Any) -> Twin:
        """A copy with `points` instead of all points of the same hooks, and with other fields from `changes`."""
        names = {point.name for point in points}
        kept = tuple(point for point in self.points if point.name not in names)
        return replace(self, points=kept + points, **changes)


ABSENT = "-"  # a path that no module has: the hook is not recorded


def _first(gate: str, up: str = ABSENT, fused: str = ABSENT) -> tuple[Point, ...]:
    """The points before an MLP's activation. The projections are `gate` and `up`, both in `fused`, or only `up`."""
    return (
        Point("mlp_pre", gate),
        Point("mlp_pre", up, unless=gate),
        Point("mlp_pre", fused, part="gate"),
        Point("mlp_pre_linear", up, needs=gate),
        Point("mlp_pre_linear", fused, part="up"),
    )


LLAMA = Twin(
    points=(
        Point("resid_pre", "input_layernorm", "in"),
        Point("ln1", "input_layernorm"),
        Point("q", "self_attn.q_proj"),
        Point("k", "self_attn.k_proj"),
        Point("v", "self_attn.v_proj"),
        Point("q", "self_attn.qkv_proj", part="q"),
        Point("k", "self_attn.qkv_proj", part="k"),
        Point("v", "self_attn.qkv_proj", part="v"),
        Point("q", "self_attn.q_b_proj"),
        Point("kv_c", "self_attn.kv_a_layernorm"),
        Point("q", "self_attn.q_norm"),
        Point("k", "self_attn.k_norm"),
        Point("indexer_topk", "self_attn.indexer"),
        Point("z", "self_attn.o_proj", "in"),
        Point("attn_out", "self_attn.o_proj"),
        Point("resid_mid", "post_attention_layernorm", "in"),
        Point("ln2", "post_attention_layernorm"),
        *_first("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
        Point("mlp_post", "mlp.down_proj", "in"),
        Point("mlp_out", "mlp"),
    ),
    once=(Point("embed", "embed_tokens"), Point("resid_final", "norm", "in"), Point("final_ln", "norm")),
)
_GEMMA = LLAMA.but(
    Point("attn_proj", "self_attn.o_proj"),
    Point("attn_out", "post_attention_layernorm"),
    Point("resid_mid", "pre_feedforward_layernorm", "in"),
    Point("ln2", "pre_feedforward_layernorm"),
    Point("mlp_proj", "mlp"),
    Point("mlp_out", "post_feedforward_layernorm"),
)
_DENSE = (
    Point("mlp_pre", "mlp.gate_proj"),
    Point("mlp_pre_linear", "mlp.up_proj"),
    Point("mlp_post", "mlp.down_proj", "in"),
)
_DELTA = LLAMA.but(
    Point("mix_proj", "linear_attn.in_proj_qkvz linear_attn.in_proj_ba"),
    Point("mix_proj", " ".join(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a"))),
    Point("mix_core", "linear_attn.norm", "in"),
    Point("mix_z", "linear_attn.out_proj", "in"),
    Point("attn_out", "linear_attn.out_proj"),
    Point("attn_out", "self_attn.o_proj"),
)
_LATENT = replace(LLAMA, weights_scale="routed_scaling_factor", latent=True)
_OLMO = LLAMA.but(
    Point("resid_pre", "self_attn", "in"),
    Point("attn_proj", "self_attn.o_proj"),
    Point("attn_out", "post_attention_layernorm"),
    Point("resid_mid", "mlp", "in"),
    Point("ln2", ABSENT),
    Point("mlp_proj", "mlp"),
    Point("mlp_out", "post_feedforward_layernorm"),
)
_GPT2 = Twin(
    points=(
        Point("resid_pre", "ln_1", "in"),
        Point("ln1", "ln_1"),
        Point("q", "attn.c_attn", part="q"),
        Point("k", "attn.c_attn", part="k"),
        Point("v", "attn.c_attn", part="v"),
        Point("z", "attn.c_proj", "in"),
        Point("attn_out", "attn.c_proj"),
        Point("resid_mid", "ln_2", "in"),
        Point("ln2", "ln_2"),
        Point("mlp_pre", "mlp.c_fc"),
        Point("mlp_post", "mlp.c_proj", "in"),
        Point("mlp_out", "mlp"),
    ),
    once=(Point("embed", "wte"), Point("resid_final", "ln_f", "in"), Point("final_ln", "ln_f")),
    layers="h",
    attn="attn",
    rotary=False,
)
_GRANITE_MOE = LLAMA.but(
    Point("mlp_out", "block_sparse_moe"), gate="block_sparse_moe.router", scale="residual_multiplier"
)
_GLM4 = LLAMA.but(
    Point("attn_proj", "self_attn.o_proj"),
    Point("attn_out", "post_self_attn_layernorm"),
    Point("mlp_proj", "mlp"),
    Point("mlp_out", "post_mlp_layernorm"),
)
_PARALLEL = LLAMA.but(Point("resid_mid", ABSENT), Point("ln2", ABSENT))
_LFM2 = replace(
    LLAMA.but(
        Point("resid_pre", "operator_norm", "in"),
        Point("ln1", "operator_norm"),
        Point("q", "self_attn.q_layernorm"),
        Point("k", "self_attn.k_layernorm"),
        Point("z", "self_attn.out_proj", "in"),
        Point("attn_out", "self_attn.out_proj"),
        Point("attn_out", "conv.out_proj"),
        Point("resid_mid", "ffn_norm", "in"),
        Point("ln2", "ffn_norm"),
        *_first("feed_forward.w1", "feed_forward.w3"),
        Point("mlp_post", "feed_forward.w2", "in"),
        Point("mlp_out", "feed_forward"),
    ),
    once=(
        Point("embed", "embed_tokens"),
        Point("resid_final", "embedding_norm", "in"),
        Point("final_ln", "embedding_norm"),
    ),
)
_MAMBA = (
    Point("mix_proj", "mamba.in_proj"),
    Point("mix_core", "mamba.norm", "in"),
    Point("mix_z", "mamba.out_proj", "in"),
)
_NEMOTRON_H = Twin(
    points=(
        Point("resid_pre", "norm", "in"),
        Point("ln1", "norm"),
        Point("q", "mixer.q_proj"),
        Point("k", "mixer.k_proj"),
        Point("v", "mixer.v_proj"),
        Point("z", "mixer.o_proj", "in"),
        *(Point(point.name, point.module.replace("mamba", "mixer"), point.side) for point in _MAMBA),
        Point("attn_out", "mixer.o_proj"),
        Point("attn_out", "mixer.out_proj"),
        Point("mlp_pre", "mixer.up_proj"),
        Point("mlp_post", "mixer.down_proj", "in"),
        Point("mlp_out", "mixer.down_proj"),
        Point("mlp_out", "mixer", needs="mixer.experts"),
    ),
    once=(Point("embed", "embeddings"), Point("resid_final", "norm_f", "in"), Point("final_ln", "norm_f")),
    attn="mixer",
    gate="mixer.gate",
    rotary=False,
    weights_scale="routed_scaling_factor",
)
TWINS = {
    "nemotron_h": _NEMOTRON_H,
    "granitemoehybrid": replace(
        LLAMA.but(
            *_MAMBA,
            Point("attn_out", "self_attn.o_proj"),
            Point("attn_out", "mamba.out_proj"),
            Point("mlp_pre", "shared_mlp.input_linear", part="gate", unless="block_sparse_moe"),
            Point("mlp_pre_linear", "shared_mlp.input_linear", part="up", unless="block_sparse_moe"),
            Point("mlp_post", "shared_mlp.output_linear", "in", unless="block_sparse_moe"),
            Point("mlp_out", "shared_mlp"),
            Point("mlp_out", "block_sparse_moe + shared_mlp"),
        ),
        scale="residual_multiplier",
        gate="block_sparse_moe.router",
    ),
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, gate="feed_forward.gate"),
    "qwen3_next": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "gemma2": _GEMMA,
    "gemma3_text": replace(_GEMMA, norms_heads=True),
    "gemma4_text": _GEMMA.but(
        Point("v", "self_attn.v_norm"),
        Point("router_logits", "router.proj"),
        *(replace(point, unless="experts") for point in _DENSE),
        gate="router",
    ),
    "glm4v_moe_text": replace(LLAMA, weights_scale="routed_scaling_factor"),
    "glm4_moe": replace(LLAMA, weights_scale="routed_scaling_factor"),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,  # vLLM reads such a config as a DeepseekV3Config, and gives the class this `model_type`
    "glm4_moe_lite": _LATENT,
    "deepseek_v32": _LATENT,  # as for kimi_k2. A config of V3 has it too, if vLLM has read one of V3.2
    "glm_moe_dsa": _LATENT,
    "mimo_v2_flash": replace(LLAMA, values_scale="attention_value_scale"),
    "glm4": _GLM4,
    "glm4v_text": _GLM4,
    "cohere": _PARALLEL,
    "cohere2": _PARALLEL,
    "cohere2_moe": _PARALLEL,
    "exaone4": replace(_OLMO, norms_heads=True),
    "exaone_moe": replace(LLAMA, norms_heads=True),
    "apertus": LLAMA.but(
        Point("resid_pre", "attention_layernorm", "in"),
        Point("ln1", "attention_layernorm"),
        Point("resid_mid", "feedforward_layernorm", "in"),
        Point("ln2", "feedforward_layernorm"),
        norms_heads=True,
    ),
    "granite_swa": replace(LLAMA, scale="residual_multiplier"),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "granitemoe_swa": _GRANITE_MOE,
    "hyperclovax": LLAMA.but(
        Point("attn_proj", "self_attn.o_proj"),
        Point("attn_out", "post_norm1"),
        Point("mlp_proj", "mlp"),
        Point("mlp_out", "post_norm2"),
        scale="residual_multiplier",
    ),
    "afmoe": LLAMA.but(
        Point("attn_proj", "self_attn.o_proj"),
        Point("attn_out", "post_attention_layernorm"),
        Point("resid_mid", "pre_mlp_layernorm", "in"),
        Point("ln2", "pre_mlp_layernorm"),
        Point("mlp_proj", "mlp"),
        Point("mlp_out", "post_mlp_layernorm"),
        gate="mlp.router",
    ),
    "hy_v3": replace(LLAMA, norms_heads=True),
    "phimoe": replace(LLAMA, gate="mlp.router"),
    "granite": replace(LLAMA, scale="residual_multiplier"),
    "gpt_oss": replace(LLAMA, gate="mlp.router"),
    "llama4_text": LLAMA.but(
        *_first("feed_forward.gate_proj", "feed_forward.up_proj"),
        Point("mlp_post", "feed_forward.down_proj", "in"),
        Point("mlp_out", "feed_forward"),
        gate="feed_forward.router",
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gptj": replace(
        _GPT2.but(
            Point("q", "attn.q_proj"),
            Point("k", "attn.k_proj"),
            Point("v", "attn.v_proj"),
            Point("z", "attn.out_proj", "in"),
            Point("attn_out", "attn.out_proj"),
            Point("resid_mid", ABSENT),
            Point("ln2", ABSENT),
            Point("mlp_pre", "mlp.fc_in"),
            Point("mlp_post", "mlp.fc_out", "in"),
        ),
        rotary=True,
        attends="_attn",
    ),
    "opt": LLAMA.but(
        Point("resid_pre", "self_attn_layer_norm", "in"),
        Point("ln1", "self_attn_layer_norm"),
        Point("z", "self_attn.out_proj", "in"),
        Point("attn_out", "self_attn.out_proj"),
        Point("resid_mid", "final_layer_norm", "in"),
        Point("ln2", "final_layer_norm"),
        Point("mlp_pre", "fc1"),
        Point("mlp_post", "fc2", "in"),
        Point("mlp_out", "fc2"),
        once=(
            Point("embed", "decoder.embed_tokens"),
            Point("resid_final", "decoder.final_layer_norm", "in"),
            Point("final_ln", "decoder.final_layer_norm"),
        ),
        layers="decoder.layers",
        rotary=False,
    ),
    "bloom": LLAMA.but(
        Point("q", "self_attention.query_key_value", part="q"),
        Point("k", "self_attention.query_key_value", part="k"),
        Point("v", "self_attention.query_key_value", part="v"),
        Point("z", "self_attention.dense", "in"),
        Point("attn_out", "self_attention.dense"),
        Point("mlp_pre", "mlp.dense_h_to_4h"),
        Point("mlp_post", "mlp.dense_4h_to_h", "in"),
        # The MLP module adds the residual stream itself.
        Point("mlp_out", "mlp.dense_4h_to_h"),
        once=(Point("embed", "word_embeddings"), Point("resid_final", "ln_f", "in"), Point("final_ln", "ln_f")),
        layers="h",
        attn="self_attention",
        rotary=False,
        by_head=True,
    ),
    "gpt_neox": LLAMA.but(
        Point("q", "attention.query_key_value", part="q"),
        Point("k", "attention.query_key_value", part="k"),
        Point("v", "attention.query_key_value", part="v"),
        Point("z", "attention.dense", "in"),
        Point("attn_out", "attention.dense"),
        Point("mlp_pre", "mlp.dense_h_to_4h"),
        Point("mlp_post", "mlp.dense_4h_to_h", "in"),
        once=(
            Point("embed", "embed_in"),
            Point("resid_final", "final_layer_norm", "in"),
            Point("final_ln", "final_layer_norm"),
        ),
        by_head=True,
    ),
    "phi": replace(
        LLAMA.but(
            Point("q", "self_attn.q_proj"),
            Point("k", "self_attn.k_proj"),
            Point("q", "self_attn.q_layernorm"),
            Point("k", "self_attn.k_layernorm"),
            Point("z", "self_attn.dense", "in"),
            Point("attn_out", "self_attn.dense"),
            Point("mlp_pre", "mlp.fc1"),
            Point("mlp_post", "mlp.fc2", "in"),
        ),
        once=(
            Point("embed", "embed_tokens"),
            Point("resid_final", "final_layernorm", "in"),
            Point("final_ln", "final_layernorm"),
        ),
        norms_heads=True,
    ),
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "flex_olmo": _OLMO,
    "starcoder2": LLAMA.but(Point("mlp_pre", "mlp.c_fc"), Point("mlp_post", "mlp.c_proj", "in")),
}
"""{`model_type` of the config: twin}. LLAMA is the twin of all other types."""
