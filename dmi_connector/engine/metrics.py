# SPDX-License-Identifier: Apache-2.0
"""Counts captures, for vLLM's Prometheus endpoint and its log (docs/OPERATIONS.md).

In each step, vLLM asks both halves of the connector for changes (`CaptureStats`). A rank answers in steps in which it
reports (`StepMetadata.report`), at least once in STEPS_TOGETHER steps. vLLM aggregates the answers of all ranks, and
passes the result to the process that serves /metrics (`CaptureProm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from dmi_connector.store.format.completeness import LABELS

Numbers = dict[str, int | float]

COUNTERS = {
    # key in CaptureStats: (metric name without "vllm:dmi_", help text)
    "started": ("captures_started", "Captures that were started"),
    "complete": ("captures_complete", "Captures whose store is finished and has all rows"),
    **{f"incomplete.{r}": ("captures_incomplete", "Captures whose store lacks rows, by reason") for r in LABELS},
    "failed": ("captures_failed", "Captures that left no store"),
    "refused": ("captures_refused", "Requests that were served without a capture: a bad option, or a limit"),
    "cancelled": (
        "captures_cancelled",
        "Requests that ended before their first step, such as those aborted in the queue",
    ),
    "not_kept": ("captures_not_kept", "Requests without a store because keep_if did not hold"),
    "recomputed_tokens": (
        "recomputed_tokens",
        "Cached tokens that were computed again for their rows",
    ),
    "borrowed_tokens": (
        "borrowed_tokens",
        "Cached tokens whose rows are copied from an earlier store",
    ),
    "bytes_exported": ("exported_bytes", "Bytes copied to the host buffer"),
    "bytes_raw": ("raw_bytes", "Bytes of finished captures before compression"),
    "bytes_stored": ("stored_bytes", "Bytes of finished captures in their files"),
    "uploaded": ("stores_uploaded", "Stores uploaded to the object store"),
    "upload_failed": ("uploads_failed", "Stores that could not be uploaded, and stay on disk"),
    "bytes_queued": ("upload_queued_bytes", "Bytes of finished stores that were queued for their upload"),
    "bytes_uploaded": ("uploaded_bytes", "Bytes of stores that were uploaded"),
    "lost_ranges": ("lost_ranges", "Ranges of rows that were dropped before they reached the host buffer"),
    "lost_rows": ("lost_rows", "Rows that were dropped before they reached the host buffer"),
    "blocked_seconds": ("blocked_seconds", "Seconds for which the engine's thread waited for room in the host buffer"),
}
BACKLOG = "backlog_bytes"
"""Gauge: bytes of a rank's host buffer that are in use. Its key in CaptureStats ends with the rank."""


SCORE = "probe_score"
"""Histogram: the largest score of a probe in each request. Its key in CaptureStats ends with the probe's name, and its
value is a list of scores.
"""
ALERTS = "probe_alerts"
"""Counter: requests with a score above the threshold in `probe_alerts`. Its key in CaptureStats ends with the name of
the probe.
"""
_BUCKETS = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1, 2, 5, 10)
"""Upper bounds of the buckets of scores. Most scores are probabilities. With a negative bound the histogram would have
no sum, which `LLM.get_metrics` needs.
"""


class CaptureStats(KVConnectorStats):
    """Changes since the last report.

    data: {key of COUNTERS: increase, "backlog_bytes.RANK": level, "probe_score.NAME": scores, "probe_alerts.NAME":
    increase}.
    """

    def reset(self) -> None:
        self.data.clear()

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the stats of another rank, of the connector's other half, or of a later step."""
        for key, value in other.data.items():
            self.data[key] = self.data[key] + value if key in self.data and not key.startswith(BACKLOG) else value
        return self

    def reduce(self) -> Numbers:
        """The numbers that vLLM logs, by metric name. The backlog is the largest of all ranks."""
        levels = [value for key, value in self.data.items() if key.startswith(BACKLOG)]
        alerts = {key: value for key, value in self.data.items() if key.startswith(ALERTS) and value}
        return described(self.data) | alerts | ({BACKLOG: max(levels)} if levels else {})


class CaptureProm(KVConnectorPromMetrics):
    """The Prometheus series of an engine: one per counter and reason, one per rank (the backlog), and two per probe."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        families: dict[str, Any] = {}
        self._counters: dict[tuple[int, str], Any] = {}
        for key, (name, text) in COUNTERS.items():
            reason = key.split(".")[1:]
            if name not in families:
                labels = [*labelnames, *(["reason"] if reason else [])]
                families[name] = self._counter_cls(name=f"vllm:dmi_{name}", documentation=text, labelnames=labels)
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine, key] = families[name].labels(*values, *reason)
        of_probe = {"labelnames": [*labelnames, "probe"]}
        self._scores = self._histogram_cls(
            name=f"vllm:dmi_{SCORE}", documentation="Largest score of each request", buckets=_BUCKETS, **of_probe
        )
        self._alerts = self._counter_cls(
            name=f"vllm:dmi_{ALERTS}", documentation="Requests with a score above the threshold", **of_probe
        )
        self._backlog = self._gauge_cls(
            name=f"vllm:dmi_{BACKLOG}",
            documentation="Bytes of the host buffer in use, not written yet",
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, "rank"],
        )
        parallel = vllm_config.parallel_config
        for rank in range(parallel.tensor_parallel_size * parallel.pipeline_parallel_size):
            for values in per_engine_labelvalues.values():
                self._backlog.labels(*values, str(rank))  # the series is 0 until the rank reports

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record the data of a CaptureStats."""
        for key, value in transfer_stats_data.items():
            name, _, label = key.partition(".")  # the label is a rank, a probe or a reason
            labels = (*self.per_engine_labelvalues[engine_idx], label)
            if name == BACKLOG:
                self._backlog.labels(*labels).set(value)
            elif name == ALERTS:
                self._alerts.labels(*labels).inc(value)
            elif name == SCORE:
                series = self._scores.labels(*labels)
                for score in value:
                    series.observe(score)
            else:
                self._counters[engine_idx, key].inc(value)


def described(counts: Mapping[str, int | float]) -> Numbers:
    """The counts that are not 0, by metric name, in the order of COUNTERS. A metric with reasons is "NAME.REASON"."""
    names = {key: ".".join([name, *key.split(".")[1:]]) for key, (name, _) in COUNTERS.items()}
    return {name: round(counts[key], 3) for key, name in names.items() if counts.get(key)}
