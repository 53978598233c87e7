# SPDX-License-Identifier: Apache-2.0
"""Reads planned rows of many shard files, in threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from dmi_connector.store.read.arrays.chunk import ABSENT, most_stored, read_piece
from dmi_connector.store.read.arrays.hook_array import HookArray, Piece, ShardPieces
from dmi_connector.store.read.files.store_files import HeldBytes
from dmi_connector.store.read.files.thread_pool import in_fetch_threads, in_threads, read_threads

_LEAST_JOB, _MOST_JOB = 1 << 20, 16 << 20
"""Minimum and maximum of the decoded bytes in one job of a thread."""
_MOST_RUN, _MOST_FETCHED = 8 << 20, 256 << 20
"""Maximum bytes of one request to an object store, and of decoded values that are planned at a time."""


def read_pieces(planned: Iterable[ShardPieces]) -> None:
    """Read all planned pieces, from any number of arrays and stores.

    Rows that an incomplete store lacks become zeros. Raises ValueError, naming the file, for a damaged chunk, and
    FileNotFoundError for a shard that a complete store lacks.
    """
    listed = list(planned)
    remote = [some for some in listed if some.array.files.remote]
    in_threads(_read_all, _jobs([some for some in listed if not some.array.files.remote] if remote else listed))
    if remote:
        _fetch(remote)


def read_blocks(plan: Callable[[int], Iterable[ShardPieces]], blocks: Sequence[int], nbytes: int) -> None:
    """Plan and read many blocks, each in the thread that reads it. Raises like `read_pieces`.

    plan: function that returns the pieces of a block. blocks: arguments for `plan`. nbytes: approximate number of
    decoded bytes per block. Plans are not all in memory at once, because that would trigger the garbage collector
    repeatedly.
    """
    if blocks and any(some.array.files.remote for some in plan(blocks[0])):
        most = max(1, _MOST_FETCHED // max(1, nbytes))
        for first in range(0, len(blocks), most):
            read_pieces(_plan_all(plan, blocks[first : first + most]))
        return
    size = max(1, min(len(blocks) // (4 * read_threads()), _MOST_JOB // max(1, nbytes)))

    def work(some: Sequence[int]) -> None:
        for block in some:
            for pieces in plan(block):
                _read_shard(pieces)

    in_threads(work, [blocks[first : first + size] for first in range(0, len(blocks), size)])


def _plan_all(plan: Callable[[int], Iterable[ShardPieces]], blocks: Sequence[int]) -> list[ShardPieces]:
    """Plan many blocks in threads, because a plan may have to request the metadata of its store."""
    planned: list[ShardPieces] = []
    in_fetch_threads(lambda block: planned.extend(plan(block)), blocks)
    return planned


def _jobs(planned: list[ShardPieces]) -> Iterator[list[ShardPieces]]:
    """Split the work into jobs. A job has some pieces of a large shard, or several small shards."""
    total = sum(len(some.pieces) * some.array.chunk_bytes for some in planned)
    limit = min(max(_LEAST_JOB, total // (2 * read_threads())), _MOST_JOB)
    job: list[ShardPieces] = []
    size = 0
    for some in planned:
        count = max(1, limit // some.array.chunk_bytes)
        for first in range(0, len(some.pieces), count):
            pieces = some.pieces[first : first + count]
            job.append(some._replace(pieces=pieces))
            size += len(pieces) * some.array.chunk_bytes
            if size >= limit:
                yield job
                job, size = [], 0
    if job:
        yield job


def _read_all(job: list[ShardPieces]) -> None:
    for some in job:
        _read_shard(some)


def _read_shard(some: ShardPieces) -> None:
    array = some.array
    path = array.path(some.segment, some.shard)
    try:
        file = array.files.open(path)
    except FileNotFoundError as error:
        _without(some, path, error)
        return
    with file:
        try:
            index = array.index(file, some.segment, some.shard)
            entries = [(index[piece.slot].tolist(), piece) for piece in some.pieces]
            for (offset, size), piece in sorted(entries, key=_offset):
                read_piece(array, file, offset, size, piece)
        except ValueError as error:
            raise _damaged(array, path, error) from error


def _without(some: ShardPieces, path: str, error: FileNotFoundError) -> None:
    """Handle a missing shard file: fill zeros, or raise FileNotFoundError for a complete store."""
    if some.array.complete:
        raise FileNotFoundError(
            f"{some.array.files}/{path} does not exist: the store was removed just now, or is damaged (dmi verify)"
        ) from error
    for piece in some.pieces:
        piece.out[piece.places] = 0


@contextlib.contextmanager
def _naming(array: HookArray, path: str) -> Iterator[None]:
    """Add the name of the file to a ValueError raised in the `with` block."""
    try:
        yield
    except ValueError as error:
        raise _damaged(array, path, error) from error


def _damaged(array: HookArray, path: str, error: ValueError) -> ValueError:
    return ValueError(f"{array.files}/{path}: {error}; dmi verify says what else is damaged")


class _Run(NamedTuple):
    """Adjacent chunks of one shard, fetched by one request. first: offset in the file. nbytes: number of bytes."""

    some: ShardPieces
    first: int
    nbytes: int
    entries: list[tuple[list[int], Piece]]


def _fetch(planned: list[ShardPieces]) -> None:
    """Read from an object store, with many concurrent requests: first all unknown indexes, then all chunks."""
    unknown = {
        (some.array, some.segment, some.shard): some
        for some in planned
        if not some.array.knows_index(some.segment, some.shard)
    }
    in_fetch_threads(_fetch_index, unknown.values())
    in_fetch_threads(_fetch_run, [run for some in planned for run in _runs(some)])


def _fetch_index(some: ShardPieces) -> None:
    array, path = some.array, some.array.path(some.segment, some.shard)
    try:
        with array.files.open(path) as file, _naming(array, path):
            array.index(file, some.segment, some.shard)
    except FileNotFoundError as error:
        _without(some, path, error)


def _runs(some: ShardPieces) -> Iterator[_Run]:
    """The requests for the pieces of a shard. Each request covers adjacent pieces, without gaps."""
    array, path = some.array, some.array.path(some.segment, some.shard)
    if not array.knows_index(some.segment, some.shard):  # the file is missing, in an incomplete store
        _without(some, path, FileNotFoundError(path))
        return
    index = array.known_index(some.segment, some.shard)
    entries = sorted(((index[piece.slot].tolist(), piece) for piece in some.pieces), key=_offset)
    run: _Run | None = None
    for entry in entries:
        (offset, size), piece = entry
        if offset == ABSENT or not 0 < size <= most_stored(array):
            with _naming(array, path):
                read_piece(array, HeldBytes(b""), offset, size, piece)  # writes zeros, or raises ValueError
            continue
        if run is not None and run.first + run.nbytes == offset and run.nbytes + size <= _MOST_RUN:
            run.entries.append(entry)
            run = run._replace(nbytes=run.nbytes + size)
            continue
        if run is not None:
            yield run
        run = _Run(some, offset, size, [entry])
    if run is not None:
        yield run


def _fetch_run(run: _Run) -> None:
    array, path = run.some.array, run.some.array.path(run.some.segment, run.some.shard)
    with array.files.open(path) as file, _naming(array, path):
        held = HeldBytes(file.read(run.first, run.nbytes), run.first)
        for (offset, size), piece in run.entries:
            read_piece(array, held, offset, size, piece)


def _offset(entry: tuple[list[int], Piece]) -> int:
    return entry[0][0]
