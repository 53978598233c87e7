# SPDX-License-Identifier: Apache-2.0
"""`force_token.ForceToken` for the V2 model runner, which has its own interface for logits processors."""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState


class ForceToken(LogitsProcessor):
    """`SamplingParams.extra_args["force"]` (over HTTP: `vllm_xargs`) is the id of the token to sample."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._forced = torch.full((req_states.max_num_reqs,), -1, dtype=torch.long, device=req_states.device)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        token = (sampling_params.extra_args or {}).get("force")
        self._forced[req_idx] = -1 if token is None else int(token)
        return token is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        forced = self._forced[ctx.expanded_idx_mapping]
        [rows] = torch.nonzero(forced >= 0, as_tuple=True)
        kept = logits[rows, forced[rows]]
        logits[rows] = -float("inf")
        logits[rows, forced[rows]] = kept
        return logits
