# SPDX-License-Identifier: Apache-2.0
"""Hybrid models: in some layers a mixer stands in the place of attention, or beside it.

Hooks of such layers are read at the mixer's input projections, at the norm behind its core and at its output
projection (`Architecture.mix_in`, `mix_norm`, `mix_out`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dmi_connector.engine.model.architectures.base import MODELS, QK_NORM, Architecture
from dmi_connector.hooks import ModelDims

_NO_ATTENTION: dict[str, Any] = dict.fromkeys(("qkv", "q_norm", "k_norm", "attn"), "")
_NO_MIXER: dict[str, Any] = dict.fromkeys(("mix_first", "mix_in", "mix_norm", "mix_out"), "")


class Hybrid(Architecture):
    """A row of which layers with attention have the modules of attention, and the others those of the mixer."""

    def of_layer(self, index: int, dims: ModelDims) -> Architecture:
        if dims.attn_layers is None or index in dims.attn_layers:
            return replace(self, **_NO_MIXER)
        return replace(self, **_NO_ATTENTION, o_proj=self.mix_out)


class GatedDelta(Hybrid):
    """Gated delta nets, beside gated attention."""

    def fit(self, config: Any) -> Architecture:
        if getattr(config, "layer_scale", False):
            raise ValueError(
                f"model: {self.name} with layer_scale=True multiplies the outputs of its blocks by weights before they "
                "are added, which its row of hooks does not describe; use another model"
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
    """`ModelDims.attn_layers` and `mixer_layers`, of `layer_types` in a config."""
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
HYBRIDS: tuple[Architecture, ...] = (
    GatedDelta("Qwen3NextForCausalLM", f"{MODELS}.qwen3_next:Qwen3NextForCausalLM", **_DELTA),
    GatedDelta("Qwen3_5ForCausalLM", f"{MODELS}.qwen3_5:Qwen3_5ForCausalLM", **_DELTA),
    GatedDelta("Qwen3_5MoeForCausalLM", f"{MODELS}.qwen3_5:Qwen3_5MoeForCausalLM", **_DELTA),
)
