# SPDX-License-Identifier: Apache-2.0
"""Copies rows of logits into the ring, with the slots of their tokens. A slot identifies the request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from dmi_connector.engine.messages import Sample, StepMetadata
from dmi_connector.engine.owners.base import RowMemory
from dmi_connector.engine.transfer.chunk_transfer import CaptureExport, Progress
from dmi_connector.engine.transfer.draft_logits import DraftLogits, rows_of
from dmi_connector.engine.transfer.gpu_lane import DeviceLane
from dmi_connector.store.format.completeness import Cause
from dmi_connector.store.write.client import OpenCapture
from dmi_connector.store.write.ring import Extent, Ring

_SLOT_BYTES = 8
"""Bytes of a slot number. Slot numbers follow the rows of logits."""
SampleRow = tuple[OpenCapture, str, int, int, int]
"""One row for `StoreClient.rows`."""
Post = Callable[[Extent, Sequence[SampleRow]], None]
"""Hands rows of an extent to the coordinator, which frees the extent."""
Wanted = tuple[CaptureExport, int, int]
"""A row of logits of an accepted token: capture, number of the sample, position of the token."""


class Worker(Protocol):
    """The attributes of `Exporter` that this module reads."""

    layer: RowMemory
    ring: Ring
    lane: DeviceLane | None
    captures: dict[int, CaptureExport]
    progress: Progress

    def room(self, nbytes: int) -> Extent | None: ...


def step_bytes(row_bytes: int, requests: int, drafts: int) -> int:
    """Maximum bytes of the ring for the logits of a step. drafts: maximum number of draft tokens per request."""
    return requests * (row_bytes + 2 * _SLOT_BYTES) * (1 + drafts)


class LogitsExport:
    """Exports rows of logits of captured requests. vLLM computes them after the forward of a step.

    post: hands rows of an extent to the coordinator, which frees the extent. None on ranks that write no logits: each
    tensor-parallel rank has the logits of the whole vocabulary, and only one rank writes them. drafts: whether the
    engine uses speculative decoding. If so, a step also computes logits of draft tokens, which are kept until the
    scheduler knows which tokens were accepted.
    """

    def __init__(self, worker: Worker, post: Post | None, drafts: bool) -> None:
        self._worker, self.post, self._drafts = worker, post, drafts
        self._samples: list[Sample] = []
        self._step = 0  # number of the running step, if logits of draft tokens are captured
        self._slots: list[int] = []  # slots of the tokens whose logits are captured
        self._tokens: torch.Tensor | None = None
        self.draft_logits = DraftLogits()

    def begin(self, metadata: StepMetadata) -> None:
        """Begin a step. Exports the logits of tokens that were accepted in earlier steps."""
        self._samples, self._step, self._slots = metadata.samples, metadata.logits_step, metadata.logits_slots
        if not self._drafts or self.post is None:
            return
        messages = [*metadata.accepted, *(one for close in metadata.closes for one in close.accepted)]
        wanted: list[Wanted] = []
        slots: list[int] = []
        last: list[int] = []
        for message in messages:
            capture = self._worker.captures[message.capture]
            if capture.layout.logits is not None:
                for index, slot in enumerate(message.slots.tolist()):
                    wanted.append((capture, message.first + index, message.position + index))
                    slots.append(slot)
                    last.append(message.step)
        if wanted:
            self._export_accepted(wanted, self.draft_logits.take(slots, last))
        self.draft_logits.drop(metadata.decided)

    def _export_accepted(self, wanted: list[Wanted], taken: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Export rows of accepted tokens, in the order of `wanted`."""
        deliver = lambda extent, found, row_bytes: self._deliver_accepted(extent, found, row_bytes, wanted)  # noqa: E731
        if taken is None or not self._send(taken[0], taken[1].long(), deliver):
            for capture, _, position in wanted:
                capture.lose(position - capture.start, 1, Cause.FELL_BEHIND)

    def _deliver_accepted(self, extent: Extent, found: np.ndarray, row_bytes: int, wanted: list[Wanted]) -> None:
        """Hand rows of accepted tokens, which are in the ring, to the coordinator. found: 0 for a lost row."""
        rows: list[SampleRow] = []
        for at, (capture, index, position) in enumerate(wanted):
            if not found[at]:
                capture.lose(position - capture.start, 1, Cause.FELL_BEHIND)
            elif capture.out is not None:
                rows.append((capture.out, "logits", index, position, at * row_bytes))
        assert self.post is not None
        self.post(extent, rows)

    def of_tokens(self, tokens: torch.Tensor) -> None:
        """Set which tokens of the step have logits. tokens: indices of these tokens in the batch, int [samples]."""
        self._tokens = tokens

    def export(self, logits: torch.Tensor) -> None:
        """Export the logits of a step, [samples, vocab] in the order of the batch: one row per request without drafts.

        Without drafts, all rows of logits are lost if there are more rows than requests, as a newer vLLM might compute.
        Raises RuntimeError if `of_tokens` was not called with one token for each row in a step with draft tokens.
        """
        samples, number, step = self._samples, self._step, self._worker.layer.step
        self._samples, self._step = [], 0  # prompt logprobs call compute_logits again in the same step
        if step is None or self.post is None:
            return
        if self._drafts:
            if number:
                self._keep_drafts(logits, number, step.slot_mapping)
            return
        asked = ((s, self._worker.captures[s.capture]) for s in samples)
        wanted = {s.slot: (s, capture) for s, capture in asked if capture.layout.logits is not None}
        if not wanted:
            return
        requests = len(step.query_start_loc) - 1  # includes unused ones at the end, with CUDA graphs
        if len(logits) > requests:
            error = f"the step has {len(logits)} rows of logits for {requests} requests"
            for sample, capture in wanted.values():
                capture.lose(sample.position - capture.start, 1, Cause.NOT_GATHERED, error=error)
            return
        slots = step.slot_mapping[step.query_start_loc[1 : logits.shape[0] + 1].long() - 1]
        deliver = lambda extent, slots, row_bytes: self._deliver(extent, slots, row_bytes, wanted)  # noqa: E731
        if not self._send(logits, slots, deliver):
            for sample, capture in wanted.values():
                capture.lose(sample.position - capture.start, 1, Cause.FELL_BEHIND)

    def _keep_drafts(self, logits: torch.Tensor, number: int, slots: torch.Tensor) -> None:
        """Keep logits of a step until the scheduler knows which draft tokens were accepted."""
        tokens = self._tokens
        if tokens is None or len(tokens) != len(logits):
            known = "unknown" if tokens is None else len(tokens)
            raise RuntimeError(
                f"logits: a step with draft tokens has {len(logits)} rows of logits, but {known} token indices"
            )
        dtype, found = self._worker.layer.row_dtype, slots[tokens.long()].long()
        self.draft_logits.add(number, *rows_of(self._slots, logits, found, dtype))

    def _send(
        self, logits: torch.Tensor, slots: torch.Tensor, deliver: Callable[[Extent, np.ndarray, int], None]
    ) -> bool:
        """Copy logits and the slot of each row (int64 [samples]) into one extent of the ring.

        deliver: called after the copy with the extent, the slots and the bytes of a row. Returns False if the ring has
        no room under policy drop.
        """
        worker = self._worker
        logits = logits.to(worker.layer.row_dtype).contiguous()
        count, row_bytes = logits.shape[0], logits.shape[1] * logits.element_size()
        nbytes = -(-count * row_bytes // 16) * 16 + _SLOT_BYTES * count
        extent = worker.room(nbytes)
        if extent is None:
            return False

        def there() -> None:
            worker.progress.counts["bytes_exported"] += nbytes
            deliver(extent, worker.ring.view(extent)[nbytes - _SLOT_BYTES * count :].view(np.int64), row_bytes)

        if worker.lane is None:
            _fill(torch.from_numpy(worker.ring.view(extent)), logits, slots)
            there()
        else:
            source = torch.empty(nbytes, dtype=torch.uint8, device=logits.device)
            _fill(source, logits, slots)
            worker.lane.send_tensor(source, extent.offset, there)
        return True

    def _deliver(
        self, extent: Extent, slots: np.ndarray, row_bytes: int, wanted: Mapping[int, tuple[Sample, CaptureExport]]
    ) -> None:
        """Hand rows of logits, which are in the ring, to the coordinator. wanted: by slot."""
        found = []
        for index, slot in enumerate(slots.tolist()):
            if slot in wanted:
                sample, capture = wanted[slot]
                if capture.out is not None:
                    found.append((capture.out, "logits", sample.index, sample.position, index * row_bytes))
        assert self.post is not None
        self.post(extent, found)


def _fill(target: torch.Tensor, logits: torch.Tensor, slots: torch.Tensor) -> None:
    """Write logits to the start and slots to the end of `target` (uint8)."""
    size = logits.numel() * logits.element_size()
    target[:size].view(logits.dtype).view(logits.shape).copy_(logits)
    target[target.numel() - _SLOT_BYTES * slots.numel() :].view(torch.int64).copy_(slots)
