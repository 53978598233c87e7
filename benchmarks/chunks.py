# SPDX-License-Identifier: Apache-2.0
"""What the chunk size costs: writing, stored size, and reading little or much, by codec.

    python -m benchmarks.chunks --out benchmarks/results/chunks-cpu.json

One writer's work (`GroupWriter`) on two arrays of a 36-layer model, bf16 normal values (no structure: the worst case
for a codec), 1,024 tokens. Reads are of the finished store through `open_capture`: one token of every layer, and one
layer's every token.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.report import machine
from dmi_connector.store.capture import CaptureSpec
from dmi_connector.store.persist import Persistence
from dmi_connector.store.persist_settings import PersistSettings
from dmi_connector.store.reader import open_capture
from dmi_connector.store.schema import ArraySpec

TOKENS = 1024
CHUNKS = (16, 32, 64, 128, 256, 512)
CODECS = ("none", "lz4", "zstd")


def _seconds(work: Any, repeat: int) -> float:
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure(directory: Path, codec: str, chunk: int, repeat: int) -> dict[str, float]:
    """Write one store `repeat` times, then read it."""
    arrays = (
        ArraySpec("resid_pre", "bfloat16", tuple(range(36)), 2560),
        ArraySpec("k", "bfloat16", tuple(range(36)), 256),
    )
    token_bytes = sum(a.token_bytes for a in arrays)
    values = np.random.default_rng(0).standard_normal(token_bytes * chunk // 2, dtype=np.float32)
    payload = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    persistence = Persistence(max(64 << 20, 3 * payload.nbytes), 1, PersistSettings(codec, chunk, TOKENS))
    path = directory / f"{codec}-{chunk}.zarr"
    times = []
    for _ in range(repeat + 1):  # the first warms up
        shutil.rmtree(path, ignore_errors=True)
        begin = time.perf_counter()
        handle = persistence.open_capture(CaptureSpec(str(path), arrays, {"prompt_len": TOKENS}))
        for first in range(0, TOKENS, chunk):
            extent = persistence.alloc(payload.nbytes)
            assert extent is not None
            persistence.ring.view(extent)[:] = payload
            handle.chunk(extent, first, chunk)
        handle.close(TOKENS, token_ids=np.zeros(TOKENS, np.int32))
        persistence.flush()
        times.append(time.perf_counter() - begin)
    persistence.shutdown()
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    capture = open_capture(path, timeout=0)
    return {
        "write_GBps": TOKENS * token_bytes / statistics.median(times[1:]) / 1e9,
        "ratio": TOKENS * token_bytes / size,
        "read_one_token_all_layers_ms": 1e3 * _seconds(lambda: capture.numpy("resid_pre", tokens=[500]), repeat),
        "read_one_layer_ms": 1e3 * _seconds(lambda: capture.numpy("resid_pre", layer=17), repeat),
        "full_row_of_2.56MB_two_chunks_MB": 2 * chunk * 2.56,
    }


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.chunks", description=__doc__.splitlines()[0])
    p.add_argument("--out", default="benchmarks/results/chunks.json")
    p.add_argument("--directory", default="/dev/shm/dmi-chunks")
    p.add_argument("--repeat", type=int, default=5)
    args = p.parse_args()
    directory = Path(args.directory)
    directory.mkdir(parents=True, exist_ok=True)
    found = {codec: {chunk: measure(directory, codec, chunk, args.repeat) for chunk in CHUNKS} for codec in CODECS}
    shutil.rmtree(directory)
    command = f"python -m benchmarks.chunks --repeat {args.repeat}"
    common.save(args.out, {"command": command, "machine": machine(), "chunks": found})
    for codec, by_chunk in found.items():
        for chunk, numbers in by_chunk.items():
            print(codec, chunk, {k: round(v, 2) for k, v in numbers.items()})


if __name__ == "__main__":
    main()
