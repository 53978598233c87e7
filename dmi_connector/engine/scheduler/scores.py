# SPDX-License-Identifier: Apache-2.0
"""Scores of running requests: which rows the workers report them of in a step, and what responses say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dmi_connector.conditions import AGGREGATES, Condition
from dmi_connector.engine.messages import ScoreRows, StepScores
from dmi_connector.engine.metrics import ALERTS, SCORE
from dmi_connector.engine.scheduler.decode import Decode
from dmi_connector.engine.scheduler.late_scores import LateScores
from dmi_connector.engine.scheduler.request_scores import RequestScores
from dmi_connector.hook_table import PROBE
from dmi_connector.reduce import largest
from dmi_connector.reduce.probe import NORM, TOP, Probe

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from dmi_connector.engine.context import CaptureContext
    from dmi_connector.engine.owners.base import RowSlots
    from dmi_connector.engine.scheduler.tracked_request import Tracked
    from dmi_connector.request_options import CaptureParams

_Places = list[tuple[int, slice]]
"""Of values that are merged: the ranks that have them, and where in their answer."""


class ProbeScores:
    """The scores of all running requests that need them here. slots: where their rows lie. drafts: whether steps
    compute rows of draft tokens.
    """

    def __init__(self, context: CaptureContext, slots: RowSlots, drafts: bool) -> None:
        self._slots, self._drafts = slots, drafts
        self._probes: dict[str, Probe] = {}
        found: dict[str, dict[int, _Places]] = {}  # probe, layer -> where ranks have its values
        for rank, layout in enumerate(context.layouts):
            at = 0
            for one in layout.scored:
                name, width = one.hook.removeprefix(PROBE), one.stored[1]
                assert isinstance(one.reduction, Probe)
                self._probes[name] = one.reduction
                found.setdefault(name, {}).setdefault(one.layer, []).append((rank, slice(at, at + width)))
                at += width
        # Ranks may share out the layers of a hook that all have whole.
        self._places = {name: _joined([layers[n] for n in sorted(layers)]) for name, layers in found.items()}
        self._others = [name for name, _ in context.options.probes if name not in self._probes]
        of_rows = [name for name, probe in self._probes.items() if probe.form in (NORM, TOP)]
        self._summarised = sorted(of_rows, key=lambda name: self._probes[name].k)  # of a hook, the larger k is said
        self._alerts = dict(context.options.probe_alerts)
        self._counts: dict[str, Any] = {f"{ALERTS}.{name}": 0 for name in self._alerts}  # 0: the series exist
        self.running: dict[int, Tracked] = {}
        self._stopping: dict[int, Condition] = {}  # of running requests, as long as `stop_if` has not held
        self._late = LateScores()
        self._decode = Decode(slots)
        self._apart: dict[int, Tracked] = {}  # running requests that are not in `_decode`

    # ---- arrival and end --------------------------------------------------------------------------------------------

    def check(self, params: CaptureParams) -> None:
        """Raises OptionError for a probe that has no scores here."""
        params.check_probes(self._probes, self._others)

    def arrived(self, tracked: Tracked) -> None:
        """A request is to be captured."""
        if wanted := self._named(tracked) | {*(self._summarised if tracked.params.summary else ())}:
            tracked.scores = RequestScores(tuple(wanted))
            self.running[tracked.capture] = self._apart[tracked.capture] = tracked
            if tracked.params.stop_if is not None:
                self._stopping[tracked.capture] = tracked.params.stop_if

    def _named(self, tracked: Tracked) -> set[str]:
        """The probes that a request or the option `probe_alerts` names."""
        return {*tracked.params.scored, *self._alerts}

    def ended(self, tracked: Tracked, end: int) -> None:
        """A request ended. end: position behind its last row."""
        scores = self._scores(tracked)
        self.running.pop(tracked.capture, None)
        self._stopping.pop(tracked.capture, None)
        if scores is None:
            return
        if self._apart.pop(tracked.capture, None) is None:
            self._decode.ended(tracked)
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

    def ask(self, output: SchedulerOutput) -> ScoreRows | None:
        """The rows whose scores the workers report after this step.

        Rows of draft tokens count as those of any token: which are accepted is known later. With asynchronous
        scheduling it is not even known which of the step before were accepted. So all rows from the last known token
        on are asked for. `Tracked.blocks` must include the blocks of this step.
        """
        scheduled = output.num_scheduled_tokens
        for tracked in self._decode.step(output):
            self._apart[tracked.capture] = tracked
        one, more, joining = _Parts(), _Parts(), []
        for tracked in self._apart.values():
            request, scores = tracked.request, tracked.scores
            count = scheduled.get(request.request_id)
            if count is None or scores is None:
                continue
            computed = request.num_computed_tokens
            if count == 1 and computed == scores.asked and computed < scores.until:
                joining.append(tracked)
                one.add(tracked.capture, [computed], [self._slots.row_slot(tracked, computed)])
            elif tracked.opened:
                self._ask_rows(more, tracked, scores, count)
        if joining:
            self._decode.join(joining, one.rows)
            for tracked in joining:
                del self._apart[tracked.capture]
        found = self._decode.rows.joined(more.rows) if more.slots else self._decode.rows
        return found if len(found.slots) else None

    def _ask_rows(self, parts: _Parts, tracked: Tracked, scores: RequestScores, count: int) -> None:
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
            parts.add(tracked.capture, range(first, stop), self._slots.of(tracked, first, stop).tolist())
            if scores.first < 0:
                scores.first = first
            scores.asked = max(scores.asked, stop)
            if not self._drafts:
                scores.until = tracked.limit  # it only grows, with the prompts of a session

    def take(self, answers: Sequence[StepScores]) -> None:
        """Scores of a step have come, from one rank or from each. They are sorted by request when one needs them."""
        self._late.add(answers)
        if self._late.full or self._stopping:
            rows = self._late.take()
            wanted = {name for tracked in self.running.values() if tracked.scores for name in tracked.scores.wanted}
            merged = {name: self._merge(name, rows.values) for name in wanted if len(rows.positions)}
            for capture, part in rows.by_capture():
                if (tracked := self.running.get(capture)) is not None and tracked.scores is not None:
                    for name in tracked.scores.wanted:
                        tracked.scores.put(name, rows.positions[part], merged[name][part])
            for tracked in self.running.values():
                if tracked.scores is not None:
                    tracked.scores.sorted = self._late.added
        for capture in [*self._stopping]:
            tracked, condition = self.running[capture], self._stopping[capture]
            if (scores := tracked.scores) is not None and scores.sorted == self._late.added:
                self._stop(tracked, condition, scores)
                if tracked.stopped:
                    del self._stopping[capture]

    def _scores(self, tracked: Tracked) -> RequestScores | None:
        """The scores of a request, with those of the last step."""
        scores = tracked.scores
        if scores is not None and scores.sorted < self._late.added and tracked.capture in self.running:
            rows = self._late.of(tracked.capture)
            scores.sorted = self._late.added
            for name in scores.wanted if len(rows.positions) else ():
                scores.put(name, rows.positions, self._merge(name, rows.values))
        return scores

    def _merge(self, name: str, values: Mapping[int, np.ndarray]) -> np.ndarray:
        """The scores of one probe, layer after layer, [rows, values]. values: by rank."""
        layers = [[values[rank][:, at] for rank, at in places] for places in self._places[name]]
        merged = [self._probes[name].merge(parts) for parts in layers]
        return merged[0] if len(merged) == 1 else np.concatenate(merged, 1)

    # ---- conditions -------------------------------------------------------------------------------------------------

    def why_dropped(self, tracked: Tracked, end: int) -> str:
        """Why a request that ended is not kept; "" if it is: `keep_if` holds, or there is no score to decide by."""
        condition = tracked.params.keep_if
        if (
            condition is None
            or (scores := self._scores(tracked)) is None
            or not len(rows := scores.of(condition.probe, end))
        ):
            return ""
        measure = condition.measure(rows[:, 0])
        if not condition.refutes(measure):
            return ""
        return f"dmi.keep_if: {condition.text} does not hold ({condition.what} is {measure:.6g}), so nothing is stored"

    @staticmethod
    def _stop(tracked: Tracked, condition: Condition, scores: RequestScores) -> None:
        """End a request if `stop_if` holds for a row of a token that is known. vLLM then takes one more token."""
        request = tracked.request
        rows = scores.of(condition.probe, min(request.num_tokens, tracked.limit))
        if not len(rows):
            return
        rows = rows[:, 0]
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
        """By hook and layer the mean norm of rows and that of the last one, and the neurons with the largest values.
        {} if the request asks for no summary.
        """
        scores = tracked.scores
        if scores is None or not tracked.params.summary:
            return {}
        found: dict[str, Any] = {}
        for name in self._summarised:
            rows, probe = scores.of(name, end), self._probes[name]
            if not len(rows):
                return {"tokens": 0}
            if probe.form == TOP:
                about = _neurons(rows, probe.k, scores.first, tracked.request.num_prompt_tokens)
            else:
                about = {what: _plain(_rounded(AGGREGATES[what](rows)), 1) for what in ("mean", "last")}
            found.setdefault(probe.source, {}).update(about)
        return {**found, "from": scores.first, "through": scores.first + len(rows) - 1}

    def _inline(self, name: str, scores: RequestScores, asked: Sequence[str], end: int) -> dict[str, Any]:
        rows = scores.of(name, end)
        if not len(rows):
            return {"tokens": 0}
        found: dict[str, Any] = {}
        outputs = len(self._probes[name].outputs)
        for what in dict.fromkeys([*asked, "last"]):
            found[what] = _plain(AGGREGATES[what](rows), outputs)
            if what == "max":
                found["at"] = _plain(scores.first + rows.argmax(0), outputs)
        return {**found, "from": scores.first, "through": scores.first + len(rows) - 1}


def _neurons(rows: np.ndarray, k: int, first: int, prompt: int) -> dict[str, Any]:
    """The neurons with the largest values in the rows of generated tokens; of the prompt where there is no other row.

    rows: of a probe TOP, from position `first` on. prompt: its tokens.
    """
    since = prompt - first if first < prompt < first + len(rows) else 0
    neurons, values, at = largest.over_rows(rows[since:], k)
    found = {"neuron": neurons, "value": _rounded(values.ravel()), "at": first + since + at}
    return {what: _plain(of_layers.ravel(), k) for what, of_layers in found.items()}


def _joined(layers: list[_Places]) -> list[_Places]:
    """The same with neighbours of one rank as one, where nothing is merged."""
    found: list[_Places] = []
    for places in layers:
        [(rank, at), *others], [(before, last), *more] = places, found[-1] if found else [(-1, slice(0))]
        if rank == before and at.start == last.stop and not others and not more:
            found[-1] = [(rank, slice(last.start, at.stop))]
        else:
            found.append(places)
    return found


@dataclass
class _Parts:
    """`ScoreRows` that grow."""

    captures: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def add(self, capture: int, positions: Sequence[int], slots: Sequence[int]) -> None:
        """Rows of a capture."""
        self.captures += [capture] * len(slots)
        self.positions += positions
        self.slots += slots

    @property
    def rows(self) -> ScoreRows:
        """What was added."""
        return ScoreRows(*(np.array(values, np.int64) for values in (self.captures, self.positions, self.slots)))


def _plain(values: np.ndarray, each: int) -> Any:
    """JSON: of each layer a number, or a list of `each`; with several layers a list of these. null if not finite."""
    finite, kept = np.isfinite(values), values
    if not finite.all():
        kept = values.astype(object)
        kept[~finite] = None
    layers = kept.tolist() if each == 1 else kept.reshape(-1, each).tolist()
    return layers[0] if len(layers) == 1 else layers


def _rounded(values: np.ndarray) -> np.ndarray:
    """float64 of the same shape, with four digits each, so that a response stays short."""
    return np.array([float(f"{value:.4g}") for value in values.tolist()])
