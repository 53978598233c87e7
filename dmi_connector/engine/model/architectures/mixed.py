# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of architectures: models whose layers have attention heads of different numbers or sizes.

A hook has the same width in all of its layers. So hooks inside attention exist only in layers with the most common
sizes. Other hooks do not depend on these sizes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from dmi_connector.engine.model.architectures.base import MODELS, QK_NORM, Architecture
from dmi_connector.hooks import HOOKS, ModelDims

_NO_ATTENTION: dict[str, Any] = dict.fromkeys(("qkv", "q_norm", "k_norm", "attn"), "")


class Sizes(NamedTuple):
    """The sizes of attention in one layer.

    heads: number of query heads. kv_heads: number of heads of keys and values. head_dim: elements per head. v_head_dim:
    elements per head of values, or 0 if that equals `head_dim`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int = 0


class Mixed(Architecture):
    """An architecture whose attention hooks exist only in the layers with the most common sizes."""

    def sizes(self, config: Any) -> list[Sizes | None]:
        """The sizes of each layer; None for a layer that reads the keys and values of an earlier layer."""
        raise NotImplementedError

    def layer_config(self, config: Any) -> Any:
        """A config with the fields that `Architecture.dims` reads. Override it if `config` lacks some of them."""
        return config

    def dims(self, config: Any) -> ModelDims:
        sizes = self.sizes(config)
        usual = Counter(size for size in sizes if size is not None).most_common(1)[0][0]
        there = tuple(i for i, size in enumerate(sizes) if size == usual)
        rest = tuple(i for i, size in enumerate(sizes) if size != usual)
        dims = super().dims(self.layer_config(config))
        only = frozenset(name for name in dims.only or HOOKS if not name.startswith("mix_"))
        return replace(dims, **usual._asdict(), attn_layers=there, mixer_layers=rest, only=only)

    def of_layer(self, index: int, dims: ModelDims) -> Architecture:
        return self if index in (dims.attn_layers or ()) else replace(self, **_NO_ATTENTION)


def _shared(config: Any) -> int:
    """Number of layers at the end of the model that read the keys and values of earlier layers."""
    return getattr(config, "num_kv_shared_layers", 0) or 0


class Gemma4(Mixed):
    """Gemma 4: layers with full attention have other head sizes than layers with sliding windows.

    The last layers may read the keys and values of earlier layers. In models with per-layer embeddings, each layer
    adds a projection of its own token embedding to the residual stream, after its MLP. Each layer ends by multiplying
    the stream by a scalar.
    """

    def fit(self, config: Any) -> Architecture:
        wide = getattr(config, "use_double_wide_mlp", False) and _shared(config)
        # With experts, `mlp_norm` gets the sum of the outputs of MLP and experts. No module returns this sum.
        neurons = dict.fromkeys(("mlp_pre", "mlp_pre_linear", "mlp_post"), wide)
        lacks = {**neurons, "mlp_proj": getattr(config, "num_experts", None)}
        return replace(self, lacks=tuple(name for name, absent in lacks.items() if absent))

    def layer_config(self, config: Any) -> Any:
        return config.per_layer_config[0]

    def sizes(self, config: Any) -> list[Sizes | None]:
        own = config.num_hidden_layers - _shared(config)
        layers = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
        return [
            Sizes(config.num_attention_heads, layer.num_key_value_heads, layer.head_dim) if i < own else None
            for i, layer in enumerate(layers)
        ]


class MiMo(Mixed):
    """MiMo V2: layers with sliding windows may have heads of other numbers or sizes. Attention gets scaled values."""

    def sizes(self, config: Any) -> list[Sizes | None]:
        names = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
        whole = Sizes(*(getattr(config, name) for name in names))
        windows = Sizes(*(getattr(config, f"swa_{name}") for name in names))
        return [windows if window else whole for window in config.hybrid_layer_pattern]


class Step(Mixed):
    """Step 3.5: one type of layer may have other sizes. vLLM computes the final norm only for the rows of logits.

    vLLM 0.33 reads the config with a class of transformers, earlier versions with a class of their own.
    """

    adds_in_place: ClassVar[bool] = True

    def layer_config(self, config: Any) -> Any:
        return config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config

    def sizes(self, config: Any) -> list[Sizes | None]:
        names = ("num_attention_heads", "num_attention_groups", "head_dim")
        if getattr(config, "is_heterogeneous", False):
            layers = (config.per_layer_config[i] for i in range(config.num_hidden_layers))
            return [Sizes(*(getattr(layer, name) for name in names)) for layer in layers]
        usual = Sizes(*(getattr(config, name) for name in names))
        other = getattr(config, "attention_other_setting", None)
        if not other:
            return [usual] * config.num_hidden_layers
        windows = Sizes(*(other[name] for name in names))
        return [windows if kind == other["attention_type"] else usual for kind in config.layer_types]

    def dims(self, config: Any) -> ModelDims:
        dims = super().dims(config)
        if getattr(config, "mlp_layer_types", None):
            return dims
        listed = getattr(config, "moe_layers_enum", None)
        experts = range(1, config.num_hidden_layers) if listed is None else map(int, listed.split(","))
        return replace(dims, moe_layers=tuple(experts))

    def of_layer(self, index: int, dims: ModelDims) -> Architecture:
        row = super().of_layer(index, dims)
        return replace(row, mlp="moe", up_proj="", down_proj="") if index in dims.moe_layers else row


MIXED: tuple[Architecture, ...] = (
    Step(
        "Step3p5ForCausalLM",
        f"{MODELS}.step3p5:Step3p5ForCausalLM",
        **QK_NORM,
        final_norm="",
        moe_gate="moe.gate",
        moe_experts="moe.experts",
        lacks=("final_ln",),
    ),
    MiMo("MiMoV2FlashForCausalLM", f"{MODELS}.mimo_v2:MiMoV2FlashForCausalLM", v_at_attn=True),
    MiMo("MiMoV2ForCausalLM", f"{MODELS}.mimo_v2:MiMoV2ForCausalLM", v_at_attn=True),
    Gemma4(
        "Gemma4ForCausalLM",
        f"{MODELS}.gemma4:Gemma4ForCausalLM",
        **QK_NORM,
        v_at_attn=True,  # a norm changes the values before attention
        embed_scaled=True,
        attn_norm="post_attention_layernorm",
        ln2="pre_feedforward_layernorm",
        mlp_norm="post_feedforward_layernorm",
        moe_gate="router",
        moe_experts="experts",
        sums=False,
    ),
)
