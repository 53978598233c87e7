# SPDX-License-Identifier: Apache-2.0
"""Makes stores of what killed writers left: shard indexes and metadata come from the journals (journal.py)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.dtypes import ITEMSIZE, numpy_dtype
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format import schema
from dmi_connector.store.format.checksum import crc32c, file_checksum
from dmi_connector.store.format.completeness import Cause, Loss, losses_to_json, merge_ranges
from dmi_connector.store.format.locks import claim
from dmi_connector.store.format.paths import umask_of
from dmi_connector.store.format.remote_path import RemotePath
from dmi_connector.store.format.shard_index import EMPTY, empty_index, index_bytes
from dmi_connector.store.read.index import CaptureInfo, find_captures
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.read.shard_reader import ShardReader, StoredArray
from dmi_connector.store.read.store_files import LocalFiles, load_file
from dmi_connector.store.read.verify import damaged_files
from dmi_connector.store.write.array_writer import FileList, plain_array, write_file
from dmi_connector.store.write.commit import Commit, append_finish, append_index, now, remove_partial
from dmi_connector.store.write.journal import (
    JOURNAL_PREFIX,
    JournalArray,
    JournalContent,
    read_journal,
    remove_journals,
)
from dmi_connector.store.write.messages import Message, pack_array
from dmi_connector.store.write.settings import UploadSettings
from dmi_connector.store.write.upload import RemoteIndexPart, finish_upload
from dmi_connector.urls import parse_url

PARTIAL = ".zarr" + schema.PARTIAL_SUFFIX
_NOT_ATTRIBUTES = ("rank", "ranks", "arrays", "attrs")
"""Facts of a capture (`about`) that are no root attributes."""


@dataclass
class Outcome:
    """What became of one partial store.

    state: "salvaged" (it is an incomplete store now), "published" (it was whole and lacked only its final name),
    "written" (a writer has it: left alone), "empty" (nothing can be salvaged), "removed" (it was empty), "refused" (a
    store has its name already) or "failed". Of a finished store whose upload was not finished: "uploaded", "not
    uploaded", or "waits" (a server that runs uploads it). store: the finished store. notes: what is lost or wrong. url:
    where it was uploaded to, or should be.
    """

    partial: str
    state: str
    store: str | None = None
    num_tokens: int = 0
    missing: list[list[int]] = field(default_factory=list)
    hooks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    url: str | None = None

    def __str__(self) -> str:
        if self.url:
            return "\n  ".join([f"{self.store}: {self.state} to {self.url}", *self.notes])
        text = f"{self.store or self.partial}: {self.state}"
        if self.store:
            lost = sum(stop - start for start, stop in self.missing)
            text += f", {self.num_tokens - lost} of {self.num_tokens} rows of {', '.join(self.hooks)}"
        return "\n  ".join([text, *self.notes])


def repair(path: str | os.PathLike[str], remove_empty: bool = False) -> list[Outcome]:
    """Repair a partial store, or every one in a directory. Finished stores are never touched.

    Of a directory, uploads are finished too: those of stores that its index names as not uploaded.

    remove_empty: remove partial stores of which nothing can be salvaged. An error with one partial store becomes its
    outcome; the others are repaired all the same.
    """
    root = Path(os.path.abspath(path))
    outcomes = []
    for partial in [root] if root.name.endswith(PARTIAL) else sorted(root.glob("*" + PARTIAL)):
        try:
            with claim(partial) as alone, umask_of(partial):
                outcomes.append(_repair(partial, remove_empty) if alone else Outcome(str(partial), "written"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, FileNotFoundError) and not partial.exists():
                continue  # it was finished or aborted meanwhile
            outcomes.append(Outcome(str(partial), "failed", notes=[f"{type(error).__name__}: {error}"]))
    if not root.name.endswith(PARTIAL):
        try:
            outcomes += finish_uploads(root)
        except OSError as error:
            outcomes.append(Outcome(str(root), "failed", notes=[f"uploads: {error}"]))
    return outcomes


def finish_uploads(directory: Path, retry_seconds: float = UploadSettings.retry_seconds) -> list[Outcome]:
    """Upload the stores of a directory whose upload was cut short, or failed.

    A server that runs holds the directory: what it has not tried is left to it.
    """
    unfinished = [i for i in find_captures(directory) if i.upload in ("pending", "failed") and i.finished]
    waiting = [info for info in unfinished if info.url and isinstance(info.store, Path) and info.store.is_dir()]
    if not waiting:
        return []
    parts: dict[RemotePath, RemoteIndexPart] = {}
    with claim(directory) as alone, umask_of(directory):
        outcomes = [_finish_upload(info, alone, retry_seconds, parts) for info in waiting]
        for part in parts.values():
            with contextlib.suppress(OSError):  # stores are found without it, each opened once
                part.write()
    return outcomes


def _finish_upload(
    info: CaptureInfo, alone: bool, retry_seconds: float, parts: dict[RemotePath, RemoteIndexPart]
) -> Outcome:
    assert isinstance(info.store, Path) and info.url is not None
    outcome = Outcome(str(info.store), "waits", str(info.store), info.num_tokens or 0, url=info.url)
    if info.upload == "pending" and not alone:
        return outcome
    try:
        to = RemotePath(*parse_url("url in the index", info.url))
        result = finish_upload(info.store, to, retry_seconds, info.remove_local)
    except (OSError, ValueError, ImportError) as error:
        outcome.state, outcome.notes = "not uploaded", [str(error)]
        return outcome
    outcome.state = "uploaded" if result.reason is None else "not uploaded"
    outcome.notes = [] if result.reason is None else [result.reason]
    if result.line is not None:
        parts.setdefault(to.parent, RemoteIndexPart(to.parent, uuid.uuid4().hex[:12])).add(result.line)
    return outcome


def rebuild(commit: Message, names: set[str]) -> tuple[FileList, list[Loss], int]:
    """Rebuild the arrays `names` of a capture that is about to be committed, whose writer died or failed.

    Returns the files made, what is lost, and the bytes of the rows. Arrays without any row get no files.
    """
    salvage = _Salvage(Path(commit["partial"]), Path(commit["final"]))
    specs = [spec for spec in salvage.specs() if spec.name in names]
    if not specs:
        return {}, salvage.losses, 0
    salvage.length, salvage.samples = commit["attrs"]["num_tokens"], commit["samples"]
    kept, rows = salvage.rebuild(specs)
    if any(not spec.per_sample for spec in kept) and (missing := salvage.missing(rows)):
        salvage.losses.append(Loss.of(Cause.NOT_WRITTEN, missing))
    return salvage.files, salvage.losses, salvage.bytes_raw


def _repair(partial: Path, remove_empty: bool) -> Outcome:
    final = partial.with_suffix("")
    outcome = Outcome(str(partial), "refused")
    if os.path.lexists(final):
        outcome.notes.append(f"{final.name} exists already; remove or rename one of the two")
        return outcome
    if _is_whole(partial):
        _publish(partial, final)
        outcome.state = "published"
    else:
        salvage = _Salvage(partial, final)
        whole = salvage.run()
        outcome.notes = [loss.words for loss in salvage.losses]
        if not whole:
            outcome.state = "empty"
            if remove_empty:
                outcome.state = "removed"
                _remove(partial, final)
            return outcome
        outcome.state = "salvaged"
    attrs = read_attrs(final)
    outcome.store, outcome.num_tokens, outcome.missing = str(final), attrs["num_tokens"], attrs["missing"]
    outcome.hooks = list(attrs["hooks"])
    return outcome


def _is_whole(partial: Path) -> bool:
    """Whether the root document and what it lists is written: then only the final name is lacking.

    Raises ValueError when the root document is sound, but a file is not, and no journal is left to go by.
    """
    try:
        attrs = read_attrs(partial)
    except ValueError:
        return False
    if attrs.get("checksum") != crc32c(schema.canonical(attrs)):
        return False
    damaged = damaged_files(partial, attrs)
    if damaged and not any(partial.glob(JOURNAL_PREFIX + "*")):
        where = damaged[0].where
        raise ValueError(f"{where} is not what the root document says: mend or remove the partial store by hand")
    return not damaged


def _publish(partial: Path, final: Path) -> None:
    """Do what is left of a commit that was killed after it had written the root document."""
    attrs = read_attrs(partial)
    arrays = {hook["array"] for hook in attrs["hooks"].values()}
    documents = [json.loads((partial / name / "zarr.json").read_bytes()) for name in arrays]
    remove_journals(str(partial))
    os.rename(partial, final)
    append_finish(str(final), attrs, sum(math.prod(d["shape"]) * ITEMSIZE[d["data_type"]] for d in documents))


def _remove(partial: Path, final: Path) -> None:
    remove_partial(str(partial))
    if (final.parent / schema.INDEX_NAME).exists():
        append_index(str(final.parent), {"event": "abort", "store": final.name, "state": "aborted"})


class _Salvage:
    """One partial store that nobody writes any more.

    losses: what is known to be lost. files, bytes_raw: of the arrays that were rebuilt.
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
        self.length = 0
        self.samples: dict[str, int] = {}  # by array, where more is known than the journals say
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
        """Make a store of what there is. False where there is nothing: then the partial store stays."""
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
        self._commit(kept, rows)
        return True

    def rebuild(self, specs: list[ArraySpec]) -> tuple[list[ArraySpec], set[int]]:
        """Rebuild arrays of a store of `length` rows.

        Returns those with rows, and the first rows of the chunks that are whole in all of these.
        """
        journal = self.journals[0]
        self.grid = schema.effective_grid(self.length, journal.chunk_tokens, journal.segment_tokens)
        self.codec = journal.codec
        whole = {spec.name: chunks for spec in specs if (chunks := self._array(spec))}
        rows = [whole[spec.name] for spec in specs if spec.name in whole and not spec.per_sample]
        return [spec for spec in specs if spec.name in whole], set.intersection(*rows) if rows else set()

    def missing(self, rows: set[int]) -> list[list[int]]:
        """Ranges of rows outside the chunks that begin at `rows`."""
        spans = [[n, min(self.length, n + self.grid.chunk)] for n in range(0, self.length, self.grid.chunk)]
        return merge_ranges([span for span in spans if span[0] not in rows])

    # ---- what the journals say --------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        """Root attributes as far as they were known when the capture began."""
        if not self.abouts:
            return {}
        about = self.abouts[0]  # of rank 0, if it got as far: the index has what it says
        facts = {"format_version": schema.FORMAT_VERSION, "start": 0, "tp": about.get("ranks", 1), "created": now()}
        return {**facts, **about.get("attrs", {}), **{k: v for k, v in about.items() if k not in _NOT_ATTRIBUTES}}

    def specs(self) -> list[ArraySpec]:
        """Every array of the capture, as one of rank 0."""
        known = [ArraySpec(**spec) for about in self.abouts for spec in about.get("arrays", [])]
        specs = {spec.name: replace(spec, rank=0) for spec in [*known, *(a.spec for a in self.arrays.values())]}
        return list(specs.values())

    def _length(self) -> int:
        """Rows of the store: what the capture was closed with, else one past the last row in any journal."""
        closed = [journal.length for journal in self.journals if journal.length is not None]
        arrays = [array for array in self.arrays.values() if not array.spec.per_sample]
        return max(closed or [first + count for array in arrays for first, count in array.counts.items()] or [0])

    def _sample_count(self, name: str) -> int:
        """Samples of an array: what the capture was closed with, else one past the last in any journal."""
        closed = [known[name] for known in [self.samples, *(j.samples for j in self.journals)] if name in known]
        ends = [i + 1 for (own, _), array in self.arrays.items() if own == name for i in array.counts]
        return max(closed or ends or [0])

    # ---- what the shards hold ---------------------------------------------------------------------------------------

    def _array(self, spec: ArraySpec) -> set[int]:
        """Rebuild the shards and metadata of an array.

        Returns the first rows of the chunks (or the samples) that are whole on all ranks. Without any, there is no
        array.
        """
        length = self._sample_count(spec.name) if spec.per_sample else self.length
        stored = StoredArray(LocalFiles(self.partial), spec, length, self.grid, self.codec)
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
        document = schema.hook_document(spec, length, self.grid, self.codec)
        write_file(str(self.partial), f"{spec.name}/zarr.json", schema.dump(document), files)
        rows = sum(min(stored.rows_per_chunk, length - first) for first in whole)
        self.bytes_raw += rows * spec.n_layers * spec.width * spec.itemsize
        self.files |= files
        return whole

    def _rank(self, stored: StoredArray, array: JournalArray | None, files: FileList, damaged: list[str]) -> set[int]:
        """Rebuild the shards that one rank wrote of an array; adds to `files` and `damaged`."""
        if array is None:
            return set()
        sound = [self._shard(stored, array, segment, files, damaged) for segment in range(stored.segments)]
        return set().union(*sound)

    def _shard(
        self, stored: StoredArray, array: JournalArray, segment: int, files: FileList, damaged: list[str]
    ) -> set[int]:
        """Check the chunks of a shard and write its index. Returns the first rows of those sound in all layers."""
        spec, path = stored.spec, stored.path(segment, array.spec.rank)
        known = [(s, a, b) for s, a, b in stored.chunks(segment, array.spec.rank) if array.counts.get(a) == b - a]
        chunks = stored.rows_per_segment // stored.rows_per_chunk
        index = empty_index((chunks,) if spec.per_sample else (spec.shard_layers, chunks))
        for slot, first, _ in known:
            index[slot] = array.places[first][0 if spec.per_sample else slot[0]]
        data = load_file(self.partial / path)
        shape = (stored.rows_per_chunk, spec.local_width)
        reader = ShardReader(b"" if data is None else data, index, numpy_dtype(spec.dtype), shape, self.codec)
        sound = {first for _, first, _ in known}
        for slot, first, stop in known:
            try:
                reader.chunk(slot)
            except ValueError as error:
                index[slot] = EMPTY
                sound.discard(first)
                layer = f" layer {spec.layers[array.spec.first_layer + slot[0]]}" if spec.layers else ""
                damaged.append(f"{error} ({path},{layer} rows {first} to {stop - 1})")
        if (index[..., 0] != EMPTY).any():
            checksum = file_checksum(path, reader.content())
            files[path] = [_seal(self.partial / path, index), checksum]
        return sound

    # ---- the store --------------------------------------------------------------------------------------------------

    def _commit(self, specs: list[ArraySpec], rows: set[int]) -> None:
        """Commit the arrays. rows: first rows of the chunks that are not missing."""
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
    """Write the index of a shard file, right after the last chunk in it. Returns the size of the file."""
    places = index[index[..., 0] != EMPTY].astype(np.int64)
    end = int(places.sum(axis=1).max())
    tail = index_bytes(index)
    with open(path, "r+b") as f:
        f.truncate(end)
        f.seek(end)
        f.write(tail)
    return end + len(tail)
