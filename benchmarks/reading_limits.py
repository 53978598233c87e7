# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.reading` compares reads with: raw reads of the same files, the codec alone, a raw write."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import blosc

from dmi_connector import Capture, TokenDataset
from dmi_connector.captures.captures import Captures
from dmi_connector.store.read.arrays.chunk_reader import ShardPieces

HOOK, WIDTH, CHUNK = "resid_pre", 2560, 128
"""Of the stores that are read."""
THREADS = len(os.sched_getaffinity(0))
_PIECE = 1 << 20
"""Bytes that raw reads take at a time: fewer and more are slower here."""


def in_threads(work: Callable[[Any], object], items: list[Any]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, items))


def read_raw(path: str) -> None:
    """The chunks of one file into fresh memory: as much as their values take, so that malloc treats both alike."""
    fd = os.open(path, os.O_RDONLY)
    size = os.fstat(fd).st_size // (CHUNK * WIDTH * 2) * CHUNK * WIDTH * 2
    memory = np.empty(size, np.uint8).data
    for at in range(0, size, _PIECE):
        os.preadv(fd, [memory[at : at + _PIECE]], at)
    os.close(fd)


def shard_files(captures: Captures) -> list[str]:
    """The shard files of the hook."""
    return [
        str(path)
        for info in captures.infos
        for path in sorted(Path(str(info.store), HOOK, "c").rglob("*"))
        if path.is_file()
    ]


def frames(captures: Captures) -> list[bytes]:
    """Every encoded chunk, without its crc32c."""
    found = []
    for capture in captures:
        array = capture._values.array(HOOK)
        with array.files.open(array.path(0, 0)) as file:
            for offset, size in array.index(file, 0, 0).reshape(-1, 2).tolist():
                found.append(file.read(offset, size - 4))
    return found


def decode_alone(encoded: list[bytes]) -> None:
    """The codec alone, into memory that each thread uses again."""

    def work(share: list[bytes]) -> None:
        target = np.empty(CHUNK * WIDTH * 2, np.uint8)
        for frame in share:
            blosc.decompress(frame, target)

    in_threads(work, [encoded[i::THREADS] for i in range(THREADS)])


def decode_anew(encoded: list[bytes], stores: int) -> None:
    """The codec alone, store by store into new memory, which all threads share as those of a reader do."""
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
    """Read the planned chunks whole, raw, into `out` [chunks, bytes of a chunk and more]. Returns their number.

    Compressed ones are decoded by the codec alone.
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
    """All chunks of a store."""
    array = capture._values.array(HOOK)
    return array.plan(range(array.shape[0]), array.rows(None), np.empty(array.shape, np.uint16))


def epoch_chunks(data: TokenDataset) -> list[ShardPieces]:
    """The chunks of the first epoch in their order."""
    (view,) = data.views.values()
    out = view.buffer(CHUNK)
    store, first, count = data._blocks
    blocks = data._stream(0, 0, 1).blocks.tolist()
    return [p for b in blocks for p in view.plan_block(int(store[b]), int(first[b]), np.arange(count[b]), out)]


def write_alone(path: Path, values: np.ndarray, nbytes: int) -> None:
    """Write a new file of `nbytes` from the same memory again and again, and remove it."""
    with open(path, "wb", buffering=0) as file:
        for at in range(0, nbytes, values.nbytes):
            file.write(values[: nbytes - at].data)
    path.unlink()
