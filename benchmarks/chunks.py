# SPDX-License-Identifier: Apache-2.0
"""What the chunk size costs: writing, stored size, and reading little or much, by codec.

    python -m benchmarks.chunks --out benchmarks/results/cpu-chunks.json

One writer writes two arrays of a 36-layer model, 1,024 tokens of normal bf16 values (no structure: the worst case for a
codec). Then `open_capture` reads the store: one token of every layer, and every token of one layer.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import common
from dmi_connector.captures.capture import open_capture
from dmi_connector.layout import HEADER_SENT_BYTES, ArraySpec, PayloadLayout
from dmi_connector.store.write.coordinator.captures import Captures
from dmi_connector.store.write.ring import Ring
from dmi_connector.store.write.settings import WriteSettings

TOKENS = 1024
CHUNKS = (16, 32, 64, 128, 256, 512)
CODECS = ("none", "lz4", "zstd")


def _seconds(work: Callable[[], object], repeat: int) -> float:
    """Median seconds of `work`."""
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
    layout = PayloadLayout(arrays, chunk, TOKENS, codec)
    payload = common.activations(layout.header_base * chunk)
    ring = Ring(max(64 << 20, 3 * layout.token_bytes * chunk))
    captures = Captures(ring, 1, WriteSettings(), lambda _record: None)
    number = captures.register(layout)
    path = directory / f"{codec}-{chunk}.zarr"
    ids, times = np.zeros(TOKENS, np.int32), []
    for _ in range(repeat + 1):  # the first warms up
        shutil.rmtree(path, ignore_errors=True)
        begin = time.perf_counter()
        record = captures.open(number, str(path), {"prompt_len": TOKENS})
        for first in range(0, TOKENS, chunk):
            extent = ring.alloc(layout.token_bytes * chunk)
            assert extent is not None
            memory = ring.view(extent)
            memory[: payload.nbytes] = payload
            header = memory[payload.nbytes :].view("<i4").reshape(chunk, HEADER_SENT_BYTES // 4)
            header[:, 0], header[:, 1] = 0, np.arange(first, first + chunk)
            captures.chunk(record, extent, first, chunk)
            ring.release(extent)
        captures.close(record, TOKENS, token_ids=ids)
        captures.flush()
        times.append(time.perf_counter() - begin)
    assert captures.stats()["complete"] == repeat + 1
    captures.shutdown()
    nbytes = TOKENS * layout.header_base
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    capture = open_capture(path, timeout=0)
    return {
        "write_GBps": nbytes / statistics.median(times[1:]) / 1e9,
        "ratio": nbytes / size,
        "read_one_token_all_layers_ms": 1e3 * _seconds(lambda: capture.numpy("resid_pre", tokens=[500]), repeat),
        "read_one_layer_ms": 1e3 * _seconds(lambda: capture.numpy("resid_pre", layer=17), repeat),
        "full_row_of_2.56MB_two_chunks_MB": 2 * chunk * 2.56,
    }


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    p = common.parser("benchmarks.chunks", __doc__)
    p.add_argument("--out", default="benchmarks/results/chunks.json")
    p.add_argument("--directory", default="/dev/shm/dmi-chunks")
    p.add_argument("--repeat", type=int, default=5)
    args = p.parse_args(argv)
    header = common.header("benchmarks.chunks", argv)
    directory = Path(args.directory)
    directory.mkdir(parents=True, exist_ok=True)
    found = {codec: {chunk: measure(directory, codec, chunk, args.repeat) for chunk in CHUNKS} for codec in CODECS}
    shutil.rmtree(directory)
    common.save(args.out, {"header": header, "chunks": found})
    for codec, by_chunk in found.items():
        for chunk, numbers in by_chunk.items():
            print(codec, chunk, {k: round(v, 2) for k, v in numbers.items()})


if __name__ == "__main__":
    main()
