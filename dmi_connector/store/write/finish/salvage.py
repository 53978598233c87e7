# SPDX-License-Identifier: Apache-2.0
"""Rebuilds arrays or whole stores from the journals (journal.py) and shards that killed writers left behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.layout import ArraySpec
from dmi_connector.store.format import schema
from dmi_connector.store.format.checksum import file_checksum
from dmi_connector.store.format.completeness import Cause, Loss, losses_to_json, merge_ranges
from dmi_connector.store.format.shard_index import EMPTY, empty_index, index_bytes
from dmi_connector.store.read.arrays.hook_array import HookArray
from dmi_connector.store.read.arrays.shard_reader import ShardReader
from dmi_connector.store.read.files.store_files import LocalFiles, load_file
from dmi_connector.store.read.journal import JOURNAL_PREFIX, JournalArray, JournalContent, known_attrs, read_journal
from dmi_connector.store.write.arrays.array_writer import FileList, plain_array, write_file
from dmi_connector.store.write.finish.commit import Commit, now
from dmi_connector.store.write.messages import Message, pack_array


def rebuild(commit: Message, names: set[str]) -> tuple[FileList, list[Loss], int]:
    """Rebuild the arrays `names` of a capture that is being committed, because their writer died or failed.

    Returns the files written, the losses, and the bytes of the rows. Arrays without any row get no files.
    """
    salvage = Salvage(Path(commit["partial"]), Path(commit["final"]))
    specs = [spec for spec in salvage.specs() if spec.name in names]
    if not specs:
        return {}, salvage.losses, 0
    salvage.length, salvage.samples = commit["attrs"]["num_tokens"], commit["samples"]
    kept, rows = salvage.rebuild(specs)
    if any(not spec.per_sample for spec in kept) and (missing := salvage.missing(rows)):
        salvage.losses.append(Loss.of(Cause.NOT_WRITTEN, missing))
    return salvage.files, salvage.losses, salvage.bytes_raw


class Salvage:
    """Rebuilds arrays of one partial store that no process writes any more.

    losses: known losses. files: files of the rebuilt arrays. bytes_raw: bytes of their rows.
    """

    def __init__(self, partial: Path, final: Path) -> None:
        self.partial, self.final = partial, final
        self.losses: list[Loss] = []
        self.journals = self._read()
        abouts = [journal.about for journal in self.journals if journal.about]
        self.abouts = sorted(abouts, key=lambda about: int(about.get("rank", 0)))
        for journal in self.journals:
            if journal.torn:
                self.losses.append(Loss.of(Cause.JOURNAL_TORN, nbytes=journal.torn))
        self.arrays: dict[tuple[str, int], JournalArray] = {}
        for array in (a for journal in self.journals for a in journal.arrays):
            self.arrays.setdefault((array.spec.name, array.spec.rank), JournalArray(array.spec)).add(array)
        for array in self.arrays.values():
            array.drop_replaced()
        self.length = 0
        self.samples: dict[str, int] = {}  # by array: the numbers of samples that the commit knows
        self.files: FileList = {}
        self.bytes_raw = 0

    def _read(self) -> list[JournalContent]:
        found = []
        for path in sorted(self.partial.glob(JOURNAL_PREFIX + "*")):
            try:
                found.append(read_journal(path))
            except ValueError as error:
                self.losses.append(Loss.of(Cause.JOURNAL_UNREADABLE, journal=path.name, error=str(error)))
        return found

    def run(self) -> bool:
        """Make a store of all intact rows.

        Returns False if there are none, or if the journals lack `prompt_len`. The partial store then stays.
        """
        if "prompt_len" not in self._facts():
            self.losses.append(Loss.of(Cause.NOT_RECORDED))
            return False
        self.length = self._length()
        specs = self.specs()
        kept, rows = self.rebuild(specs)
        if not kept:
            self.losses.append(Loss.of(Cause.NOTHING_WHOLE))
            return False
        if len(kept) < len(specs):
            without = ", ".join(spec.name for spec in specs if spec not in kept)
            self.losses.append(Loss.of(Cause.HOOKS_WITHOUT_ROWS, hooks=without))
        if all(journal.length is None for journal in self.journals):
            self.losses.append(Loss.of(Cause.LENGTH_UNKNOWN, length=self.length))
        self._commit(kept, rows)
        return True

    def rebuild(self, specs: list[ArraySpec]) -> tuple[list[ArraySpec], set[int]]:
        """Rebuild arrays of a store with `length` rows.

        Returns the arrays that have rows, and the first row of each chunk that is intact in all these token arrays.
        """
        journal = self.journals[0]
        self.grid = schema.effective_grid(self.length, journal.chunk_tokens, journal.segment_tokens)
        self.codec = journal.codec
        whole = {spec.name: chunks for spec in specs if (chunks := self._array(spec))}
        rows = [whole[spec.name] for spec in specs if spec.name in whole and not spec.per_sample]
        return [spec for spec in specs if spec.name in whole], set.intersection(*rows) if rows else set()

    def missing(self, rows: set[int]) -> list[list[int]]:
        """Ranges of rows [start, stop) outside the chunks that begin at `rows`."""
        spans = [[n, min(self.length, n + self.grid.chunk)] for n in range(0, self.length, self.grid.chunk)]
        return merge_ranges([span for span in spans if span[0] not in rows])

    # ---- what the journals say --------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        """The root attributes that were known at the start of the capture."""
        if not self.abouts:
            return {}
        known = known_attrs(self.abouts[0])  # those of rank 0 if it wrote any, as in the index
        return {"format_version": schema.FORMAT_VERSION, "created": now(), **known}

    def specs(self) -> list[ArraySpec]:
        """All arrays of the capture, as rank 0 describes them."""
        known = [ArraySpec(**spec) for about in self.abouts for spec in about.get("arrays", [])]
        specs = {spec.name: replace(spec, rank=0) for spec in [*known, *(a.spec for a in self.arrays.values())]}
        return list(specs.values())

    def _length(self) -> int:
        """Number of rows of the store: the length given at the close, else one past the last row in any journal."""
        closed = [journal.length for journal in self.journals if journal.length is not None]
        arrays = [array for array in self.arrays.values() if not array.spec.per_sample]
        return max(closed or [first + count for array in arrays for first, count in array.counts.items()] or [0])

    def _sample_count(self, name: str) -> int:
        """Number of samples of an array: the count given at the close, else one past the last sample in any journal."""
        closed = [known[name] for known in [self.samples, *(j.samples for j in self.journals)] if name in known]
        ends = [i + 1 for (own, _), array in self.arrays.items() if own == name for i in array.counts]
        return max(closed or ends or [0])

    # ---- what the shards hold ---------------------------------------------------------------------------------------

    def _array(self, spec: ArraySpec) -> set[int]:
        """Rebuild the shards and metadata of an array.

        Returns the first row of each chunk (or the index of each sample) that is intact on all ranks. If there is none,
        no array is written.
        """
        length = self._sample_count(spec.name) if spec.per_sample else self.length
        document = schema.hook_document(spec, length, self.grid, self.codec)
        stored = HookArray.parse(LocalFiles(self.partial), spec.name, document, complete=False)
        files: FileList = {}
        damaged: list[str] = []
        ranks = [self._rank(stored, self.arrays.get((spec.name, i)), files, damaged) for i in range(spec.shards)]
        if damaged:
            self.losses.append(Loss.of(Cause.CHUNKS_DAMAGED, hook=spec.name, count=len(damaged), first=damaged[0]))
        whole = set.intersection(*ranks)
        if not whole:
            return whole
        if spec.per_sample:
            known = self.arrays[spec.name, 0].positions
            positions = np.array([known[i] if i in whole else -1 for i in range(length)], "<i4")
            plain_array(str(self.partial), f"{spec.name}_positions", "int32", positions.tobytes(), "sample", files)
            if len(whole) < length:
                lost = length - len(whole)
                self.losses.append(Loss.of(Cause.SAMPLES_LOST, hook=spec.name, lost=lost, samples=length))
        write_file(str(self.partial), f"{spec.name}/zarr.json", schema.dump(document), files)
        rows = sum(min(stored.chunk_rows, length - first) for first in whole)
        self.bytes_raw += rows * spec.n_layers * spec.width * spec.itemsize
        self.files |= files
        return whole

    def _rank(self, stored: HookArray, array: JournalArray | None, files: FileList, damaged: list[str]) -> set[int]:
        """Rebuild the shards of an array that one rank wrote. Adds to `files` and `damaged`."""
        if array is None:
            return set()
        sound = [self._shard(stored, array, segment, files, damaged) for segment in range(stored.segments)]
        return set().union(*sound)

    def _shard(
        self, stored: HookArray, array: JournalArray, segment: int, files: FileList, damaged: list[str]
    ) -> set[int]:
        """Check the chunks of a shard, write its index. Returns the first row of each chunk intact in all layers."""
        rank = array.spec.rank
        path = stored.path(segment, rank)
        known = [(s, a, b) for s, a, b in stored.chunks(segment, rank) if array.counts.get(a) == b - a]
        index = empty_index(stored.slots)
        for slot, first, _ in known:
            index[slot] = array.places[first][0 if stored.per_sample else slot[0]]
        data = load_file(self.partial / path)
        reader = ShardReader(stored, b"" if data is None else data, index)
        sound = {first for _, first, _ in known}
        for slot, first, stop in known:
            try:
                reader.chunk(slot)
            except ValueError as error:
                index[slot] = EMPTY
                sound.discard(first)
                layer = f" layer {stored.layers[stored.first_layer(rank) + slot[0]]}" if stored.layers else ""
                damaged.append(f"{error} ({path},{layer} rows {first} to {stop - 1})")
        if (index[..., 0] != EMPTY).any():
            checksum = file_checksum(path, reader.content())
            files[path] = [_seal(self.partial / path, index), checksum]
        return sound

    # ---- the store --------------------------------------------------------------------------------------------------

    def _commit(self, specs: list[ArraySpec], rows: set[int]) -> None:
        """Commit the arrays. rows: first row of each chunk that is not missing."""
        grid, length = self.grid, self.length
        attrs = {**self._facts(), "hooks": schema.hooks_attribute(specs), "codec": self.codec}
        attrs |= {"num_tokens": length, "chunk_tokens": grid.chunk, "segment_tokens": grid.segment}
        token_ids = np.zeros(length, "<i4")
        known = {first: ids for j in self.journals for first, ids in j.token_ids.items() if first + len(ids) <= length}
        for first, ids in known.items():
            token_ids[first : first + len(ids)] = ids
        if rows - known.keys():
            self.losses.append(Loss.of(Cause.TOKEN_IDS_UNKNOWN))
        positions = np.arange(attrs["start"], attrs["start"] + length, dtype="<i4")
        phase = (positions >= attrs["prompt_len"]).astype("u1")
        arrays = {"token_ids": token_ids, "positions": positions, "phase": phase}
        losses = [Loss.of(Cause.SALVAGED, self.missing(rows)), *self.losses]
        message: Message = {"partial": str(self.partial), "final": str(self.final), "files": self.files, "attrs": attrs}
        message |= {"arrays": {name: pack_array(a) for name, a in arrays.items()}, "bytes_raw": self.bytes_raw}
        message |= {"losses": losses_to_json(losses), "ranks": 1, "rank_timeout": 0, "fsync": True}
        Commit.start(message).run()


def _seal(path: Path, index: np.ndarray) -> int:
    """Write the index of a shard file after its last chunk. Returns the size of the file."""
    places = index[index[..., 0] != EMPTY].astype(np.int64)
    end = int(places.sum(axis=1).max())
    tail = index_bytes(index)
    with open(path, "r+b") as f:
        f.truncate(end)
        f.seek(end)
        f.write(tail)
    return end + len(tail)
