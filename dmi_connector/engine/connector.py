# SPDX-License-Identifier: Apache-2.0
"""The KV connector that vLLM calls. Its scheduler half calls the tracker, and its worker half calls the exporter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger

from dmi_connector.engine.context import capture_context, rank_here
from dmi_connector.engine.messages import RankMemory, Report, StepMetadata
from dmi_connector.engine.metrics import CaptureProm, CaptureStats, described

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from dmi_connector.engine.transfer.exporter import Exporter

logger = init_logger("vllm.dmi_connector")


class DMIConnector(KVConnectorBase_V1):
    """Exports the captured rows of each request into a Zarr store of its own.

    The class does not implement SupportsHMA, so vLLM turns its hybrid KV cache manager off. All layers, including those
    with sliding windows, are then in one KV cache group, whose blocks stay until their request ends. Owner "pool" keeps
    rows outside of vLLM's blocks, and uses `DMIPoolConnector`.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.context = capture_context(vllm_config)
        slots = self.context.owner.row_slots(self.context, kv_cache_config, vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            from dmi_connector.engine import sizing
            from dmi_connector.engine.replaced import ask_one_rank, tell_turns
            from dmi_connector.engine.scheduler.tracker import Tracker
            from dmi_connector.engine.transfer.chunk_layout import sent_bytes

            self.context.owner.before_scheduler(vllm_config)
            tell_turns(DMIConnector)
            if self.context.ranks > 1:
                ask_one_rank()
            behind = int(bool(vllm_config.scheduler_config.async_scheduling))
            gpu = vllm_config.device_config.device_type != "cpu"
            keep_rows = sizing.keep_rows(self.context.options, sent_bytes(self.context), gpu)
            self.tracker = Tracker(self.context, slots, keep_rows, behind)
            self.tracker.warning = self.context.owner.ignored(vllm_config, self.context)
            if self.tracker.warning:
                logger.warning("dmi: ignored: %s", self.tracker.warning)
        else:
            self.exporter: Exporter | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """False, because no other engine receives KV. So vLLM keeps the output of a step that is in flight when its
        request is preempted.
        """
        return False

    # ---- scheduler half -------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.tracker.slots.bind(kv_cache_manager)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Receive the `RankMemory` of each rank. metadata: {rank: its message}."""
        ranks = [metadata[rank] for rank in sorted(metadata)]
        memory = [rank for rank in ranks if isinstance(rank, RankMemory)]
        if pages := [rank.pages for rank in memory if rank.pages]:
            self.tracker.slots.sized(min(pages))
        if memory:
            self.tracker.scores.open([rank.scores for rank in memory], max(rank.slots for rank in memory))

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """As `set_xfer_handshake_metadata`. metadata: {(pipeline stage, tensor-parallel rank): its message}."""
        self.set_xfer_handshake_metadata(dict(enumerate(metadata[rank] for rank in sorted(metadata))))

    def on_new_request(self, request: Request) -> None:
        self.tracker.on_new_request(request)

    def on_turn_end(self, request: Request) -> None:
        """A turn of a session (a request with streaming input) has ended; see `replaced.tell_turns`.

        vLLM has not dropped the step in flight yet.
        """
        drafts, tracked = self.tracker.drafts, self.tracker.tracked.get(request.request_id)
        if drafts is not None and tracked is not None:
            drafts.end_turn(tracked)

    def on_next_turn(self, request: Request, kept: int) -> None:
        """A session got its next prompt. kept: number of tokens of earlier turns that vLLM keeps."""
        self.tracker.on_next_turn(request, kept)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.tracker.slots.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        return None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.tracker.step(scheduler_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.tracker.finish(request, block_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, Report):
            self.tracker.on_report(report)
        self.tracker.slots.freed(connector_output.finished_sending or ())

    @staticmethod
    def _worker_here() -> Exporter | None:
        """The exporter, if vLLM runs its worker in the scheduler's process."""
        worker = get_kv_transfer_group() if has_kv_transfer_group() else None
        return worker.exporter if isinstance(worker, DMIConnector) else None

    def has_pending_push_work(self) -> bool:
        """Whether rows are still being copied out of a pool, or, in an engine that may sleep, by worker processes.

        While this is true, vLLM runs empty steps, in which captures end. vLLM neither pauses nor sleeps meanwhile.
        Without a pool, kept blocks make vLLM run empty steps.
        """
        if self.tracker.slots.stays:
            return self.tracker.leaving
        return self.context.may_sleep and self.tracker.leaving and self._worker_here() is None

    def reset_cache(self) -> bool | None:
        """Pass captures that have begun or ended to the worker, if the engine may sleep and its worker is in this
        process. vLLM calls the method before sleep, and when the connector's cache is reset.

        In a single process, vLLM runs no step between the last reply and sleep.
        """
        worker = self._worker_here()
        if self.context.may_sleep and worker is not None:
            opens, self.tracker.pending_opens = self.tracker.pending_opens, []
            closes, self.tracker.pending_closes = self.tracker.pending_closes, []
            worker.before_sleep(closes, opens)
        return None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return None

    # ---- worker half ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from dmi_connector.engine.transfer.exporter import Exporter

        self._check_coverage()
        memory = self.context.owner.row_memory(self.context, self._kv_cache_config, self._vllm_config)
        rank = rank_here(self.context.tp, len(self.context.stages))
        self.exporter = Exporter(self.context, memory, rank, self._vllm_config)

    def get_handshake_metadata(self) -> RankMemory | None:
        """Metadata for the scheduler half, sent once after the caches are allocated."""
        if self.exporter is None:
            return None
        layer = self.exporter.layer
        if layer.scores is None:
            return RankMemory(layer.pages)
        return RankMemory(layer.pages, layer.scores.path, layer.scores.slots)

    def unregister_kv_caches(self) -> None:
        """Export the rows that are still in the caches. vLLM 0.33 and later call this method before the caches are
        freed, and before sleep.
        """
        if self.exporter is not None:
            self.exporter.before_sleep([])

    def _check_coverage(self) -> None:
        """Raise ValueError for hooks that the model's first forward did not write (coverage.py)."""
        coverage = self.context.coverage
        if not coverage.begun:
            from dmi_connector.engine.model.first_forward import first_forward

            assert coverage.model is not None, "the tapped model has not been built"
            first_forward(coverage.model(), self._vllm_config)
        coverage.check()
        if "logits" in self.context.selection.hooks and self.context.last_stage:
            coverage.check_logits()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before the forward, which may overwrite blocks that were freed since the last step."""
        if self.exporter is not None and isinstance(kv_connector_metadata, StepMetadata):
            with self._exit_if_unreported(self.exporter.rank, kv_connector_metadata):
                self.exporter.before_forward(kv_connector_metadata)

    @staticmethod
    @contextmanager
    def _exit_if_unreported(rank: int, metadata: StepMetadata) -> Iterator[None]:
        """Exit this process if an error cannot be reported.

        In most steps vLLM waits only for the answer of rank 0 (replaced.py), and does not see errors of other ranks.
        The exit ends the engine, as a reported error does.
        """
        try:
            yield
        except Exception as error:
            if rank == 0 or metadata.report:
                raise
            logger.exception("dmi_connector: rank %d failed", rank)
            raise SystemExit(1) from error

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        return None

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return None

    def wait_for_save(self) -> None:
        """Called after the forward. On a GPU, the kernels that write the step's rows may still be queued."""
        if self.exporter is not None and self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, StepMetadata)
            with self._exit_if_unreported(self.exporter.rank, metadata):
                self.exporter.after_forward(metadata)

    def _reporting(self) -> Exporter | None:
        """The exporter if this rank reports in this step, else None.

        In an engine with one rank, the rank also reports after rows were lost.
        """
        metadata, exporter = self._connector_metadata, self.exporter
        if exporter is None or not isinstance(metadata, StepMetadata) or metadata.report:
            return exporter
        return exporter if self.context.ranks == 1 and exporter.progress.lost else None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        exporter = self._reporting()
        return (None if exporter is None else exporter.take_finished() or None), None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        exporter = self._reporting()
        return None if exporter is None else exporter.take_report()

    def shutdown(self) -> None:
        if (tracker := getattr(self, "tracker", None)) is not None:
            tracker.slots.close()
        exporter = getattr(self, "exporter", None)
        if exporter is not None:
            exporter.shutdown()
            totals = described(exporter.meter.totals())  # includes events after the last step, which no metric shows
            text = ", ".join(f"{name}={value}" for name, value in totals.items())
            logger.info("dmi_connector: rank %d since the start: %s", exporter.rank, text or "nothing captured")

    # ---- metrics --------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> CaptureStats | None:
        """Changes since the last report in this half of the connector."""
        if self.role == KVConnectorRole.WORKER:
            exporter = self._reporting()
            return None if exporter is None else exporter.meter.take()
        counts = self.tracker.take_counts()
        return CaptureStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CaptureStats | None:
        return CaptureStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> CaptureProm | None:
        return CaptureProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class DMIPoolConnector(DMIConnector, SupportsHMA):
    """The connector of owner "pool". vLLM's hybrid KV cache manager stays on.

    The rows of a request are found by its blocks in one KV cache group (`RowSlots.group`).
    """

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`. block_ids: by KV cache group."""
        return self.request_finished(request, block_ids[self.tracker.slots.group])


def __getattr__(name: str) -> Any:
    """Raise ValueError for the name of another connector. vLLM looks up the class `kv_connector` in this module.

    With kv_offloading_size, vLLM sets `kv_connector` to a connector of its own, but leaves `kv_connector_module_path`.
    Without `kv_connector_module_path` vLLM finds its connector, and `refusals.check_alone` raises this error.
    """
    if name.endswith("Connector"):
        from dmi_connector.engine.refusals import replaced_by

        raise replaced_by(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def note_logits_of(tokens: torch.Tensor) -> None:
    """Note which tokens of a step have logits. With speculative decoding, vLLM's runner calls this function
    (`replaced.tell_logits_of`).

    tokens: indexes of these tokens in the step, int [samples].
    """
    if has_kv_transfer_group():
        connector = get_kv_transfer_group()
        if isinstance(connector, DMIConnector) and connector.exporter is not None:
            connector.exporter.logits.of_tokens(tokens)


def offer_logits(logits: torch.Tensor) -> None:
    """Export logits [samples, vocab]. The tapped model calls this function with the result of compute_logits."""
    if not has_kv_transfer_group():
        return
    connector = get_kv_transfer_group()
    if isinstance(connector, DMIConnector) and connector.exporter is not None:
        connector.exporter.logits.export(logits)
