# SPDX-License-Identifier: Apache-2.0
"""A custom logits processor: requests with the extra argument `force` sample only that token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class ForceToken(AdapterLogitsProcessor):
    """`SamplingParams.extra_args["force"]` (over HTTP: `vllm_xargs`) is the id of the token to sample."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        token = (params.extra_args or {}).get("force")
        if token is None:
            return None

        def force(_output: list[int], logits: torch.Tensor) -> torch.Tensor:
            kept = logits[int(token)].clone()
            logits.fill_(-float("inf"))
            logits[int(token)] = kept
            return logits

        return force
