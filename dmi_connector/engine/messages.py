# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half tells the worker half each step. Plain picklable data, no references to either."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass
class Rows:
    """Rows to export: `first` is the row's index in the store, slots int64 [count] say where the rows lie."""

    capture: int
    first: int
    slots: np.ndarray


@dataclass
class Open:
    """A capture begins. path: of its store. hooks: {hook: layers} of this capture. start: position of its first row.
    most_rows: how many it may have.
    """

    capture: int
    path: str
    hooks: dict[str, tuple[int, ...]]
    request_id: str
    key: str | None
    start: int
    most_rows: int
    attrs: dict[str, Any]


@dataclass
class Close:
    """A capture ends: its last rows, its true length, and what the store says about it.

    held: the request's id if its blocks are kept until these rows are gathered, None if they are free already.
    """

    capture: int
    rows: list[Rows]
    length: int
    samples: int
    token_ids: list[int]
    attrs: dict[str, Any]
    held: str | None = None


@dataclass
class Sample:
    """The logits row of this step whose token lies in `slot` belongs to sample `index` at `position`."""

    capture: int
    index: int
    position: int
    slot: int


@dataclass
class StepMetadata(KVConnectorMetadata):
    """opens and closes are carried out before the forward (freed blocks may be overwritten by it), chunks after.

    preempted: captures whose blocks were taken away since the last step.
    """

    opens: list[Open] = field(default_factory=list)
    closes: list[Close] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    chunks: list[Rows] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


@dataclass
class Report(KVConnectorWorkerMetadata):
    """What a worker tells the scheduler.

    gathered: rows gathered since the start. lost: ranges given up since its last report, by capture (policy drop).
    """

    gathered: int = 0
    lost: dict[int, list[list[int]]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the reports of two ranks: the slower one counts."""
        assert isinstance(other, Report)
        lost = {k: self.lost.get(k, []) + other.lost.get(k, []) for k in {**self.lost, **other.lost}}
        return Report(min(self.gathered, other.gathered), lost)
