# SPDX-License-Identifier: Apache-2.0
"""Describes why a capture lacks rows.

All parts of the package report missing rows as a `Loss`. From the losses of a capture, `reason` makes the store's
attribute `reason`, and `missing` its attribute `missing`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

LABELS = ("shutdown", "write_error", "dropped", "quota", "aborted", "other")
"""Labels of incomplete captures in metrics. If several apply, the first one is used (docs/OPERATIONS.md)."""

OWN_ENDS = ("stop", "length", "repetition")
"""Finish reasons of requests that were not aborted. The store of an aborted request may be complete too: it
then has the rows of all tokens up to the abort. A request is also aborted when its engine shuts down.
"""

Ranges = Sequence[Sequence[int]]
"""[start, stop) row ranges of a store."""


class Cause(enum.Enum):
    """A cause of missing rows: (label in metrics, sentence in a store's `reason`)."""

    # In the engine.
    QUOTA = "quota", "max_request_bytes: {limit} bytes hold the rows of {end} of {expected} tokens"
    ENDED_EARLY = "aborted", "the request ended ({finish}) after {end} of {expected} tokens were computed"
    PREEMPTED = "other", "the request ended ({finish}) while it was preempted, with {end} of {expected} rows copied"
    FELL_BEHIND = "dropped", "writing fell behind (policy drop)"
    NOT_GATHERED = "other", "rows could not be gathered ({error})"
    UNWRITTEN = "other", "no tap wrote {hooks} in some row"
    # In the coordinator, or a writer.
    NOT_BORROWED = "other", "rows of tokens in the prefix cache could not be copied from {store} ({error})"
    # In the coordinator.
    NEVER_CAME = "other", "rows never came from the engine"
    WRONG_POSITIONS = "other", "the rows of positions {first} to {last} carry other positions"
    WRONG_TOKEN = "other", "the row at position {position} holds token {found}, not {expected}"
    CLOSE_REFUSED = "other", "{error}"
    ENGINE_ENDED = "shutdown", "the engine ended before the request did"
    PROCESS_DIED = "write_error", "{process} died ({how})"
    # In a writer.
    WRITE_FAILED = "write_error", "{error}"
    WRITE_REFUSED = "other", "{error}"
    SAMPLES_LOST = "other", "{hook}: {lost} of {samples} samples are lost, their position is -1"
    # At the commit.
    RANKS_LATE = "other", "ranks {ranks} did not finish in {seconds} s"
    FILES_GONE = "write_error", "{count} files are gone from the partial store, the first: {first}"
    NOT_SALVAGED = "write_error", "what is left of {hooks} cannot be salvaged: {error}"
    NOT_WRITTEN = "write_error", ""  # only lists rows; another loss says why the writer stopped
    HOOKS_WITHOUT_DATA = "other", "hooks without data: {hooks}"
    # During a repair.
    SALVAGED = "other", "salvaged after the writer or the engine was killed"
    LENGTH_UNKNOWN = "other", "how many rows the request had is not known: rows from {length} on may be lost"
    JOURNAL_TORN = "other", "a journal ends in {nbytes} bytes of a torn record"
    JOURNAL_UNREADABLE = "other", "{journal} cannot be read: {error}"
    CHUNKS_DAMAGED = "other", "{hook}: {count} damaged chunks are left out, the first: {first}"
    HOOKS_WITHOUT_ROWS = "other", "hooks without rows: {hooks}"
    TOKEN_IDS_UNKNOWN = "other", "token ids are not known for all rows: unknown ones are 0"
    NOT_RECORDED = "other", "no journal describes the capture"
    NOTHING_WHOLE = "other", "no chunk was completed on all ranks, or all are damaged"

    @property
    def label(self) -> str:
        """One of LABELS."""
        return self.value[0]


@dataclass(frozen=True)
class Loss:
    """One reason why a capture is incomplete.

    rows: [start, stop) ranges of lost rows; () if none are lost, or if they are unknown. facts: values of the
    placeholders in the cause's sentence. rank: the rank that reports the loss.
    """

    cause: Cause
    rows: tuple[tuple[int, int], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0

    @classmethod
    def of(cls, cause: Cause, rows: Ranges = (), **facts: Any) -> Loss:
        """Make a loss of `rows`."""
        return cls(cause, tuple((int(start), int(stop)) for start, stop in rows), facts)

    @property
    def words(self) -> str:
        """The loss as a sentence."""
        sentence = self.cause.value[1].format(**self.facts)
        return f"rank {self.rank}: {sentence}" if self.rank else sentence

    def before(self, length: int) -> Loss:
        """The loss without rows at or after `length`."""
        return replace(self, rows=tuple((start, min(stop, length)) for start, stop in self.rows if start < length))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict for `from_json`."""
        return {"cause": self.cause.name, "rows": self.rows, "facts": dict(self.facts), "rank": self.rank}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Loss:
        """The inverse of `to_json`."""
        rows = tuple((start, stop) for start, stop in values["rows"])
        return cls(Cause[values["cause"]], rows, values["facts"], values["rank"])


def add_loss(losses: list[Loss], loss: Loss) -> None:
    """Append a loss. If one with the same cause, facts and rank exists, its rows are extended instead."""
    for i, other in enumerate(losses):
        if (other.cause, other.facts, other.rank) == (loss.cause, loss.facts, loss.rank):
            losses[i] = replace(other, rows=other.rows + loss.rows)
            return
    losses.append(loss)


def losses_to_json(losses: Iterable[Loss]) -> list[dict[str, Any]]:
    """`Loss.to_json` of each."""
    return [loss.to_json() for loss in losses]


def losses_from_json(values: Iterable[Mapping[str, Any]]) -> list[Loss]:
    """The inverse of `losses_to_json`."""
    return [Loss.from_json(one) for one in values]


def reason(losses: Iterable[Loss]) -> str | None:
    """The attribute `reason` of a store: the distinct sentences of its losses, or None if there are none."""
    return "; ".join(dict.fromkeys(filter(None, (loss.words for loss in losses)))) or None


def missing(losses: Iterable[Loss]) -> list[list[int]]:
    """The attribute `missing` of a store: the rows of all losses, as merged [start, stop) ranges."""
    return merge_ranges(rows for loss in losses for rows in loss.rows)


def label(losses: Iterable[Loss]) -> str:
    """The metric label of a capture with these losses, which must not be empty."""
    found = {loss.cause.label for loss in losses}
    return next(name for name in LABELS if name in found)


def merge_ranges(ranges: Iterable[Sequence[int]]) -> list[list[int]]:
    """Sorted, disjoint [start, stop) ranges that cover the given ones."""
    merged: list[list[int]] = []
    for start, stop in sorted([int(a), int(b)] for a, b in ranges):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return merged
