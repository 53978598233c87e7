# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half tells the worker half each step, and back. Plain picklable data."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from dmi_connector.store.format.completeness import Loss

T = TypeVar("T")

STEPS_TOGETHER = 16
"""Number of steps whose rows leave the GPU together. Finding and gathering them costs the engine's thread the same for
one step as for all of these. Workers report as often.
"""


@dataclass
class Rows:
    """Rows to export. first: the number of the first row in the store. slots: where the rows lie, int64 [count]."""

    capture: int
    first: int
    slots: np.ndarray


@dataclass
class Borrow:
    """Rows that a capture takes from the store of an earlier one: its tokens were in the prefix cache.

    path, request_id, key: of the other store. token_ids: int32 [rows], of its first rows.
    """

    path: str
    request_id: str
    key: str | None
    token_ids: np.ndarray

    @property
    def attributes(self) -> dict[str, Any]:
        """Root attributes of the store that takes them."""
        source = {"store": os.path.basename(self.path), "key": self.key, "request_id": self.request_id}
        return {"borrowed_tokens": len(self.token_ids), "borrowed_from": source}


@dataclass
class Open:
    """A capture begins.

    path: of its store. hooks: {hook: layers} of this capture. start: position of its first row. most_rows: how many
    rows it may have. attrs: root attributes of the store. borrow: its first rows, if another store has them.
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
    """Rows of logits whose tokens were accepted, beside speculative decoding.

    first: number of the first of these samples. position: the position of its token. slots: the slots of the tokens,
    int64 [samples]. step: the last step that may have computed them.
    """

    capture: int
    first: int
    position: int
    slots: np.ndarray
    step: int


@dataclass
class Close:
    """A capture ends.

    rows: its last rows. length: rows of the store. samples: rows of logits. attrs: root attributes of the store.
    losses: rows that were wanted but not computed. keeps_blocks: id of the request if its blocks are kept until these
    rows are gathered, None if they are free already. stays: no block has these rows, so they may wait. draft_index: by
    row, which draft token of its step the token was, from 1 on, and 0 for a sampled token and in the prompt; None
    without speculative decoding. accepted: its last logits.
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
    """The logits row of this step whose token lies in `slot` is sample `index` of a capture, at `position`."""

    capture: int
    index: int
    position: int
    slot: int


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The scheduler's message to the workers for one step.

    opens: carried out before the forward. closes: likewise, because it may overwrite freed blocks, except those that
    keep theirs. chunks: exported after it. preempted: captures whose blocks were taken away since the last step.
    leaving: their whole chunks, exported before the forward. idle: nothing is computed, and no other step may follow.
    gather: rows that wait for others leave now, those of this step too. report: each rank says what is new. release:
    kept blocks were given back, so their rows and all that wait leave before the forward.

    Of rows in a pool of pages. table: entries of its table that change before the forward and their pages, int64
    [2, entries]; None if none does. need: this many rows since the start are gathered before that, because their pages
    are given out again. kept_scores: slots of vLLM whose scores are copied to other lines before the forward, int64
    [rows], and the first of these lines (host_scores.py).

    Beside speculative decoding a step computes logits of draft tokens too, and which of them are accepted is known
    later. logits_step: number of this step if its logits are wanted, else 0. logits_slots: slots of the tokens of
    captures whose logits may be accepted. Not all of them need be in this step: with asynchronous scheduling it is not
    yet known which tokens the step before accepted. accepted: logits of steps before that are part of a capture.
    decided: the other logits of steps up to this one are not.
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

    pages: of its pool, without the null page; 0 without a pool. scores: `HostScores.path`, "" without probes. slots: of
    vLLM's cache, 0 without probes.
    """

    pages: int = 0
    scores: str = ""
    slots: int = 0


@dataclass
class Report(KVConnectorWorkerMetadata):
    """A worker's message to the scheduler, in a step that asks for it.

    gathered: rows gathered since the start. lost: row ranges given up since its last report, by capture. staged:
    whether some of what is gathered lies in staging memory. Only said in an engine that may sleep. stored: paths of
    stores that are finished, and whether they have all rows. unborrowed: rows that could not be borrowed, by capture.
    """

    gathered: int = 0
    lost: dict[int, list[list[int]]] = field(default_factory=dict)
    staged: bool = False
    stored: dict[str, bool] = field(default_factory=dict)
    unborrowed: dict[int, list[Loss]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the reports of two ranks: the slower one counts."""
        assert isinstance(other, Report)
        lost = _joined(self.lost, other.lost)
        unborrowed = _joined(self.unborrowed, other.unborrowed)
        stored = {
            **self.stored,
            **{path: whole and self.stored.get(path, True) for path, whole in other.stored.items()},
        }
        return Report(min(self.gathered, other.gathered), lost, self.staged or other.staged, stored, unborrowed)


def _joined(one: dict[int, list[T]], other: dict[int, list[T]]) -> dict[int, list[T]]:
    return {key: one.get(key, []) + other.get(key, []) for key in {**one, **other}}
