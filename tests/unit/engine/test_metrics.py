# SPDX-License-Identifier: Apache-2.0
"""Counts of captures, from a real exporter and real processes to vLLM's own logger and Prometheus classes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from dmi_connector.args import CONNECTOR, CONNECTOR_MODULE
from dmi_connector.engine.connector import DMIConnector
from dmi_connector.engine.messages import Close, Open, Rows, StepMetadata
from dmi_connector.engine.metrics import CaptureStats
from dmi_connector.engine.transfer.chunk_transfer import Progress
from dmi_connector.engine.transfer.exporter import Exporter
from dmi_connector.engine.transfer.meter import Meter
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.write.child_process import Child
from dmi_connector.store.write.client import StoreClient
from dmi_connector.store.write.ring import Ring
from tests.exporterkit import make_exporter as build_exporter
from tests.storekit import IDS, PATIENCE, begin, send, until
from tests.trackerkit import ask, make_tracker

CHUNK, CHUNKS = 64, 8
TOKENS = CHUNK * CHUNKS
ATTRS = {"finish_reason": "length"}

MakeExporter = Callable[..., Exporter]


@pytest.fixture
def make_exporter(tmp_path: Path) -> Iterator[MakeExporter]:
    """make_exporter(policy, rank): an exporter over the rows of one request, with room for three of its chunks."""
    made: list[Exporter] = []

    def make(policy: str = "block", rank: int = 0) -> Exporter:
        sizes = {"chunk_tokens": CHUNK, "host_buffer_bytes": 3_300_000}
        made.append(build_exporter(tmp_path, TOKENS, rank=rank, tp=rank + 1, policy=policy, **sizes))
        return made[-1]

    yield make
    for exporter in made:
        exporter.shutdown()


def run_capture(exporter: Exporter, path: Path, *losses: Loss) -> None:
    """Open a capture, export all its chunks and close it. losses: the losses that the scheduler reports."""
    hooks = dict(exporter.context.selection.hooks)
    exporter.before_forward(
        StepMetadata(opens=[Open(1, str(path), hooks, "r", None, 0, TOKENS, {"prompt_len": TOKENS})])
    )
    slots = np.arange(TOKENS)
    chunks = [Rows(1, first, slots[first : first + CHUNK]) for first in range(0, TOKENS, CHUNK)]
    exporter.after_forward(StepMetadata(chunks=chunks))
    close = Close(1, [], TOKENS, 0, list(range(TOKENS)), ATTRS, list(losses))
    exporter.before_forward(StepMetadata(closes=[close]))


def settled(exporter: Exporter) -> dict[str, int | float]:
    """Wait until all captures are written. Returns the meter's values."""
    until(lambda: not exporter.pending())
    stats = exporter.meter.take()
    assert stats is not None
    return stats.data


def coordinator(exporter: Exporter) -> int:
    assert exporter.client is not None
    assert exporter.client._child.ready.wait(PATIENCE)
    return exporter.client._child.pid


def test_steps_without_work_do_not_touch_the_lane(make_exporter: MakeExporter) -> None:
    """The lane's threads may hold its lock, and torch's lookup of the current stream takes 20 us."""
    exporter = make_exporter()
    touched: list[list[Any]] = []
    lane: Any = SimpleNamespace(send=touched.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "lane", lane)
        for _ in range(3):
            exporter.before_forward(StepMetadata())
            exporter.after_forward(StepMetadata())
        assert touched == []


def test_a_meter_needs_no_exporter() -> None:
    """Rank 0 reports all counts of its client, other ranks only bytes. Keys of gauges include the rank."""
    client: Any = SimpleNamespace(counts=lambda: {"started": 2, "bytes_raw": 30, "bytes_stored": 20})
    ring = Ring(1 << 20)
    progress = Progress()
    progress.counts["lost_rows"] = 7
    first, second, alone = (
        Meter(progress, client, ring, 0),
        Meter(progress, client, ring, 1),
        Meter(progress, None, ring, 0),
    )
    of_every_rank = {"bytes_raw": 30, "bytes_stored": 20, "lost_rows": 7}
    for meter, counts in ((first, {"started": 2, **of_every_rank}), (second, of_every_rank), (alone, {"lost_rows": 7})):
        stats = meter.take()
        assert stats is not None and stats.data == counts and meter.take() is None
    extent = ring.alloc(4096, 0)
    assert extent is not None
    stats = second.take()
    assert stats is not None and stats.data == {"backlog_bytes.1": ring.used} and ring.used
    os.close(ring.fd)


def test_a_whole_capture_counts_as_complete_with_its_bytes(
    make_exporter: MakeExporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = make_exporter()
    assert exporter.meter.take() is None
    sent: list[dict[str, Any]] = []
    post = Child.post
    monkeypatch.setattr(Child, "post", lambda child, message: (sent.append(message), post(child, message))[1])
    run_capture(exporter, tmp_path / "a.zarr")
    assert [m["most_rows"] for m in sent if m["type"] == "open"] == [TOKENS], (
        "the writers' pace needs the number of rows"
    )
    told, raw = settled(exporter), TOKENS * 4 * 1024 * 4
    stored = told.pop("bytes_stored")
    assert told == {"started": 1, "complete": 1, "bytes_exported": raw + 8 * TOKENS, "bytes_raw": raw} | {
        key: told[key] for key in ("blocked_seconds",) if key in told
    }
    assert raw < stored < raw + 4096
    assert exporter.meter.take() is None, "the counts must be reported once"


def test_ranks_above_0_report_only_bytes(make_exporter: MakeExporter, tmp_path: Path) -> None:
    exporter = make_exporter(rank=1)
    run_capture(exporter, tmp_path / "a.zarr")
    assert set(settled(exporter)) - {"blocked_seconds"} == {"bytes_exported", "bytes_raw", "bytes_stored"}


def test_dropped_rows_are_counted_as_lost(make_exporter: MakeExporter, tmp_path: Path) -> None:
    exporter = make_exporter("drop")
    os.kill(coordinator(exporter), signal.SIGSTOP)
    run_capture(exporter, tmp_path / "a.zarr")
    told = exporter.meter.take()
    os.kill(coordinator(exporter), signal.SIGCONT)
    assert told is not None
    kept = told.data["bytes_exported"] // exporter._layout(dict(exporter.context.selection.hooks)).payload.token_bytes
    assert 0 < kept < TOKENS and told.data["lost_rows"] == TOKENS - kept
    assert told.data["lost_ranges"] == (TOKENS - kept) / CHUNK
    assert told.data["backlog_bytes.0"] >= told.data["bytes_exported"]
    assert "blocked_seconds" not in told.data
    told_later = settled(exporter)
    assert told_later["incomplete.dropped"] == 1 and told_later["backlog_bytes.0"] == 0


def test_the_time_blocked_on_a_full_ring_is_counted(make_exporter: MakeExporter, tmp_path: Path) -> None:
    exporter = make_exporter("block")
    pid = coordinator(exporter)
    os.kill(pid, signal.SIGSTOP)
    waker = threading.Timer(3, os.kill, (pid, signal.SIGCONT))
    waker.start()
    began = time.perf_counter()
    run_capture(exporter, tmp_path / "a.zarr")
    took = time.perf_counter() - began
    told = settled(exporter)
    assert 0 < told["blocked_seconds"] < took and told["complete"] == 1 and "lost_rows" not in told


@pytest.mark.parametrize(
    ("cause", "facts", "label"),
    [(Cause.ENDED_EARLY, {"finish": "abort"}, "aborted"), (Cause.QUOTA, {"limit": 9}, "quota")],
)
def test_an_incomplete_capture_counts_under_the_cause_of_its_loss(
    make_exporter: MakeExporter, tmp_path: Path, cause: Cause, facts: dict[str, Any], label: str
) -> None:
    exporter = make_exporter()
    run_capture(exporter, tmp_path / "a.zarr", Loss.of(cause, [[512, 600]], **facts, end=512, expected=600))
    assert settled(exporter)[f"incomplete.{label}"] == 1


def test_a_capture_with_rows_of_another_request_counts_as_other(make_exporter: MakeExporter, tmp_path: Path) -> None:
    exporter = make_exporter()
    exporter.rows[100, 4:8] = 7
    run_capture(exporter, tmp_path / "a.zarr")
    assert settled(exporter)["incomplete.other"] == 1


def test_a_capture_with_a_write_error_and_an_abort_counts_as_write_error(tmp_path: Path) -> None:
    client = StoreClient(1 << 20)
    ended = Loss.of(Cause.ENDED_EARLY, finish="OSError: of the request", end=128, expected=300)
    try:
        capture = begin(client, tmp_path / "a.zarr")
        send(client, capture, 0)
        until(lambda: list(tmp_path.glob("a.zarr*/q/c/0/0/*")))
        for path in tmp_path.glob("a.zarr*"):
            (path / "q" / "zarr.json").mkdir()  # the coordinator cannot write this file
        capture.close(128, {}, IDS[:128], losses=[ended])
        assert client.flush(PATIENCE) and client.counts()["incomplete.write_error"] == 1, capture.reason
        capture = begin(client, tmp_path / "b.zarr")
        send(client, capture, 0)
        capture.close(128, {}, IDS[:128], losses=[ended])
        assert client.flush(PATIENCE) and client.counts()["incomplete.aborted"] == 1, capture.reason
        assert client.stats()["incomplete"] == 2
    finally:
        client.shutdown(PATIENCE)


def test_failed_captures_and_those_cut_by_the_shutdown_are_counted(tmp_path: Path) -> None:
    client = StoreClient(1 << 20)
    begin(client, tmp_path / "not-a-store").close(0)
    send(client, begin(client, tmp_path / "a.zarr"), 0)
    assert client.shutdown(PATIENCE)
    counts = client.counts()
    assert (counts["started"], counts["failed"], counts["incomplete.shutdown"]) == (2, 1, 1)


def test_the_last_line_of_the_log_gives_the_totals(
    make_exporter: MakeExporter, tmp_path: Path, engine_log: list[str]
) -> None:
    connector = DMIConnector.__new__(DMIConnector)
    connector.exporter = make_exporter()
    run_capture(connector.exporter, tmp_path / "a.zarr")
    connector.shutdown()
    assert "rank 0 since the start: captures_started=1, captures_complete=1, exported_bytes=" in engine_log[-1]


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_vllm_shows_our_counts_on_its_endpoint_and_in_its_log(parallel: str) -> None:
    """The first step has counts of two ranks and of the scheduler. The second one has counts of one rank."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    transfer = KVTransferConfig(
        kv_connector=CONNECTOR, kv_connector_module_path=CONNECTOR_MODULE, kv_role="kv_producer"
    )
    sizes = SimpleNamespace(**{"tensor_parallel_size": 1, "pipeline_parallel_size": 1, parallel: 2})
    config: Any = SimpleNamespace(kv_transfer_config=transfer, parallel_config=sizes)
    ranks = CaptureStats({"started": 2, "bytes_raw": 100, "backlog_bytes.0": 7})
    first = ranks.aggregate(CaptureStats({"bytes_raw": 50, "backlog_bytes.1": 9})).aggregate(
        CaptureStats({"refused": 1, "cancelled": 168, "probe_score.risk": [0.25], "probe_alerts.risk": 0})
    )
    first.aggregate(CaptureStats({"probe_score.risk": [0.75, 30.0], "probe_alerts.risk": 2}))
    second = CaptureStats({"complete": 1, "incomplete.dropped": 1, "backlog_bytes.1": 3, "blocked_seconds": 0.25})
    prom, log, lines = KVConnectorProm(config, ["engine"], {0: ["0"]}), KVConnectorLogging(transfer), []
    try:

        def value(name: str, **labels: str) -> float | None:
            return REGISTRY.get_sample_value(f"vllm:dmi_{name}", {"engine": "0", **labels})

        assert value("backlog_bytes", rank="0") == value("backlog_bytes", rank="1") == 0
        for step in (first, second):
            log.observe(step.to_dict())
            prom.observe(step.to_dict())
        log.log(lambda text, *args: lines.append(text % args))
        log.log(lambda text, *args: lines.append(text % args))
        assert value("captures_started_total") == 2 and value("captures_complete_total") == 1
        assert value("captures_refused_total") == 1 and value("captures_cancelled_total") == 168
        assert value("raw_bytes_total") == 150
        assert value("captures_incomplete_total", reason="dropped") == 1
        assert value("captures_incomplete_total", reason="aborted") == 0
        assert value("backlog_bytes", rank="0") == 7 and value("backlog_bytes", rank="1") == 3
        assert value("blocked_seconds_total") == 0.25
        assert value("probe_alerts_total", probe="risk") == 2 and value("probe_score_sum", probe="risk") == 31
        below = {le: value("probe_score_bucket", probe="risk", le=le) for le in ("0.2", "0.3", "0.8", "10.0", "+Inf")}
        assert list(below.values()) == [0, 1, 2, 2, 3]
    finally:
        unregister_vllm_metrics()
    assert lines == [
        "KV Transfer metrics: captures_started=2, captures_complete=1, captures_incomplete.dropped=1, "
        "captures_refused=1, captures_cancelled=168, raw_bytes=150, blocked_seconds=0.25, probe_alerts.risk=2, "
        "backlog_bytes=7"
    ]


def test_requests_that_are_cancelled_in_the_queue_are_counted_apart_from_refused_ones(tmp_path: Path) -> None:
    connector = DMIConnector.__new__(DMIConnector)
    connector._role, connector.tracker = KVConnectorRole.SCHEDULER, make_tracker(tmp_path)
    for number in range(7):
        kv = {"dmi": {"hooks": "resid_per"}} if number < 2 else {}
        connector.on_new_request(ask(kv, 20, f"r{number}"))  # type: ignore[arg-type]
    for number in range(7):
        connector.request_finished(ask({}, 20, f"r{number}"), [])  # type: ignore[arg-type]
    stats = connector.get_kv_connector_stats()
    assert stats is not None and stats.data == {"refused": 2, "cancelled": 5}
    assert connector.get_kv_connector_stats() is None


def test_the_log_says_at_the_start_what_the_selection_costs(make_exporter: MakeExporter, engine_log: list[str]) -> None:
    """The log has the bytes per token, the tokens that fit into the cache and the buffer, and the limit of the rate."""
    exporter = make_exporter()
    [full] = [layout.payload for layout in exporter.layouts.values()]
    buffer = f"host buffer 3 MiB = {3_300_000 // full.token_bytes} tokens"
    rate = f"bound by 1 writers, codec none at about 1.6 GB/s = {1.6e9 / full.token_bytes:.0f} tokens/s"
    cost = f"MB per token in the cache ({TOKENS} tokens fit), {full.token_bytes / 1e6:.3f} MB per token exported"
    for said in (cost, buffer, rate, "policy block"):
        assert any(said in message for message in engine_log), engine_log
