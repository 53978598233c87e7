# SPDX-License-Identifier: Apache-2.0
"""Routing of experts that vLLM's CPU router does not have, in an engine of this process.

Outside of groups of experts it takes the softmax of scores alone: it refuses the sigmoid, and leaves out the bias by
which a model chooses its experts. `stand_in` computes both as vLLM does on a GPU: with one group of all experts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines of this process choose experts by the sigmoid, or with a bias, where there are no groups of them."""
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    routes = cpu_router.CPURouter._compute_routing

    def compute(self: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = self.scoring_func == "softmax" and self.e_score_correction_bias is None
        if self.use_grouped_topk or self.custom_routing_function is not None or plain:
            return routes(self, hidden_states, router_logits, *args, **kwargs)
        groups = {"num_expert_group": 1, "topk_group": 1}
        names = "renormalize", "scoring_func", "routed_scaling_factor", "e_score_correction_bias"
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        return cpu_router._grouped_topk(router_logits, self.top_k, **groups, **given)

    monkeypatch.setattr(cpu_router.CPURouter, "_compute_routing", compute)
