# SPDX-License-Identifier: Apache-2.0
"""Reads the scores of captured requests for `keep_if`, `stop_if`, alerts and responses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dmi_connector.conditions import AGGREGATES
from dmi_connector.engine.host_scores import KEPT_STEPS, open_scores
from dmi_connector.engine.metrics import ALERTS, SCORE
from dmi_connector.engine.scheduler.request_scores import RequestScores
from dmi_connector.engine.scheduler.steps import beginning, taken_back
from dmi_connector.hook_table import PROBE
from dmi_connector.reduce import largest
from dmi_connector.reduce.probe import NORM, TOP, Probe
from dmi_connector.store.format import completeness

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from dmi_connector.engine.context import CaptureContext
    from dmi_connector.engine.messages import StepMetadata
    from dmi_connector.engine.owners.base import RowSlots
    from dmi_connector.engine.scheduler.tracked_request import Tracked
    from dmi_connector.request_options import CaptureParams

_Places = list[tuple[int, slice]]
"""Where the ranks have their parts of some scores: (rank, columns of that rank's lines). `Probe.merge` merges them."""


@dataclass
class _Kept:
    """Scores of a preempted request in additional lines. step: they are copied before the forward of this step. first:
    position of the first row. line, count: first line, and number of lines.
    """

    step: int
    tracked: Tracked
    first: int
    line: int
    count: int


class ProbeScores:
    """The scores of captured requests that the scheduler's process needs.

    slots, behind: see `Tracker`. last: the previous step, None before the first. stopping: requests whose `stop_if` has
    not held yet, by capture.

    A preempted request loses its lines (host_scores.py), so existing scores are read at once. Rows of the step in
    flight have no scores yet. Without a pool these rows are computed again. With a pool they stay, so their scores are
    copied to additional lines before the next forward, and read two steps later.
    """

    def __init__(self, context: CaptureContext, slots: RowSlots, behind: int) -> None:
        self._slots, self._behind = slots, behind
        self.last: SchedulerOutput | None = None
        self._steps = 0
        self._kept: list[_Kept] = []
        self._kept_now = 0  # rows of `_kept` that this step adds
        self._probes: dict[str, Probe] = {}
        self._widths = [0 for _ in context.layouts]  # number of scores per row, by rank
        found: dict[str, dict[int, _Places]] = {}  # probe -> layer -> places of its values
        for rank, layout in enumerate(context.layouts):
            for one in layout.scored:
                name, width, at = one.hook.removeprefix(PROBE), one.stored[1], self._widths[rank]
                assert isinstance(one.reduction, Probe)
                self._probes[name] = one.reduction
                found.setdefault(name, {}).setdefault(one.layer, []).append((rank, slice(at, at + width)))
                self._widths[rank] += width
        # Sorted by layer: if each rank has the whole hook, the layers are divided among the ranks.
        self._places = {name: _joined([layers[n] for n in sorted(layers)]) for name, layers in found.items()}
        self._lines: list[np.ndarray] = []  # by rank
        self._cache_lines = 0  # number of lines for slots; additional lines follow
        self._others = [name for name, _ in context.options.probes if name not in self._probes]
        of_rows = [name for name, probe in self._probes.items() if probe.form in (NORM, TOP)]
        self._summarised = sorted(of_rows, key=lambda name: self._probes[name].k)  # the largest k of a hook comes last
        self._alerts = dict(context.options.probe_alerts)
        self._counts: dict[str, Any] = {f"{ALERTS}.{name}": 0 for name in self._alerts}  # 0 creates the series
        self.stopping: dict[int, Tracked] = {}

    def open(self, paths: Sequence[str], cache_slots: int) -> None:
        """Open the workers' memory. paths: `RankMemory.scores` of each rank. cache_slots: `RankMemory.slots`.

        Raises ValueError if it cannot be opened.
        """
        self._cache_lines = cache_slots
        if self._probes:
            none = np.zeros((0, 0), np.float32)
            widths = zip(paths, self._widths, strict=True)
            self._lines = [open_scores(path, width) if path else none for path, width in widths]

    # ---- arrival and end --------------------------------------------------------------------------------------------

    def check(self, params: CaptureParams) -> None:
        """Raises OptionError if the request names a probe that has no scores."""
        params.check_probes(self._probes, self._others)

    def arrived(self, tracked: Tracked) -> None:
        """A request that will be captured has arrived."""
        if wanted := self._named(tracked) | {*(self._summarised if tracked.params.summary else ())}:
            tracked.scores = RequestScores(tuple(wanted))
            if tracked.params.stop_if is not None:
                self.stopping[tracked.capture] = tracked

    def _named(self, tracked: Tracked) -> set[str]:
        """The probes that a request or the option `probe_alerts` names."""
        return {*tracked.params.scored, *self._alerts}

    def begin_step(self) -> None:
        """A step is planned. The results of all earlier steps except the last have arrived."""
        self._steps += 1
        self._kept_now = 0
        while self._kept and self._kept[0].step <= self._steps - 2:
            self._take_kept(self._kept.pop(0))

    def preempted(self, tracked: Tracked, computed: int, there: int, metadata: StepMetadata) -> None:
        """A request lost its blocks. computed: argument of `RowSlots.preempted`. there: result of that method."""
        scores = tracked.scores
        if scores is None:
            return
        if pending := self._pending(tracked):
            first = pending[-1].first + pending[-1].count
        else:
            self._take(tracked, scores, min(there, self._known(tracked, computed or there)))
            first = scores.stop
        if self._slots.eager and first < there:
            slots = self._slots.in_cache(tracked, first, there)
            of_step = max(len(lines) - self._cache_lines for lines in self._lines) // KEPT_STEPS
            assert self._kept_now + len(slots) <= of_step, "more rows than a step has tokens"
            line = self._cache_lines + self._steps % KEPT_STEPS * of_step + self._kept_now
            self._kept.append(_Kept(self._steps, tracked, first, line, len(slots)))
            self._kept_now += len(slots)
            metadata.kept_scores.append((slots, line))

    def next_turn(self, tracked: Tracked, computed: int) -> None:
        """A session got its next prompt. computed: number of tokens of its earlier turns that are computed.

        Their scores are read now, because `_known` does not know them in the first step of a turn. If `stop_if` held in
        an earlier turn, this turn ends after one token: vLLM has replaced `max_tokens`.
        """
        if tracked.scores is not None and tracked.opened and not self._pending(tracked):
            self._take(tracked, tracked.scores, computed)
        if tracked.stopped:
            tracked.request.max_tokens = 1

    def _pending(self, tracked: Tracked) -> list[_Kept]:
        """The entries of `_kept` of a request. They must be read before scores of later positions."""
        return [kept for kept in self._kept if kept.tracked is tracked]

    def _take_kept(self, kept: _Kept) -> None:
        """Read scores that were copied to additional lines."""
        assert kept.tracked.scores is not None and kept.tracked.scores.stop == kept.first
        there = slice(kept.line, kept.line + kept.count)
        self._add(kept.tracked.scores, [lines[there].copy() for lines in self._lines], kept.count)

    def _known(self, tracked: Tracked, computed: int) -> int:
        """Position up to which the scores of a running request exist.

        computed: number of its computed tokens. With asynchronous scheduling, this number includes tokens of the last
        step, whose results vLLM has not received yet. Returns 0 if the request began in the last step, because that
        step may compute cached tokens too. From the position of the last known token on, tokens may be rejected later.
        """
        request = tracked.request
        # Without vLLM's count of tokens in flight, the last step counts as in flight.
        if self._behind and self.last is not None and getattr(request, "num_in_flight_tokens", True):
            if request.request_id in beginning(self.last):
                return 0
            computed -= self.last.num_scheduled_tokens.get(request.request_id, 0)
        return min(computed, request.num_tokens - 1)

    def _take(self, tracked: Tracked, scores: RequestScores, end: int) -> None:
        """Read the scores of positions below `end`."""
        if scores.stop < (end := min(end, tracked.limit)):
            slots = self._slots.in_cache(tracked, scores.stop, end)
            self._add(scores, [lines[slots] if lines.size else lines for lines in self._lines], len(slots))

    def _add(self, scores: RequestScores, lines: Sequence[np.ndarray], count: int) -> None:
        """Add the scores of the next `count` positions. lines: float32 [count, values], by rank."""
        scores.add({name: self._merge(name, lines) for name in scores.wanted}, count)

    def ended(self, tracked: Tracked, there: bool) -> None:
        """A request ended. Reads its last scores, and counts them for the metrics.

        there: whether the request still has blocks, which are then in `tracked.blocks`.
        """
        self.stopping.pop(tracked.capture, None)
        if tracked.scores is None or not tracked.opened:
            return
        mine = self._pending(tracked)
        self._kept = [kept for kept in self._kept if kept.tracked is not tracked]
        request = tracked.request
        own = str(request.get_finished_reason()) in completeness.OWN_ENDS
        if there and own:  # all tokens except the last sampled one were computed since
            for kept in mine:
                self._take_kept(kept)
            self._take(tracked, tracked.scores, max(request.num_prompt_tokens, request.num_tokens - 1))
        elif there and not mine:
            computed = request.num_computed_tokens
            known = min(computed, request.num_tokens - 1) if taken_back(request) else self._known(tracked, computed)
            self._take(tracked, tracked.scores, known)
        tracked.scores.short = own and not there
        for name in self._named(tracked):
            rows = tracked.scores.of(name)
            if self._probes[name].one_score:
                finite = rows[np.isfinite(rows)]
                if len(finite):
                    self._counts.setdefault(f"{SCORE}.{name}", []).append(float(finite.max()))
                if (rows > self._alerts.get(name, math.inf)).any():
                    self._counts[f"{ALERTS}.{name}"] = self._counts.get(f"{ALERTS}.{name}", 0) + 1

    def take_counts(self) -> dict[str, Any]:
        """Changes since the last call, by key of `CaptureStats.data`."""
        counts, self._counts = self._counts, {}
        return counts

    def _merge(self, name: str, lines: Sequence[np.ndarray]) -> np.ndarray:
        """The scores of one probe, [rows, values], with the values of all layers in order. lines: by rank."""
        layers = [[lines[rank][:, at] for rank, at in places] for places in self._places[name]]
        merged = [self._probes[name].merge(parts) for parts in layers]
        return merged[0] if len(merged) == 1 else np.concatenate(merged, 1)

    # ---- conditions -------------------------------------------------------------------------------------------------

    @staticmethod
    def why_dropped(tracked: Tracked) -> str:
        """Why the capture of an ended request is not kept; "" if it is kept.

        A capture is also kept if its scores are NaN or missing, or if the scores of its last step are missing.
        """
        condition, scores = tracked.params.keep_if, tracked.scores
        if condition is None or scores is None or scores.short or not len(rows := scores.of(condition.probe)):
            return ""
        measure = condition.measure(rows[:, 0])
        if not condition.refutes(measure):
            return ""
        return f"dmi.keep_if: {condition.text} does not hold ({condition.what} is {measure:.6g}), so nothing is stored"

    def check_stops(self, output: SchedulerOutput) -> None:
        """End running requests whose `stop_if` holds. `Tracked.blocks` must include the blocks of this step."""
        begun = beginning(output)
        for tracked in [*self.stopping.values()]:
            if not tracked.opened or tracked.request.request_id in begun or self._pending(tracked):
                continue
            end = min(self._known(tracked, tracked.request.num_computed_tokens), tracked.limit)
            if tracked.scores is not None and tracked.scores.checked < end:
                self._stop(tracked, tracked.scores, end)

    def _stop(self, tracked: Tracked, scores: RequestScores, end: int) -> None:
        """End a request after its next token if `stop_if` holds below position `end`."""
        condition, request = tracked.params.stop_if, tracked.request
        assert condition is not None
        self._take(tracked, scores, end)
        since, scores.checked = scores.checked, scores.stop
        rows = scores.of(condition.probe)[since - scores.first :, 0]
        found = np.flatnonzero(condition.of_rows(rows))
        if len(found):
            at = int(found[0])
            tracked.stopped = (
                f"dmi.stop_if: {condition.text} holds at position {since + at}, where it is {rows[at]:.6g}"
            )
            request.max_tokens = min(request.max_tokens, request.num_output_tokens + 1)
            del self.stopping[tracked.capture]

    # ---- responses --------------------------------------------------------------------------------------------------

    def answer(self, tracked: Tracked) -> dict[str, Any]:
        """The scores that the request asks for, by key of `kv_transfer_params`."""
        found = {"dmi_probe": self._asked(tracked), "dmi_summary": self._summary(tracked)}
        return {key: value for key, value in found.items() if value}

    def _asked(self, tracked: Tracked) -> dict[str, Any]:
        """probe -> the scores that the request asks for; {} if it names no probe."""
        scores = tracked.scores
        asked = tracked.params.probes
        if scores is None or asked is None:
            return {}
        return {name: self._inline(name, scores, whats) for name, whats in asked.items()}

    def _summary(self, tracked: Tracked) -> dict[str, Any]:
        """By hook and layer: the mean norm of rows, the norm of the last row, and the neurons with the largest values.
        {} if the request asks for no summary.
        """
        scores = tracked.scores
        if scores is None or not tracked.params.summary:
            return {}
        found: dict[str, Any] = {}
        for name in self._summarised:
            rows, probe = scores.of(name), self._probes[name]
            if not len(rows):
                return {"tokens": 0}
            if probe.form == TOP:
                about = _neurons(rows, probe.k, scores.first, tracked.request.num_prompt_tokens)
            else:
                about = {what: _plain(_rounded(AGGREGATES[what](rows)), 1) for what in ("mean", "last")}
            found.setdefault(probe.source, {}).update(about)
        return {**found, "from": scores.first, "through": scores.first + len(rows) - 1}

    def _inline(self, name: str, scores: RequestScores, asked: Sequence[str]) -> dict[str, Any]:
        rows = scores.of(name)
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
    """The neurons with the largest values in rows of generated tokens, or in rows of the prompt if there are no others.

    rows: rows of a probe TOP, from position `first` on. prompt: number of prompt tokens.
    """
    since = prompt - first if first < prompt < first + len(rows) else 0
    neurons, values, at = largest.over_rows(rows[since:], k)
    found = {"neuron": neurons, "value": _rounded(values.ravel()), "at": first + since + at}
    return {what: _plain(of_layers.ravel(), k) for what, of_layers in found.items()}


def _joined(layers: list[_Places]) -> list[_Places]:
    """Join adjacent columns of one rank into one slice, for scores that are not merged over ranks."""
    found: list[_Places] = []
    for places in layers:
        [(rank, at), *others], [(before, last), *more] = places, found[-1] if found else [(-1, slice(0))]
        if rank == before and at.start == last.stop and not others and not more:
            found[-1] = [(rank, slice(last.start, at.stop))]
        else:
            found.append(places)
    return found


def _plain(values: np.ndarray, each: int) -> Any:
    """JSON: for one layer a number, or a list of `each` numbers; for several a list of these. null if not finite."""
    finite, kept = np.isfinite(values), values
    if not finite.all():
        kept = values.astype(object)
        kept[~finite] = None
    layers = kept.tolist() if each == 1 else kept.reshape(-1, each).tolist()
    return layers[0] if len(layers) == 1 else layers


def _rounded(values: np.ndarray) -> np.ndarray:
    """The values rounded to four digits, which keeps responses short. float64 [values]."""
    return np.array([float(f"{value:.4g}") for value in values.tolist()])
