# SPDX-License-Identifier: Apache-2.0
"""Expert routing that vLLM's CPU router does not support, in an engine of this process.

For models without groups of experts, the CPU router only supports the softmax of scores. It refuses the sigmoid, and
ignores the bias with which a model chooses its experts. `stand_in` computes both as vLLM does on a GPU, with all
experts in one group.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runner import GPU


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines of this process route with the sigmoid or with a bias in models without groups of experts.

    On a GPU, vLLM's kernels do.
    """
    if GPU:
        return
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
