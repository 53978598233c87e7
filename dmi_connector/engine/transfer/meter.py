# SPDX-License-Identifier: Apache-2.0
"""Computes the changes of one rank's counts since its last report, for vLLM's metrics (engine/metrics.py)."""

from __future__ import annotations

from dmi_connector.engine.metrics import BACKLOG, CaptureStats, Numbers
from dmi_connector.engine.transfer.chunk_transfer import Progress
from dmi_connector.store.write.client import StoreClient
from dmi_connector.store.write.ring import Ring

_OF_EVERY_RANK = ("bytes_raw", "bytes_stored")
"""Counts of a `StoreClient` that ranks above 0 report. Each rank writes a part of every store, but only rank 0 counts
captures.
"""


class Meter:
    """Computes the changes on one worker. The engine's thread calls it in steps in which ranks report.

    client: None if no store is written (sinks host and null).
    """

    def __init__(self, progress: Progress, client: StoreClient | None, ring: Ring, rank: int) -> None:
        self._progress, self._client, self._ring, self._rank = progress, client, ring, rank
        self._told: Numbers = {}
        self._backlog = 0

    def totals(self) -> Numbers:
        """Counts since the start, by key of COUNTERS."""
        if self._client is None:
            return dict(self._progress.counts)
        counts = self._client.counts()
        if self._rank:
            counts = {key: counts[key] for key in _OF_EVERY_RANK}
        return self._progress.counts | counts

    def take(self) -> CaptureStats | None:
        """Changes since the last call; None if there are none."""
        totals, backlog = self.totals(), self._ring.used
        if totals == self._told and backlog == self._backlog:
            return None
        data = {key: value - self._told.get(key, 0) for key, value in totals.items()}
        data = {key: value for key, value in data.items() if value}
        if backlog != self._backlog:
            data[f"{BACKLOG}.{self._rank}"] = backlog
        self._told, self._backlog = totals, backlog
        return CaptureStats(data) if data else None
