# SPDX-License-Identifier: Apache-2.0
"""The coordinator's record of one capture, and the states of a capture.

A capture is in one state at a time:

    OPEN         its rows arrive, and are passed on to the writers of its arrays
    CLOSING      no more rows arrive; its writers finish their files
    COMMITTING   on rank 0, one writer makes the store. On another rank, one writer leaves the results of the rank for
                 rank 0. After an abort, one writer removes the partial store
    COMPLETE, INCOMPLETE, FAILED, ABORTED    the final states
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dmi_connector.layout import PayloadLayout
from dmi_connector.store.format import schema
from dmi_connector.store.format.completeness import Loss
from dmi_connector.store.write.arrays.array_writer import FileList
from dmi_connector.store.write.arrays.row_check import RowCheck
from dmi_connector.store.write.child_process import Child
from dmi_connector.store.write.coordinator.writer_pool import Assignment
from dmi_connector.store.write.messages import Message


class State(enum.StrEnum):
    """States of a capture; see the docstring of the module."""

    OPEN = "open"
    CLOSING = "closing"
    COMMITTING = "committing"
    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    ABORTED = "aborted"


ENDS = (State.COMPLETE, State.INCOMPLETE, State.FAILED, State.ABORTED)


@dataclass(frozen=True)
class End:
    """The arguments of `Captures.close`.

    attrs: root attributes, {} for ranks above 0. arrays: {name: token array, packed by `messages.pack_array`}.
    """

    length: int
    samples: dict[str, int]
    attrs: dict[str, Any]
    arrays: dict[str, str]
    losses: list[Loss]


@dataclass(eq=False)
class CaptureRecord:
    """One capture. On ranks above 0, COMPLETE means that the part of this rank is complete.

    final: path of the store. attrs: root attributes known so far. losses: reported by writers. to_come: payload bytes
    that may still arrive. client_number: number of the capture in the engine's client. reason, label: why the capture
    is not complete (completeness.py); None until that is known. takers: by segment, the assignments that write its
    token arrays.
    """

    number: int
    final: str
    layout: PayloadLayout
    layout_number: int
    attrs: Mapping[str, Any]
    request_id: str | None
    key: str | None
    rank: int
    ranks: int
    created: str
    to_come: int
    assignments: list[Assignment]
    check: RowCheck
    client_number: int = 0
    takers: dict[int, list[Assignment]] = field(default_factory=dict)
    unfinished: set[str] = field(default_factory=set)  # arrays of writers that died, whose files are rebuilt
    state: State = State.OPEN
    losses: list[Loss] = field(default_factory=list)
    reason: str | None = None
    label: str | None = None
    files: FileList = field(default_factory=dict)
    bytes_raw: int = 0
    bytes_stored: int = 0
    sampled: dict[str, int] = field(default_factory=dict)  # rows that have arrived, by per-sample array
    end: End | None = None  # None for an aborted capture
    committer: Child | None = None
    recommitted: bool = False  # whether a committing writer has died once

    @property
    def partial(self) -> str:
        """The path of the store until it is renamed."""
        return self.final + schema.PARTIAL_SUFFIX

    @property
    def start(self) -> int:
        """Position of its first row."""
        return int(self.attrs.get("start", 0))

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt, 0 if this is not known."""
        return int(self.attrs.get("prompt_len", 0))

    def about(self) -> dict[str, Any]:
        """The facts that a salvage needs, for the journal (docs/FORMAT.md, section 10)."""
        facts: dict[str, Any] = {"request_id": self.request_id, "key": self.key, "created": self.created}
        facts |= {
            "rank": self.rank,
            "ranks": self.ranks,
            "arrays": [a.to_json() for a in (*self.layout.arrays, *self.layout.elsewhere)],
        }
        return {**facts, "attrs": dict(self.attrs)}

    def index_line(self, event: str, state: str) -> Message:
        """The message that makes a writer append a line to the index."""
        line: Message = {"event": event, "store": os.path.basename(self.final), "state": state}
        line |= {"key": self.key, "request_id": self.request_id, "created": self.created}
        return {"type": "line", "directory": os.path.dirname(self.final), "line": line}

    def start_line(self, upload: Mapping[str, Any]) -> Message:
        """As `index_line`, for the line `start`. upload: `WriteSettings.upload`."""
        message = self.index_line("start", "started")
        if upload:
            url = f"{upload['url'].rstrip('/')}/{message['line']['store']}"
            message["line"] |= {"upload": "pending", "url": url, "remove_local": upload["remove_local"]}
            message["line"] |= {"only_complete": True} if upload["only_complete"] else {}
        return message
