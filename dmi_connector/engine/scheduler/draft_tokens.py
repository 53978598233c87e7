# SPDX-License-Identifier: Apache-2.0
"""Tracks the draft tokens of captured requests: which were accepted, and whose logits are captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from dmi_connector.engine.messages import Accepted, Close, StepMetadata
from dmi_connector.engine.scheduler.tracked_request import Tracked

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from dmi_connector.engine.owners.base import RowSlots


class DraftTokens:
    """Follows the draft tokens of captured requests. The tracker has one if the engine uses speculative decoding.

    A step computes a row for each draft token, at positions from `Request.num_tokens` on. num_tokens counts only
    accepted tokens, and the position of a rejected token is computed again. So after the forward of a step, every row
    at a position below num_tokens is final. Before the forward, every row below num_tokens - 1 is final, because the
    last token is an input of the step.

    behind: see `Tracker`.
    """

    def __init__(self, slots: RowSlots, behind: int) -> None:
        self._slots, self._behind = slots, behind
        self._steps = 0  # steps with scheduled tokens
        self._last: Mapping[str, int] = {}  # scheduled tokens of the last step, by request
        self._before: Mapping[str, int] = {}  # of the step before it
        self._of_turns = 0  # accepted draft tokens of turns that ended since the last step
        self._began: set[str] = set()  # requests that began or resumed in the last step

    def begin(
        self, output: SchedulerOutput, tracked: Mapping[str, Tracked], logits: bool, metadata: StepMetadata
    ) -> int:
        """Process the results of earlier steps. `Tracked.blocks` must include their blocks.

        logits: whether a running request captures logits. Returns the number of new rows: tokens of this step without
        its draft tokens, and accepted draft tokens of earlier steps.
        """
        scheduled, rows = output.num_scheduled_tokens, output.total_num_scheduled_tokens + self._of_turns
        self._of_turns = 0
        metadata.decided = max(0, self._steps - self._behind) if logits else self._steps
        for one in tracked.values():
            if not one.opened:
                continue
            if logits and one.has_logits and one.turn_ended:
                metadata.accepted += self._of_ended_turn(one)
            rows += self._note_results(one)
            if logits and one.has_logits:
                metadata.accepted += self._accepted(one, one.request.num_tokens - 1)
        self._before, self._last = self._last, scheduled
        self._began = {new.req_id for new in output.scheduled_new_reqs} | set(
            output.scheduled_cached_reqs.resumed_req_ids
        )
        self._steps += bool(scheduled)
        for request_id, drafts in output.scheduled_spec_decode_tokens.items():
            rows -= len(drafts)
            if (drafted := tracked.get(request_id)) is not None:
                drafted.scheduled += len(drafts)
        return rows

    def end_turn(self, tracked: Tracked) -> None:
        """A turn of a session has ended. After this call, vLLM drops the step in flight and keeps no record of it."""
        self._of_turns += self._note_results(tracked)

    def _note_results(self, tracked: Tracked) -> int:
        """Process the tokens that were added since the last call. Returns the number of accepted draft tokens."""
        return tracked.note_tokens(self._behind > 0 and self._two_ended(tracked))

    def _two_ended(self, tracked: Tracked) -> bool:
        """Whether the last two steps computed tokens of a request, and both have ended.

        The tokens of the two steps then arrive together. With asynchronous scheduling, both steps were in flight when
        the engine paused, and ended in the pause.
        """
        request = tracked.request
        if getattr(request, "num_in_flight_tokens", request.num_output_placeholders):
            return False
        name = request.request_id
        return name in self._last and name in self._before and name not in self._began

    def want_logits(self, tracked: Tracked, computed: int, metadata: StepMetadata) -> None:
        """Tell the workers to keep logits of this step from which a captured token may be sampled.

        computed: tokens of the request after this step, if all its draft tokens are accepted.
        """
        tracked.last_step, tracked.reached = self._steps, computed
        first, end = max(tracked.request.num_tokens - 1, tracked.params.start), min(computed, tracked.limit)
        if tracked.has_logits and first < end:
            metadata.logits_step = self._steps
            metadata.logits_slots += [self._slots.sample_slot(tracked, position) for position in range(first, end)]

    def close(self, tracked: Tracked, start: int, end: int, close: Close) -> None:
        """Add draft attributes and the remaining logits to the end of a capture of positions [start, end).

        A reset of the prefix cache drops the result of the step in flight, and the request computes its tokens again.
        If the request is then aborted before its last row, no token was sampled from that row, which has no logits.
        """
        if tracked.has_logits and tracked.turn_ended:
            close.accepted = self._of_ended_turn(tracked)
        self._note_results(tracked)
        close.attrs["draft_tokens"] = {"scheduled": tracked.scheduled, "accepted": tracked.accepted}
        close.draft_index = tracked.draft_index(start, end)
        if tracked.has_logits:
            close.accepted += self._accepted(tracked, min(end, tracked.reached))
            close.samples = tracked.samples_until(end)

    def _of_ended_turn(self, tracked: Tracked) -> list[Accepted]:
        """`_accepted` for a turn that ended since the last step. `Tracked.limit` already is the next turn's limit."""
        return self._accepted(tracked, tracked.kept if tracked.params.include_output_tokens else tracked.turn)

    def _accepted(self, tracked: Tracked, end: int) -> list[Accepted]:
        """A message for the accepted logits below position `end` that were not sent yet. [] if there are none."""
        first, end = max(tracked.decided, tracked.params.start), min(end, tracked.limit)
        if first >= end:
            return []
        tracked.decided = end
        numbers = [tracked.number_sample(position, tracked.turn) for position in range(first, end)]
        slots = np.array([self._slots.sample_slot(tracked, position) for position in range(first, end)], np.int64)
        return [Accepted(tracked.capture, numbers[0], first, slots, tracked.last_step)]
