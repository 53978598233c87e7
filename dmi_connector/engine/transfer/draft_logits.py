# SPDX-License-Identifier: Apache-2.0
"""Logits of steps with draft tokens: they wait in the ring until the scheduler knows which tokens were accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dmi_connector.engine.messages import Accepted
from dmi_connector.engine.transfer.chunk_transfer import CaptureExport
from dmi_connector.store.format.completeness import Cause
from dmi_connector.store.write.client import OpenCapture
from dmi_connector.store.write.ring import Extent

SampleRow = tuple[OpenCapture, str, int, int, int]
"""One row for `StoreClient.rows`."""

Post = Callable[[Extent, Sequence[SampleRow]], None]
"""Hands rows of an extent to the coordinator, which gives the extent back."""


@dataclass
class _Step:
    """The logits of one step. extent: None where there was no room. rows: slot -> number of its row in the extent."""

    number: int
    extent: Extent | None
    rows: dict[int, int]
    row_bytes: int
    accepted: list[SampleRow] = field(default_factory=list)


class DraftLogits:
    """The logits of steps of which not all draft tokens are decided. Not thread-safe."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []

    def add(self, step: int, extent: Extent, slots: np.ndarray, row_bytes: int) -> None:
        """The logits of a step lie in `extent`, one row for each of `slots` (int64)."""
        rows = {slot: row for row, slot in enumerate(slots.tolist())}
        self._steps.append(_Step(step, extent, rows, row_bytes))

    def lose(self, step: int) -> None:
        """There is no room for the logits of a step."""
        self._steps.append(_Step(step, None, {}, 0))

    def decide(self, accepted: Sequence[tuple[CaptureExport, Accepted]], decided: int, post: Post) -> None:
        """Hand on the accepted rows. What else steps up to number `decided` computed is not wanted."""
        for capture, message in accepted:
            for index, slot in enumerate(message.slots.tolist()):
                self._accept(capture, message, index, slot)
        for step in self._steps:
            if step.number <= decided and step.extent is not None:
                post(step.extent, step.accepted)
        self._steps = [step for step in self._steps if step.number > decided]

    def _accept(self, capture: CaptureExport, message: Accepted, index: int, slot: int) -> None:
        """One row. A token that was rejected is computed anew, so the last step that has the slot has its row."""
        position = message.position + index
        for step in reversed(self._steps):
            if step.number <= message.step and slot in step.rows:
                if capture.out is not None:
                    at = step.rows[slot] * step.row_bytes
                    step.accepted.append((capture.out, "logits", message.first + index, position, at))
                return
        capture.lose(position - capture.start, 1, Cause.FELL_BEHIND)
