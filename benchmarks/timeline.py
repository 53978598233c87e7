# SPDX-License-Identifier: Apache-2.0
"""What the GPU did during a decode: how long it computed and waited, and how long our kernels took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

OURS = ("write_rows_kernel", "reduce_rows_kernel", "reduce_layers_kernel", "gather_rows_kernel", "summary_kernel")
_TOP = 12


class Event(NamedTuple):
    """One operation of the GPU; times in us."""

    name: str
    start: float
    duration: float


def summarise(events: Iterable[Event]) -> dict[str, Any]:
    """Milliseconds from the first kernel's start to the last one's end (window), with a kernel running (busy), of each
    kernel of ours and of the longest others, and of copies. Copies run beside kernels and do not count as busy.
    """
    copies, kernels = 0.0, []
    for event in sorted(events, key=lambda e: e.start):
        if event.name.startswith(("Memcpy", "Memset")):
            copies += event.duration
        else:
            kernels.append(event)
    busy, end = 0.0, kernels[0].start if kernels else 0.0
    times: defaultdict[str, float] = defaultdict(float)
    for name, start, duration in kernels:
        times[name] += duration
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    ours = {name: times.pop(name) for name in OURS if name in times}
    top = dict(sorted(times.items(), key=lambda item: -item[1])[:_TOP])
    window = end - kernels[0].start if kernels else 0.0
    parts: dict[str, Any] = {"window": window, "busy": busy, "copies": copies, "ours": ours, "others": top}
    return {"kernels": len(kernels)} | {
        f"{name}_ms": {k: round(v / 1e3, 3) for k, v in value.items()} if isinstance(value, dict) else value / 1e3
        for name, value in parts.items()
    }


def worker_timeline(worker: Any, start: bool) -> dict[str, Any]:
    """Runs inside the worker: record what the GPU does from the first call on, and summarise it at the second. Empty
    without a GPU.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    if start:
        worker.dmi_timeline = profile(activities=[ProfilerActivity.CUDA])
        worker.dmi_timeline.start()
        return {}
    recorded = worker.dmi_timeline
    del worker.dmi_timeline
    recorded.stop()
    found = [e for e in recorded.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    return summarise(Event(e.name(), e.start_ns() / 1e3, e.duration_ns() / 1e3) for e in found)
