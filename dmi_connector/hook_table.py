# SPDX-License-Identifier: Apache-2.0
"""The table of hooks, and the presets. Nothing here imports torch or vllm."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hook:
    """One kind of tensor.

    width: symbol of its width, see `ModelDims.width`. scope: "layer" (one a layer), "once" (one a forward) or "sampled"
    (one row for each sampled position). sharded: under tensor parallelism each rank holds a slice of the width. dtype:
    "model" (the model's own) or a fixed one. only: who has it: layers that are "dense" or "moe" (mixtures of experts),
    models with one of FEATURES, models with "mrope" (positions on several axes), or layers with a "mixer" (hybrid
    models); None for all. unless: models with this one of FEATURES lack it. block: what a layer must have, one of
    BLOCKS; "" for any layer. source: for a probe, the hook that it is computed from; it has the width, scope, sharding
    and dtype of that hook. "" for a tensor of the model. layers: for a probe, the layers of its source; (0,) if that
    exists once.
    """

    name: str
    width: str
    scope: str
    sharded: bool
    doc: str
    dtype: str = "model"
    only: str | None = None
    unless: str = ""
    block: str = ""
    source: str = ""
    layers: tuple[int, ...] = ()

    @property
    def layered(self) -> bool:
        """Whether stores have an entry for each of its layers. A probe of one layer exists once."""
        return self.scope == "layer" and len(self.layers) != 1


BLOCKS = {
    "attention": "which have no attention, or one of other sizes",
    "tokens": "which have neither attention nor a mixer",
    "mlp": "which have no MLP",
}
"""What some layers of hybrid models lack, and what a refusal says of them. "tokens": attention or a mixer, whose output
for a token depends on tokens before.
"""
FEATURES = {
    "rotary": "which has no rotary embedding",
    "latent": "which has no latent attention",
    "sequential": "which runs attention and MLP side by side",
    "input_norm": "which has no norm before attention",
    "mlp_norm": "which has no norm of its own before the MLP",
    "post_norms": "which has no norm after a block",
    "gated_mixer": "which has no norm after the core of its mixers",
    "ungated_mlp": "whose MLP has a gate",
}
"""Features of a model that some hooks need, and what a refusal says of a model that lacks one."""
USUAL = frozenset(("rotary", "sequential", "input_norm", "mlp_norm"))
"""The features of a Llama."""
INSTEAD = {
    "latent": "whose attention has kv_c and k_pe in the place of keys and values of heads",
    "ungated_mlp": "whose MLP has no gate",
}
"""What a refusal says of a model that lacks a hook because it has one of FEATURES."""


def _of_attention(
    name: str, width: str, sharded: bool, doc: str, dtype: str = "model", only: str | None = None, unless: str = ""
) -> Hook:
    return Hook(name, width, "layer", sharded, doc, dtype, only, unless, block="attention")


PROBE = "probe."
"""How the names of probes begin, which are hooks of one engine: `ModelDims.hooks` has them."""

_LINEAR = Hook(
    "mlp_pre_linear",
    "I",
    "layer",
    True,
    "what the activation of the gate is multiplied by, output of up_proj",
    only="dense",
    unless="ungated_mlp",
)
HOOKS: dict[str, Hook] = {
    h.name: h
    for h in (
        Hook("embed", "H", "once", False, "output of the token embedding"),
        Hook("resid_pre", "H", "layer", False, "residual stream entering the layer"),
        Hook("ln1", "H", "layer", False, "output of the norm before attention", only="input_norm"),
        _of_attention("q", "Q", True, "queries after q_norm where there is one, before rotary"),
        _of_attention("k", "K", True, "keys after k_norm where there is one, before rotary", unless="latent"),
        _of_attention("v", "K", True, "values", unless="latent"),
        _of_attention("kv_c", "C", False, "latent of keys and values, as attention sees it", only="latent"),
        _of_attention("k_pe", "R", False, "rotary key that all heads share, after rotary", only="latent"),
        _of_attention("q_rot", "Q", True, "queries after rotary, as attention sees them", only="rotary"),
        _of_attention("k_rot", "K", True, "keys after rotary, as attention sees them", only="rotary", unless="latent"),
        _of_attention("pattern", "A", True, "attention weights of heads: see attn(m)", "float32", unless="latent"),
        _of_attention("z", "Z", True, "attention output of every head, before the output projection"),
        Hook("mix_proj", "P", "layer", False, "outputs of a mixer's input projections, side by side", only="mixer"),
        Hook("mix_core", "N", "layer", True, "output of a mixer's core, before its gated norm", only="gated_mixer"),
        Hook("mix_z", "N", "layer", True, "what enters a mixer's output projection", only="mixer"),
        Hook("attn_proj", "H", "layer", False, "output of the attention block before its post-norm", only="post_norms"),
        Hook("attn_out", "H", "layer", False, "what attention or a mixer adds to the residual stream", block="tokens"),
        Hook("resid_mid", "H", "layer", False, "residual stream between attention and MLP", only="sequential"),
        Hook("ln2", "H", "layer", False, "output of the norm before the MLP", only="mlp_norm"),
        Hook("router_logits", "E", "layer", False, "router scores of every expert", "float32", "moe"),
        Hook("topk_ids", "T", "layer", False, "chosen experts", "int32", "moe"),
        Hook("topk_weights", "T", "layer", False, "weights of the chosen experts", "float32", "moe"),
        Hook(
            "mlp_pre", "I", "layer", True, "MLP neurons before the activation: the gate, if there is one", only="dense"
        ),
        _LINEAR,
        Hook("mlp_post", "I", "layer", True, "MLP neurons after the activation, before down_proj", only="dense"),
        Hook("mlp_proj", "H", "layer", False, "output of the MLP block before its post-norm", only="post_norms"),
        Hook("mlp_out", "H", "layer", False, "what the MLP adds to the residual stream", block="mlp"),
        Hook("resid_final", "H", "once", False, "residual stream after the last layer"),
        Hook("final_ln", "H", "once", False, "output of the final norm"),
        Hook("mrope_positions", "M", "once", False, "position on each axis of M-RoPE", "int32", only="mrope"),
        Hook("logits", "V", "sampled", False, "output of compute_logits at each sampled position"),
    )
}

ALWAYS = ("token_ids", "positions", "mrope_positions")
"""Stored with every capture, the last of models that have it. A selection may name them, without effect."""

ALIASES = {"mlp_in": "ln2"}
"""Other names of the same tensor, which is stored once. `resid_post` is one too: that of layer l is the resid_pre of
layer l + 1, that of the last layer is resid_final."""

_NAMED_ALONE = ("q_rot", "k_rot", "pattern", "mlp_pre", "mlp_pre_linear")
"""Hooks that `vllm-full` leaves out: other hooks and the weights give their values."""

PRESETS: dict[str, tuple[str, ...]] = {
    "hidden-states": ("resid_pre", "resid_final"),
    "vllm-full": tuple(n for n in HOOKS if n not in _NAMED_ALONE),
    "attention": ("q_rot", "k_rot", "v", "kv_c", "k_pe", "z"),
    "mlp": ("ln2", "mlp_post", "mlp_out"),
    "logits": ("logits",),
}
