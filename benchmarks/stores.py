# SPDX-License-Identifier: Apache-2.0
"""GB/s written to finished stores, and the CPU time of the writers, without an engine: the ring is always full.

    python -m benchmarks.stores --out results.json [--directory /dev/shm/dmi-stores] [--writers 15] [--codec none]
        [--always-compress]

Captures hold normally distributed bf16 values of 36 layers with Qwen3-4B's widths, 2.56 MB per token, or the hooks of
--arrays. For comparison, `--writers` + 1 processes write as many bytes to plain files.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from dmi_connector.layout import HEADER_SENT_BYTES, ArraySpec, PayloadLayout
from dmi_connector.store.write.client import StoreClient
from dmi_connector.store.write.settings import WriteSettings

CHUNK = 128
"""Number of rows per chunk."""
FILE_CHUNKS = 4
"""Number of chunks per plain file."""


def processes(name: str, group: int) -> Iterator[tuple[int, float, float]]:
    """Yield (process id, user seconds, system seconds) of each process of a name in a process group."""
    ticks = os.sysconf("SC_CLK_TCK")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue  # the process has ended
        fields = text[text.rindex(")") + 2 :].split()
        if text[text.index("(") + 1 : text.rindex(")")] == name and int(fields[2]) == group:
            yield int(stat.parent.name), int(fields[11]) / ticks, int(fields[12]) / ticks


def cpu_seconds(name: str, group: int) -> tuple[float, float]:
    """(user seconds, system seconds) of all processes of a name in a process group."""
    found = list(processes(name, group))
    return sum(user for _, user, _ in found), sum(system for _, _, system in found)


def write_files(directory: str, number: int, layers: int, nbytes: int, barrier: Any) -> None:
    """Write plain files with chunks of one hook as a writer does, in a child process.

    number: number of the process. nbytes: bytes to write. barrier: waited for before the first write.
    """
    chunk_bytes = memoryview(np.random.default_rng(number).bytes(CHUNK * 2560 * 2))
    barrier.wait()
    for at in range(0, nbytes, FILE_CHUNKS * layers * len(chunk_bytes)):
        fd = os.open(f"{directory}/files-{number}-{at}", os.O_RDWR | os.O_CREAT, 0o600)
        for chunk in range(FILE_CHUNKS):
            os.pwritev(fd, [chunk_bytes] * layers, chunk * layers * len(chunk_bytes))
        os.close(fd)


def files_alone(directory: str, processes: int, layers: int, nbytes: int) -> float:
    """GB/s of `processes` processes that together write `nbytes` bytes to plain files in `directory`."""
    context = get_context("spawn")
    barrier = context.Barrier(processes + 1)
    own = nbytes // processes
    children = [
        context.Process(target=write_files, args=(directory, i, layers, own, barrier)) for i in range(processes)
    ]
    for child in children:
        child.start()
    barrier.wait()
    begin = time.perf_counter()
    for child in children:
        child.join()
    seconds = time.perf_counter() - begin
    written = sum(file.stat().st_size for file in Path(directory).iterdir())
    return written / seconds / 1e9


def feed(
    client: StoreClient,
    layout: PayloadLayout,
    number: int,
    paths: Sequence[str],
    length: int,
    rank: int = 0,
    ranks: int = 1,
) -> float:
    """Send captures of `length` rows as fast as the ring takes them. Returns the seconds until all stores are finished.

    number: the number that the client gave `layout`. paths: paths of the stores, whose names are their keys. Values are
    those that are in the ring already.
    """
    begin = time.perf_counter()
    captures = [
        client.open_capture(number, path, {"prompt_len": length}, key=Path(path).stem, rank=rank, ranks=ranks)
        for path in paths
    ]
    for first in range(0, length, layout.chunk_tokens):
        count = min(layout.chunk_tokens, length - first)
        for capture in captures:
            extent = client.ring.alloc(layout.token_bytes * count, None)
            assert extent is not None
            header = (
                client.ring.view(extent)[layout.header_base * count :]
                .view("<i4")
                .reshape(count, HEADER_SENT_BYTES // 4)
            )
            header[:, 0], header[:, 1] = 7, np.arange(first, first + count)
            capture.chunk(extent, first, count)
    for capture in captures:
        capture.close(length, token_ids=np.full(length, 7))
    assert client.flush(300)
    return time.perf_counter() - begin


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    p = common.parser("benchmarks.stores", __doc__)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--directory", default="/dev/shm/dmi-stores")
    p.add_argument("--writers", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    p.add_argument("--codec", default="none")
    p.add_argument("--always-compress", action="store_true", help="compress even if the ring is full")
    p.add_argument("--ring-bytes", type=int, default=8 << 30)
    p.add_argument("--captures", type=int, default=32)
    p.add_argument("--length", type=int, default=256, help="tokens per capture (default: %(default)s)")
    p.add_argument("--arrays", default=",".join(common.WIDTHS), help="comma-separated (default: %(default)s)")
    p.add_argument("--layers", type=int, default=common.QWEN3_LAYERS)
    p.add_argument("--repeat", type=int, default=3)
    args = p.parse_args(argv)
    header = common.header("benchmarks.stores", argv)
    arrays = [
        ArraySpec(name, "bfloat16", tuple(range(args.layers)), common.WIDTHS[name]) for name in args.arrays.split(",")
    ]
    layout = PayloadLayout(tuple(arrays), codec=args.codec)
    nbytes = layout.header_base * args.length * args.captures
    os.makedirs(args.directory)
    try:
        files = files_alone(args.directory, args.writers + 1, args.layers, nbytes)
        client = StoreClient(args.ring_bytes, args.writers, WriteSettings(always_compress=args.always_compress))
        memory = client.ring.memory
        memory[:] = common.activations(len(memory))
        number, rates, cpu = client.register(layout), [], []
        for turn in range(args.repeat + 1):  # the first round, which starts processes, does not count
            shutil.rmtree(args.directory)
            os.makedirs(args.directory)
            before = cpu_seconds("dmi-writer", client.group)
            paths = [f"{args.directory}/{turn}-{i}.zarr" for i in range(args.captures)]
            rates.append(nbytes / feed(client, layout, number, paths, args.length) / 1e9)
            cpu.append([after - b for after, b in zip(cpu_seconds("dmi-writer", client.group), before, strict=True)])
        assert client.stats()["complete"] == args.captures * (args.repeat + 1)
        stored = client.stats()["bytes_stored"] / client.stats()["bytes_raw"]
        client.shutdown()
    finally:
        shutil.rmtree(args.directory)
    results: dict[str, Any] = {
        "header": header,
        "GB": round(nbytes / 1e9, 3),
        "files_alone_GBps": common.three_digits(files),
        "GBps": common.three_digits(statistics.median(rates[1:])),
        "runs": [common.three_digits(rate) for rate in rates[1:]],
        "stored_share": round(stored, 3),
        "writers_user_s": round(statistics.median(user for user, _ in cpu[1:]), 2),
        "writers_system_s": round(statistics.median(system for _, system in cpu[1:]), 2),
    }
    print(results)
    common.save(args.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
