# SPDX-License-Identifier: Apache-2.0
"""Salvage of partial stores whose writers were killed: shard indexes and metadata from their journals (journal.py)."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.store import schema
from dmi_connector.store.capture import CaptureSpec
from dmi_connector.store.commit import Commit, append_finish, append_index, merge_ranges, now, remove_partial
from dmi_connector.store.group import FileList, plain_array, write_file
from dmi_connector.store.journal import (
    JOURNAL_PREFIX,
    Log,
    Part,
    claim,
    read_journal,
    remove_journals,
)
from dmi_connector.store.metadata import read_attrs
from dmi_connector.store.paths import umask_of
from dmi_connector.store.schema import ArraySpec
from dmi_connector.store.shard import EMPTY, crc32c
from dmi_connector.store.shardfile import ShardReader, StoredArray, numpy_dtype, read_file
from dmi_connector.store.wire import Message, pack_array

REASON = "salvaged after the writer or the engine was killed"
PARTIAL = ".zarr" + schema.PARTIAL_SUFFIX
_STRUCTURE = ("rank", "ranks", "arrays", "attrs")  # what of the facts of a capture are no root attributes


@dataclass
class Outcome:
    """What became of one partial store.

    state: "salvaged" (it is an incomplete store now), "published" (it was whole and lacked its final name alone),
    "written" (a writer has it: left alone), "empty" (nothing can be salvaged), "removed" (it was empty), "refused" (a
    store has its name already) or "failed". store: the finished store. notes: what is lost or wrong.
    """

    partial: str
    state: str
    store: str | None = None
    num_tokens: int = 0
    missing: list[list[int]] = field(default_factory=list)
    hooks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.store or self.partial}: {self.state}"
        if self.store:
            lost = sum(stop - start for start, stop in self.missing)
            text += f", {self.num_tokens - lost} of {self.num_tokens} rows of {', '.join(self.hooks)}"
        return "\n  ".join([text, *self.notes])


def repair(path: str | os.PathLike[str], remove_empty: bool = False) -> list[Outcome]:
    """Repair a partial store, or every one in a directory. Finished stores are never touched.

    remove_empty: remove partial stores of which nothing can be salvaged. Trouble with one partial store becomes its
    outcome, and the others are repaired all the same.
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
    return outcomes


def rebuild(commit: Message, names: set[str]) -> tuple[FileList, list[list[int]], list[str], int]:
    """Rebuild the arrays `names` of a capture that is about to be committed, whose writer died or failed.

    Gives the files made, the row ranges that they lack, what is to be said of it, and the bytes of their rows. Arrays
    without any row get no files.
    """
    salvage = _Salvage(Path(commit["partial"]), Path(commit["final"]))
    specs = [spec for spec in salvage.specs() if spec.name in names]
    if not specs:
        return {}, [], salvage.notes, 0
    salvage.length, salvage.samples = commit["attrs"]["num_tokens"], commit["samples"]
    kept, rows = salvage.rebuild(specs)
    lost = salvage.missing(rows) if any(not spec.per_sample for spec in kept) else []
    return salvage.files, lost, salvage.notes, salvage.bytes_raw


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
        outcome.notes = salvage.notes
        if not salvage.run():
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
    for path, (size, crc) in attrs["files"].items():
        data = read_file(partial / path)
        if data is None or len(data) != size or crc32c(data) != crc:
            if any(partial.glob(JOURNAL_PREFIX + "*")):
                return False
            raise ValueError(f"{path} is not what the root document says: mend or remove the partial store by hand")
    return True


def _publish(partial: Path, final: Path) -> None:
    """Do what is left of a commit that was killed after it had written the root document."""
    attrs = read_attrs(partial)
    arrays = {hook["array"] for hook in attrs["hooks"].values()}
    documents = [json.loads((partial / name / "zarr.json").read_bytes()) for name in arrays]
    remove_journals(str(partial))
    os.rename(partial, final)
    append_finish(str(final), attrs, sum(math.prod(d["shape"]) * schema.ITEMSIZE[d["data_type"]] for d in documents))


def _remove(partial: Path, final: Path) -> None:
    remove_partial(str(partial))
    if (final.parent / schema.INDEX_NAME).exists():
        append_index(str(final.parent), {"event": "abort", "store": final.name, "state": "aborted"})


class _Salvage:
    """One partial store that nobody writes any more. notes: what is lost."""

    def __init__(self, partial: Path, final: Path) -> None:
        self.partial, self.final = partial, final
        self.notes: list[str] = []
        self.logs = self._read()
        self.abouts = [log.about for log in self.logs if log.about]
        self.notes += [f"a journal ends in {log.torn} bytes of a torn record" for log in self.logs if log.torn]
        self.parts = {(part.spec.name, part.spec.rank): part for log in self.logs for part in log.parts}
        self.samples: dict[str, int] = {}  # by array, where more is known than the journals say
        self.files: FileList = {}
        self.bytes_raw = 0

    def _read(self) -> list[Log]:
        found = []
        for path in sorted(self.partial.glob(JOURNAL_PREFIX + "*")):
            try:
                found.append(read_journal(path))
            except ValueError as error:
                self.notes.append(f"{path.name} cannot be read: {error}")
        return found

    def run(self) -> bool:
        """Make a store of what there is. False where there is nothing: then the partial store stays."""
        if "prompt_len" not in self._facts():
            self.notes.append("what it captures is not recorded")
            return False
        self.length = self._length()
        specs = self.specs()
        kept, rows = self.rebuild(specs)
        if not kept:
            self.notes.append("no chunk was completed on all ranks, or all are damaged")
            return False
        if len(kept) < len(specs):
            self.notes.append(f"hooks without rows: {', '.join(s.name for s in specs if s not in kept)}")
        self._commit(kept, rows)
        return True

    def rebuild(self, specs: list[ArraySpec]) -> tuple[list[ArraySpec], set[int]]:
        """Rebuild arrays of a store of `length` rows. Gives those with rows, and the first rows of the chunks that are
        whole in all of these.
        """
        log = self.logs[0]
        self.grid = schema.effective_grid(self.length, log.chunk_tokens, log.segment_tokens)
        self.codec = log.codec
        whole = {spec.name: chunks for spec in specs if (chunks := self._array(spec))}
        rows = [whole[spec.name] for spec in specs if spec.name in whole and not spec.per_sample]
        return [spec for spec in specs if spec.name in whole], set.intersection(*rows) if rows else set()

    def missing(self, rows: set[int]) -> list[list[int]]:
        """Ranges of rows outside the chunks that begin at `rows`."""
        spans = [[n, min(self.length, n + self.grid.chunk)] for n in range(0, self.length, self.grid.chunk)]
        return merge_ranges([span for span in spans if span[0] not in rows])

    # ---- what the journals and facts say ----

    def _facts(self) -> dict[str, Any]:
        """Root attributes as far as they were known when the capture began."""
        if not self.abouts:
            return {}
        about = self.abouts[0]  # ranks agree on these
        facts = {"format_version": schema.FORMAT_VERSION, "start": 0, "tp": about.get("ranks", 1), "created": now()}
        return {**facts, **about.get("attrs", {}), **{k: v for k, v in about.items() if k not in _STRUCTURE}}

    def specs(self) -> list[ArraySpec]:
        """Every array of the capture, as one of rank 0."""
        known = [ArraySpec(**spec) for about in self.abouts for spec in about.get("arrays", [])]
        specs = {spec.name: replace(spec, rank=0) for spec in [*known, *(part.spec for part in self.parts.values())]}
        return list(specs.values())

    def _length(self) -> int:
        """Rows of the store: what the capture was closed with, else one past the last row in any journal."""
        closed = [log.length for log in self.logs if log.length is not None]
        parts = [part for part in self.parts.values() if not part.spec.per_sample]
        return max(closed or [first + count for part in parts for first, count in part.counts.items()] or [0])

    def _samples(self, name: str) -> int:
        closed = [known[name] for known in [self.samples, *(log.samples for log in self.logs)] if name in known]
        return max(
            closed or [i + 1 for (array, _), part in self.parts.items() if array == name for i in part.counts] or [0]
        )

    # ---- what the shards hold ----

    def _array(self, spec: ArraySpec) -> set[int]:
        """Rebuild the shards of an array. Gives the first rows of the chunks (the samples) that are whole on all ranks;
        if there are any, the array is one of the store.
        """
        length = self._samples(spec.name) if spec.per_sample else self.length
        array = StoredArray(self.partial, spec, length, self.grid, self.codec)
        files: FileList = {}
        damaged: list[str] = []
        ranks = [self._part(array, self.parts.get((spec.name, i)), files, damaged) for i in range(spec.shards)]
        if damaged:
            self.notes.append(f"{spec.name}: {len(damaged)} damaged chunks are left out, the first: {damaged[0]}")
        whole = set.intersection(*ranks)
        if not whole:
            return whole
        if spec.per_sample:
            known = self.parts[spec.name, 0].positions
            positions = np.array([known[i] if i in whole else -1 for i in range(length)], "<i4")
            plain_array(str(self.partial), f"{spec.name}_positions", "int32", positions.tobytes(), "sample", files)
            if len(whole) < length:
                self.notes.append(
                    f"{spec.name}: {length - len(whole)} of {length} samples are lost, their position is -1"
                )
        document = schema.hook_document(spec, length, self.grid, self.codec)
        write_file(str(self.partial), f"{spec.name}/zarr.json", schema.dump(document), files)
        rows = sum(min(array.rows_per_chunk, length - first) for first in whole)
        self.bytes_raw += rows * spec.n_layers * spec.width * spec.itemsize
        self.files |= files
        return whole

    def _part(self, array: StoredArray, part: Part | None, files: FileList, damaged: list[str]) -> set[int]:
        """Rebuild what one rank wrote of an array; `files` and `damaged` are added to."""
        if part is None:
            return set()
        sound = [self._shard(array, part, segment, files, damaged) for segment in range(array.segments)]
        return set().union(*sound)

    def _shard(self, array: StoredArray, part: Part, segment: int, files: FileList, damaged: list[str]) -> set[int]:
        """Check the chunks of a shard and write its index. Gives the first rows of those sound in all layers."""
        spec, path = array.spec, array.path(segment, part.spec.rank)
        known = [(s, first, stop) for s, first, stop in array.chunks(segment) if part.counts.get(first) == stop - first]
        chunks = array.rows_per_segment // array.rows_per_chunk
        index = np.full((chunks, 2) if spec.per_sample else (spec.n_layers, chunks, 2), EMPTY, "<u8")
        for slot, first, _ in known:
            index[slot] = part.places[first][0 if spec.per_sample else slot[0]]
        data = read_file(self.partial / path)
        reader = ShardReader(
            b"" if data is None else data,
            index,
            numpy_dtype(spec.dtype),
            (array.rows_per_chunk, spec.local_width),
            self.codec,
        )
        sound = {first for _, first, _ in known}
        for slot, first, stop in known:
            try:
                reader.chunk(slot)
            except ValueError as error:
                index[slot] = EMPTY
                sound.discard(first)
                layer = f" layer {spec.layers[slot[0]]}" if spec.layers else ""
                damaged.append(f"{error} ({path},{layer} rows {first} to {stop - 1})")
        if (index[..., 0] != EMPTY).any():
            files[path] = _seal(self.partial / path, reader.data, index)
        return sound

    # ---- the store ----

    def _commit(self, specs: list[ArraySpec], rows: set[int]) -> None:
        """Commit the arrays, with the chunks of token rows that begin at `rows` as those that are not missing."""
        grid, length = self.grid, self.length
        attrs = {**self._facts(), "hooks": CaptureSpec(str(self.final), tuple(specs)).hooks(), "codec": self.codec}
        attrs |= {"num_tokens": length, "chunk_tokens": grid.chunk, "segment_tokens": grid.segment}
        attrs["missing"] = self.missing(rows)
        token_ids = np.zeros(length, "<i4")
        known = {first: ids for log in self.logs for first, ids in log.token_ids.items() if first + len(ids) <= length}
        for first, ids in known.items():
            token_ids[first : first + len(ids)] = ids
        if rows - known.keys():
            self.notes.append("token ids are not known for all rows: those are 0")
        positions = np.arange(attrs["start"], attrs["start"] + length, dtype="<i4")
        phase = (positions >= attrs["prompt_len"]).astype("u1")
        arrays = {"token_ids": token_ids, "positions": positions, "phase": phase}
        attrs |= {"complete": False, "reason": "; ".join([REASON, *self.notes])}
        message: Message = {"partial": str(self.partial), "final": str(self.final), "files": self.files, "attrs": attrs}
        message |= {"arrays": {name: pack_array(a) for name, a in arrays.items()}, "bytes_raw": self.bytes_raw}
        Commit.start({**message, "ranks": 1, "rank_timeout": 0, "fsync": True}).run()


def _seal(path: Path, data: bytes | np.ndarray, index: np.ndarray) -> list[int]:
    """End a shard file with its index, right after the last chunk in it. Gives the size and crc32c of the file."""
    places = index[index[..., 0] != EMPTY].astype(np.int64)
    end = int(places.sum(axis=1).max())
    body = index.tobytes()
    tail = body + crc32c(body).to_bytes(4, "little")
    crc = crc32c(tail, crc32c(data[:end]))
    with open(path, "r+b") as f:
        f.truncate(end)
        f.seek(end)
        f.write(tail)
    return [end + len(tail), crc]
