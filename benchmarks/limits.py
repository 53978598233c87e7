# SPDX-License-Identifier: Apache-2.0
"""Measures what the machine can reach, for comparison with results: link, memory, codecs, files, and raw reads.

Each program measures these limits in the same run as its results.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import blosc

from benchmarks import common
from dmi_connector import Capture, TokenDataset
from dmi_connector.captures.captures import Captures
from dmi_connector.store.read.arrays.chunk_reader import ShardPieces

# ---- of the machine ------------------------------------------------------------------------------------------------


def _rate(work: Callable[[], Any], nbytes: int, repeat: int = 5) -> float:
    """Median GB/s of `work`, which moves `nbytes` bytes."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return nbytes / statistics.median(times) / 1e9


def gpu_limits() -> dict[str, float]:
    """GB/s of copies to pinned host memory, and within the GPU (bytes read and written); {} without a GPU."""
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
    """(GB/s of raw bytes, raw / encoded bytes) of one process that encodes chunks of 128 x 2560 values with crc32c."""
    from dmi_connector.store.write.arrays import shard_writer as shard

    chunk = common.activations(128 * 2560 * 2).view(np.uint16).reshape(128, 2560)
    done, stored, begin = 0, 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        stored += shard.encode(chunk, codec).nbytes
        done += chunk.nbytes
    return done / (time.perf_counter() - begin) / 1e9, done / stored


def _file_worker(path: str, nbytes: int) -> float:
    """GB/s of one process that writes a file of `nbytes` bytes. Removes the file."""
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
    """GB/s of memcpy, of each codec, and of writing files in `directory`, for one process and for `processes`.

    seconds: duration for each codec. Files have 1 GiB, or less if `seconds` is below 1. The first use of memory may be
    slow on a virtual machine, so the first files are listed separately (`file_first_GBps`).
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


# ---- of reads: raw reads of the same files, the codec alone, a raw write -------------------------------------------

HOOK, WIDTH, CHUNK = "resid_pre", 2560, 128
"""Hook, width and rows per chunk of the stores that are read."""
THREADS = len(os.sched_getaffinity(0))
_PIECE = 1 << 20
"""Number of bytes that raw reads read at a time. Smaller and larger pieces were slower."""


def in_threads(work: Callable[[Any], object], items: list[Any]) -> None:
    """Call `work` on each item, in THREADS threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, items))


def read_raw(path: str) -> None:
    """Read the chunks of one file into new memory.

    The memory has the size of the decoded values, so that malloc treats it like the memory of a reader.
    """
    fd = os.open(path, os.O_RDONLY)
    size = os.fstat(fd).st_size // (CHUNK * WIDTH * 2) * CHUNK * WIDTH * 2
    memory = np.empty(size, np.uint8).data
    for at in range(0, size, _PIECE):
        os.preadv(fd, [memory[at : at + _PIECE]], at)
    os.close(fd)


def shard_files(captures: Captures) -> list[str]:
    """The paths of the shard files of HOOK."""
    return [
        str(path)
        for info in captures.infos
        for path in sorted(Path(str(info.store), HOOK, "c").rglob("*"))
        if path.is_file()
    ]


def frames(captures: Captures) -> list[bytes]:
    """All encoded chunks, without their crc32c."""
    found = []
    for capture in captures:
        array = capture._values.array(HOOK)
        with array.files.open(array.path(0, 0)) as file:
            for offset, size in array.index(file, 0, 0).reshape(-1, 2).tolist():
                found.append(file.read(offset, size - 4))
    return found


def decode_alone(encoded: list[bytes]) -> None:
    """Decode chunks with the codec alone, into memory that each thread reuses."""

    def work(share: list[bytes]) -> None:
        target = np.empty(CHUNK * WIDTH * 2, np.uint8)
        for frame in share:
            blosc.decompress(frame, target)

    in_threads(work, [encoded[i::THREADS] for i in range(THREADS)])


def decode_anew(encoded: list[bytes], stores: int) -> None:
    """Decode chunks with the codec alone, into new memory for each store.

    All threads work on the same store, like the threads of a reader.
    """
    chunks = len(encoded) // stores
    with ThreadPoolExecutor(THREADS) as pool:
        for first in range(0, len(encoded), chunks):
            out = np.empty((chunks, CHUNK * WIDTH * 2), np.uint8)
            pairs = list(zip(encoded[first : first + chunks], out, strict=True))
            share = -(-chunks // (2 * THREADS))
            list(pool.map(_decode_pairs, [pairs[at : at + share] for at in range(0, chunks, share)]))


def _decode_pairs(pairs: list[tuple[bytes, np.ndarray]]) -> None:
    for frame, target in pairs:
        blosc.decompress(frame, target)


def chunks_in_order(planned: list[ShardPieces], out: np.ndarray) -> int:
    """Read the planned chunks into `out`, uint8 [n, at least the bytes of a chunk]. Returns the number of chunks.

    Chunks are read whole and in order. Compressed chunks are decoded with the codec alone. Chunk i is written to row i
    modulo n.
    """
    places = []
    for some in planned:
        with some.array.files.open(path := some.array.path(some.segment, some.shard)) as file:
            index = some.array.index(file, some.segment, some.shard)
        slots = sorted(index[piece.slot].tolist() for piece in some.pieces)
        places.append((f"{some.array.files}/{path}", slots, some.array.codec.compresses))

    def work(share: list[tuple[int, str, list[list[int]], bool]]) -> None:
        packed = np.empty(CHUNK * WIDTH * 2 + 64, np.uint8)
        for at, path, slots, compressed in share:
            fd = os.open(path, os.O_RDONLY)
            for i, (offset, size) in enumerate(slots):
                target = packed if compressed else out[(at + i) % len(out)]
                os.preadv(fd, [target[:size].data], offset)
                if compressed:
                    blosc.decompress(target[: size - 4], out[(at + i) % len(out), : CHUNK * WIDTH * 2])
            os.close(fd)

    starts = np.cumsum([0, *(len(slots) for _, slots, _ in places)]).tolist()
    jobs = [(start, *place) for start, place in zip(starts, places, strict=False)]
    size = -(-len(jobs) // (4 * THREADS))
    in_threads(work, [jobs[i : i + size] for i in range(0, len(jobs), size)])
    return int(starts[-1])


def whole_chunks(capture: Capture) -> Iterator[ShardPieces]:
    """Plan to read all chunks of a store."""
    array = capture._values.array(HOOK)
    return array.plan(range(array.shape[0]), array.rows(None), np.empty(array.shape, np.uint16))


def epoch_chunks(data: TokenDataset) -> list[ShardPieces]:
    """Plan to read the chunks of the first epoch, in the order of the epoch."""
    (view,) = data.views.values()
    out = view.buffer(CHUNK)
    store, _, count = data._blocks
    begin = np.cumsum(count) - count
    blocks = data.order.stream(0, 0, 1).blocks.tolist()
    return [p for b in blocks for p in view.plan_block(int(store[b]), int(begin[b]), np.arange(count[b]), out)]


def write_alone(path: Path, values: np.ndarray, nbytes: int) -> None:
    """Write a new file of `nbytes` bytes, which repeats `values`, and remove it."""
    with open(path, "wb", buffering=0) as file:
        for at in range(0, nbytes, values.nbytes):
            file.write(values[: nbytes - at].data)
    path.unlink()
