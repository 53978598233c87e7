# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding beside a capture: which draft tokens were accepted, and which of their logits are captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.request import RequestStatus

from dmi_connector.engine.messages import Accepted, Close, StepMetadata
from dmi_connector.engine.scheduler.tracked_request import Tracked

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from dmi_connector.engine.owners.base import RowSlots


class DraftTokens:
    """Follows the draft tokens of captured requests. A tracker has one if the engine drafts.

    A step computes a row for each draft token, at positions from `Request.num_tokens` on. num_tokens counts accepted
    tokens only, and a rejected position is computed again. So after the forward of a step every row below num_tokens is
    final. Before the forward every row below num_tokens - 1 is: the last token is an input of the step to come.

    behind: steps in flight when vLLM schedules the next one: 1 with asynchronous scheduling.
    """

    def __init__(self, slots: RowSlots, behind: int) -> None:
        self._slots, self._behind = slots, behind
        self._steps = 0  # steps with scheduled tokens

    def begin(
        self, output: SchedulerOutput, tracked: Mapping[str, Tracked], logits: bool, metadata: StepMetadata
    ) -> None:
        """Process the results of earlier steps. `Tracked.blocks` must include their blocks.

        logits: whether a scheduled request captures them.
        """
        metadata.decided = max(0, self._steps - self._behind) if logits else self._steps
        again = {new.req_id for new in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
        for request_id, one in tracked.items():
            if not one.opened:
                continue
            if one.has_logits and one.turn_ended:
                metadata.accepted += self._accepted(one, one.request.num_computed_tokens)
            one.note_tokens(mixed=request_id not in again and self._mixed(one))
            if one.has_logits:
                metadata.accepted += self._accepted(one, one.request.num_tokens - 1)
            scheduled = request_id in output.num_scheduled_tokens
            one.two_in_flight, one.in_flight = scheduled and one.in_flight and request_id not in again, scheduled
        self._steps += bool(output.num_scheduled_tokens)
        for request_id, drafts in output.scheduled_spec_decode_tokens.items():
            if request_id in tracked:
                tracked[request_id].scheduled += len(drafts)

    def _mixed(self, tracked: Tracked) -> bool:
        """Whether the tokens since the last look are of two steps. Both were in flight, and after a pause none is."""
        request = tracked.request
        if not self._behind or not tracked.two_in_flight or request.status != RequestStatus.RUNNING:
            return False
        return not request.num_output_placeholders

    def want_logits(self, tracked: Tracked, computed: int, metadata: StepMetadata) -> None:
        """Keep logits of this step from which a captured token may be sampled.

        computed: tokens of the request after this step, if all its draft tokens are accepted.
        """
        tracked.last_step = self._steps
        first, end = max(tracked.request.num_tokens - 1, tracked.params.start), min(computed, tracked.limit)
        if tracked.has_logits and first < end:
            metadata.logits_step = self._steps
            metadata.logits_slots += [self._slots.sample_slot(tracked, position) for position in range(first, end)]

    def close(self, tracked: Tracked, start: int, end: int, close: Close) -> None:
        """Add what there is to say of drafts at the end of a capture of positions [start, end)."""
        tracked.note_tokens()
        close.attrs["draft_tokens"] = {"scheduled": tracked.scheduled, "accepted": len(tracked.drafted)}
        close.draft_index = tracked.draft_index(start, end)
        if tracked.has_logits:
            close.accepted = self._accepted(tracked, end)
            close.samples = tracked.samples_until(end)

    def _accepted(self, tracked: Tracked, end: int) -> list[Accepted]:
        """Accepted logits below `end` that were not sent yet: a list of at most one message."""
        first, end = max(tracked.decided, tracked.params.start), min(end, tracked.limit)
        if first >= end:
            return []
        tracked.decided = end
        numbers = [tracked.number_sample(position, tracked.turn) for position in range(first, end)]
        slots = np.array([self._slots.sample_slot(tracked, position) for position in range(first, end)], np.int64)
        return [Accepted(tracked.capture, numbers[0], first, slots, tracked.last_step)]
