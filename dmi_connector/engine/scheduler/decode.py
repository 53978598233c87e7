# SPDX-License-Identifier: Apache-2.0
"""The rows whose scores are requested, for requests that decode one token per step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from dmi_connector.engine.messages import ScoreRows

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from dmi_connector.engine.owners.base import RowSlots
    from dmi_connector.engine.scheduler.tracked_request import Tracked


class Decode:
    """The requests that had one token in the last step, and the rows of these tokens.

    In the next step each has one more token. Its row is in the next slot, unless it begins a block. So a few array
    operations find the rows of all requests. rows: of the last step. While a request is here, its
    `RequestScores.asked` is not up to date.
    """

    def __init__(self, slots: RowSlots) -> None:
        self._slots = slots
        self._tracked: list[Tracked] = []
        self._ids: list[str] = []
        self._until = np.zeros(0, np.int64)
        self.rows = ScoreRows(*(np.zeros(0, np.int64) for _ in range(3)))

    def step(self, output: SchedulerOutput) -> list[Tracked]:
        """Advance to the rows of a step. Removes and returns the requests that do not have their next token in it."""
        if not self._ids:
            return []
        cached = output.scheduled_cached_reqs
        positions, left = self.rows.positions + 1, []
        if output.total_num_scheduled_tokens == len(self._ids) and cached.req_ids == self._ids:  # nobody else runs
            goes = (np.array(cached.num_computed_tokens) == positions) & (positions < self._until)
        else:
            scheduled = output.num_scheduled_tokens
            computed = [tracked.request.num_computed_tokens for tracked in self._tracked]
            goes = (np.array(computed) == positions) & (positions < self._until)
            goes &= np.array([scheduled.get(name, 0) for name in self._ids]) == 1
        if cached.resumed_req_ids:  # with other blocks than before
            goes &= [name not in cached.resumed_req_ids for name in self._ids]
        if not goes.all():
            left = self._keep(goes)
            positions = self.rows.positions + 1
        slots = self.rows.slots + 1
        for at in np.flatnonzero(positions % self._slots.neighbours == 0).tolist():
            slots[at] = self._slots.row_slot(self._tracked[at], int(positions[at]))
        self.rows = ScoreRows(self.rows.captures, positions, slots)
        return left

    def _keep(self, which: np.ndarray) -> list[Tracked]:
        """Remove the other requests and return them, with their `RequestScores.asked` up to date."""
        left = list(compress(self._tracked, ~which))
        for tracked, position in zip(left, self.rows.positions[~which].tolist(), strict=True):
            assert tracked.scores is not None
            tracked.scores.asked = position + 1
        self._tracked, self._ids = list(compress(self._tracked, which)), list(compress(self._ids, which))
        self._until = self._until[which]
        rows = self.rows
        self.rows = ScoreRows(rows.captures[which], rows.positions[which], rows.slots[which])
        return left

    def join(self, joining: Sequence[Tracked], rows: ScoreRows) -> None:
        """Add requests. rows: the row of each in this step."""
        mine = self.rows
        self._tracked += joining
        self._ids += [tracked.request.request_id for tracked in joining]
        until = [tracked.scores.until for tracked in joining if tracked.scores is not None]
        self._until = np.concatenate([self._until, until])
        self.rows = mine.joined(rows)

    def ended(self, tracked: Tracked) -> None:
        """Remove a request that has ended, if it is here."""
        which = self.rows.captures != tracked.capture
        if not which.all():
            self._keep(which)
