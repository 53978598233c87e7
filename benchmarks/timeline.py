# SPDX-License-Identifier: Apache-2.0
"""What the GPU did during a decode: how long it computed and waited, and how long our kernels took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

OURS = ("write_rows_kernel", "reduce_rows_kernel", "reduce_layers_kernel", "gather_rows_kernel", "summary_kernel")
_TOP = 30
_NAME_LENGTH = 80
GAPS = {"under 2 us": 2.0, "2 to 10 us": 10.0, "10 to 50 us": 50.0, "50 to 200 us": 200.0, "longer": float("inf")}


class Event(NamedTuple):
    """One operation of the GPU; times in us."""

    name: str
    start: float
    duration: float


def summarise(events: Iterable[Event]) -> dict[str, Any]:
    """What ran between the first kernel's start and the last one's end, times in ms.

    window: how long that was. busy: with a kernel running. copies: beside kernels, they do not count as busy. gaps:
    [number, ms] of the times without a kernel, by length. ours, others: [number, ms] of each kernel of ours and of
    those of others that took longest.
    """
    copies, kernels = 0.0, []
    for event in sorted(events, key=lambda e: e.start):
        if event.name.startswith(("Memcpy", "Memset")):
            copies += event.duration
        else:
            kernels.append(event)
    busy, end = 0.0, kernels[0].start if kernels else 0.0
    ours: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    others, gaps = ours.copy(), ours.copy()
    for name, start, duration in kernels:
        _count(ours if name in OURS else others, name[:_NAME_LENGTH], duration)
        if start > end:
            _count(gaps, next(length for length, most in GAPS.items() if start - end < most), start - end)
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    longest = sorted(others, key=lambda name: -others[name][1])[:_TOP]
    window = end - kernels[0].start if kernels else 0.0
    return {
        "kernels": len(kernels),
        "window_ms": _ms(window),
        "busy_ms": _ms(busy),
        "copies_ms": _ms(copies),
        "gaps": {length: [gaps[length][0], _ms(gaps[length][1])] for length in GAPS if length in gaps},
        "ours": {name: [count, _ms(us)] for name, (count, us) in ours.items()},
        "others": {name: [others[name][0], _ms(others[name][1])] for name in longest},
    }


def _count(into: dict[str, list[float]], name: str, us: float) -> None:
    into[name][0] += 1
    into[name][1] += us


def _ms(us: float) -> float:
    return round(us / 1e3, 3)


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
