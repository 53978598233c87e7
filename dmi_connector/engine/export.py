# SPDX-License-Identifier: Apache-2.0
"""Worker half: gather rows out of the paged cache into the shared ring and hand them to the writer processes."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger

from dmi_connector.engine import startup
from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.device import DeviceLane, Piece
from dmi_connector.engine.kernels import gather_rows_torch
from dmi_connector.engine.messages import Close, Open, Report, Rows, Sample, StepMetadata
from dmi_connector.engine.plan import Plan, make_plan
from dmi_connector.store.capture import CaptureHandle, CaptureSpec
from dmi_connector.store.persist import Persistence, PersistSettings
from dmi_connector.store.ring import Extent, Ring

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from dmi_connector.engine.rows import CaptureLayer

logger = init_logger("vllm.dmi_connector")


@dataclass
class Running:
    """One capture on this worker. headers: token ids as the rows themselves say, [(first row, ids)].

    pieces: what was left to the lane's own thread and may still be there.
    """

    number: int
    plan: Plan
    handle: CaptureHandle | None
    start: int
    attrs: dict[str, Any]
    headers: list[tuple[int, np.ndarray]] = field(default_factory=list)
    lost: list[list[int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)


class Exporter:
    """Owns the ring, the writers and the captures under way on one tensor-parallel rank.

    On a GPU what finds no room waits in the lane while its rows stay in the paged cache. Blocks of a request that
    ends meanwhile are either held until its rows are gathered (`ending`), or its rows are forced out before the
    next forward.
    """

    def __init__(self, context: CaptureContext, layer: CaptureLayer, rank: int, vllm_config: VllmConfig) -> None:
        self.context, self.layer, self.rank = context, layer, rank
        self.captures: dict[int, Running] = {}
        self.plans: dict[tuple[tuple[str, tuple[int, ...]], ...], Plan] = {}
        self.samples: list[Sample] = []
        self.ending: list[tuple[Running, Close]] = []
        self.finished: set[str] = set()
        self.gathered = 0
        self._gathered: deque[int] = deque()  # not yet in `gathered`; the lane's thread appends too
        self._lost: dict[int, list[list[int]]] = {}
        self.store_attrs = startup.store_attrs(context, vllm_config)
        options = context.options
        full = self._plan(dict(context.selection.hooks))
        assert layer.rows is not None
        self.rows = layer.rows
        seqs = vllm_config.scheduler_config.max_num_seqs
        logits = 0 if full.logits is None else seqs * (full.logits.token_bytes + 16)
        sizes = startup.buffer_sizes(options, full.token_bytes, self.rows.is_cuda, logits)
        self.persistence: Persistence | None = None
        writers = 0
        if options.sink == "disk":
            writers = options.writers or startup.default_writers(self.rows.is_cuda)
            self.persistence = Persistence(
                ring_bytes=sizes.host,
                writers=writers,
                settings=PersistSettings(options.codec, options.chunk_tokens, options.segment_tokens, options.fsync),
            )
        self.ring = self.persistence.ring if self.persistence else Ring(sizes.host)
        self.lane: DeviceLane | None = None
        if self.rows.is_cuda and options.sink != "null":
            self.lane = DeviceLane(self.ring.memory, sizes.staging, self.rows)
        startup.announce(context, full, self.rows, sizes, self.lane, writers)

    def _plan(self, hooks: dict[str, tuple[int, ...]]) -> Plan:
        key = tuple(hooks.items())
        if key not in self.plans:
            self.plans[key] = make_plan(self.context, hooks, self.rank)
        return self.plans[key]

    # ---- the two moments of a step --------------------------------------------------------------------------------

    def before_forward(self, metadata: StepMetadata) -> None:
        """Begin new captures and finish ended ones: the forward that follows may overwrite their freed blocks."""
        self.samples = metadata.samples
        for message in metadata.opens:
            self._open(message)
        for close in metadata.closes:
            self._close(close)
        for number in metadata.preempted:
            capture = self.captures.get(number)
            if capture is not None:
                self._force_out(capture)

    def after_forward(self, metadata: StepMetadata) -> None:
        """Export chunks that the forward completed, as far as there is room."""
        for rows in metadata.chunks:
            self._export(self.captures[rows.capture], rows)
        self._end_held()

    def take_report(self) -> Report:
        while self._gathered:
            self.gathered += self._gathered.popleft()
        report = Report(self.gathered, self._lost)
        self._lost = {}
        return report

    def take_finished(self) -> set[str]:
        """Requests whose blocks were held back for us and may be freed now."""
        finished, self.finished = self.finished, set()
        return finished

    # ---- captures ---------------------------------------------------------------------------------------------------

    def _open(self, message: Open) -> None:
        plan = self._plan(message.hooks)
        handle = None
        if self.persistence is not None:
            handle = self.persistence.open_capture(
                CaptureSpec(
                    final=os.path.join(self.context.options.store_dir, message.name),
                    arrays=plan.arrays if plan.logits is None else (*plan.arrays, plan.logits),
                    request_id=message.request_id,
                    key=message.key,
                    rank=self.rank,
                    ranks=self.context.tp,
                )
            )
        attrs = {**self.store_attrs, **message.attrs, "start": message.start}
        self.captures[message.capture] = Running(message.capture, plan, handle, message.start, attrs)

    def _close(self, message: Close) -> None:
        """Export the last rows of a capture and end it. Its blocks are held for it, or free from here on."""
        capture = self.captures.pop(message.capture)
        for rows in message.rows:
            self._export(capture, rows)
        if message.held:
            self.ending.append((capture, message))
            return
        self._force_out(capture)
        self._end(capture, message)

    def _force_out(self, capture: Running) -> None:
        """The blocks of a capture may be overwritten by the next forward: get its waiting rows gathered before."""
        if self.lane is None:
            return
        for piece in self.lane.flush(capture, self.context.options.policy == "drop"):
            self._lose(capture, piece)
        for piece in capture.pieces:
            if piece.gathered is not None:
                torch.cuda.current_stream().wait_event(piece.gathered)  # gathers that ran on the side stream

    def _end_held(self) -> None:
        """End captures whose held blocks are no longer needed."""
        still = []
        for capture, message in self.ending:
            if any(piece.gathered is None for piece in capture.pieces):
                still.append((capture, message))
                continue
            self._force_out(capture)
            self._end(capture, message)
            assert message.held is not None
            self.finished.add(message.held)
        self.ending = still

    def _end(self, capture: Running, message: Close) -> None:
        if self.lane is None:
            self._finish(capture, message)
            return
        self.lane.then(lambda: self._finish(capture, message))

    def _export(self, capture: Running, rows: Rows) -> None:
        """Send one piece of rows on its way."""
        count, plan = len(rows.slots), capture.plan
        nbytes = plan.token_bytes * count
        if self.context.options.sink == "null":
            self._gathered.append(count)
            return
        extents: list[Extent] = []

        def ring_space(timeout: float | None = 0.0) -> int | None:
            extent = self.ring.alloc(nbytes, timeout)
            if extent is None:
                return None
            extents.append(extent)
            self._gathered.append(count)
            return extent.offset

        def deliver() -> None:
            self._deliver(capture, rows.first, count, extents[0])

        piece = Piece(capture, rows.slots, plan.pieces, nbytes, ring_space, deliver)
        piece.first, piece.count = rows.first, count
        if self.lane is not None:
            self.lane.send(piece)
            if piece.gathered is None:
                capture.pieces.append(piece)
            return
        if ring_space(0.0 if self.context.options.policy == "drop" else None) is None:
            self._lose(capture, piece)
            return
        payload = torch.from_numpy(self.ring.view(extents[0]))
        gather_rows_torch(self.rows, torch.from_numpy(rows.slots), torch.from_numpy(plan.pieces), payload)
        deliver()

    def _lose(self, capture: Running, piece: Piece) -> None:
        """Policy drop: note which positions were given up."""
        first = capture.start + piece.first
        self._gathered.append(piece.count)
        self._lost.setdefault(capture.number, []).append([first, first + piece.count])
        capture.lost.append([first, first + piece.count])

    # ---- deliveries: on a GPU these run on the lane's thread ------------------------------------------------------

    def _deliver(self, capture: Running, first: int, count: int, extent: Extent) -> None:
        """Check the headers of rows that arrived, then give them to the writers."""
        payload = self.ring.view(extent)
        base = capture.plan.header_base * count
        header = payload[base : base + 8 * count].view(np.int32).reshape(count, 2)
        capture.headers.append((first, header[:, 0].copy()))
        begin = capture.start + first
        if not np.array_equal(header[:, 1], np.arange(begin, begin + count, dtype=np.int32)):
            capture.problems.append(f"the rows of positions {begin} to {begin + count - 1} carry other positions")
        if capture.handle is None:
            self.ring.release(extent)
        else:
            capture.handle.chunk(extent, first, count)

    def _finish(self, capture: Running, message: Close) -> None:
        attrs = {**capture.attrs, **message.attrs}
        problems = [attrs["reason"]] if attrs["reason"] else []
        problems += capture.problems + _check_tokens(capture, message)
        if capture.lost:
            attrs["missing"] = sorted(capture.lost + attrs["missing"])
            problems.append("rows were dropped because writing fell behind (policy drop)")
        attrs["complete"] = attrs["complete"] and not problems
        attrs["reason"] = "; ".join(problems) or None
        if capture.handle is not None:
            samples = {"logits": message.samples} if capture.plan.logits is not None else {}
            capture.handle.close(message.length, samples, message.token_ids, attrs=attrs)
        elif problems:
            logger.error("capture of %s: %s", capture.attrs.get("request_id"), attrs["reason"])

    # ---- logits -----------------------------------------------------------------------------------------------------

    def logits(self, logits: torch.Tensor) -> None:
        """Export the logits rows of captured requests. logits: [samples, vocab], in the order of the batch."""
        step, samples = self.layer.step, self.samples
        self.samples = []  # prompt logprobs call compute_logits again in the same step
        if not samples or step is None or self.persistence is None:
            return
        wanted = {s.slot: (s, self.captures[s.capture]) for s in samples}
        logits = logits.to(self.layer.row_dtype).contiguous()
        count, row_bytes = logits.shape[0], logits.shape[1] * logits.element_size()
        slots = step.slot_mapping[step.query_start_loc[1 : count + 1].long() - 1]
        # One extent: the rows, then the slots that say whose they are.
        nbytes = -(-count * row_bytes // 16) * 16 + 8 * count
        extent = self.ring.alloc(nbytes, None)
        assert extent is not None

        def deliver() -> None:
            tail = self.ring.view(extent)[nbytes - 8 * count :].view(np.int64)
            for index, slot in enumerate(tail.tolist()):
                if slot in wanted:
                    sample, capture = wanted[slot]
                    if capture.handle is not None and capture.plan.logits is not None:
                        capture.handle.rows(
                            "logits", extent, sample.index, 1, [sample.position], index * row_bytes, keep=True
                        )
            self.ring.release(extent)

        if self.lane is None:
            self._fill_logits(torch.from_numpy(self.ring.view(extent)), logits, slots)
            deliver()
        else:
            source = torch.empty(nbytes, dtype=torch.uint8, device=logits.device)
            self._fill_logits(source, logits, slots)
            self.lane.send_tensor(source, extent.offset, deliver)

    @staticmethod
    def _fill_logits(target: torch.Tensor, logits: torch.Tensor, slots: torch.Tensor) -> None:
        size = logits.numel() * logits.element_size()
        target[:size].view(logits.dtype).view(logits.shape).copy_(logits)
        target[target.numel() - 8 * slots.numel() :].view(torch.int64).copy_(slots)

    def pending(self) -> int:
        """Captures under way and bytes not yet written; 0 when everything sent has reached its sink."""
        pending = len(self.captures) + len(self.ending) + self.ring.used
        if self.persistence is not None:
            stats = self.persistence.stats()
            pending += stats["open"] + stats["closing"]
        return int(pending)

    def shutdown(self) -> None:
        """Export what is waiting, then finish the stores and stop the writers, within a minute each."""
        if self.lane is not None:
            self.lane.finish_gathers()
            self._end_held()
            self.lane.shutdown()
        if self.persistence is not None:
            self.persistence.shutdown(timeout=60.0)


def _check_tokens(capture: Running, message: Close) -> list[str]:
    """Compare the token ids that rows carry with those of the request: a row of another request cannot pass."""
    for first, ids in capture.headers:
        expected = np.asarray(message.token_ids[first : first + len(ids)], dtype=np.int32)
        wrong = np.flatnonzero(ids[: len(expected)] != expected)
        if len(wrong):
            at = int(wrong[0])
            return [f"the row at position {capture.start + first + at} holds token {ids[at]}, not {expected[at]}"]
    return []
