# SPDX-License-Identifier: Apache-2.0
"""Maps TransformerLens' names of tensors to the hooks that are the same tensors.

tests/types/test_transformer_lens.py compares each of these hooks with TransformerLens' cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dmi_connector.wording import suggest

TL_NAMES = {
    "hook_embed": "embed",
    "hook_resid_pre": "resid_pre",
    "hook_in": "resid_pre",
    "ln1.hook_in": "resid_pre",
    "ln1.hook_out": "ln1",
    "attn.hook_in": "ln1",
    "attn.q.hook_in": "ln1",
    "attn.k.hook_in": "ln1",
    "attn.v.hook_in": "ln1",
    "attn.hook_v": "v",
    "attn.v.hook_out": "v",
    "attn.hook_rot_q": "q_rot",
    "attn.hook_rot_k": "k_rot",
    "attn.hook_z": "z",
    "attn.o.hook_in": "z",
    "hook_attn_out": "attn_out",
    "hook_resid_mid": "resid_mid",
    "ln2.hook_in": "resid_mid",
    "ln2.hook_out": "ln2",
    "mlp.hook_in": "ln2",
    "mlp.hook_pre": "mlp_pre",
    "mlp.hook_pre_linear": "mlp_pre_linear",
    "mlp.hook_post": "mlp_post",
    "mlp.out.hook_in": "mlp_post",
    "hook_mlp_out": "mlp_out",
    "hook_resid_post": "resid_post",
    "hook_out": "resid_post",
    "ln_final.hook_in": "resid_final",
    "ln_final.hook_out": "final_ln",
    "unembed.hook_in": "final_ln",
}
"""{name without the block's prefix (`blocks.3.`): hook that is the same tensor}."""

QK_NAMES = {
    False: {"attn.hook_q": "q", "attn.q.hook_out": "q", "attn.hook_k": "k", "attn.k.hook_out": "k"},
    True: {
        "attn.hook_q_normed": "q",
        "attn.q_norm.hook_out": "q",
        "attn.hook_k_normed": "k",
        "attn.k_norm.hook_out": "k",
    },
}
"""The same for queries and keys, by whether the model has a norm of queries and keys (`qk_norm`)."""

POST_NORM_NAMES = {
    "attn.hook_out": "attn_proj",
    "attn.o.hook_out": "attn_proj",
    "ln1_post.hook_in": "attn_proj",
    "ln1_post.hook_out": "attn_out",
    "mlp.out.hook_out": "mlp_proj",
    "mlp.hook_out": "mlp_proj",
    "ln2_post.hook_in": "mlp_proj",
    "ln2_post.hook_out": "mlp_out",
}
"""The same for models with post-norms, whose stores have `attn_proj` or `mlp_proj`."""

ALL_NAMES = {**TL_NAMES, **QK_NAMES[False], **QK_NAMES[True], **POST_NORM_NAMES}
"""All names of these tables. `equal_hooks` yields those that are the same tensors in a model."""

PATTERN = "attn.hook_pattern"
NORMS = {"ln1": "resid_pre", "ln2": "resid_mid", "ln_final": "resid_final"}
"""{norm: hook that is its input}. `hook_scale` and `hook_normalized` are computed from the input."""
HEADS = {"q": "heads", "k": "kv_heads", "v": "kv_heads", "q_rot": "heads", "k_rot": "kv_heads", "z": "heads"}
"""{hook with several heads: key of the attribute `dims` with the number of heads}."""
OF_NORMS = tuple(f"{norm}.{part}" for norm in NORMS for part in ("hook_scale", "hook_normalized"))

_EMBED_BEFORE = (
    *("GraniteForCausalLM", "GraniteSWAForCausalLM", "BloomForCausalLM", "AfmoeForCausalLM", "MiniCPMForCausalLM"),
    *("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteMoeSWAForCausalLM", "HyperCLOVAXForCausalLM"),
    "GraniteMoeHybridForCausalLM",
)
_OTHER_ORDER = ("Llama4ForCausalLM",)

ABSENT = {
    "hook_pos_embed": "not captured: it is resid_pre of layer 0 minus embed",
    "pos_embed.hook_out": "not captured: it is resid_pre of layer 0 minus embed",
    "hook_unembed": "logits exist only for sampled positions: see cap.numpy('logits') and cap.logits_positions",
    "unembed.hook_out": "logits exist only for sampled positions: see cap.numpy('logits') and cap.logits_positions",
    "attn.hook_attn_scores": "not captured: compute it from hook_rot_q, hook_rot_k, the scale and the mask",
    "attn.hook_result": "not captured: cache.compute_head_results() computes it from z and the model's weights",
    "mlp.hook_expert_weights": "of another shape: see cap.numpy('topk_weights') for those of the chosen experts",
    "mlp.hook_expert_indices": "of another shape, without a batch dimension: see cap.routed_experts()",
}
"""{name of TransformerLens that no store has: reason}."""
OTHERWISE = "no hook is the same tensor in every model"
"""The reason for names of TransformerLens that are in none of these tables."""

_BLOCK = re.compile(r"^blocks\.(\d+)\.(.+)$")


def split_name(name: str) -> tuple[str, int | None]:
    """(name without the block's prefix, number of the block or None)."""
    block = _BLOCK.match(name)
    return (block[2], int(block[1])) if block else (name, None)


def full_name(name: str, layer: int | None) -> str:
    """The name, with the prefix of its block if it belongs to a block."""
    return name if layer is None else f"blocks.{layer}.{name}"


def unlisted(name: str) -> str:
    """The reason for a name that is in none of these tables, whether or not TransformerLens has it."""
    near = suggest(name, [*ALL_NAMES, PATTERN, *OF_NORMS, *ABSENT])
    return f"{OTHERWISE}, or TransformerLens has no such name{near}"


def lens_name(hook: str, layer: int | None) -> str | None:
    """The first name of a hook in TL_NAMES, with the prefix of its block; None if TL_NAMES does not have the hook.

    In some models the name means another tensor: see `why_not_equal`.
    """
    for name, same in TL_NAMES.items():
        if same == hook:
            return full_name(name, layer)
    return None


def equal_hooks(attrs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (TransformerLens' name, hook) for all tensors that are the same in the model of a store."""
    architecture, normed = attrs.get("architecture"), attrs.get("qk_norm")
    named = {**TL_NAMES, **({} if normed is None else QK_NAMES[normed])}
    if {"attn_proj", "mlp_proj"} & attrs["hooks"].keys():
        named |= POST_NORM_NAMES
    for name, hook in named.items():
        if not (architecture in _OTHER_ORDER and hook in ("q", "k", "q_rot", "k_rot")) and not (
            architecture in _EMBED_BEFORE and hook == "embed"
        ):
            yield name, hook


def why_not_equal(name: str, attrs: Mapping[str, Any]) -> str | None:
    """Why no hook is the tensor that a TransformerLens name means in a store's model; None if a hook may be."""
    architecture, normed = attrs.get("architecture"), attrs.get("qk_norm")
    hook = {**TL_NAMES, **QK_NAMES[False], **QK_NAMES[True]}.get(name)
    if architecture in _EMBED_BEFORE and hook == "embed":
        return "embed is the value before the model's multiplier or norm: use resid_pre of layer 0"
    if architecture in _OTHER_ORDER and hook in ("q", "k", "q_rot", "k_rot"):
        return "vLLM keeps the values of a head in another order"
    if name in QK_NAMES[True] or name in QK_NAMES[False]:
        if normed is None:
            return "the store is too old to say whether queries and keys pass a norm: use cap.numpy with 'q' and 'k'"
        if normed != (name in QK_NAMES[True]):
            return "not captured: q and k are after the norm" if normed else "the model has no norm of queries and keys"
    return ABSENT.get(name)
