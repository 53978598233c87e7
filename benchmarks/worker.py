# SPDX-License-Identifier: Apache-2.0
"""What the capture benchmark asks of a running worker: sent by collective_rpc, these functions run inside it."""

from __future__ import annotations

import gc
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import python_us


def _connector() -> Any:
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    return get_kv_transfer_group()


def worker_switch(worker: Any, changes: dict[str, Any], least_share: float = 0.0) -> None:
    """Replace the exporter by one with other options. Nothing may be under way. least_share: of the writers' time that
    they work while this engine decodes, 0 for the package's own.
    """
    from unittest import mock

    from dmi_connector.engine import startup
    from dmi_connector.engine.export import Exporter
    from dmi_connector.engine.tracker import Tracker

    connector = _connector()
    layer, rank = connector.exporter.layer, connector.exporter.rank
    connector.exporter.shutdown()
    gathered = connector.build_connector_worker_meta().gathered  # the scheduler goes on counting
    connector.exporter = None
    gc.unfreeze()  # vLLM froze what was there at start
    gc.collect()  # frees the old buffers before the next ones are made
    # Beside a GPU the scheduler's half is in this process: the policy says whether blocks are kept until rows are gone.
    trackers = [found for found in gc.get_objects() if type(found) is Tracker]
    gc.freeze()
    connector.context = replace(connector.context, options=replace(connector.context.options, **changes))
    with mock.patch.object(startup, "LEAST_SHARE", least_share or startup.LEAST_SHARE):
        connector.exporter = Exporter(connector.context, layer, rank, connector._vllm_config)
    connector.exporter.gathered = gathered
    if layer.rows.is_cuda and len(trackers) != 1:
        raise RuntimeError(f"{len(trackers)} schedulers in this process: the benchmark needs an engine of one process")
    for tracker in trackers:
        tracker.context = connector.context


def worker_pending(worker: Any) -> int:
    """Bytes and captures still on their way to finished stores."""
    return int(_connector().exporter.pending())


def _writers() -> list[int]:
    """Process ids of the writers."""
    group, writers = _connector().exporter.persistence.group, []
    for entry in Path("/proc").iterdir():
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            mine = entry.name.isdecimal() and os.getpgid(int(entry.name)) == group
            if mine and b"dmi_connector.store.writer" in (entry / "cmdline").read_bytes():
                writers.append(int(entry.name))
    return writers


def worker_confine(worker: Any, cores: list[int]) -> int:
    """Let the writers run on these cores only. Returns how many there are."""
    writers = _writers()
    for writer in writers:
        os.sched_setaffinity(writer, cores)
    return len(writers)


def worker_stand_still(worker: Any, still: bool) -> int:
    """Let the writers stand still, or go on. Returns how many there are."""
    writers = _writers()
    for writer in writers:
        os.kill(writer, signal.SIGSTOP if still else signal.SIGCONT)
    return len(writers)


def worker_python_us(worker: Any) -> float:
    """`python_us` of the engine's thread."""
    return python_us()


def worker_pin(worker: Any, cores: list[int]) -> None:
    """Let the engine's thread run on these cores only. Threads and processes that it starts inherit that."""
    os.sched_setaffinity(0, cores)


def worker_sizes(worker: Any) -> tuple[int, int, int]:
    """(bytes of a token's hooks, tokens of a chunk, bytes of a chunk as it travels)."""
    connector = _connector()
    plan, chunk = next(iter(connector.exporter.plans.values())), connector.context.options.chunk_tokens
    return plan.header_base, chunk, plan.token_bytes * chunk


def _profiled(worker: Any) -> dict[str, tuple[type, str]]:
    """What of the engine's thread is timed: vLLM's parts of a step, and our part in them."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    from dmi_connector.engine import export, tracker

    runner = type(worker.model_runner)
    return {
        "schedule": (Scheduler, "schedule"),
        "execute_model": (runner, "execute_model"),
        "sample_tokens": (runner, "sample_tokens"),
        "wait_for_tokens": (AsyncOutput, "get_output"),
        "update_from_output": (Scheduler, "update_from_output"),
        "ours: before_forward": (export.Exporter, "before_forward"),
        "ours: after_forward": (export.Exporter, "after_forward"),
        "ours: build_meta": (tracker.Tracker, "step"),
    }


def worker_profile(worker: Any, start: bool) -> dict[str, Any]:
    """Time the engine's thread: wraps methods on start, gives microseconds a call on stop, and from one call of
    `execute_model` to the next (step, each of them too). Methods that were not called are left out.
    """
    targets = _profiled(worker)
    if start:
        for owner, method in targets.values():
            original = getattr(owner, method)
            samples: list[tuple[float, float]] = []

            def timed(
                *args: Any, _original: Any = original, _samples: list[tuple[float, float]] = samples, **named: Any
            ) -> Any:
                begin = time.perf_counter()
                result = _original(*args, **named)
                _samples.append((begin, time.perf_counter()))
                return result

            vars(timed).update(original=original, samples=samples)
            setattr(owner, method, timed)
        return {}
    result = {}
    for name, (owner, method) in targets.items():
        wrapper = getattr(owner, method)
        setattr(owner, method, wrapper.original)
        if wrapper.samples:
            result[name] = _statistics([end - begin for begin, end in wrapper.samples])
            begins = [begin for begin, _ in wrapper.samples]
            if name == "execute_model" and len(begins) > 1:
                steps = [after - before for before, after in pairwise(begins)]
                result["step"] = _statistics(steps)
                result["step"]["each_us"] = [round(seconds * 1e6) for seconds in steps]
    return result


def _statistics(seconds: list[float]) -> dict[str, Any]:
    values = sorted(s * 1e6 for s in seconds)
    return {
        "calls": len(values),
        "mean_us": round(sum(values) / len(values), 1),
        "median_us": round(values[len(values) // 2], 1),
        "p99_us": round(values[int(len(values) * 0.99)], 1),
        "max_us": round(values[-1], 1),
    }
