# SPDX-License-Identifier: Apache-2.0
"""Worker half of the connector: exports rows from the cache or pool to the coordinator process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from dmi_connector.engine import contract, sizing
from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.host_scores import HostScores
from dmi_connector.engine.kernels.gather import gather_index, gather_rows_torch
from dmi_connector.engine.messages import Borrow, Close, Open, Report, Rows, StepMetadata
from dmi_connector.engine.store_attributes import store_attributes
from dmi_connector.engine.transfer.announcement import announce
from dmi_connector.engine.transfer.chunk_layout import ChunkLayout, chunk_layout, sent_bytes
from dmi_connector.engine.transfer.chunk_transfer import CaptureExport, ChunkTransfer, Parcel, Progress
from dmi_connector.engine.transfer.gpu_lane import DeviceLane
from dmi_connector.engine.transfer.logits import LogitsExport, step_bytes
from dmi_connector.engine.transfer.meter import Meter
from dmi_connector.store.format.completeness import Cause
from dmi_connector.store.write.client import StoreClient
from dmi_connector.store.write.messages import pack_array
from dmi_connector.store.write.ring import Extent, Ring

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from dmi_connector.engine.owners.base import RowMemory

logger = init_logger("vllm.dmi_connector")

FIRST_CAPTURES = 16
"""On an untested vLLM, the check for values that no tap wrote ends after this many captures."""
_CHECK_S = 1.0
"""Seconds after which a wait for ring memory checks whether the lane has failed."""
LAYOUTS_KEPT = 64
"""Maximum number of layouts that are kept. Requests choose hooks and layers, so there may be any number."""


class Exporter:
    """Owns the ring, the coordinator and the running captures of one rank.

    On a CPU rows are copied to the ring after each step. On a GPU rows of several steps are collected in `due` until
    the scheduler orders the gather. The lane then gathers and copies these rows (gpu_lane.py). Rows for which staging
    memory or the ring has no room wait in the cache. If a request ends in the meantime, its blocks are kept until its
    rows are gathered (`ending`), or its rows are gathered before the next forward. Captures with rows in a pool also
    wait in `ending`, without blocks.
    """

    def __init__(self, context: CaptureContext, layer: RowMemory, rank: int, vllm_config: VllmConfig) -> None:
        assert context.rank == rank, "the rows are those of another rank"
        self.context, self.layer, self.rank = context, layer, rank
        self.captures: dict[int, CaptureExport] = {}
        self.layouts: dict[tuple[tuple[str, tuple[int, ...]], ...], ChunkLayout] = {}
        self.registered: dict[ChunkLayout, int] = {}  # layouts that the coordinator knows, with its number of each
        self.due: list[tuple[CaptureExport, Rows]] = []
        self.ending: list[tuple[CaptureExport, Close]] = []
        self.finished: set[str] = set()
        self.progress = Progress()
        self.store_attrs = store_attributes(context, vllm_config)
        options = context.options
        full = self._layout(dict(context.selection.hooks))
        assert layer.rows is not None
        self.rows = layer.rows
        self.trials = FIRST_CAPTURES if layer.poisons else 0  # number of captures that will still be checked
        gpu = self.rows.is_cuda
        seqs = vllm_config.scheduler_config.max_num_seqs
        drafts = 0 if context.drafting is None else context.drafting.most
        logits = 0 if full.logits is None else step_bytes(full.logits.token_bytes, seqs, drafts)
        share = sizing.gpu_share(sent_bytes(context), rank) if gpu else 1.0
        sizes = sizing.buffer_sizes(options, full.payload.token_bytes, gpu, logits, share)
        self.client: StoreClient | None = None
        writers = 0
        if options.sink == "disk":
            writers = options.writers or sizing.default_writers(gpu, share)
            self.client = StoreClient(sizes.host, writers, sizing.write_settings(options, rank, gpu))
        self.ring = self.client.ring if self.client else Ring(sizes.host)
        post = None if self.client is None or full.logits is None else self.client.rows
        self.logits = LogitsExport(self, post, drafts > 0)
        if context.layout.scored:
            layer.scores = HostScores(context.layout, layer.cache_slots, layer.step_tokens, self.rows.device)
        self.meter = Meter(self.progress, self.client, self.ring, rank)
        self.lane: DeviceLane | None = None
        if gpu and options.sink != "null":
            self.lane = DeviceLane(self.ring, sizes.staging, self.rows, sizes.least_host)
            self.lane.warm_up(full.table)
        place = "pool" if layer.pages else "cache"
        announce(context, full, self.rows, sizes, self.lane, writers, place)

    def _layout(self, hooks: dict[str, tuple[int, ...]]) -> ChunkLayout:
        """The layout of a selection. The first layout, with all hooks, and the most recently used others are kept."""
        key = tuple(hooks.items())
        layout = self.layouts.get(key)
        if layout is not None and layout is next(iter(self.layouts.values())):
            return layout
        self.layouts.pop(key, None)
        self.layouts[key] = layout or chunk_layout(self.context, hooks, self.rank)
        if len(self.layouts) > LAYOUTS_KEPT:
            _, oldest, *_ = self.layouts
            number = self.registered.pop(self.layouts.pop(oldest), None)
            if self.client is not None and number is not None:
                self.client.forget(number)  # running captures with this layout continue
        return self.layouts[key]

    # ---- before and after the forward of a step -------------------------------------------------------------------

    def before_forward(self, metadata: StepMetadata) -> None:
        """Begin new captures, end finished ones, and gather rows that the forward may overwrite."""
        for message in metadata.opens:
            self._open(message)
        self.logits.begin(metadata)
        closing: list[tuple[CaptureExport, Close]] = []
        for close in metadata.closes:
            if close.keeps_blocks:
                continue
            capture = self.captures.pop(close.capture)
            self._add(capture, close.rows)
            (self.ending if close.stays else closing).append((capture, close))
        for rows in metadata.leaving:
            self._add(self.captures[rows.capture], [rows])
        if closing or metadata.preempted:
            self._export_due()
        for capture, close in closing:
            self._flush(capture)
            self._end(capture, close)
        for number in metadata.preempted:
            if number in self.captures:
                self._flush(self.captures[number])
        if metadata.release:
            self._take_ending(metadata)
            self._export_due()
            for capture, _ in self.ending:
                self._flush(capture)
            self._end_gathered()
        if metadata.need > self.progress.count():
            self._export_due()
            self._gather_until(metadata.need)
        for slots, line in metadata.kept_scores:
            if self.layer.scores is not None:
                self.layer.scores.keep(slots, line)
        if metadata.table is not None:
            self.layer.place(metadata.table)
        if self.layer.poisons:
            self.layer.poison_step()

    def after_forward(self, metadata: StepMetadata) -> None:
        """Add full chunks, and last rows whose blocks are kept, to `due`. Export `due` if the scheduler orders it.

        Raises RuntimeError if the first captures of an untested vLLM lack values. Their stores list these losses.
        """
        if self.layer.poisons:
            self.layer.unpoisoned = None  # after a step without a forward, it would have slots of an older step
        if self.progress.unwritten and (version := contract.untested()):
            raise RuntimeError(
                f"vllm: no tap wrote {', '.join(self.progress.unwritten)} in version {version}, which was not tested "
                f"with capture; install vllm{contract.SUPPORTED}, or take these hooks out"
            )
        for rows in metadata.chunks:
            self._add(self.captures[rows.capture], [rows])
        if not metadata.release:
            self._take_ending(metadata)
        if metadata.gather or self.lane is None:
            self._export_due()
        if self.ending:
            self._end_gathered()

    def _take_ending(self, metadata: StepMetadata) -> None:
        """Move ended captures whose blocks are kept to `ending`."""
        for close in metadata.closes:
            if close.keeps_blocks:
                capture = self.captures.pop(close.capture)
                self._add(capture, close.rows)
                self.ending.append((capture, close))

    def before_sleep(self, closes: Sequence[Close], opens: Sequence[Open] = ()) -> None:
        """Begin and end captures, and copy all rows off the GPU, before vLLM frees its cache and other memory."""
        for message in opens:
            self._open(message)
        self.logits.begin(StepMetadata(closes=list(closes)))
        for close in closes:
            capture = self.captures.pop(close.capture)
            self._add(capture, close.rows)
            self.ending.append((capture, close))
        self._export_due()
        if self.lane is not None:
            self.lane.drain()
        self._end_gathered()

    def take_report(self) -> Report:
        """The next report to the scheduler."""
        report = self.progress.report()
        staged = self.context.may_sleep and self.lane is not None and self.lane.staged
        # The lane's thread may have gathered the last rows since `after_forward`. The next step ends their captures.
        report.leaving = staged or bool(self.ending)
        if self.client is not None:
            ended, losses = self.client.take_news()
            report.stored = ended if self.rank == 0 else {}  # rank 0 commits the store once all ranks have finished
            for capture in [*self.captures.values(), *(capture for capture, _ in self.ending)] if losses else ():
                if capture.out is not None and capture.out.path in losses:
                    report.lost.setdefault(capture.number, []).extend(losses[capture.out.path])
        return report

    def take_finished(self) -> set[str]:
        """Ids of ended requests whose kept blocks can be freed now."""
        finished, self.finished = self.finished, set()
        return finished

    # ---- captures ---------------------------------------------------------------------------------------------------

    def _open(self, message: Open) -> None:
        layout, out = self._layout(message.hooks), None
        if self.client is not None:
            if layout not in self.registered:
                self.registered[layout] = self.client.register(layout.payload, self.store_attrs)
            out = self.client.open_capture(
                self.registered[layout],
                message.path,
                {**message.attrs, "start": message.start},
                message.request_id,
                message.key,
                self.rank,
                self.context.ranks,
                message.most_rows,
                None if message.borrow is None else _borrow_message(message.borrow),
            )
        checked = self.context.options.check == "poison" or self.layer.poisons
        self.captures[message.capture] = CaptureExport(
            message.capture, layout, out, message.start, self.ring, self.progress, checked=checked
        )

    def _add(self, capture: CaptureExport, rows: Sequence[Rows]) -> None:
        """Add rows to those that are exported next."""
        self.due += [(capture, each) for each in rows]
        capture.due += len(rows)

    def _export_due(self) -> None:
        """Start the transfers of all rows in `due`."""
        batch, self.due = self.due, []
        if not batch:  # avoids waiting for the lane's lock
            return
        for capture, _ in batch:
            capture.due = 0
        if self.context.options.sink == "null":
            for _, rows in batch:
                self.progress.gather(len(rows.slots))
            return
        transfers = [ChunkTransfer(capture, rows.first, rows.slots) for capture, rows in batch]
        if self.lane is None:
            for transfer in transfers:
                self._export_now(transfer)
            return
        self.lane.send(transfers)
        for transfer in transfers:
            if transfer.waits:
                transfer.capture.waiting.append(transfer)

    def _export_now(self, transfer: ChunkTransfer) -> None:
        """On a CPU: copy a chunk into the ring and deliver it at once."""
        parcel = Parcel([transfer])
        parcel.extent = self.room(parcel.nbytes)
        if parcel.extent is None:
            parcel.lose(Cause.FELL_BEHIND)
            return
        self.progress.gather(len(transfer.slots))
        payload = torch.from_numpy(self.ring.view(parcel.extent))
        index = torch.from_numpy(gather_index([(0, transfer.slots)]))
        gather_rows_torch(self.rows, index, torch.from_numpy(transfer.table), payload)
        parcel.deliver()

    def room(self, nbytes: int) -> Extent | None:
        """Allocate ring memory. If there is no room, policy block waits for it, and policy drop returns None.

        Raises RuntimeError if the lane has failed, because memory that it should fill is then never freed.
        """
        extent = self.ring.alloc(nbytes, 0.0)
        if extent is None and self.context.options.policy == "block":
            began = time.perf_counter()
            while extent is None and self.ring.fd >= 0:
                if self.lane is not None:
                    self.lane.check()
                extent = self.ring.alloc(nbytes, None if self.lane is None else _CHECK_S)
            self.progress.counts["blocked_seconds"] += time.perf_counter() - began
        return extent

    def _flush(self, capture: CaptureExport) -> None:
        """Gather the waiting rows of a capture now, because the next forward may overwrite its blocks."""
        if self.lane is None or not capture.waiting:
            return
        drop, began = self.context.options.policy == "drop", time.perf_counter()
        self.lane.flush(capture, drop)
        self.progress.counts["blocked_seconds"] += 0.0 if drop else time.perf_counter() - began
        capture.waiting.clear()

    def _gather_until(self, need: int) -> None:
        """Gather until `need` rows were gathered since the start, because the pages of these rows are reused next.

        Raises RuntimeError if the scheduler has not handed these rows to this worker.
        """
        if self.lane is None:
            return
        drop, began = self.context.options.policy == "drop", time.perf_counter()
        self.lane.gather_until(lambda: self.progress.count() >= need, drop)
        self.progress.counts["blocked_seconds"] += 0.0 if drop else time.perf_counter() - began
        if self.progress.count() < need:
            raise RuntimeError(f"rows {self.progress.count()} to {need} of the pool were not handed to this worker")

    def _end_gathered(self) -> None:
        """End the captures in `ending` whose rows are all gathered."""
        still = []
        for capture, message in self.ending:
            if capture.due or any(transfer.waits for transfer in capture.waiting):
                still.append((capture, message))
                continue
            self._flush(capture)
            self._end(capture, message)
            if message.keeps_blocks:
                self.finished.add(message.keeps_blocks)
        self.ending = still

    def _end(self, capture: CaptureExport, message: Close) -> None:
        """Close a capture once its rows are delivered."""
        if self.layer.poisons and message.length:
            self.trials -= 1
            self.layer.poisons = self.trials > 0
        self._after_copies(lambda: self._close(capture, message))

    def _close(self, capture: CaptureExport, message: Close) -> None:
        """Tell the coordinator where a capture ends. On a GPU, the lane's thread runs this."""
        if capture.out is None:
            return
        # Dropped samples after the end are not losses: with asynchronous scheduling, a step may follow a stop.
        lost = [part for loss in capture.losses if (part := loss.before(message.length)).rows]
        losses = message.losses + lost if self.rank == 0 else lost  # rank 0 reports the losses of the request
        samples = {"logits": message.samples} if capture.layout.logits is not None else {}
        end = (message.length, samples, message.token_ids, message.attrs, losses)
        capture.out.close(*end, draft_index=message.draft_index)

    def _after_copies(self, work: Callable[[], None]) -> None:
        """Run `work` after the copies that are under way."""
        if self.lane is None:
            work()
        else:
            self.lane.then(work)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def pending(self) -> int:
        """Number of unfinished captures plus unwritten bytes; 0 when everything is written."""
        pending = len(self.captures) + len(self.ending) + self.ring.used
        if self.client is not None:
            stats = self.client.stats()
            pending += stats["open"] + stats["closing"]
        return int(pending)

    def shutdown(self) -> None:
        """Export pending rows, finish the stores and stop the writers, all within `shutdown_seconds`."""
        deadline = time.monotonic() + self.context.options.shutdown_seconds
        try:
            self._export_due()
        except RuntimeError:  # the lane has failed
            logger.exception("pending rows are not exported")
        if self.lane is not None:
            self.lane.finish_gathers(deadline - time.monotonic())
            self._end_gathered()
            self.lane.shutdown(max(0.0, deadline - time.monotonic()))
        if self.client is not None:
            self.client.shutdown(max(1.0, deadline - time.monotonic()))
        self.ring.close()
        if self.layer.scores is not None:
            self.layer.scores.close()


def _borrow_message(borrow: Borrow) -> dict[str, Any]:
    """The part of the message to the coordinator that describes borrowed rows."""
    ids = pack_array(borrow.token_ids.astype("<i4"))
    return {"final": borrow.path, "request_id": borrow.request_id, "rows": len(borrow.token_ids), "token_ids": ids}
