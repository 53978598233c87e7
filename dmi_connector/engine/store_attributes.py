# SPDX-License-Identifier: Apache-2.0
"""The root attributes that all stores of an engine share (docs/FORMAT.md, section 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dmi_connector.engine.context import CaptureContext

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def store_attributes(context: CaptureContext, vllm_config: VllmConfig) -> dict[str, Any]:
    """The shared attributes, JSON-ready. `engine/tracker.py` adds those of one request."""
    import vllm

    import dmi_connector

    dims = context.dims
    return {
        "model": vllm_config.model_config.model,
        "architecture": context.arch.name,
        "dtype": context.dtype,
        "num_layers": dims.layers,
        "identities": True,
        "attention": _attention(context, vllm_config),
        **({"parallel": True} if context.arch.parallel else {}),
        "tp": context.tp,
        "owner": context.owner,
        "versions": {
            "dmi_connector": dmi_connector.__version__,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
        },
        "dims": {
            "hidden": dims.hidden,
            "heads": dims.heads,
            "kv_heads": dims.kv_heads,
            "head_dim": dims.head_dim,
            "vocab": dims.vocab,
        },
    }


def _attention(context: CaptureContext, vllm_config: VllmConfig) -> dict[str, Any]:
    """How the layers attend, for readers that work attention out again. {} where vLLM does not tell."""
    named = vllm_config.compilation_config.static_forward_context
    arch = context.arch
    numbers = range(context.dims.layers)
    layers = [named.get(f"{arch.layers}.{i}.{arch.attn}", named.get(f"{i}.attn")) for i in numbers]  # 0.31: by number
    if any(layer is None or not hasattr(layer, "sliding_window") for layer in layers):
        return {}
    impls = [layer.impl for layer in layers]
    slopes = impls[0].alibi_slopes
    facts = {
        "scale": float(impls[0].scale),
        "soft_cap": float(impls[0].logits_soft_cap or 0) or None,
        "windows": [layer.sliding_window for layer in layers],
        "chunks": [getattr(layer, "attention_chunk_size", None) for layer in layers],
        "sinks": any(getattr(impl, "sinks", None) is not None for impl in impls),
        "alibi_slopes": None if slopes is None else [float(slope) for slope in slopes],
    }
    return {name: value for name, value in facts.items() if value and value != [None] * len(layers)}
