# SPDX-License-Identifier: Apache-2.0
"""The machine's own limits, measured in the run that cites them: link, memory, codecs, files."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common


def _rate(work: Callable[[], Any], nbytes: int, repeat: int = 5) -> float:
    """Median GB/s of `work`, which moves `nbytes`."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return nbytes / statistics.median(times) / 1e9


def gpu_limits() -> dict[str, float]:
    """GB/s of copies to pinned host memory and within the GPU (read + write); empty without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    nbytes = 1 << 30
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_(0, 255)
    other = torch.empty_like(device)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def timed(source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        def work() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        return work

    timed(device, host)()
    timed(device, other)()
    return {
        "link_d2h_GBps": _rate(timed(device, host), nbytes),
        "device_copy_GBps": _rate(timed(device, other), 2 * nbytes),
    }


def _codec_worker(codec: str, seconds: float) -> tuple[float, float]:
    """(GB/s of raw data, ratio) of one process encoding 128 x 2560 chunks with crc32c."""
    from dmi_connector.store.write.arrays import shard_writer as shard

    chunk = common.activations(128 * 2560 * 2).view(np.uint16).reshape(128, 2560)
    done, stored, begin = 0, 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        stored += shard.encode(chunk, codec).nbytes
        done += chunk.nbytes
    return done / (time.perf_counter() - begin) / 1e9, done / stored


def _file_worker(path: str, nbytes: int) -> float:
    data = common.activations(64 << 20).data
    begin = time.perf_counter()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    written = 0
    while written < nbytes:
        written += os.write(fd, data[: nbytes - written])
    os.close(fd)
    rate = nbytes / (time.perf_counter() - begin) / 1e9
    os.unlink(path)
    return rate


def cpu_limits(directory: str, processes: int, seconds: float = 1.0) -> dict[str, float]:
    """GB/s of memcpy, of each codec and of file writes in `directory`, for one process and for `processes`.

    seconds: for each codec. Files have 1 GiB, less if `seconds` is below 1. A virtual machine may get memory at its
    first use, which is slow, so the first files count apart (`file_first_GBps`).
    """
    data = common.activations(256 << 20)
    target = np.empty_like(data)
    limits = {"memcpy_GBps_1": _rate(lambda: np.copyto(target, data), data.nbytes)}
    Path(directory).mkdir(parents=True, exist_ok=True)
    file_bytes = int(min(1.0, seconds) * (1 << 30))
    with ProcessPoolExecutor(processes) as pool:
        for codec in ("none", "lz4", "zstd"):
            one, ratio = _codec_worker(codec, seconds)
            many = sum(r for r, _ in pool.map(_codec_worker, [codec] * processes, [seconds] * processes))
            limits |= {f"{codec}_GBps_1": one, f"{codec}_GBps_{processes}": many, f"{codec}_ratio": ratio}
        paths = [f"{directory}/limit-{i}" for i in range(processes)]
        for name in ("file_first_GBps", "file_GBps"):
            limits[f"{name}_1"] = _file_worker(paths[0], file_bytes)
            limits[f"{name}_{processes}"] = sum(pool.map(_file_worker, paths, [file_bytes] * processes))
    return limits
