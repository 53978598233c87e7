# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's outputs and requests say of steps that are computed or in flight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


def computed_before(request_id: str, steps: Iterable[SchedulerOutput]) -> int:
    """Number of a request's tokens that were computed at the end of its last step. steps: newest first.

    0 if it was in no step. vLLM resets its own number at a preemption.
    """
    for step in steps:
        if request_id in step.num_scheduled_tokens:
            cached = step.scheduled_cached_reqs
            computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            computed |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
            return computed[request_id] + step.num_scheduled_tokens[request_id]
    return 0


def beginning(output: SchedulerOutput) -> set[str]:
    """Ids of the requests that begin in a step, or resume in it after a preemption. A turn of a session begins too."""
    return {new.req_id for new in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)


def taken_back(request: Request) -> bool:
    """Whether vLLM has taken the step in flight out of `num_computed_tokens`, as it does at the end of a turn."""
    stale = getattr(request, "num_stale_output_tokens", 0)  # vLLM 0.31 lacks the three attributes
    return bool(stale) and request.drop_stale_output and stale == request.num_in_flight_tokens
