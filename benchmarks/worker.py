# SPDX-License-Identifier: Apache-2.0
"""Functions that the benchmarks of engines run in a worker, by `collective_rpc`."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import python_us
from benchmarks.stores import cpu_seconds


def _connector() -> Any:
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    return get_kv_transfer_group()


def worker_switch(worker: Any, changes: dict[str, Any], least_share: float = 0.0) -> None:
    """Replace the exporter by one with other server options. All captures must have ended.

    changes: {name: value} of the options. least_share: minimum share of time that writers work while the engine
    decodes; 0: the package's default.
    """
    from unittest import mock

    from dmi_connector.engine import sizing
    from dmi_connector.engine.scheduler.tracker import Tracker
    from dmi_connector.engine.transfer.exporter import Exporter

    connector = _connector()
    layer, rank = connector.exporter.layer, connector.exporter.rank
    connector.exporter.shutdown()
    gathered = connector.exporter.take_report().gathered  # the new exporter continues this count for the scheduler
    connector.exporter = None
    gc.unfreeze()  # vLLM froze the objects that existed at the start
    gc.collect()  # frees the old buffers before new ones are allocated
    # The scheduler needs the policy, which decides whether blocks are kept. On one GPU, it is in this process.
    trackers = [found for found in gc.get_objects() if type(found) is Tracker]
    gc.freeze()
    before = connector.context.options
    connector.context = replace(connector.context, options=replace(before, **changes))
    with mock.patch.object(sizing, "LEAST_SHARE", least_share or sizing.LEAST_SHARE):
        connector.exporter = Exporter(connector.context, layer, rank, connector._vllm_config)
    connector.exporter.progress.gathered = gathered
    if layer.rows.is_cuda and len(trackers) != 1 and connector.context.options.policy != before.policy:
        raise RuntimeError(f"{len(trackers)} schedulers in this process: another policy needs an engine of one process")
    for tracker in trackers:
        tracker.context = connector.context


def worker_pending(worker: Any) -> int:
    """`Exporter.pending` of this worker: 0 if all captures have reached their sink."""
    return int(_connector().exporter.pending())


def worker_backlog(worker: Any) -> dict[str, float]:
    """Exported bytes since the start, bytes that wait for the link or for writers, and lost rows.

    All are 0 in an engine that does not capture.
    """
    exporter = getattr(_connector(), "exporter", None) if _has_connector() else None
    if exporter is None:
        return dict.fromkeys(("exported", "waiting", "lost_rows"), 0.0)
    waiting = float(exporter.ring.used)
    if exporter.lane is not None:
        waiting += sum(transfer.nbytes for transfer in list(exporter.lane.waiting))
    counts = exporter.progress.counts
    return {"exported": counts["bytes_exported"], "waiting": waiting, "lost_rows": counts["lost_rows"]}


def worker_writers_s(worker: Any) -> float:
    """CPU seconds of this rank's writers so far."""
    return sum(cpu_seconds("dmi-writer", _connector().exporter.client.group))


def _has_connector() -> bool:
    from vllm.distributed.kv_transfer.kv_transfer_state import has_kv_transfer_group

    return bool(has_kv_transfer_group())


def _writers() -> list[int]:
    """Process ids of the writers. They are in the coordinator's process group."""
    from dmi_connector.store.write.coordinator.writer_pool import WRITER

    group, writers = _connector().exporter.client.group, []
    for entry in Path("/proc").iterdir():
        with suppress(ProcessLookupError, FileNotFoundError):  # the process has ended
            mine = entry.name.isdecimal() and os.getpgid(int(entry.name)) == group
            if mine and WRITER.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                writers.append(int(entry.name))
    return writers


def worker_stand_still(worker: Any, still: bool) -> int:
    """Stop the writers (SIGSTOP) if `still`, otherwise let them continue. Returns the number of writers."""
    writers = _writers()
    for writer in writers:
        os.kill(writer, signal.SIGSTOP if still else signal.SIGCONT)
    return len(writers)


def worker_graph_mode(worker: Any) -> str:
    """The CUDA graph mode of the worker, such as "FULL"."""
    return str(worker.vllm_config.compilation_config.cudagraph_mode.name)


def worker_python_us(worker: Any) -> float:
    """`python_us` on the engine's thread."""
    return python_us()


def worker_pin(worker: Any, cores: list[int]) -> None:
    """Restrict the engine's thread to these cores. Threads and processes that it starts inherit the restriction."""
    os.sched_setaffinity(0, cores)


def worker_sizes(worker: Any) -> tuple[int, int, int]:
    """(bytes of hooks per token, tokens per chunk, bytes of the payload of a chunk), for the whole selection."""
    layout = next(iter(_connector().exporter.layouts.values())).payload  # the first is that of the whole selection
    return layout.header_base, layout.chunk_tokens, layout.token_bytes * layout.chunk_tokens


def _profiled(worker: Any) -> dict[str, tuple[Any, str]]:
    """{name in a profile: (owner, name of its method)} of parts of a step; "ours: ..." for those of this package."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    from dmi_connector.engine.scheduler.tracker import Tracker
    from dmi_connector.engine.transfer import gpu_lane, staging
    from dmi_connector.engine.transfer.exporter import Exporter
    from dmi_connector.engine.transfer.gpu_lane import DeviceLane

    runner = type(worker.model_runner)
    return {
        "schedule": (Scheduler, "schedule"),
        "execute_model": (runner, "execute_model"),
        "sample_tokens": (runner, "sample_tokens"),
        "wait_for_tokens": (AsyncOutput, "get_output"),
        "update_from_output": (Scheduler, "update_from_output"),
        "ours: before_forward": (Exporter, "before_forward"),
        "ours: after_forward": (Exporter, "after_forward"),
        "ours: of these, gathers": (DeviceLane, "send"),
        "ours: of a gather, index": (staging.Index, "on_gpu"),
        "ours: of a gather, launch": (gpu_lane, "gather_rows"),
        "ours: of a gather, room": (staging.Staging, "reserve"),
        "ours: build_meta": (Tracker, "step"),
    }


def worker_profile(worker: Any, start: bool) -> dict[str, Any]:
    """Time methods on the engine's thread.

    start: True wraps the methods of `_profiled`, and returns {}. False unwraps them, and returns the statistics of
    their calls. "step" is the time from one call of `execute_model` to the next. Methods without calls are left out.
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
        worker.threads_before = _threads_ms()
        return {}
    before, after = worker.threads_before, _threads_ms()
    result: dict[str, Any] = {"threads_ms": {n: round(ms - before[n], 1) for n, ms in after.items() if n in before}}
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


def _threads_ms() -> dict[str, float]:
    """{name: CPU time in ms} of the threads of this process that Python knows."""
    ms_per_tick = 1000 / os.sysconf("SC_CLK_TCK")
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rsplit(")", 1)[1].split()
        found[thread.name] = found.get(thread.name, 0.0) + (int(fields[11]) + int(fields[12])) * ms_per_tick
    return found


def _statistics(seconds: list[float]) -> dict[str, Any]:
    """Statistics of the durations of calls, in microseconds."""
    values = sorted(s * 1e6 for s in seconds)
    return {
        "calls": len(values),
        "mean_us": round(sum(values) / len(values), 1),
        "median_us": round(values[len(values) // 2], 1),
        "p99_us": round(values[int(len(values) * 0.99)], 1),
        "max_us": round(values[-1], 1),
    }
