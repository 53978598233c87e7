# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of architectures: hybrid models. In some layers, a mixer (such as Mamba) replaces attention.

Hooks of a mixer are read at its input projections, at the norm after its core (the recurrence), and at its output
projection (`Architecture.mix_first`, `mix_in`, `mix_norm`, `mix_out`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dmi_connector.engine.model.architectures.base import MODELS, QK_NORM, Architecture, ungated
from dmi_connector.hooks import HOOKS, ModelDims

_NO_ATTENTION: dict[str, Any] = dict.fromkeys(("qkv", "q_norm", "k_norm", "attn"), "")
_NO_MIXER: dict[str, Any] = dict.fromkeys(("mix_first", "mix_in", "mix_norm", "mix_out"), "")


class Hybrid(Architecture):
    """A row of a hybrid model. `of_layer` keeps the modules of attention, or those of the mixer."""

    def of_layer(self, index: int, dims: ModelDims) -> Architecture:
        if dims.attn_layers is None or index in dims.attn_layers:
            return replace(self, **_NO_MIXER)
        return replace(self, **_NO_ATTENTION, o_proj=self.mix_out)


class NemotronH(Hybrid):
    """Nemotron-H: each layer has one block: Mamba 2, attention, an MLP or experts. So there is no `resid_mid`."""

    @property
    def features(self) -> frozenset[str]:
        return super().features - {"sequential"}

    def fit(self, config: Any) -> Architecture:
        sizes = config.intermediate_size
        if hasattr(config, "get_nemotron_h_config_for_layer") or (isinstance(sizes, list) and len({*sizes}) > 1):
            raise ValueError(
                f"model: {self.name} with layers of different sizes is not supported, because a hook has one width in "
                "all layers; use a model whose layers have equal sizes"
            )
        # vLLM has no CPU kernel for experts without a gate, so hooks of routing were not tested. They are left out.
        known = tuple(name for name, hook in HOOKS.items() if hook.only != "moe")
        if "E" not in config.hybrid_override_pattern:
            return self
        return replace(self, only=known, float16_divisor="routed_scaling_factor")

    def of_layer(self, index: int, dims: ModelDims) -> Architecture:
        if index in (dims.mlp_layers or ()):
            return replace(self, **_NO_ATTENTION, **_NO_MIXER, o_proj="")
        return replace(super().of_layer(index, dims), mlp="", up_proj="", down_proj="")

    def dims(self, config: Any) -> ModelDims:
        kinds, sizes = config.hybrid_override_pattern, config.intermediate_size
        inner = config.mamba_num_heads * config.mamba_head_dim
        found: dict[str, tuple[int, ...]] = {
            name: tuple(i for i, kind in enumerate(kinds) if kind in those)
            for name, those in (("attn_layers", "*"), ("mixer_layers", "M"), ("mlp_layers", "-E"), ("moe_layers", "E"))
        }
        layers: Any = {"layers": len(kinds), "intermediate": sizes[0] if isinstance(sizes, list) else sizes, **found}
        return replace(
            super().dims(config),
            **layers,
            mixer_proj=2 * (inner + config.n_groups * config.ssm_state_size) + config.mamba_num_heads,
            mixer_inner=inner,
        )


class GraniteHybrid(Hybrid):
    """Granite 4: some layers have Mamba 2, the others attention. A shared MLP may run in addition to the experts."""

    def fit(self, config: Any) -> Architecture:
        row = replace(self, rotary=config.position_embedding_type == "rope")
        if not config.num_local_experts:
            return row
        if not config.shared_intermediate_size:
            return replace(row, mlp="block_sparse_moe")
        return replace(row, mlp_first="block_sparse_moe")

    def dims(self, config: Any) -> ModelDims:
        inner = config.mamba_expand * config.hidden_size
        sizes = {"intermediate": config.shared_intermediate_size or config.intermediate_size, "mixer_inner": inner}
        return replace(
            super().dims(config),
            **_layers(config.layer_types),
            **sizes,
            mixer_proj=2 * (inner + config.mamba_n_groups * config.mamba_d_state) + config.mamba_n_heads,
        )


class Lfm2(Hybrid):
    """LFM2: some layers have a short convolution, the others attention. One op computes a whole convolution block."""

    def of_layer(self, index: int, dims: ModelDims) -> Architecture:
        if index in (dims.attn_layers or ()):
            return replace(self, fills="")
        return replace(self, **_NO_ATTENTION, o_proj="")

    def dims(self, config: Any) -> ModelDims:
        size = config.intermediate_size
        if getattr(config, "block_auto_adjust_ff_dim", False):  # configs of models with experts lack this field
            size = int(2 * size / 3)
            if config.block_ffn_dim_multiplier is not None:
                size = int(config.block_ffn_dim_multiplier * size)
            size = -(-size // config.block_multiple_of) * config.block_multiple_of
        return replace(super().dims(config), **_layers(config.layer_types), intermediate=size)


class GatedDelta(Hybrid):
    """Qwen3-Next and Qwen3.5: some layers have a gated delta net, the others attention, whose heads may have gates."""

    def fit(self, config: Any) -> Architecture:
        if getattr(config, "layer_scale", False):
            raise ValueError(
                f"model: {self.name} with layer_scale=True is not supported, because it multiplies the outputs of its "
                "blocks by weights before they are added; use another model"
            )
        return replace(self, gated=bool(getattr(config, "attn_output_gate", True)))

    def dims(self, config: Any) -> ModelDims:
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        return replace(
            super().dims(config),
            **_layers(config.layer_types),
            mixer_proj=2 * (keys + values + config.linear_num_value_heads),
            mixer_inner=values,
        )


def _layers(kinds: Sequence[str]) -> dict[str, Any]:
    """`ModelDims.attn_layers` and `mixer_layers` of a model. kinds: `layer_types` of its config."""
    attends = {i for i, kind in enumerate(kinds) if kind in ("full_attention", "attention")}
    return {
        "attn_layers": tuple(sorted(attends)),
        "mixer_layers": tuple(i for i in range(len(kinds)) if i not in attends),
    }


_DELTA: dict[str, Any] = {
    **QK_NORM,
    "mix_first": "linear_attn.in_proj_qkvz",
    "mix_in": "linear_attn.in_proj_ba",
    "mix_norm": "linear_attn.norm",
    "mix_out": "linear_attn.out_proj",
    "one_rank": ("mix_proj",),
}


def _mamba(path: str) -> dict[str, Any]:
    """Fields of a row whose mixer is vLLM's Mamba 2. path: path of the mixer in a layer."""
    paths = {"mix_in": "in_proj", "mix_norm": "norm", "mix_out": "out_proj"}
    return {**{name: f"{path}.{module}" for name, module in paths.items()}, "one_rank": ("mix_proj",)}


_LFM2: dict[str, Any] = {
    "final_norm": "model.embedding_norm",
    "ln1": "operator_norm",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "o_proj": "self_attn.out_proj",
    "fills": "short_conv",
    "ln2": "ffn_norm",
    "mlp": "feed_forward",
    "up_proj": "feed_forward.w13",
    "down_proj": "feed_forward.w2",
    "moe_gate": "feed_forward.gate",
    "moe_experts": "feed_forward.experts",
    "only": tuple(name for name in HOOKS if not name.startswith("mix_")),
}

HYBRIDS: tuple[Architecture, ...] = (
    GatedDelta("Qwen3NextForCausalLM", f"{MODELS}.qwen3_next:Qwen3NextForCausalLM", **_DELTA),
    GatedDelta("Qwen3_5ForCausalLM", f"{MODELS}.qwen3_5:Qwen3_5ForCausalLM", **_DELTA),
    GatedDelta("Qwen3_5MoeForCausalLM", f"{MODELS}.qwen3_5:Qwen3_5MoeForCausalLM", **_DELTA),
    NemotronH(
        "NemotronHForCausalLM",
        f"{MODELS}.nemotron_h:NemotronHForCausalLM",
        final_norm="model.norm_f",
        ln1="norm",
        qkv="mixer.qkv_proj",
        attn="mixer.attn",
        o_proj="mixer.o_proj",
        **_mamba("mixer"),
        ln2="",
        mlp="mixer",
        **ungated("mixer.up_proj"),
        down_proj="mixer.down_proj",
        moe_gate="mixer.gate",
        moe_experts="mixer.experts",
        rotary=False,
    ),
    GraniteHybrid(
        "GraniteMoeHybridForCausalLM",
        f"{MODELS}.granitemoehybrid:GraniteMoeHybridForCausalLM",
        **_mamba("mamba"),
        mlp="shared_mlp",
        up_proj="shared_mlp.input_linear",
        down_proj="shared_mlp.output_linear",
        moe_gate="block_sparse_moe.gate",
        moe_experts="block_sparse_moe.experts",
        scale="residual_multiplier",
    ),
    Lfm2("Lfm2ForCausalLM", f"{MODELS}.lfm2:Lfm2ForCausalLM", **_LFM2),
    Lfm2("Lfm2MoeForCausalLM", f"{MODELS}.lfm2_moe:Lfm2MoeForCausalLM", **_LFM2),
)
