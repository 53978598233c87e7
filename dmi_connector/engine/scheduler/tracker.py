# SPDX-License-Identifier: Apache-2.0
"""Scheduler half of the connector: decides which rows of each request to export, and writes the workers' messages."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable
from itertools import compress
from typing import TYPE_CHECKING, Any

from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.messages import STEPS_TOGETHER, Close, Open, Report, Rows, Sample, StepMetadata
from dmi_connector.engine.scheduler.draft_tokens import DraftTokens
from dmi_connector.engine.scheduler.ignored import ignored_path
from dmi_connector.engine.scheduler.media import later_media
from dmi_connector.engine.scheduler.opening import opening
from dmi_connector.engine.scheduler.quota import UNLIMITED, Quota, RequestBytes, row_bytes
from dmi_connector.engine.scheduler.refused_requests import RefusedRequests
from dmi_connector.engine.scheduler.responses import dropped, response
from dmi_connector.engine.scheduler.scores import ProbeScores
from dmi_connector.engine.scheduler.steps import computed_before
from dmi_connector.engine.scheduler.tracked_request import Tracked
from dmi_connector.hooks import SelectionError, narrow
from dmi_connector.option_values import OptionError
from dmi_connector.request_options import CaptureParams
from dmi_connector.store.format import completeness
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.format.paths import custom_directory, store_name
from dmi_connector.wording import show

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from dmi_connector.engine.owners.base import Captured, RowSlots

logger = logging.getLogger("vllm.dmi_connector")


class Tracker:
    """Follows every captured request from its arrival to its end. Runs in the thread of vLLM's scheduler.

    Rows of running requests can wait, because vLLM keeps their blocks. So the tracker looks for full chunks only once
    in STEPS_TOGETHER steps. Blocks of an ended request are kept until the workers have gathered its last rows together
    with other rows. If the blocks cannot be kept, workers gather these rows before the next forward. A report takes the
    engine's time, so workers report once in STEPS_TOGETHER steps, and in steps that gather rows, free kept blocks or
    compute nothing. Under policy drop, and if staging memory is short, they report in each step.

    Sleep discards pending rows. So in an engine that may sleep, rows are gathered and workers report in every step.

    slots: `RowSlots` of the owner. keep_rows: number of pending rows above which staging memory is short. behind: steps
    in flight when vLLM schedules the next one: 1 with asynchronous scheduling, otherwise 0.
    """

    def __init__(self, context: CaptureContext, slots: RowSlots, keep_rows: int, behind: int = 0) -> None:
        self.context, self.slots = context, slots
        self.drafts = None if context.drafting is None else DraftTokens(slots, behind)
        self._steps = 1 if context.may_sleep else STEPS_TOGETHER
        self.keep_rows = keep_rows
        self.tracked: dict[str, Tracked] = {}
        self.refused = RefusedRequests()
        self.pending_opens: list[Open] = []  # of ended requests whose `keep_if` holds
        self.pending_closes: list[Close] = []
        self._since: list[SchedulerOutput] = []  # steps since the last check for full chunks
        self._before: list[SchedulerOutput] = []  # the step of that check
        self._rows_since = 0  # tokens scheduled in `_since`
        self._taken = 0  # entries of `_since` whose new blocks are in `tracked`
        self._with_logits = 0  # running captures with logits, which are checked in each step
        self.handed = 0  # rows handed to the workers since the start
        self._left = 0  # value of `handed` at the last order to gather
        self._waited = 0  # steps in which rows waited for an order to gather
        self._unreported = 0  # steps since the workers last reported
        self.gathered = 0  # rows that the slowest worker has gathered since the start
        self._leaving = False  # `Report.leaving` of the last report
        self.lost: dict[int, list[Loss]] = {}
        self._captures = 0
        self.scores = ProbeScores(context, slots, behind)
        self._counts: Counter[str] = Counter()  # requests that ended without a capture since the last `take_counts`
        self.warning = ""  # in all responses: ignored settings of the engine
        self._path_told = False  # whether a warning about an ignored `hidden_states_path` was logged
        self._row_bytes = row_bytes(context, context.selection)  # once, because it takes 0.2 ms for 400 tensors
        self.quota = Quota(context.options)

    # ---- arrival ----------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Read the request's options. If they are invalid, the request is served, and its response has the error."""
        request_id = request.request_id
        if self.refused.beam_search(request):
            return
        try:
            params = CaptureParams.parse(request.kv_transfer_params)
            if not params.enabled:
                return
            if request.prompt_token_ids is None:
                raise OptionError(
                    "prompt_embeds: requests without token ids cannot be captured; send token ids or text"
                )
            self.scores.check(params)
            self.tracked[request_id] = self._track(request, params)
            self.slots.arrived(self.tracked[request_id])
            self.scores.arrived(self.tracked[request_id])
        except (OptionError, SelectionError) as error:
            self.refused.add(request_id, str(error))
        except Exception as error:  # no request may end the engine
            logger.exception("dmi: the options of request %s could not be handled", request_id)
            if (tracked := self.tracked.pop(request_id, None)) is not None:
                self.quota.ended(tracked.path, nothing=True)
            self.refused.add(
                request_id, f"kv_transfer_params: they could not be handled: {type(error).__name__}: {error}"
            )

    def on_next_turn(self, request: Request, kept: int) -> None:
        """A session got its next prompt. kept: number of tokens of earlier turns that vLLM keeps."""
        if (tracked := self.tracked.get(request.request_id)) is not None:
            tracked.kept = kept
            self._take_blocks()
            self.scores.next_turn(tracked, min(kept, request.num_computed_tokens))

    def _track(self, request: Request, params: CaptureParams) -> Tracked:
        """Determine which rows to capture, and the path of the store. Raises OptionError and SelectionError."""
        context, options = self.context, self.context.options
        selection = narrow(context.selection, params.hooks, params.layers, context.dims)
        prompt = request.num_prompt_tokens
        params.check_prompt(prompt)
        rows = self._row_bytes if selection is context.selection else row_bytes(context, selection)
        size = RequestBytes.of(rows, params.start, prompt)
        quota_end = size.end_within(options.max_request_bytes) if options.max_request_bytes else UNLIMITED
        directory = options.store_dir
        if params.save_path is not None:
            roots = options.save_path_roots if options.allow_custom_save_path else ()
            directory = custom_directory(params.save_path, roots, options.file_mode)
        path = os.path.join(directory, store_name(params.key, request.request_id))
        params.check_waits(selection.hooks)
        self._captures += 1
        ignored = ignored_path(request.kv_transfer_params)
        due = params.start + options.chunk_tokens if params.keep_if is None else UNLIMITED
        tracked = Tracked(request, params, self._captures, path, selection, quota_end, params.start, due, ignored)
        self.slots.check_room(tracked)
        if options.sink == "disk":  # the last check: an admitted request counts against the quota until it ends
            self.quota.admit(path, size.until(prompt if params.stop is None else min(prompt, params.stop)))
        if ignored and not self._path_told:
            logger.warning("dmi: ignored in request %s: %s", show(request.request_id), ignored)
            self._path_told = True
        return tracked

    # ---- a step -----------------------------------------------------------------------------------------------------

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """The message for the step that `output` describes."""
        scheduled = output.num_scheduled_tokens
        metadata = StepMetadata(self.pending_opens, self.pending_closes, idle=not scheduled)
        self.pending_opens, self.pending_closes = [], []
        metadata.release = self.slots.take_release()
        self.scores.begin_step()
        if self.drafts is not None:
            if self._with_logits:
                self._take_blocks()
            self._rows_since += self.drafts.begin(output, self.tracked, bool(self._with_logits), metadata)
        else:
            self._rows_since += output.total_num_scheduled_tokens
        for request_id in output.preempted_req_ids or ():
            if request_id in self.tracked:
                self._take_blocks()
                leaving = self.tracked[request_id]
                before = computed_before(request_id, reversed(self._before + self._since))
                computed = self.slots.preempted(leaving, before, metadata)
                self.scores.preempted(leaving, before, computed, metadata)
                if self.drafts is not None:  # its last step may have computed rows of rejected tokens
                    computed = min(computed, leaving.request.num_tokens - 1)
                self._export_chunks(leaving, computed, metadata.leaving)
        if output.scheduled_new_reqs:
            self._take_blocks()  # of earlier steps, because a new request may reuse an id
        self._since.append(output)
        for new in output.scheduled_new_reqs:
            tracked = self.tracked.get(new.req_id)
            if tracked is not None:
                tracked.blocks = list(new.block_ids[self.slots.group])
                tracked.begin_turn()
                if not tracked.opened:
                    tracked.opened = True
                    self._with_logits += tracked.has_logits
                    message = opening(tracked, self.slots.begin(tracked), self.context)
                    if tracked.scores is not None:
                        tracked.scores.begin(tracked.exported)
                    if tracked.params.keep_if is None:
                        metadata.opens.append(message)
                    else:
                        tracked.opening = message
        prompts: Iterable[tuple[Captured, int]] = ()
        if self.slots.eager:
            self._take_blocks()
            prompts = self.slots.cover(output, self.gathered)
        # Rows are handed over at the latest when they fill a quarter of the staging memory.
        if self._with_logits or len(self._since) >= self._steps or self._rows_since > self.keep_rows // 2:
            self._take_blocks()
            self._before, self._since = self._since[-1:], []
            self._rows_since = self._taken = 0
            if self.slots.eager:  # chunks that are handed over before the forward make room for its rows
                running = [tracked for tracked in self.tracked.values() if tracked.opened]
                for tracked in running:
                    if (before := tracked.request.num_computed_tokens) >= tracked.due:
                        self._export_chunks(tracked, min(before, tracked.request.num_tokens - 1), metadata.leaving)
                self.slots.look(running, scheduled)
            if self._with_logits or not self.slots.eager:
                for request_id, tracked in self.tracked.items():
                    if tracked.opened:
                        computed = tracked.request.num_computed_tokens + scheduled.get(request_id, 0)
                        if not self.slots.eager:
                            self._export_chunks(tracked, computed, metadata.chunks)
                        if self._with_logits and request_id in scheduled:
                            take = self._take_sample if self.drafts is None else self.drafts.want_logits
                            take(tracked, computed, metadata)
        if self.scores.stopping:
            self._take_blocks()
            self.scores.check_stops(output)
        for prompt, computed in prompts:
            self._export_chunks(self.tracked[prompt.request.request_id], computed, metadata.chunks)
        self._plan(metadata)
        self.slots.plan(output, metadata)
        self.scores.last = output
        return metadata

    def _plan(self, metadata: StepMetadata) -> None:
        """Decide whether pending rows are gathered, and whether ranks report, in this step."""
        waiting = self.handed - self._left
        if waiting:
            self._waited += 1
            due = self._waited >= self._steps or waiting > self.keep_rows // 2
            metadata.gather = metadata.idle or metadata.release or due
        if metadata.gather:
            self._waited, self._left = 0, self.handed
        self._unreported += 1
        short = self.handed - self.gathered > self.keep_rows or self.context.options.policy == "drop"
        now = metadata.gather or metadata.idle or metadata.release or short
        if now or self._unreported >= self._steps:
            metadata.report, self._unreported = True, 0

    def _take_blocks(self) -> None:
        """Record the blocks that vLLM has added to running and resumed requests since the last call."""
        for output in self._since[self._taken :]:
            cached = output.scheduled_cached_reqs
            for request_id in cached.resumed_req_ids:
                if request_id in self.tracked:
                    self.tracked[request_id].blocks = []
            given = zip(cached.req_ids, cached.new_block_ids, strict=True)
            for request_id, new in compress(given, cached.new_block_ids):  # most requests get no blocks
                if request_id in self.tracked:
                    self.tracked[request_id].blocks.extend(new[self.slots.group])
        self._taken = len(self._since)

    def _export_chunks(self, tracked: Tracked, computed: int, chunks: list[Rows]) -> None:
        """Append the full chunks of a request to `chunks`, once `computed` of its tokens are computed.

        Only rows of known tokens count: with asynchronous scheduling the last scheduled token may come after a stop.
        """
        if computed < tracked.due:
            return
        chunk = self.context.options.chunk_tokens
        end = min(computed, tracked.request.num_tokens, tracked.limit)
        while tracked.exported + chunk <= end:
            chunks.append(self._rows(tracked, tracked.exported, tracked.exported + chunk))
            tracked.exported += chunk
        tracked.due = tracked.exported + chunk
        if tracked.due > tracked.limit:
            tracked.due = UNLIMITED  # the remaining rows are exported when the request ends

    def _take_sample(self, tracked: Tracked, computed: int, metadata: StepMetadata) -> None:
        """Request the logits of the last computed position, if a token is sampled from them."""
        position = computed - 1
        if not tracked.has_logits or computed < tracked.request.num_tokens:
            return
        if tracked.params.start <= position < tracked.limit:
            slot = self.slots.sample_slot(tracked, position)
            metadata.samples.append(Sample(tracked.capture, tracked.number_sample(position), position, slot))

    def _rows(self, tracked: Tracked, start: int, stop: int) -> Rows:
        """Hand the rows of positions [start, stop) to the workers. Returns them for a message."""
        self.handed += stop - start
        rows = Rows(tracked.capture, start - tracked.params.start, self.slots.of(tracked, start, stop))
        self.slots.handed(tracked, stop, self.handed)
        return rows

    def on_report(self, report: Report) -> None:
        """Process a report of the workers."""
        self.gathered, self._leaving = report.gathered, report.leaving
        for path, whole in report.stored.items():
            self.slots.stored(path, whole)
        self.slots.lost(report.lost)
        running = {t.capture for t in self.tracked.values()} if report.lost else set()
        # The response of an ended request was sent. Its store says what is lost.
        for capture in report.lost.keys() & running:
            self.lost.setdefault(capture, []).extend(report.lost[capture])

    @property
    def leaving(self) -> bool:
        """Whether rows are on their way off the GPU, or captures have yet to end, by the workers' last report."""
        return self._leaving or self.handed > self.gathered

    # ---- the end ----------------------------------------------------------------------------------------------------

    def finish(self, request: Request, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. Hands over its last rows, and ends its capture.

        Returns (whether its blocks are kept until workers report it, `kv_transfer_params` of its response or None).
        """
        request_id = request.request_id
        refused = self.refused.pop(request_id, None)
        if refused is not None:
            self._counts["refused"] += 1
            return False, {"dmi_error": refused}
        tracked = self.tracked.pop(request_id, None)
        if tracked is None:
            return False, None
        tracked.blocks = blocks or tracked.blocks  # without blocks (preempted), its last known blocks locate its logits
        self.scores.ended(tracked, there=bool(blocks))
        why = self.scores.why_dropped(tracked)
        self.quota.ended(tracked.path, nothing=bool(why) or not tracked.opened)
        if not tracked.opened:
            self.slots.forget(tracked)
            self._counts["cancelled"] += 1
            return False, {"dmi_error": "the request ended before its first token was computed: nothing to capture"}
        self._with_logits -= tracked.has_logits
        if why:
            self.slots.forget(tracked)
            self._counts["not_kept"] += 1
            return False, self._scored(tracked, {**dropped(tracked, self.warning), "dmi_reason": why})
        if tracked.opening is not None:
            self.pending_opens.append(tracked.opening)
        close = self._close(tracked)
        self.pending_closes.append(close)
        waiting = self.handed - self.gathered > self.keep_rows
        keep = self.slots.ended(request, blocks, waiting, others=bool(self.tracked))
        close.keeps_blocks, close.stays = request_id if keep else None, self.slots.stays
        self.slots.forget(tracked)
        return keep, self._response(tracked, close)

    def _response(self, tracked: Tracked, close: Close) -> dict[str, Any]:
        """`kv_transfer_params` of the response."""
        lost = self.lost.pop(tracked.capture, [])
        said = response(tracked, close, self.context.options, lost, self.warning)
        return self._scored(tracked, said)

    def _scored(self, tracked: Tracked, said: dict[str, Any]) -> dict[str, Any]:
        """Add the scores, and the reason of `stop_if`, to the response of an ended request."""
        said |= self.scores.answer(tracked)
        if tracked.stopped:
            said["dmi_stop"] = tracked.stopped
        return said

    def take_counts(self) -> dict[str, Any]:
        """Changes since the last call, by key of `CaptureStats.data`."""
        counts, self._counts = self._counts, Counter()
        more = {key: count for key, count in self.slots.take_counts().items() if count}
        return {**counts, **more, **self.scores.take_counts()}

    def _close(self, tracked: Tracked) -> Close:
        """The message that ends a capture. The last sampled token was never an input and has no row."""
        request, params = tracked.request, tracked.params
        inputs = max(request.num_prompt_tokens, request.num_tokens - 1)
        computed = max(request.num_computed_tokens, self.slots.captured(tracked))
        end = max(min(computed, inputs, tracked.limit), tracked.exported)
        expected = min(inputs, tracked.wanted)
        chunk = self.context.options.chunk_tokens
        rows = [self._rows(tracked, at, min(at + chunk, end)) for at in range(tracked.exported, end, chunk)]
        finish = request.get_finished_reason()
        attrs: dict[str, Any] = {"finish_reason": None if finish is None else str(finish)}
        start = min(params.start, end)
        losses = []
        if end < expected:
            limit = self.context.options.max_request_bytes
            facts: dict[str, Any] = {"limit": limit} if end == tracked.quota_end else {"finish": str(finish)}
            # A request that was not aborted has computed all its rows, but a preemption may have freed its blocks.
            preempted = not request.num_computed_tokens and str(finish) in completeness.OWN_ENDS
            cause = Cause.QUOTA if end == tracked.quota_end else Cause.PREEMPTED if preempted else Cause.ENDED_EARLY
            if cause is Cause.ENDED_EARLY:  # `end` and `expected` count the tokens of the request
                copied = tracked.exported if tracked.exported > params.start else 0  # includes rows before a preemption
                facts |= {"end": max(min(end, computed), copied), "expected": expected}
            else:  # they count the rows of the store
                facts |= {"end": end - start, "expected": expected - start}
            losses = [Loss.of(cause, [[end - start, expected - start]], **facts)]
        close = Close(
            capture=tracked.capture,
            rows=rows,
            length=end - start,
            samples=tracked.samples_until(end),
            token_ids=list(request.all_token_ids[start:end]),
            attrs={**attrs, **self.slots.attributes(tracked), **later_media(request, tracked.media, self.context)},
            losses=losses,
        )
        if self.drafts is not None:
            self.drafts.close(tracked, start, end, close)
        return close
