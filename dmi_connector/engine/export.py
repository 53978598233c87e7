# SPDX-License-Identifier: Apache-2.0
"""Worker half: gather rows out of the paged cache into the shared ring and hand them to the writer processes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger

from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.messages import Close, Open, Rows, Sample, StepMetadata
from dmi_connector.engine.plan import Plan, make_plan
from dmi_connector.hooks import ITEMSIZE
from dmi_connector.store.capture import CaptureHandle, CaptureSpec
from dmi_connector.store.persist import Persistence, PersistSettings
from dmi_connector.store.ring import Extent

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from dmi_connector.engine.rows import CaptureLayer

logger = init_logger("vllm.dmi_connector")


@dataclass
class Running:
    """One capture on this worker. token_ids: as the rows' own headers say, [(first row, ids)]."""

    plan: Plan
    handle: CaptureHandle
    start: int
    attrs: dict[str, Any]
    headers: list[tuple[int, np.ndarray]] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)


class Exporter:
    """Owns the ring, the writers and the captures under way on one tensor-parallel rank."""

    def __init__(self, context: CaptureContext, layer: CaptureLayer, rank: int, vllm_config: VllmConfig) -> None:
        self.context, self.layer, self.rank = context, layer, rank
        self.captures: dict[int, Running] = {}
        self.plans: dict[tuple[tuple[str, tuple[int, ...]], ...], Plan] = {}
        self.samples: list[Sample] = []
        self.store_attrs = _store_attrs(context, vllm_config)
        options = context.options
        full = self._plan(dict(context.selection.hooks))
        self.persistence = Persistence(
            ring_bytes=_ring_bytes(options.host_buffer_bytes, full.token_bytes * options.chunk_tokens),
            writers=options.writers or _default_writers(),
            settings=PersistSettings(options.codec, options.chunk_tokens, options.segment_tokens, options.fsync),
        )
        logger.info(
            "Capturing %s: %d bytes a token in the cache; host buffer holds %d tokens",
            ", ".join(context.selection.hooks),
            context.layout.row_bytes,
            self.persistence.ring.nbytes // max(1, full.token_bytes),
        )

    def _plan(self, hooks: dict[str, tuple[int, ...]]) -> Plan:
        key = tuple(hooks.items())
        if key not in self.plans:
            self.plans[key] = make_plan(self.context, hooks, self.rank)
        return self.plans[key]

    def before_forward(self, metadata: StepMetadata) -> None:
        """Begin new captures and finish ended ones: the forward that follows may overwrite their freed blocks."""
        self.samples = metadata.samples
        for message in metadata.opens:
            self._open(message)
        for close in metadata.closes:
            self._close(close)

    def after_forward(self, metadata: StepMetadata) -> None:
        """Export chunks that the forward completed."""
        for rows in metadata.chunks:
            self._export(self.captures[rows.capture], rows)

    def _open(self, message: Open) -> None:
        options = self.context.options
        plan = self._plan(message.hooks)
        final = os.path.join(options.store_dir, message.name)
        arrays = plan.arrays if plan.logits is None else (*plan.arrays, plan.logits)
        handle = self.persistence.open_capture(
            CaptureSpec(
                final=final,
                arrays=arrays,
                request_id=message.request_id,
                key=message.key,
                rank=self.rank,
                ranks=self.context.tp,
            )
        )
        attrs = {**self.store_attrs, **message.attrs, "start": message.start}
        self.captures[message.capture] = Running(plan, handle, message.start, attrs)

    def _export(self, capture: Running, rows: Rows) -> None:
        """Gather one piece of rows ([count] slots) in store layout and pass it on."""
        count = len(rows.slots)
        plan = capture.plan
        timeout = None if self.context.options.policy == "block" else 0.0
        extent = self.persistence.alloc(plan.token_bytes * count, timeout)
        if extent is None:
            capture.lost.append((capture.start + rows.first, capture.start + rows.first + count))
            return
        payload = self.persistence.ring.memory[extent.offset : extent.offset + plan.token_bytes * count]
        _gather_cpu(self.layer.rows, rows.slots, plan, payload)
        self._deliver(capture, rows.first, count, extent, payload)

    def _deliver(self, capture: Running, first: int, count: int, extent: Extent, payload: np.ndarray) -> None:
        """Check the headers of gathered rows, then give them to the writers."""
        base = capture.plan.header_base * count
        header = payload[base : base + 8 * count].view(np.int32).reshape(count, 2)
        capture.headers.append((first, header[:, 0].copy()))
        expected = np.arange(capture.start + first, capture.start + first + count, dtype=np.int32)
        if not np.array_equal(header[:, 1], expected):
            capture.lost.append((capture.start + first, capture.start + first + count))
            logger.error("rows of positions %d.. belong to other positions: marked as missing", capture.start + first)
        capture.handle.chunk(extent, first, count)

    def logits(self, logits: torch.Tensor) -> None:
        """Export the logits rows of captured requests. logits: [samples, vocab], in the order of the batch."""
        step = self.layer.step
        if not self.samples or step is None:
            return
        wanted = {s.slot: s for s in self.samples}
        self.samples = []  # prompt logprobs call compute_logits again in the same step
        ends = step.query_start_loc[1 : logits.shape[0] + 1].long() - 1
        slots = step.slot_mapping[ends].tolist()
        for index, slot in enumerate(slots):
            sample = wanted.get(slot)
            capture = None if sample is None else self.captures.get(sample.capture)
            if sample is None or capture is None or capture.plan.logits is None:
                continue
            nbytes = capture.plan.logits.width * ITEMSIZE[self.context.dtype]
            extent = self.persistence.alloc(nbytes, None)
            assert extent is not None
            row = torch.from_numpy(self.persistence.ring.memory[extent.offset : extent.offset + nbytes])
            row.view(getattr(torch, self.context.dtype)).copy_(logits[index])
            capture.handle.rows("logits", extent, sample.index, 1, [sample.position])

    def _close(self, message: Close) -> None:
        capture = self.captures.pop(message.capture)
        for rows in message.rows:
            self._export(capture, rows)
        attrs = {**capture.attrs, **message.attrs}
        problems = [] if attrs["reason"] is None else [attrs["reason"]]
        problems += _check_tokens(capture, message)
        if capture.lost:
            attrs["missing"] = sorted([*map(list, capture.lost), *attrs["missing"]])
            problems.append("rows were dropped because writing fell behind, or failed their check")
        attrs["complete"] = attrs["complete"] and not problems
        attrs["reason"] = "; ".join(problems) or None
        samples = {"logits": message.samples} if capture.plan.logits is not None else {}
        capture.handle.close(message.length, samples, message.token_ids, attrs=attrs)

    def shutdown(self) -> None:
        """Finish what can be finished and stop the writers."""
        self.persistence.shutdown(timeout=60.0)


def _gather_cpu(rows: torch.Tensor | None, slots: np.ndarray, plan: Plan, payload: np.ndarray) -> None:
    """Copy the planned pieces of rows `slots` into `payload`, array by array (the torch twin of the gather kernel)."""
    assert rows is not None
    count = len(slots)
    picked = rows.numpy()[slots]
    for source, nbytes, base in plan.pieces.tolist():
        block = payload[base * count : (base + nbytes) * count].reshape(count, nbytes)
        np.copyto(block, picked[:, source : source + nbytes])


def _check_tokens(capture: Running, message: Close) -> list[str]:
    """Compare the token ids that rows carry with those of the request: a row of another request cannot pass."""
    for first, ids in capture.headers:
        expected = np.asarray(message.token_ids[first : first + len(ids)], dtype=np.int32)
        wrong = np.flatnonzero(ids[: len(expected)] != expected)
        if len(wrong):
            at = capture.start + first + int(wrong[0])
            return [f"the row at position {at} holds token {int(ids[wrong[0]])}, not {int(expected[wrong[0]])}"]
    return []


def _ring_bytes(asked: int, chunk_bytes: int) -> int:
    """Size of the host buffer: as asked, else 256 MiB, and never less than two full chunks."""
    least = 2 * chunk_bytes + (1 << 20)
    if asked and asked < least:
        raise ValueError(
            f"host_buffer_bytes: {asked} holds less than two chunks of this selection; give at least {least}, or reduce chunk_tokens"
        )
    return asked or max(256 << 20, least)


def _default_writers() -> int:
    return max(1, min(8, (os.cpu_count() or 2) // 2))


def _store_attrs(context: CaptureContext, vllm_config: VllmConfig) -> dict[str, Any]:
    """What every store of this engine says about its origin."""
    import vllm

    import dmi_connector

    dims = context.dims
    return {
        "model": vllm_config.model_config.model,
        "architecture": context.arch.name,
        "dtype": context.dtype,
        "num_layers": dims.layers,
        "identities": True,
        "tp": context.tp,
        "versions": {
            "dmi_connector": dmi_connector.__version__,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
        },
        "dims": {
            "hidden": dims.hidden,
            "heads": dims.heads,
            "kv_heads": dims.kv_heads,
            "head_dim": dims.head_dim,
            "vocab": dims.vocab,
        },
    }


