# SPDX-License-Identifier: Apache-2.0
"""The table of hooks, and the presets. Nothing here imports torch or vllm."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hook:
    """A hook: the name and the properties of one tensor of the forward pass, or of a probe.

    width: symbol of the width, see `ModelDims.width`. scope: "layer" (one tensor per layer), "once" (one per forward
    pass) or "sampled" (one row per sampled position). sharded: under tensor parallelism each rank holds a slice of the
    width. doc: what the tensor is. dtype: "model" (the dtype of the model) or the name of a fixed dtype.

    only: the models or layers that have the hook. "dense": layers with one MLP. "moe": layers with experts. "mixer":
    layers with a mixer (Mamba or linear attention). "mrope": models whose positions have several axes. A name in
    FEATURES: models with this feature. None: all. unless: a name in FEATURES; models with this feature lack the hook.
    block: a name in BLOCKS; layers without this block lack the hook. "": no block is required.

    source: for a probe, the hook from which it is computed; "" for a tensor of the model. A probe has the width, scope,
    sharding and dtype of its source. layers: for a probe, the layers of its source; (0,) if the source exists once.
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
        """Whether the hook has one entry per layer in a store. False for a probe of a single layer."""
        return self.scope == "layer" and len(self.layers) != 1


BLOCKS = {
    "attention": "which have no attention, or attention with other numbers or sizes of heads",
    "tokens": "which have neither attention nor a mixer",
    "mlp": "which have no MLP",
}
"""Block that some layers of hybrid models lack -> clause of the error message. "tokens" is attention or a mixer: the
blocks whose output for a token depends on earlier tokens.
"""
FEATURES = {
    "rotary": "which has no rotary embedding",
    "latent": "which has no latent attention",
    "indexer": "which has no indexer",
    "sequential": "which runs attention and MLP in parallel",
    "input_norm": "which has no norm before attention",
    "mlp_norm": "which has no norm of its own before the MLP",
    "post_norms": "which has no norms after attention and MLP",
    "gated_mixer": "which has no norm after the core of its mixers",
    "ungated_mlp": "whose MLP has a gate",
}
"""Feature that some hooks need -> clause of the error message for a model without the feature."""
USUAL = frozenset(("rotary", "sequential", "input_norm", "mlp_norm"))
"""The features of the Llama architecture."""
INSTEAD = {
    "latent": "whose attention has kv_c and k_pe instead of keys and values per head",
    "ungated_mlp": "whose MLP has no gate",
}
"""Feature whose models lack some hooks -> clause of the error message."""


def _of_attention(
    name: str, width: str, sharded: bool, doc: str, dtype: str = "model", only: str | None = None, unless: str = ""
) -> Hook:
    return Hook(name, width, "layer", sharded, doc, dtype, only, unless, block="attention")


PROBE = "probe."
"""Prefix of the hook names of probes. Probes belong to one engine: `ModelDims.hooks` has them, HOOKS does not."""

_LINEAR = Hook(
    "mlp_pre_linear",
    "I",
    "layer",
    True,
    "output of up_proj, which is multiplied by the activated gate",
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
        Hook("mix_proj", "P", "layer", False, "concatenated outputs of a mixer's input projections", only="mixer"),
        Hook("mix_core", "N", "layer", True, "output of a mixer's core, before its gated norm", only="gated_mixer"),
        Hook("mix_z", "N", "layer", True, "input of a mixer's output projection", only="mixer"),
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
"""Alias -> the stored hook. `resid_post` is also an alias, but its hook depends on the layer: resid_pre of the next
layer, or resid_final for the last layer."""

_NAMED_ALONE = ("q_rot", "k_rot", "pattern", "indexer_topk", "mlp_pre", "mlp_pre_linear")
"""Hooks that `vllm-full` leaves out: other hooks and the weights determine them, or their rows are large."""

PRESETS: dict[str, tuple[str, ...]] = {
    "hidden-states": ("resid_pre", "resid_final"),
    "vllm-full": tuple(n for n in HOOKS if n not in _NAMED_ALONE),
    "attention": ("q_rot", "k_rot", "v", "kv_c", "k_pe", "z"),
    "mlp": ("ln2", "mlp_post", "mlp_out"),
    "logits": ("logits",),
}
