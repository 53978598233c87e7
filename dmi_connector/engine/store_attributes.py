# SPDX-License-Identifier: Apache-2.0
"""Builds the root attributes that all stores of an engine share (docs/FORMAT.md, section 5)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from dmi_connector.engine import contract
from dmi_connector.engine.context import CaptureContext
from dmi_connector.version import __version__

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_LATENT_DIMS = ("v_head_dim", "kv_lora_rank", "qk_rope_head_dim")
"""Sizes that only models with latent attention have."""


def store_attributes(context: CaptureContext, vllm_config: VllmConfig) -> dict[str, Any]:
    """The shared attributes, JSON-ready. The scheduler half adds the attributes of each request."""
    import vllm

    dims, drafting = context.dims, context.drafting
    most = 0 if drafting is None else drafting.most
    return {
        "model": _model_name(vllm_config.model_config.model),
        "architecture": context.arch.name,
        "dtype": context.dtype,
        "num_layers": dims.layers,
        "identities": context.arch.sums,
        "attention": _attention(context, vllm_config),
        "rotary": context.arch.rotary,
        "qk_norm": bool(context.arch.q_norm),
        **({"experts": {"count": dims.experts, "layers": list(dims.moe_layers)}} if dims.moe_layers else {}),
        **({"parallel": True} if context.arch.parallel else {}),
        **({} if dims.mlp_layers is None else {"mlp_layers": list(dims.mlp_layers)}),
        "tp": context.ranks,
        "owner": context.owner.name,
        "versions": {
            "dmi_connector": __version__,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
        },
        **({} if drafting is None else {"speculative": {"method": drafting.method, "num_speculative_tokens": most}}),
        **({"untested_vllm": True} if contract.untested() else {}),
        "dims": {
            "hidden": dims.hidden,
            "heads": dims.heads,
            "kv_heads": dims.kv_heads,
            "head_dim": dims.head_dim,
            "vocab": dims.vocab,
            **({name: getattr(dims, name) for name in _LATENT_DIMS} if dims.kv_lora_rank else {}),
        },
    }


def _model_name(model: str) -> str:
    """The model's name in a hub, or the absolute path of its directory, since readers may run elsewhere."""
    return os.path.abspath(model) if os.path.isdir(model) else model


def _attention(context: CaptureContext, vllm_config: VllmConfig) -> dict[str, Any]:
    """Parameters of attention, for readers that compute it again; {} if vLLM does not provide them."""
    named = vllm_config.compilation_config.static_forward_context
    arch = context.arch
    numbers = range(context.dims.layers)  # vLLM 0.31's Transformers backend names attention layers "NUMBER.attn"
    rows = [(i, arch.of_layer(i, context.dims)) for i in numbers]
    found = {i: named.get(f"{arch.layers}.{i}.{row.attn_name}", named.get(f"{i}.attn")) for i, row in rows if row.attn}
    layers: list[Any] = [*found.values()]
    if "latent" in arch.features:
        return {"latent": True, **({} if layers[0] is None else {"scale": float(layers[0].impl.scale)})}
    if any(layer is None or not hasattr(layer, "sliding_window") for layer in layers):
        return {}
    impls = [_impl(layer) for layer in layers]
    slopes = getattr(impls[0], "alibi_slopes", None)  # a kernel without ALiBi or a soft cap may not name them
    facts = {
        "scale": float(impls[0].scale),
        "soft_cap": float(getattr(impls[0], "logits_soft_cap", None) or 0) or None,
        "windows": [getattr(found.get(i), "sliding_window", None) for i in numbers],
        "chunks": [getattr(found.get(i), "attention_chunk_size", None) for i in numbers],
        "sinks": any(getattr(impl, "sinks", None) is not None for impl in impls),
        "image_blocks": getattr(layers[0], "use_mm_prefix", False) and layers[0].attn_backend.supports_mm_prefix(),
        "alibi_slopes": None if slopes is None else [float(slope) for slope in slopes],
    }
    return {name: value for name, value in facts.items() if value and value != [None] * len(numbers)}


def _impl(layer: Any) -> Any:
    """The `impl` of an attention layer. If its backend chooses between two others for each batch, the first of these.

    On a GPU, vLLM uses such a backend for models whose image tokens attend to each other. The backend's own `impl`
    lacks most attributes. The two others have these attributes, with the same values.
    """
    impl = layer.impl
    return impl.get_impl_variants()[0] if hasattr(impl, "get_impl_variants") else impl
