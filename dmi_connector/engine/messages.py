# SPDX-License-Identifier: Apache-2.0
"""Messages between the scheduler half and the worker half of the connector. All are picklable."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from dmi_connector.store.format.completeness import Loss

STEPS_TOGETHER = 16
"""Number of steps whose rows are exported together. An export takes the same time of the engine's thread for the rows
of one step or of several. Workers report at least once in this many steps.
"""


@dataclass
class Rows:
    """Rows to export. first: index of the first row in the store. slots: slots of the rows, int64 [count]."""

    capture: int
    first: int
    slots: np.ndarray


@dataclass
class Borrow:
    """Rows that a capture copies from the store of an earlier one, because its tokens were in the prefix cache.

    path, request_id, key: of the earlier store. token_ids: int32 [rows], tokens of its first rows.
    """

    path: str
    request_id: str
    key: str | None
    token_ids: np.ndarray

    @property
    def attributes(self) -> dict[str, Any]:
        """Root attributes of the store that borrows the rows."""
        source = {"store": os.path.basename(self.path), "key": self.key, "request_id": self.request_id}
        return {"borrowed_tokens": len(self.token_ids), "borrowed_from": source}


@dataclass
class Open:
    """A capture begins.

    path: path of its store. hooks: {hook: layers}. start: position of its first row. most_rows: maximum number of rows.
    attrs: root attributes of the store. borrow: its first rows, if another store has them.
    """

    capture: int
    path: str
    hooks: dict[str, tuple[int, ...]]
    request_id: str
    key: str | None
    start: int
    most_rows: int
    attrs: dict[str, Any]
    borrow: Borrow | None = None


@dataclass
class Accepted:
    """Rows of logits whose tokens were accepted in speculative decoding.

    first: index of the first row among the samples of the capture. position: position of that row's token. slots: the
    slots of the tokens, int64 [samples]. step: the last step that may have computed the rows.
    """

    capture: int
    first: int
    position: int
    slots: np.ndarray
    step: int


@dataclass
class Close:
    """A capture ends.

    rows: its last rows. length: number of rows of the store. samples: number of rows of logits. attrs: root attributes
    of the store. losses: rows that were requested but not computed. keeps_blocks: id of the request if its blocks are
    kept until these rows are gathered; None if the blocks are already free. stays: whether the rows lie outside of
    vLLM's blocks, so that their gather may wait. draft_index: per row, the number of its draft token within the step,
    counted from 1; 0 for sampled and prompt tokens; None without speculative decoding. accepted: its last rows of
    logits.
    """

    capture: int
    rows: list[Rows]
    length: int
    samples: int
    token_ids: list[int]
    attrs: dict[str, Any]
    losses: list[Loss]
    keeps_blocks: str | None = None
    stays: bool = False
    draft_index: np.ndarray | None = None
    accepted: list[Accepted] = field(default_factory=list)


@dataclass
class Sample:
    """Sample `index` of a capture, at `position`: the logits row of this step whose token has the slot `slot`."""

    capture: int
    index: int
    position: int
    slot: int


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The scheduler's message to the workers for one step.

    opens: executed before the forward. closes: executed before the forward, which may overwrite freed blocks. Closes
    whose blocks are kept may wait. chunks: full chunks that are pending after the forward. preempted: captures whose
    blocks were freed since the last step. leaving: full chunks that are pending before the forward: those of preempted
    captures, and with a pool also those of others. idle: whether the step computes nothing, and may be the last step
    for a long time. gather: whether all pending rows are exported now, including those of this step. report: whether
    each rank reports. release: whether kept blocks were freed; all pending rows are then exported before the forward.

    The next fields are for a pool. table: changes of the pool's page table before the forward, int64 [2, entries]: the
    indexes of entries, and their new pages; None without a change. need: number of rows since the start that must be
    gathered before that change, because their pages are reused. kept_scores: (slots, line) pairs. Before the forward,
    the scores of vLLM's `slots`, int64 [rows], are copied to the lines from `line` on (host_scores.py).

    With speculative decoding, a step also computes logits of draft tokens, and a later step says which were accepted.
    logits_step: number of this step if its logits are captured, otherwise 0. logits_slots: slots of captured tokens
    whose logits may be accepted. Some of these tokens may be outside this step, because asynchronous scheduling does
    not know yet which tokens the previous step accepted. accepted: accepted logits of earlier steps. decided: the last
    step whose draft tokens are all decided; logits of steps up to `decided` that no message accepted were rejected.
    """

    opens: list[Open] = field(default_factory=list)
    closes: list[Close] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    leaving: list[Rows] = field(default_factory=list)
    chunks: list[Rows] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    accepted: list[Accepted] = field(default_factory=list)
    logits_step: int = 0
    logits_slots: list[int] = field(default_factory=list)
    decided: int = 0
    idle: bool = False
    gather: bool = False
    report: bool = False
    release: bool = False
    table: np.ndarray | None = None
    need: int = 0
    kept_scores: list[tuple[np.ndarray, int]] = field(default_factory=list)


@dataclass
class RankMemory(KVConnectorHandshakeMetadata):
    """A worker's message to the scheduler at start.

    pages: number of pages of its pool, without the null page; 0 without a pool. scores: `HostScores.path`, "" without
    probes. slots: number of slots of vLLM's cache, 0 without probes.
    """

    pages: int = 0
    scores: str = ""
    slots: int = 0


@dataclass
class Report(KVConnectorWorkerMetadata):
    """A worker's message to the scheduler, in a step that asks for it.

    gathered: number of rows gathered since the start. lost: rows that were dropped or could not be borrowed since the
    last report, by capture. leaving: whether a capture of an ended request is unfinished, or, in an engine that may
    sleep, gathered rows are in staging memory. stored: path of each finished store -> whether it has all rows.
    """

    gathered: int = 0
    lost: dict[int, list[Loss]] = field(default_factory=dict)
    leaving: bool = False
    stored: dict[str, bool] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge the reports of two ranks. The slower rank determines `gathered`."""
        assert isinstance(other, Report)
        captures = {**self.lost, **other.lost}
        lost = {capture: self.lost.get(capture, []) + other.lost.get(capture, []) for capture in captures}
        stored = {
            **self.stored,
            **{path: whole and self.stored.get(path, True) for path, whole in other.stored.items()},
        }
        return Report(min(self.gathered, other.gathered), lost, self.leaving or other.leaving, stored)
