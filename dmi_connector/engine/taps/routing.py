# SPDX-License-Identifier: Apache-2.0
"""Taps of routing: `router_logits`, `topk_ids`, `topk_weights`. vLLM computes these inside its opaque MoE op."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dmi_connector.engine.model.architectures import Architecture
from dmi_connector.engine.taps.batches import ModelTaps, TapBatch


def install_routing(taps: ModelTaps, arch: Architecture, module: nn.Module, index: int, batch: TapBatch) -> None:
    """Register the routing taps of layer `index`. module: the layer. batch: the batch of the layer.

    The taps run inside an opaque op, so their values cannot wait for the other values of the layer. `router_logits` is
    written after the gate has run, `topk_ids` and `topk_weights` after the experts are selected.
    """
    context, path = taps.context, f"{arch.layers}.{index}"
    scores = context.layout.taking("router_logits", index)
    ids, weights = context.layout.taking("topk_ids", index), context.layout.taking("topk_weights", index)
    scored, chosen = batch.again(), batch.again()
    if scores:

        def at_gate(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            scored.add_all(scores, output[0] if isinstance(output, tuple) else output)
            scored.write()

        taps.hook(f"{path}.{arch.moe_gate}", at_gate)
        for row_field in scores:
            context.coverage.expect(row_field, f"{path}.{arch.moe_gate}")
    if ids or weights:
        router: Any = module.get_submodule(arch.moe_experts).router
        select, to_places = router.select_experts, router._apply_eplb_mapping

        def apply_eplb_mapping(topk_ids: torch.Tensor) -> torch.Tensor:
            """Capture the ids of logical experts. vLLM's load balancing (EPLB) then maps them to physical experts."""
            chosen.add_all(ids, topk_ids)
            return to_places(topk_ids)

        def select_experts(*args: Any, **kwargs: Any) -> Any:
            topk_weights, topk_ids = select(*args, **kwargs)
            chosen.add_all(weights, topk_weights)
            chosen.write()
            return topk_weights, topk_ids

        router._apply_eplb_mapping, router.select_experts = apply_eplb_mapping, select_experts
        for row_field in (*ids, *weights):
            context.coverage.expect(row_field, f"{path}.{arch.moe_experts}.router.select_experts")
