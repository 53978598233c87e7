# SPDX-License-Identifier: Apache-2.0
"""Scheduler half: which rows of which request are ready, and what to tell the worker about them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.messages import Close, Open, Report, Rows, Sample, StepMetadata
from dmi_connector.hooks import HOOKS, Selection, SelectionError, parse_selection
from dmi_connector.settings import CaptureParams, OptionError, show
from dmi_connector.store.paths import custom_directory, store_name
from dmi_connector.store.quota import UNLIMITED, Quota, RequestBytes, row_bytes

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.dmi_connector")
_REASON_LENGTH = 2000


@dataclass
class Tracked:
    """One request under capture. exported: position up to which rows were handed to the worker. due: number of
    computed tokens from which a step has something to say about it. quota: first position that `max_request_bytes`
    has no room for.
    """

    request: Request
    params: CaptureParams
    capture: int
    path: str
    selection: Selection
    quota: int
    exported: int
    due: int
    opened: bool = False
    blocks: list[int] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        """First position that is not wanted."""
        wanted = UNLIMITED if self.params.include_output_tokens else self.request.num_prompt_tokens
        return wanted if self.params.stop is None else min(wanted, self.params.stop)

    @property
    def limit(self) -> int:
        """First position that is not captured."""
        return min(self.wanted, self.quota)


class Tracker:
    """Follows every captured request from arrival to finish. Lives in the scheduler's process and thread.

    hold_rows: with more rows than this on their way, blocks of finished requests are kept until they are gathered.
    """

    def __init__(self, context: CaptureContext, block_size: int, hold_rows: int) -> None:
        self.context = context
        self.hold_rows = hold_rows
        self.block_size = block_size
        self.tracked: dict[str, Tracked] = {}
        self.refused: dict[str, str] = {}
        self.pending_closes: list[Close] = []
        self.handed = 0  # rows handed to the workers since the start
        self.gathered = 0  # of these, rows the slowest worker has gathered
        self.lost: dict[int, list[list[int]]] = {}
        self._left = 0  # no tracked request computes so many tokens without one of them being due
        self._captures = 0
        self._row_bytes = row_bytes(context, context.selection)  # 0.2 ms for 400 tensors: not for every request
        self.quota = Quota(context.options)

    def on_new_request(self, request: Request) -> None:
        """Read the request's options. Why nothing is captured is remembered for the response; the request goes on."""
        request_id = request.request_id
        try:
            params = CaptureParams.parse(request.kv_transfer_params)
            if not params.enabled:
                return
            if request.prompt_token_ids is None:
                raise OptionError(
                    "prompt_embeds: requests without token ids cannot be captured; send token ids or text"
                )
            self.tracked[request_id] = self._track(request, params)
        except (OptionError, SelectionError) as error:
            self._refuse(request_id, str(error))
        except Exception as error:  # whatever a client sent, the engine goes on
            logger.exception("dmi: the options of request %s could not be handled", request_id)
            self._refuse(request_id, f"kv_transfer_params: they could not be handled: {type(error).__name__}: {error}")

    def _refuse(self, request_id: str, reason: str) -> None:
        """Remember a reason, in characters and of a length that any response can carry."""
        self.refused[request_id] = reason[:_REASON_LENGTH].encode("utf-8", "backslashreplace").decode()

    def _track(self, request: Request, params: CaptureParams) -> Tracked:
        """Work out what to capture and where. Raises OptionError and SelectionError."""
        context, options = self.context, self.context.options
        selection = self._narrow(params)
        prompt = request.num_prompt_tokens
        rows = self._row_bytes if selection is context.selection else row_bytes(context, selection)
        size = RequestBytes.of(rows, params.start, prompt)
        quota = size.end_within(options.max_request_bytes) if options.max_request_bytes else UNLIMITED
        directory = options.store_dir
        if params.save_path is not None:
            roots = options.save_path_roots if options.allow_custom_save_path else ()
            directory = custom_directory(params.save_path, roots, options.file_mode)
        path = os.path.join(directory, store_name(params.key, request.request_id))
        if options.sink == "disk":
            self.quota.admit(path, size.until(prompt if params.stop is None else min(prompt, params.stop)))
        self._captures += 1
        due = 0 if "logits" in selection.hooks else params.start + options.chunk_tokens
        return Tracked(request, params, self._captures, path, selection, quota, params.start, due)

    def _narrow(self, params: CaptureParams) -> Selection:
        served, dims = self.context.selection, self.context.dims
        chosen = served if params.hooks is None else parse_selection(params.hooks, dims, only=served)
        if params.layers is None:
            return chosen
        keep = set()
        for layer in params.layers:
            if not -dims.layers <= layer < dims.layers:
                raise OptionError(
                    f"dmi.layers: {show(layer)} is outside this model; it has layers 0 to {dims.layers - 1}"
                )
            keep.add(layer % dims.layers)
        hooks = {
            n: ls if HOOKS[n].scope != "layer" else tuple(x for x in ls if x in keep) for n, ls in chosen.hooks.items()
        }
        hooks = {n: ls for n, ls in hooks.items() if ls}
        if not hooks:
            raise OptionError(
                f"dmi.layers: {show(list(params.layers))} leaves nothing of the captured hooks; captured: {chosen}"
            )
        return Selection(hooks)

    def step(self, output: SchedulerOutput, group: int) -> StepMetadata:
        """Metadata for the step that `output` describes. group: index of the rows' KV cache group."""
        metadata = StepMetadata(closes=self.pending_closes)
        self.pending_closes = []
        for request_id in output.preempted_req_ids or ():
            if request_id in self.tracked:
                metadata.preempted.append(self.tracked[request_id].capture)
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            tracked = self.tracked.get(new.req_id)
            if tracked is not None:
                tracked.blocks = list(new.block_ids[group])
                if not tracked.opened:
                    tracked.opened = True
                    metadata.opens.append(self._open(tracked))
                computed = new.num_computed_tokens + scheduled[new.req_id]
                self._ready(tracked, computed, metadata)
                self._left = min(self._left, tracked.due - computed)
        self._continue(output, group, metadata)
        return metadata

    def _continue(self, output: SchedulerOutput, group: int, metadata: StepMetadata) -> None:
        """The part of a step that grows with the batch: of most requests nothing is due in most steps, so only those
        with new blocks are looked at.
        """
        cached, scheduled = output.scheduled_cached_reqs, output.num_scheduled_tokens
        if self._left > 0 and cached.req_ids:
            self._left -= max(map(scheduled.__getitem__, cached.req_ids))
        some: Iterable[int] = range(len(cached.req_ids))
        if self._left > 0:
            resumed = cached.resumed_req_ids
            changed = enumerate(zip(cached.req_ids, cached.new_block_ids, strict=True))
            some = [i for i, (request_id, blocks) in changed if blocks or request_id in resumed]
        for index in some:
            request_id = cached.req_ids[index]
            tracked = self.tracked.get(request_id)
            if tracked is None:
                continue
            new_blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                tracked.blocks = list(new_blocks[group]) if new_blocks else []
            elif new_blocks:
                tracked.blocks.extend(new_blocks[group])
            computed = cached.num_computed_tokens[index] + scheduled[request_id]
            if computed >= tracked.due:
                self._ready(tracked, computed, metadata)
            self._left = min(self._left, tracked.due - computed)  # much of one resumed may be in the prefix cache
        if self._left <= 0:
            all_left = (t.due - t.request.num_computed_tokens - scheduled.get(r, 0) for r, t in self.tracked.items())
            self._left = min(all_left, default=UNLIMITED)

    def _ready(self, tracked: Tracked, computed: int, metadata: StepMetadata) -> None:
        """Whole chunks of which every row exists after this step, and the sampled position if there is one.

        A row counts only once its token is known to stay: with asynchronous scheduling the last token scheduled may
        turn out to lie behind a stop.
        """
        known = tracked.request.num_tokens
        end = min(computed, known, tracked.limit)
        chunk = self.context.options.chunk_tokens
        while tracked.exported + chunk <= end:
            metadata.chunks.append(self._rows(tracked, tracked.exported, tracked.exported + chunk, tracked.blocks))
            tracked.exported += chunk
            if tracked.due:
                tracked.due += chunk
        if tracked.due and tracked.exported + chunk > tracked.limit:
            tracked.due = UNLIMITED  # what is left of it goes when it ends
        position = computed - 1
        if "logits" in tracked.selection.hooks and computed >= known and self._wants_sample(tracked, position):
            first = max(tracked.request.num_prompt_tokens - 1, tracked.params.start)
            slot = tracked.blocks[position // self.block_size] * self.block_size + position % self.block_size
            metadata.samples.append(Sample(tracked.capture, position - first, position, slot))

    @staticmethod
    def _wants_sample(tracked: Tracked, position: int) -> bool:
        return tracked.params.start <= position < tracked.limit

    def _rows(self, tracked: Tracked, start: int, stop: int, blocks: list[int]) -> Rows:
        positions = np.arange(start, stop, dtype=np.int64)
        table = np.asarray(blocks, dtype=np.int64)
        slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
        self.handed += stop - start
        return Rows(tracked.capture, start - tracked.params.start, slots)

    def _open(self, tracked: Tracked) -> Open:
        request = tracked.request
        sampling = request.sampling_params
        end = min(request.num_prompt_tokens + request.max_tokens, tracked.limit)
        return Open(
            capture=tracked.capture,
            path=tracked.path,
            hooks=dict(tracked.selection.hooks),
            request_id=request.request_id,
            key=tracked.params.key,
            start=tracked.params.start,
            most_rows=max(0, end - tracked.params.start),
            attrs={
                "prompt_len": request.num_prompt_tokens,
                "seed": None if sampling is None else sampling.seed,
                "include_output_tokens": tracked.params.include_output_tokens,
            },
        )

    def on_report(self, report: Report) -> None:
        """Take in what the workers report."""
        self.gathered = report.gathered
        running = {t.capture for t in self.tracked.values()} if report.lost else set()
        for capture, ranges in report.lost.items():
            if capture in running:  # else its response has left; the store has the ranges
                self.lost.setdefault(capture, []).extend(ranges)

    def finish(self, request: Request, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: plan its last rows.

        Returns (whether its blocks must be kept until the worker names it, what its response says). Blocks are freed
        at once unless more rows wait than the staging memory takes: reusing them then would stall the GPU.
        """
        request_id = request.request_id
        refused = self.refused.pop(request_id, None)
        if refused is not None:
            return False, {"dmi_error": refused}
        tracked = self.tracked.pop(request_id, None)
        if tracked is None:
            return False, None
        self.quota.ended(tracked.path, nothing=not tracked.opened)
        if not tracked.opened:
            return False, {"dmi_error": "the request ended before its first token was computed: nothing to capture"}
        close = self._close(tracked, blocks)
        hold = bool(blocks) and self.context.options.policy == "block" and self.handed - self.gathered > self.hold_rows
        close.held = request_id if hold else None
        self.pending_closes.append(close)
        store = tracked.path if self.context.options.sink == "disk" else None
        response: dict[str, Any] = {"dmi_store": store, "dmi_request_id": request_id}
        if tracked.params.key is not None:
            response["dmi_key"] = tracked.params.key
        lost = self.lost.pop(tracked.capture, [])
        if not close.attrs["complete"] and tracked.params.start + close.length == tracked.quota:
            lost = lost + close.attrs["missing"]
            response["dmi_reason"] = close.attrs["reason"]
        if lost:
            response["dmi_missing"] = sorted(lost)
        return hold, response

    def _close(self, tracked: Tracked, blocks: list[int]) -> Close:
        request, params = tracked.request, tracked.params
        exist = min(request.num_computed_tokens, request.num_tokens - 1)
        end = max(min(exist, tracked.limit), tracked.exported)
        expected = min(max(request.num_prompt_tokens, request.num_tokens - 1), tracked.wanted)
        chunk = self.context.options.chunk_tokens
        rows = [self._rows(tracked, at, min(at + chunk, end), blocks) for at in range(tracked.exported, end, chunk)]
        finish = request.get_finished_reason()
        reason = None
        if end < expected and end == tracked.quota:
            reason = (
                f"max_request_bytes: {self.context.options.max_request_bytes} bytes hold the rows of {end} of "
                f"{expected} tokens"
            )
        elif end < expected:
            reason = f"the request ended ({finish}) after {end} of {expected} tokens were computed"
        start = min(params.start, end)
        first_sample = max(request.num_prompt_tokens - 1, params.start)
        return Close(
            capture=tracked.capture,
            rows=rows,
            length=end - start,
            samples=max(0, end - first_sample) if "logits" in tracked.selection.hooks else 0,
            token_ids=list(request.all_token_ids[start:end]),
            attrs={
                "complete": end >= expected,
                "reason": reason,
                "missing": [] if end >= expected else [[end - start, expected - start]],
                "finish_reason": None if finish is None else str(finish),
            },
        )
