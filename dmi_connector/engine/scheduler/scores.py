# SPDX-License-Identifier: Apache-2.0
"""Scores of running requests: which rows the workers report them of in a step, and what responses say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dmi_connector.conditions import AGGREGATES, Condition
from dmi_connector.engine.messages import ScoreRows, StepScores
from dmi_connector.engine.metrics import ALERTS, SCORE
from dmi_connector.engine.scheduler.request_scores import RequestScores
from dmi_connector.hook_table import PROBE
from dmi_connector.reduce.probe import NORM, Probe

if TYPE_CHECKING:
    from dmi_connector.engine.context import CaptureContext
    from dmi_connector.engine.owners.base import RowSlots
    from dmi_connector.engine.scheduler.tracked_request import Tracked
    from dmi_connector.request_options import CaptureParams


class ProbeScores:
    """The scores of all running requests that need them here. slots: where their rows lie. drafts: whether steps
    compute rows of draft tokens.
    """

    def __init__(self, context: CaptureContext, slots: RowSlots, drafts: bool) -> None:
        self._slots, self._drafts = slots, drafts
        self._probes: dict[str, Probe] = {}
        self._places: dict[str, dict[int, list[tuple[int, slice]]]] = {}  # probe, layer -> where ranks have its values
        for rank, layout in enumerate(context.layouts):
            at = 0
            for one in layout.scored:
                name, width = one.hook.removeprefix(PROBE), one.stored[1]
                assert isinstance(one.reduction, Probe)
                self._probes[name] = one.reduction
                self._places.setdefault(name, {}).setdefault(one.layer, []).append((rank, slice(at, at + width)))
                at += width
        self._others = [name for name, _ in context.options.probes if name not in self._probes]
        self._norms = [name for name, probe in self._probes.items() if probe.form == NORM]
        self._alerts = dict(context.options.probe_alerts)
        self._counts: dict[str, Any] = {f"{ALERTS}.{name}": 0 for name in self._alerts}  # 0: the series exist
        self.running: dict[int, Tracked] = {}

    # ---- arrival and end --------------------------------------------------------------------------------------------

    def check(self, params: CaptureParams) -> None:
        """Raises OptionError for a probe that has no scores here."""
        params.check_probes(self._probes, self._others)

    def arrived(self, tracked: Tracked) -> None:
        """A request is to be captured."""
        if wanted := self._named(tracked) | {*(self._norms if tracked.params.summary else ())}:
            tracked.scores = RequestScores(tuple(wanted))
            self.running[tracked.capture] = tracked

    def _named(self, tracked: Tracked) -> set[str]:
        """The probes that a request or the option `probe_alerts` names."""
        return {*tracked.params.scored, *self._alerts}

    def ended(self, tracked: Tracked, end: int) -> None:
        """A request ended. end: the position after its last row."""
        self.running.pop(tracked.capture, None)
        if (scores := tracked.scores) is None:
            return
        for name in self._named(tracked):
            rows = scores.of(name, end)
            if self._probes[name].one_score and len(rows):
                most = float(rows.max())
                if math.isfinite(most):
                    self._counts.setdefault(f"{SCORE}.{name}", []).append(most)
                if most > self._alerts.get(name, math.inf):
                    self._counts[f"{ALERTS}.{name}"] = self._counts.get(f"{ALERTS}.{name}", 0) + 1

    def take_counts(self) -> dict[str, Any]:
        """What is new for the metrics, by key of `CaptureStats.data`."""
        counts, self._counts = self._counts, {}
        return counts

    # ---- a step -----------------------------------------------------------------------------------------------------

    def ask(self, scheduled: Mapping[str, int]) -> ScoreRows | None:
        """The rows whose scores the workers report after this step. scheduled: its tokens by request.

        Rows of draft tokens count as those of any token: which are accepted is known later. With asynchronous
        scheduling it is not even known which of the step before were accepted. So all rows from the last known token
        on are asked for. `Tracked.blocks` must include the blocks of this step.
        """
        found = ScoreRows()
        for tracked in self.running.values():
            request, scores = tracked.request, tracked.scores
            count = scheduled.get(request.request_id)
            if count is None or scores is None:
                continue
            computed = request.num_computed_tokens
            fresh = computed == scores.asked and scores.first >= 0 and not self._drafts
            if fresh and count == 1 and computed < tracked.limit:  # as most are, in decode
                scores.asked = computed + 1
                found.parts.append((tracked.capture, computed, 1))
                found.slots.append(self._slots.row_slot(tracked, computed))
            elif tracked.opened:
                self._ask_rows(found, tracked, scores, count)
        return found if found.parts else None

    def _ask_rows(self, found: ScoreRows, tracked: Tracked, scores: RequestScores, count: int) -> None:
        """Ask for the rows of a request in a step of `count` tokens of it."""
        request = tracked.request
        computed = request.num_computed_tokens
        first = min(computed, request.num_tokens - 1) if self._drafts else computed
        if scores.first < 0:
            first = 0  # rows of cached tokens lie in their blocks
        # Rows that were handed to workers before the step are final, and keep no place in a pool.
        least = tracked.exported if self._slots.eager else tracked.params.start
        first = max(min(first, scores.asked), least, self._slots.captured(tracked))
        stop = min(computed + count, tracked.limit)
        if first < stop:
            found.parts.append((tracked.capture, first, stop - first))
            found.slots += self._slots.of(tracked, first, stop).tolist()
            if scores.first < 0:
                scores.first = first
            scores.asked = max(scores.asked, stop)

    def take(self, answers: Sequence[StepScores]) -> None:
        """Scores of a step have come, from one rank or from each."""
        values = {answer.rank: answer.values for answer in answers}
        merged: dict[str, np.ndarray] = {}
        at = 0
        for capture, first, count in answers[0].parts:
            tracked = self.running.get(capture)
            if tracked is not None and (scores := tracked.scores) is not None:
                for name in scores.wanted:
                    if name not in merged:
                        merged[name] = self._merge(name, values)
                    scores.put(name, first, merged[name][at : at + count])
                if tracked.params.stop_if is not None and not tracked.stopped:
                    self._stop(tracked, tracked.params.stop_if, scores)
            at += count

    def _merge(self, name: str, values: Mapping[int, np.ndarray]) -> np.ndarray:
        """The scores of one probe, layer after layer, [rows, values]. values: by rank."""
        layers = [[values[rank][:, at] for rank, at in places] for places in self._places[name].values()]
        return np.concatenate([self._probes[name].merge(parts) for parts in layers], 1)

    # ---- conditions -------------------------------------------------------------------------------------------------

    @staticmethod
    def why_dropped(tracked: Tracked, end: int) -> str:
        """Why a request that ended is not kept; "" if it is: `keep_if` holds, or there is no score to decide by."""
        condition, scores = tracked.params.keep_if, tracked.scores
        if condition is None or scores is None or not len(rows := scores.of(condition.probe, end)):
            return ""
        measure = condition.measure(rows[:, 0])
        if not condition.refutes(measure):
            return ""
        return f"dmi.keep_if: {condition.text} does not hold ({condition.what} is {measure:.6g}), so nothing is stored"

    @staticmethod
    def _stop(tracked: Tracked, condition: Condition, scores: RequestScores) -> None:
        """End a request if `stop_if` holds for a row of a token that is known. vLLM then takes one more token."""
        request = tracked.request
        rows = scores.of(condition.probe, min(request.num_tokens, tracked.limit))[:, 0]
        since = max(0, scores.checked - scores.first)
        found = np.flatnonzero(condition.of_rows(rows[since:]))
        scores.checked = scores.first + len(rows)
        if len(found):
            at = since + int(found[0])
            tracked.stopped = (
                f"dmi.stop_if: {condition.text} holds at position {scores.first + at}, where it is {rows[at]:.6g}"
            )
            request.max_tokens = min(request.max_tokens, request.num_output_tokens + 1)

    # ---- responses --------------------------------------------------------------------------------------------------

    def answer(self, tracked: Tracked, end: int) -> dict[str, Any]:
        """The scores that the request asks for, as the response has them. end: the position after its last row."""
        found = {"dmi_probe": self._asked(tracked, end), "dmi_summary": self._summary(tracked, end)}
        return {key: value for key, value in found.items() if value}

    def _asked(self, tracked: Tracked, end: int) -> dict[str, Any]:
        """probe -> the scores that the request asks for; {} if it names no probe."""
        scores = tracked.scores
        asked = tracked.params.probes
        if scores is None or asked is None:
            return {}
        return {name: self._inline(name, scores, whats, end) for name, whats in asked.items()}

    def _summary(self, tracked: Tracked, end: int) -> dict[str, Any]:
        """hook -> mean norm of the rows and norm of the last row, by layer; {} if the request asks for none."""
        scores = tracked.scores
        if scores is None or not tracked.params.summary:
            return {}
        found: dict[str, Any] = {}
        for name in self._norms:
            rows = scores.of(name, end)
            if not len(rows):
                return {"tokens": 0}
            norms = {what: self._plain(name, _rounded(AGGREGATES[what](rows))) for what in ("mean", "last")}
            found[self._probes[name].source] = norms
        return {**found, "from": scores.first, "through": scores.first + len(rows) - 1}

    def _inline(self, name: str, scores: RequestScores, asked: Sequence[str], end: int) -> dict[str, Any]:
        rows = scores.of(name, end)
        if not len(rows):
            return {"tokens": 0}
        found: dict[str, Any] = {}
        for what in dict.fromkeys([*asked, "last"]):
            found[what] = self._plain(name, AGGREGATES[what](rows))
            if what == "max":
                found["at"] = self._plain(name, scores.first + rows.argmax(0))
        return {**found, "from": scores.first, "through": scores.first + len(rows) - 1}

    def _plain(self, name: str, values: np.ndarray) -> Any:
        """JSON: a number, a list of one for each output, or of one such list for each layer; null if not finite."""
        outputs = len(self._probes[name].outputs)
        kept = values.astype(object)
        kept[~np.isfinite(values.astype(float))] = None
        layers = [kept[at : at + outputs].tolist() for at in range(0, len(kept), outputs)]
        if outputs == 1:
            layers = [only for (only,) in layers]
        return layers[0] if len(layers) == 1 else layers


def _rounded(values: np.ndarray) -> np.ndarray:
    """float64 of the same shape, with four digits each, so that a response stays short."""
    return np.array([float(f"{value:.4g}") for value in values.tolist()])
