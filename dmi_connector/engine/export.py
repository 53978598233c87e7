# SPDX-License-Identifier: Apache-2.0
"""Worker half: gather rows out of the paged cache into the shared ring and hand them to the coordinator process."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger

from dmi_connector.engine import startup
from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.device import FELL_BEHIND, DeviceLane, Piece
from dmi_connector.engine.kernels import gather_index, gather_rows_torch
from dmi_connector.engine.messages import Close, Open, Report, Rows, Sample, StepMetadata
from dmi_connector.engine.metrics import Meter, Numbers
from dmi_connector.engine.plan import Plan, make_plan
from dmi_connector.store.client import PersistenceClient, RemoteCapture
from dmi_connector.store.ring import Extent, Ring

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from dmi_connector.engine.rows import CaptureLayer

logger = init_logger("vllm.dmi_connector")


@dataclass
class Running:
    """One capture on this worker. lost: row ranges given up, with `reasons`.

    pieces: what was left to the lane's own thread and may still be there.
    """

    number: int
    plan: Plan
    remote: RemoteCapture | None
    start: int
    lost: list[list[int]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)


class Exporter:
    """Owns the ring, the coordinator and the captures under way on one tensor-parallel rank.

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
        self.counts: Numbers = {"bytes_exported": 0, "lost_ranges": 0, "lost_rows": 0, "blocked_seconds": 0.0}
        self.meter = Meter(self)
        self.gathered = 0
        self._gathered: deque[int] = deque()  # not yet in `gathered`; the lane's thread appends too
        self._lost: dict[int, list[list[int]]] = {}
        self.registered: dict[int, int] = {}  # plans the coordinator knows, by id
        self.store_attrs = startup.store_attrs(context, vllm_config)
        options = context.options
        full = self._plan(dict(context.selection.hooks))
        assert layer.rows is not None
        self.rows = layer.rows
        seqs = vllm_config.scheduler_config.max_num_seqs
        logits = 0 if full.logits is None else seqs * (full.logits.token_bytes + 16)
        sizes = startup.buffer_sizes(options, full.token_bytes, self.rows.is_cuda, logits)
        self.persistence: PersistenceClient | None = None
        writers = 0
        if options.sink == "disk":
            writers = options.writers or startup.default_writers(self.rows.is_cuda)
            self.persistence = PersistenceClient(
                ring_bytes=sizes.host,
                writers=writers,
                settings=startup.persist_settings(options, rank, self.rows.is_cuda),
            )
        self.ring = self.persistence.ring if self.persistence else Ring(sizes.host)
        self.lane: DeviceLane | None = None
        if self.rows.is_cuda and options.sink != "null":
            self.lane = DeviceLane(self.ring.memory, sizes.staging, self.rows)
            self.lane.warm_up(full.pieces)
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
        closing = [(self.captures.pop(close.capture), close) for close in metadata.closes]
        self._export([(capture, rows) for capture, close in closing for rows in close.rows])
        for capture, close in closing:
            if close.held:
                self.ending.append((capture, close))
            else:
                self._force_out(capture)
                self._end(capture, close)
        for number in metadata.preempted:
            if number in self.captures:
                self._force_out(self.captures[number])

    def after_forward(self, metadata: StepMetadata) -> None:
        """Export chunks that the forward completed, as far as there is room."""
        if metadata.chunks:
            self._export([(self.captures[rows.capture], rows) for rows in metadata.chunks])
        if self.ending:
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
        plan, remote = self._plan(message.hooks), None
        if self.persistence is not None:
            if id(plan) not in self.registered:
                arrays = plan.arrays if plan.logits is None else (*plan.arrays, plan.logits)
                self.registered[id(plan)] = self.persistence.register(arrays, plan.header_base)
            remote = self.persistence.open_capture(
                self.registered[id(plan)],
                message.path,
                {**self.store_attrs, **message.attrs, "start": message.start},
                message.request_id,
                message.key,
                self.rank,
                self.context.tp,
                message.most_rows,
            )
        self.captures[message.capture] = Running(message.capture, plan, remote, message.start)

    def _force_out(self, capture: Running) -> None:
        """The blocks of a capture may be overwritten by the next forward: get its waiting rows gathered before."""
        if self.lane is None or not capture.pieces:
            return
        drop, began = self.context.options.policy == "drop", time.perf_counter()
        self.lane.flush(capture, drop)
        self.counts["blocked_seconds"] += 0.0 if drop else time.perf_counter() - began
        capture.pieces.clear()

    def _room(self, nbytes: int) -> Extent | None:
        """Ring space: waited for under policy block, None where there is none under drop."""
        extent = self.ring.alloc(nbytes, 0.0)
        if extent is None and self.context.options.policy == "block":
            began = time.perf_counter()
            extent = self.ring.alloc(nbytes, None)
            self.counts["blocked_seconds"] += time.perf_counter() - began
        return extent

    def _end_held(self) -> None:
        """End captures whose held blocks are no longer needed."""
        still = []
        for capture, message in self.ending:
            if any(piece.waits for piece in capture.pieces):
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

    def _export(self, batch: list[tuple[Running, Rows]]) -> None:
        """Send pieces of rows on their way."""
        if not batch:  # as in most steps: the lane's lock may be held by its threads
            return
        if self.context.options.sink == "null":
            self._gathered.extend(len(rows.slots) for _, rows in batch)
            return
        if self.lane is None:
            for capture, rows in batch:
                self._export_here(capture, rows)
            return
        pieces = [self._piece(capture, rows) for capture, rows in batch]
        self.lane.send(pieces)
        for (capture, _), piece in zip(batch, pieces, strict=True):
            if piece.waits:
                capture.pieces.append(piece)

    def _piece(self, capture: Running, rows: Rows) -> Piece:
        nbytes = capture.plan.token_bytes * len(rows.slots)
        extents: list[Extent] = []

        def ring_space() -> int | None:
            extent = self.ring.alloc(nbytes, 0.0)
            if extent is None:
                return None
            extents.append(extent)
            self._gathered.append(len(rows.slots))
            return extent.offset

        def deliver() -> None:
            self._deliver(capture, rows, extents[0])

        def lose(reason: str) -> None:
            if extents:
                self.ring.release(extents[0])
            else:
                self._gathered.append(len(rows.slots))
            self._lose(capture, rows.first, len(rows.slots), reason)

        return Piece(capture, rows.slots, capture.plan.pieces, nbytes, ring_space, deliver, lose)

    def _export_here(self, capture: Running, rows: Rows) -> None:
        """The whole way at once, on a CPU."""
        extent = self._room(capture.plan.token_bytes * len(rows.slots))
        self._gathered.append(len(rows.slots))
        if extent is None:
            self._lose(capture, rows.first, len(rows.slots), FELL_BEHIND)
            return
        payload, index = torch.from_numpy(self.ring.view(extent)), torch.from_numpy(gather_index(rows.slots, 0))
        gather_rows_torch(self.rows, index, torch.from_numpy(capture.plan.pieces), payload)
        self._deliver(capture, rows, extent)

    def _lose(self, capture: Running, first: int, count: int, reason: str) -> None:
        """Note that rows [first, first + count) were given up, and why."""
        lost = [first, first + count]
        self._lost.setdefault(capture.number, []).append(lost)
        capture.lost.append(lost)
        self.counts["lost_ranges"] += 1
        self.counts["lost_rows"] += count
        if reason not in capture.reasons:
            capture.reasons.append(reason)

    # ---- deliveries: on a GPU these run on the lane's thread ------------------------------------------------------

    def _deliver(self, capture: Running, rows: Rows, extent: Extent) -> None:
        """Rows have arrived in the ring: hand them to the writers."""
        self.counts["bytes_exported"] += extent.nbytes
        if capture.remote is None:
            self.ring.release(extent)
        else:
            capture.remote.chunk(extent, rows.first, len(rows.slots))

    def _finish(self, capture: Running, message: Close) -> None:
        if capture.remote is None:
            return
        attrs = dict(message.attrs)
        # A sample behind the end (the engine learns of a stop late) was never to be kept.
        if lost := [rows for rows in capture.lost if rows[0] < message.length]:
            attrs |= {"missing": sorted(lost + attrs["missing"]), "complete": False}
            attrs["reason"] = "; ".join(([attrs["reason"]] if attrs["reason"] else []) + capture.reasons)
        capture.remote.cause = _cause(message.attrs, capture.reasons)
        if self.rank:  # the rest is rank 0's to say
            attrs = {"missing": lost, "reason": "; ".join(capture.reasons)}
        samples = {"logits": message.samples} if capture.plan.logits is not None else {}
        capture.remote.close(message.length, samples, message.token_ids, attrs)

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
        extent = self._room(nbytes)
        if extent is None:
            for sample, capture in wanted.values():
                if capture.plan.logits is not None:
                    self._lose(capture, sample.position - capture.start, 1, FELL_BEHIND)
            return

        def deliver() -> None:
            assert self.persistence is not None
            self.counts["bytes_exported"] += nbytes
            tail = self.ring.view(extent)[nbytes - 8 * count :].view(np.int64)
            found = []
            for index, slot in enumerate(tail.tolist()):
                if slot in wanted:
                    sample, capture = wanted[slot]
                    if capture.remote is not None and capture.plan.logits is not None:
                        found.append((capture.remote, "logits", sample.index, sample.position, index * row_bytes))
            self.persistence.rows(extent, found)

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
        """Export what is waiting, then finish the stores and stop the writers, all within `shutdown_seconds`."""
        deadline = time.monotonic() + self.context.options.shutdown_seconds
        if self.lane is not None:
            self.lane.finish_gathers(deadline - time.monotonic())
            self._end_held()
            self.lane.shutdown(max(0.0, deadline - time.monotonic()))
        if self.persistence is not None:
            self.persistence.shutdown(max(1.0, deadline - time.monotonic()))


def _cause(attrs: dict[str, Any], reasons: list[str]) -> str:
    """The one of `client.REASONS` for what the engine itself knows. attrs: of Close. reasons: why rows were lost."""
    if FELL_BEHIND in reasons:
        return "dropped"
    if attrs["complete"]:
        return "other"
    return "quota" if attrs["reason"].startswith("max_request_bytes") else "aborted"
