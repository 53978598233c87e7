# SPDX-License-Identifier: Apache-2.0
"""The table of hooks, and the presets. Nothing here imports torch or vllm."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hook:
    """One kind of tensor.

    width: symbol of its width, see `ModelDims.width`. scope: "layer" (one per layer), "once" (one per forward) or
    "sampled" (one row per sampled position). sharded: under tensor parallelism each rank holds a slice of the width.
    dtype: "model" (the model's own) or a fixed one. only: which layers or models have it: layers that are "dense" or
    "moe" (mixtures of experts), models with one of FEATURES, models with "mrope" (positions on several axes), or layers
    with a "mixer" (hybrid models); None: all. unless: a feature; models with it lack the hook. block: one of BLOCKS
    that a layer must have; "" for any layer. source: for a probe, the hook from which it is computed. A probe has the
    width, scope, sharding and dtype of its source. "" for a tensor of the model. layers: for a probe, the layers of its
    source; (0,) if the source exists once.
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
        """Whether stores have one entry per layer. A probe of one layer exists once."""
        return self.scope == "layer" and len(self.layers) != 1


BLOCKS = {
    "attention": "which have no attention, or one of other sizes",
    "tokens": "which have neither attention nor a mixer",
    "mlp": "which have no MLP",
}
"""Block that some layers of hybrid models lack -> words of the refusal. "tokens" is attention or a mixer, whose output
for a token depends on earlier tokens.
"""
FEATURES = {
    "rotary": "which has no rotary embedding",
    "latent": "which has no latent attention",
    "indexer": "which has no indexer",
    "sequential": "which runs attention and MLP side by side",
    "input_norm": "which has no norm before attention",
    "mlp_norm": "which has no norm of its own before the MLP",
    "post_norms": "which has no norm after a block",
    "gated_mixer": "which has no norm after the core of its mixers",
    "ungated_mlp": "whose MLP has a gate",
}
"""Feature that some hooks need -> words of the refusal for a model without it."""
USUAL = frozenset(("rotary", "sequential", "input_norm", "mlp_norm"))
"""The features of a Llama."""
INSTEAD = {
    "latent": "whose attention has kv_c and k_pe in the place of keys and values of heads",
    "ungated_mlp": "whose MLP has no gate",
}
"""Feature with which a model lacks a hook -> words of the refusal."""


def _of_attention(
    name: str, width: str, sharded: bool, doc: str, dtype: str = "model", only: str | None = None, unless: str = ""
) -> Hook:
    return Hook(name, width, "layer", sharded, doc, dtype, only, unless, block="attention")


PROBE = "probe."
"""Prefix of the names of probes. Probes are hooks of one engine, and `ModelDims.hooks` has them."""

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
        _of_attention("indexer_topk", "X", False, "positions that the layer's indexer chose", "int32", only="indexer"),
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
"""Arrays that every capture has; `mrope_positions` only in models with M-RoPE. Selecting them has no effect."""

ALIASES = {"mlp_in": "ln2"}
"""Alias -> the stored hook. `resid_post` is an alias too: of resid_pre of the next layer, and for the last layer of
resid_final."""

_NAMED_ALONE = ("q_rot", "k_rot", "pattern", "indexer_topk", "mlp_pre", "mlp_pre_linear")
"""Hooks that `vllm-full` leaves out: other hooks and the weights give their values, or their rows are large."""

PRESETS: dict[str, tuple[str, ...]] = {
    "hidden-states": ("resid_pre", "resid_final"),
    "vllm-full": tuple(n for n in HOOKS if n not in _NAMED_ALONE),
    "attention": ("q_rot", "k_rot", "v", "kv_c", "k_pe", "z"),
    "mlp": ("ln2", "mlp_post", "mlp_out"),
    "logits": ("logits",),
}
