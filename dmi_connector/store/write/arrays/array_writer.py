# SPDX-License-Identifier: Apache-2.0
"""Writes the arrays of one capture that are assigned to one writer process, from payloads to files and metadata."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dmi_connector.codecs import CODECS
from dmi_connector.dtypes import ITEMSIZE
from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.store.format import schema
from dmi_connector.store.format.checksum import crc32c, file_checksum
from dmi_connector.store.format.completeness import Cause, Loss, Ranges, add_loss
from dmi_connector.store.format.paths import no_follow
from dmi_connector.store.format.schema import Grid
from dmi_connector.store.write.arrays.journal import Journal
from dmi_connector.store.write.arrays.plain import Costs
from dmi_connector.store.write.arrays.shard_writer import Encoded, FileCache, ShardWriter, encode
from dmi_connector.store.write.arrays.source import SourceStore

FileList = dict[str, list[int]]
"""Path in the store -> [size, checksum]: docs/FORMAT.md, section 5."""


def write_file(root: str, path: str, data: bytes, files: FileList, tail: bytes = b"") -> None:
    """Write one small file of a store: `data`, then `tail`. Adds the file to `files`. Raises OSError.

    tail: bytes that the checksum of the file does not cover.
    """
    full = os.path.join(root, path)
    os.makedirs(os.path.dirname(full), exist_ok=True)
    with open(full, "wb", opener=no_follow) as f:
        f.write(data + tail)
    files[path] = [len(data) + len(tail), file_checksum(path, data)]


def plain_array(root: str, name: str, dtype: str, data: bytes, dimension: str, files: FileList) -> None:
    """Write a 1-D array (docs/FORMAT.md, section 4): its one chunk with a crc32c, and its metadata. Raises OSError."""
    length = len(data) // ITEMSIZE[dtype]
    if length:
        write_file(root, f"{name}/c/0", data, files, crc32c(data).to_bytes(4, "little"))
    write_file(root, f"{name}/zarr.json", schema.dump(schema.plain_document(dtype, length, dimension)), files)


def write_loss(error: Exception) -> Loss:
    """The loss that a failed write causes. If the disk is full, every file fails, so the loss names no file."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        text = f"{type(error).__name__}: [Errno {error.errno}] {error.strerror}"
    return Loss.of(Cause.WRITE_FAILED if isinstance(error, OSError) else Cause.WRITE_REFUSED, error=text)


def not_borrowed(final: str, error: str, rows: Ranges) -> Loss:
    """The loss of rows that could not be copied from the store `final`."""
    return Loss.of(Cause.NOT_BORROWED, rows, store=os.path.basename(final), error=error)


def metadata_elsewhere(spec: ArraySpec, leads: bool) -> bool:
    """Whether another rank or writer writes an array's metadata. Readers then read rows without a chunk as zeros."""
    return spec.rank > 0 or not leads


class ArrayWriter:
    """Writes arrays of one capture into its partial directory, which is created if missing.

    root: the partial directory. numbers: indexes of the arrays in the layout. about: facts about the capture for the
    journal, None if another writer's journal has them. leads: whether this writer writes the metadata of its arrays. If
    not, it writes only some segments of them, and another writer leads. costs: measurements of this process, None to
    start new ones. losses: what could not be written. bytes_raw, bytes_stored: bytes of the written rows before
    encoding, and in the files.
    """

    def __init__(
        self,
        root: str,
        layout: PayloadLayout,
        numbers: Sequence[int],
        cache: FileCache,
        about: dict[str, Any] | None = None,
        leads: bool = True,
        costs: Costs | None = None,
    ) -> None:
        self.losses: list[Loss] = []
        self.bytes_raw = self.bytes_stored = 0
        self._root, self._layout, self._cache, self._leads = root, layout, cache, leads
        self._costs = costs or Costs()
        self._arrays = [(layout.arrays[i], layout.bases[i]) for i in numbers]
        specs = [spec for spec, _ in self._arrays]
        self._by_name = {spec.name: spec for spec in specs}
        self._shards: dict[str, ShardWriter] = {}
        self._files: FileList = {}
        self._end = 0  # one past the last row received
        self._short_end: int | None = None  # end of a chunk shorter than chunk_tokens, which must be the last
        self._positions: dict[str, dict[int, int]] = {}
        # Segment directories are created later, but their parents only here. So a chunk that arrives after its capture
        # was removed fails, instead of creating the directory again.
        for spec in specs:
            os.makedirs(os.path.dirname(os.path.dirname(os.path.join(root, schema.shard_path(spec, 0)))), exist_ok=True)
        self._journal = Journal(root, specs, layout, cache, about, "" if leads else f"-{os.getpid()}")

    # ---- rows -------------------------------------------------------------------------------------------------------

    def chunk(
        self,
        payload: np.ndarray,
        first: int,
        count: int,
        token_ids: bytes = b"",
        behind: bool = False,
        checked: bool = True,
    ) -> None:
        """Write token rows [first, first + count) of every array.

        payload: uint8, see `PayloadLayout`. token_ids: int32, for the journal. behind: do not compress if that is
        faster. checked: False if the rows failed their check; the journal then leaves the chunk out. Raises OSError,
        and ValueError for rows off the chunk grid, for rows of a finished shard, and for another number of token ids.
        """
        chunk = self._layout.chunk_tokens
        if len(token_ids) not in (0, 4 * count):
            raise ValueError(f"{len(token_ids)} bytes of token ids came with {count} rows")
        if first % chunk or not 0 < count <= chunk or self._short_end not in (None, first + count):
            raise ValueError(f"rows [{first}, {first + count}) are not aligned to chunks of {chunk} tokens")
        self._end = max(self._end, first + count)
        if count < chunk:
            self._short_end = first + count
        plain = self._plain(behind)
        places = []
        for spec, base in self._arrays:
            if not spec.per_sample:
                at, size = base * count, spec.token_bytes * count
                places.append(self._append(spec, payload[at : at + size], first, count, plain))
        if checked:
            self._journal.chunk(first, count, places, token_ids)

    def borrow(self, final: str, first: int, count: int, token_ids: bytes) -> list[Loss]:
        """Copy rows [first, first + count), which are whole chunks, from the store `final`, as they are encoded there.

        token_ids: int32, for the journal, or empty. Returns the losses of rows that could not be read, which are also
        added to `losses`. Rows that could not be written are only in `losses`.
        """
        lost: list[Loss] = []
        self._end = max(self._end, first + count)
        try:
            with SourceStore(final, self._layout.chunk_tokens, self._layout.segment_tokens) as source:
                self._copy(source, first, count, token_ids, lost)
        except (OSError, ValueError) as error:
            lost.append(not_borrowed(final, str(error), [[first, first + count]]))
        self.losses += lost
        return lost

    def _copy(self, source: SourceStore, first: int, count: int, token_ids: bytes, lost: list[Loss]) -> None:
        """Copy chunk by chunk. Adds chunks that cannot be read to `lost`."""
        specs, chunk = [spec for spec, _ in self._arrays if not spec.per_sample], self._layout.chunk_tokens
        for at in range(first, first + count, chunk):
            try:
                found = [source.chunk(spec, at) for spec in specs]
            except (OSError, ValueError) as error:
                add_loss(lost, not_borrowed(source.final, str(error), [[at, at + chunk]]))
                continue
            try:
                places = [self._place(spec, at, encoded) for spec, encoded in zip(specs, found, strict=True)]
                self._journal.chunk(at, chunk, places, token_ids[4 * (at - first) :][: 4 * chunk])
            except (OSError, ValueError) as error:
                self.failed(error, (at, at + chunk))

    def _place(self, spec: ArraySpec, first: int, chunks: Sequence[Encoded]) -> bytes:
        """Append a whole, encoded chunk of one array. Returns its places for the journal."""
        segment, slot, shard = self._shard_at(spec, first)
        self.bytes_raw += spec.token_bytes * self._layout.chunk_tokens
        self.bytes_stored += shard.append([(layer, slot) for layer in range(spec.local_layers)], chunks)
        return self._placed(spec, segment, slot, shard)

    def _shard_at(self, spec: ArraySpec, first: int) -> tuple[int, int, ShardWriter]:
        """(segment, number of the chunk in the segment, shard) of the chunk that begins at row `first`."""
        layout = self._layout
        segment, within = divmod(first, layout.segment_tokens)
        shard = self._shard(spec, segment, (spec.shard_layers, layout.segment_tokens // layout.chunk_tokens))
        return segment, within // layout.chunk_tokens, shard

    def _placed(self, spec: ArraySpec, segment: int, slot: int, shard: ShardWriter) -> bytes:
        """Finish the shard of an appended chunk if it is full. Returns the places of the chunk for the journal."""
        places: bytes = shard.index[: spec.local_layers, slot].tobytes()
        if shard.full:
            self._finish(spec, segment, None)
        return places

    def _plain(self, behind: bool) -> bool:
        """Whether to leave the next chunk uncompressed. behind: whether the writer is behind."""
        return behind and CODECS[self._layout.codec].has_plain and self._costs.plain_next()

    def _append(self, spec: ArraySpec, data: np.ndarray, first: int, count: int, plain: bool) -> bytes:
        """Append the chunk of one array to its shard. Returns its places for the journal."""
        block = data.view(f"u{spec.itemsize}").reshape(spec.local_layers, count, spec.local_width)
        # If the first chunk is short, it is the only one. The chunks of the finished store then have its length.
        rows = self._layout.chunk_tokens if first else count
        segment, slot, shard = self._shard_at(spec, first)
        self._put(shard, [(layer, slot) for layer in range(spec.local_layers)], block, rows, plain)
        return self._placed(spec, segment, slot, shard)

    def _put(
        self, shard: ShardWriter, slots: Sequence[tuple[int, ...]], block: np.ndarray, rows: int | None, plain: bool
    ) -> None:
        """Append one inner chunk per slot, and add the time that it took to the costs."""
        encoding_s, began = 0.0, time.perf_counter()

        def encoded() -> Iterator[Encoded]:
            nonlocal encoding_s
            for one in block:
                start = time.perf_counter()
                chunk = encode(one, self._layout.codec, rows, plain)
                encoding_s += time.perf_counter() - start
                yield chunk

        stored = shard.append(slots, encoded())
        self._costs.add(plain, block.nbytes, stored, encoding_s, time.perf_counter() - began - encoding_s)
        self.bytes_raw += block.nbytes
        self.bytes_stored += stored

    def rows(self, payload: np.ndarray, name: str, first: int, positions: Sequence[int], behind: bool = False) -> None:
        """Write rows of a per-sample array, from row `first` on.

        payload: uint8, the rows, then ignored bytes. positions: the token position of each row. behind: see `chunk`. A
        row that arrives again replaces the earlier one, and rows after it are removed: the engine dropped the steps
        that sampled them. Raises OSError, and ValueError for a short payload and for rows of a finished shard.
        """
        spec, count = self._by_name[name], len(positions)
        size = count * spec.token_bytes
        if not spec.per_sample or len(payload) < size:
            raise ValueError(f"{count} rows of {name!r} do not fit {len(payload)} bytes")
        block = payload[:size].view(f"u{spec.itemsize}").reshape(count, spec.local_width)
        plain = self._plain(behind)
        places = []
        for i, position in enumerate(positions):
            segment, slot = divmod(first + i, schema.SAMPLES_PER_SHARD)
            shard = self._shard(spec, segment, (schema.SAMPLES_PER_SHARD,))
            if shard.holds((slot,)):
                shard.take_back((slot,))
                known = self._positions[name]
                self._positions[name] = {at: known[at] for at in known if at < first + i}
            self._put(shard, [(slot,)], block[i : i + 1], None, plain)
            self._positions.setdefault(name, {})[first + i] = position
            places.append(shard.index[slot].tobytes())
            if slot == schema.SAMPLES_AGAIN and segment and schema.shard_path(spec, segment - 1) in self._shards:
                self._finish(spec, segment - 1, None)
        self._journal.rows(name, first, positions, places)

    def _shard(self, spec: ArraySpec, segment: int, slots: tuple[int, ...]) -> ShardWriter:
        path = schema.shard_path(spec, segment)
        if path in self._files:
            raise ValueError(f"{path} is finished already: rows were sent twice")
        if path not in self._shards:
            full = os.path.join(self._root, path)
            with contextlib.suppress(FileExistsError):  # another rank or writer made it
                os.mkdir(os.path.dirname(full))
            self._shards[path] = ShardWriter(full, slots, self._cache)
        return self._shards[path]

    def _finish(self, spec: ArraySpec, segment: int, slots: tuple[int, ...] | None) -> None:
        """Write the index of a shard. slots: shape to which the index is cut, None for no cut."""
        path = schema.shard_path(spec, segment)
        began = time.perf_counter()
        size, content = self._shards[path].close(slots)
        self._costs.add_writing(time.perf_counter() - began)
        self._files[path] = [size, file_checksum(path, content)]
        del self._shards[path]

    # ---- the end ----------------------------------------------------------------------------------------------------

    def failed(self, error: Exception, rows: tuple[int, int] | None = None) -> None:
        """Add a loss of rows that could not be written.

        rows: [start, stop); None for samples, which `close` counts, and for arrays that get no metadata.
        """
        add_loss(self.losses, replace(write_loss(error), rows=(rows,) if rows else ()))

    def close(self, length: int, samples: dict[str, int]) -> FileList:
        """Write the remaining indexes, and the metadata with the final shapes. Returns the finished files.

        Errors go to `losses`. An array with an error gets no metadata, so readers cannot take it for a complete one.
        """
        self._journal.close(length, samples)
        if self._end > length or self._short_end not in (None, length):
            end = self._short_end or self._end
            rows = (0, length) if any(metadata_elsewhere(spec, self._leads) for spec, _ in self._arrays) else None
            self.failed(ValueError(f"rows up to {end} were written, but the length is {length}"), rows)
            self.release()
            return {}
        grid = schema.effective_grid(length, self._layout.chunk_tokens, self._layout.segment_tokens)
        for spec, _ in self._arrays:
            try:
                self._close_array(spec, samples.get(spec.name, 0) if spec.per_sample else length, grid)
            except (OSError, ValueError) as error:
                self.failed(error, (0, length) if metadata_elsewhere(spec, self._leads) else None)
        self.release()  # shards that could not be finished
        return self._files

    def _close_array(self, spec: ArraySpec, length: int, grid: Grid) -> None:
        slots = None if spec.per_sample else (spec.shard_layers, grid.chunks)
        if spec.per_sample:
            self._drop_surplus(spec, length)
        for segment in range(-(-length // (schema.SAMPLES_PER_SHARD if spec.per_sample else grid.segment))):
            if schema.shard_path(spec, segment) in self._shards:
                self._finish(spec, segment, slots)
        if metadata_elsewhere(spec, self._leads):
            lost = length - len(self._positions.get(spec.name, {})) if spec.per_sample else 0
            if lost:  # rank 0 writes the positions of samples, and may have these
                raise ValueError(f"{spec.name}: {lost} of {length} samples were not written")
            return
        if spec.per_sample:
            self._close_samples(spec, length)
        document = schema.hook_document(spec, length, grid, self._layout.codec)
        write_file(self._root, f"{spec.name}/zarr.json", schema.dump(document), self._files)

    def _close_samples(self, spec: ArraySpec, length: int) -> None:
        """Write the positions of a per-sample array: -1 for samples that never arrived."""
        known = self._positions.get(spec.name, {})
        if length and not known:
            raise ValueError(f"{spec.name}: none of its {length} samples was written")
        positions = np.array([known.get(i, -1) for i in range(length)], "<i4")
        plain_array(self._root, f"{spec.name}_positions", "int32", positions.tobytes(), "sample", self._files)
        if len(known) < length:
            lost = length - len(known)
            self.losses.append(Loss.of(Cause.SAMPLES_LOST, hook=spec.name, lost=lost, samples=length))

    def _drop_surplus(self, spec: ArraySpec, length: int) -> None:
        """Remove rows past `length`: the engine may sample once more before it learns that a request ended."""
        known = self._positions.get(spec.name, {})
        for index in [i for i in known if i >= length]:
            del known[index]
        first = -(-length // schema.SAMPLES_PER_SHARD)
        for path in [p for p in self._shards if p.startswith(spec.name + "/c/")]:
            if int(path.split("/")[-2]) >= first:
                self._shards.pop(path).release()
                os.unlink(os.path.join(self._root, path))

    def release(self) -> None:
        """Close all files without finishing them."""
        for shard in self._shards.values():
            shard.release()
        self._shards.clear()
        self._journal.release()
