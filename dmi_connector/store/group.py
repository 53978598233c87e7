# SPDX-License-Identifier: Apache-2.0
"""The arrays of one capture that one writer process owns: chunk payloads in, shard files and metadata out."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dmi_connector.store import schema
from dmi_connector.store.journal import Journal
from dmi_connector.store.paths import no_follow
from dmi_connector.store.schema import ArraySpec, Grid
from dmi_connector.store.shard import FileCache, ShardWriter, crc32c, encode

FileList = dict[str, list[int]]


@dataclass
class GroupStats:
    """What a group has done so far. `failed` holds token ranges [start, stop) that could not be written."""

    bytes_raw: int = 0
    bytes_stored: int = 0
    failed: list[list[int]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def note(self, error: Exception) -> str:
        """Keep an error (once) and give its text. A full disk fails for each file alike: then none is named."""
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"{type(error).__name__}: [Errno {error.errno}] {error.strerror}"
        if text not in self.errors:
            self.errors.append(text)
        return text


def write_file(root: str, path: str, data: bytes, files: FileList) -> None:
    """Write one small file of a store and list its size and crc32c in `files`. Raises OSError."""
    full = os.path.join(root, path)
    os.makedirs(os.path.dirname(full), exist_ok=True)
    with open(full, "wb", opener=no_follow) as f:
        f.write(data)
    files[path] = [len(data), crc32c(data)]


def plain_array(root: str, name: str, dtype: str, data: bytes, dimension: str, files: FileList) -> None:
    """Write a 1-D array (docs/FORMAT.md, section 4): its one chunk with a crc32c, and its metadata."""
    length = len(data) // schema.ITEMSIZE[dtype]
    if length:
        write_file(root, f"{name}/c/0", data + crc32c(data).to_bytes(4, "little"), files)
    write_file(root, f"{name}/zarr.json", schema.dump(schema.plain_document(dtype, length, dimension)), files)


class GroupWriter:
    """Writes some arrays of one capture into its partial directory.

    root: the partial directory, created if missing. bases: byte offset of each array for one token of a chunk
    payload: array j of `count` tokens lies at `bases[j] * count`. about: facts of the capture for the journal.
    """

    def __init__(
        self,
        root: str,
        arrays: Sequence[ArraySpec],
        bases: Sequence[int],
        chunk_tokens: int,
        segment_tokens: int,
        codec: str,
        cache: FileCache,
        about: dict[str, Any] | None = None,
    ) -> None:
        schema.check_chunking(chunk_tokens, segment_tokens, codec)
        self.stats = GroupStats()
        self._root, self._codec, self._cache = root, codec, cache
        self._chunk, self._segment = chunk_tokens, segment_tokens
        self._arrays = list(zip(arrays, bases, strict=True))
        self._by_name = {spec.name: spec for spec in arrays}
        self._shards: dict[str, ShardWriter] = {}
        self._files: FileList = {}
        self._end = 0  # one past the last row received
        self._short_end: int | None = None  # end of a chunk shorter than chunk_tokens, which must be the last
        self._positions: dict[str, dict[int, int]] = {}
        # All but the segment directories are made here and only here: after an abort removed them, late
        # chunks must fail rather than bring them back.
        for spec in arrays:
            os.makedirs(os.path.join(root, spec.name, "c" if spec.per_sample else "c/0"), exist_ok=True)
        self._journal = Journal(root, arrays, chunk_tokens, segment_tokens, codec, cache, about)

    def chunk(self, payload: np.ndarray, first: int, count: int, token_ids: bytes = b"") -> None:
        """Write token rows [first, first + count) of every array from `payload` (uint8).

        token_ids: int32, for the journal. Raises OSError, and ValueError for rows off the chunk grid; the range then
        counts as failed.
        """
        places = []
        try:
            if len(token_ids) not in (0, 4 * count):
                raise ValueError(f"{len(token_ids)} bytes of token ids came with {count} rows")
            if first % self._chunk or not 0 < count <= self._chunk or self._short_end not in (None, first + count):
                raise ValueError(f"rows [{first}, {first + count}) are off the grid of {self._chunk}-token chunks")
            self._end = max(self._end, first + count)
            if count < self._chunk:
                self._short_end = first + count
            for spec, base in self._arrays:
                if not spec.per_sample:
                    at, size = base * count, spec.token_bytes * count
                    places.append(self._append(spec, payload[at : at + size], first, count))
        except Exception:
            self.stats.failed.append([first, first + count])
            raise
        self._journal.chunk(first, count, places, token_ids)

    def _append(self, spec: ArraySpec, data: np.ndarray, first: int, count: int) -> bytes:
        """Append the chunk of one array to its shard; gives its places for the journal."""
        block = data.view(f"u{spec.itemsize}").reshape(spec.n_layers, count, spec.local_width)
        rows = self._chunk if first else count  # a first chunk that is short is the only one, and the grid narrows
        segment, within = divmod(first, self._segment)
        shard = self._shard(spec, segment, (spec.n_layers, self._segment // self._chunk))
        slot = within // self._chunk
        slots = [(layer, slot) for layer in range(spec.n_layers)]
        stored = shard.append(slots, (encode(layer, self._codec, rows) for layer in block))
        self.stats.bytes_raw += data.nbytes
        self.stats.bytes_stored += stored
        places: bytes = shard.index[:, slot].tobytes()
        if shard.full:
            self._finish(spec, segment, None)
        return places

    def rows(self, payload: np.ndarray, name: str, first: int, count: int, positions: Sequence[int]) -> None:
        """Write rows [first, first + count) of a per-sample array, with the token position of each."""
        spec = self._by_name[name]
        size = count * spec.token_bytes
        if not spec.per_sample or len(positions) != count or len(payload) < size:
            raise ValueError(f"{count} rows of {name!r} do not fit {len(payload)} bytes and {len(positions)} positions")
        block = payload[:size].view(f"u{spec.itemsize}").reshape(count, spec.local_width)
        places = []
        for i in range(count):
            segment, slot = divmod(first + i, schema.SAMPLES_PER_SHARD)
            shard = self._shard(spec, segment, (schema.SAMPLES_PER_SHARD,))
            self.stats.bytes_stored += shard.append([(slot,)], [encode(block[i], self._codec)])
            self.stats.bytes_raw += spec.token_bytes
            self._positions.setdefault(name, {})[first + i] = positions[i]
            places.append(shard.index[slot].tobytes())
            if shard.full:
                self._finish(spec, segment, None)
        self._journal.rows(name, first, positions, places)

    def _shard(self, spec: ArraySpec, segment: int, slots: tuple[int, ...]) -> ShardWriter:
        path = schema.shard_path(spec, segment)
        if path in self._files:
            raise ValueError(f"{path} is finished already: rows were sent twice")
        if path not in self._shards:
            full = os.path.join(self._root, path)
            with contextlib.suppress(FileExistsError):  # another rank made it
                os.mkdir(os.path.dirname(full))
            self._shards[path] = ShardWriter(full, slots, self._cache)
        return self._shards[path]

    def _finish(self, spec: ArraySpec, segment: int, slots: tuple[int, ...] | None) -> None:
        path = schema.shard_path(spec, segment)
        self._files[path] = list(self._shards[path].close(slots))
        del self._shards[path]

    def close(self, length: int, samples: dict[str, int]) -> FileList:
        """Write the remaining indexes and the metadata with the true shapes.

        Returns the finished files. Errors land in `stats`; an array with one gets no metadata, so that it
        cannot be read as whole.
        """
        self._journal.close(length, samples)
        try:
            if self._end > length or self._short_end not in (None, length):
                raise ValueError(f"rows up to {self._short_end or self._end} were written, but the length is {length}")
        except ValueError as error:
            self.stats.note(error)
            self.release()
            return {}
        grid = schema.effective_grid(length, self._chunk, self._segment)
        for spec, _ in self._arrays:
            try:
                self._close_array(spec, samples.get(spec.name, 0) if spec.per_sample else length, grid)
            except (OSError, ValueError) as error:
                self.stats.note(error)
                if spec.rank:  # rank 0 writes the metadata, so readers see this rank's columns as zeros
                    self.stats.failed.append([0, length])
        self.release()  # what could not be finished
        return self._files

    def _close_array(self, spec: ArraySpec, length: int, grid: Grid) -> None:
        slots = None if spec.per_sample else (spec.n_layers, grid.chunks)
        prefix = spec.name + "/c/"
        if spec.per_sample:
            self._drop_surplus(spec, length)
        for path in [p for p in self._shards if p.startswith(prefix)]:
            self._finish(spec, int(path.split("/")[-2]), slots)
        if spec.rank:
            return  # metadata is the owner of shard 0's to write
        if spec.per_sample:
            known = self._positions.get(spec.name, {})
            if length and not known:
                raise ValueError(f"{spec.name}: none of its {length} samples was written")
            positions = np.array([known.get(i, -1) for i in range(length)], "<i4")
            plain_array(self._root, f"{spec.name}_positions", "int32", positions.tobytes(), "sample", self._files)
            if len(known) < length:
                lost = f"{spec.name}: {length - len(known)} of {length} samples are lost, their position is -1"
                self.stats.errors.append(lost)
        document = schema.hook_document(spec, length, grid, self._codec)
        write_file(self._root, f"{spec.name}/zarr.json", schema.dump(document), self._files)

    def _drop_surplus(self, spec: ArraySpec, length: int) -> None:
        """Forget rows past `length`: the engine may sample once more before it learns that a request has ended."""
        known = self._positions.get(spec.name, {})
        for index in [i for i in known if i >= length]:
            del known[index]
        first = -(-length // schema.SAMPLES_PER_SHARD)
        for path in [p for p in self._shards if p.startswith(spec.name + "/c/")]:
            if int(path.split("/")[-2]) >= first:
                self._shards.pop(path).release()
                os.unlink(os.path.join(self._root, path))

    def release(self) -> None:
        """Close all files as they are."""
        for shard in self._shards.values():
            shard.release()
        self._shards.clear()
        self._journal.release()
