# SPDX-License-Identifier: Apache-2.0
"""Reads journals, which list the chunks in the files of an unfinished store (docs/FORMAT.md, section 10)."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.checksum import crc32c

JOURNAL_PREFIX = ".journal-"
HEADER, CHUNK, ROWS, CLOSE = b"H", b"C", b"R", b"E"
"""Kinds of records. HEADER and CLOSE contain JSON."""
FRAME = struct.Struct("<II")  # length and crc32c of the record that follows; a length of 0 ends the journal
CHUNK_HEAD = struct.Struct("<cQI")  # kind, first row, number of rows
ROWS_HEAD = struct.Struct("<cIQI")  # kind, index of the array in the header, first sample, number of samples
Places = np.ndarray
"""uint64 [n, 2]: offset and length of n inner chunks of one shard file."""
_NOT_ATTRIBUTES = ("rank", "ranks", "arrays", "attrs")
"""Names in `about` (facts about a capture) that are not root attributes."""


def is_journal(name: str) -> bool:
    """Whether a file of a partial directory is a journal."""
    return name.startswith(JOURNAL_PREFIX)


@dataclass
class JournalArray:
    """The journal entries of one array on one rank.

    places: location of each chunk, one per layer, by first row (for a per-sample array, by sample). counts: number of
    rows of each chunk, by first row. positions: token positions of samples, by sample. end: one past the last sample of
    the newest record.
    """

    spec: ArraySpec
    places: dict[int, Places] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)
    end: int = 0

    def add(self, other: JournalArray) -> None:
        """Add the entries of another journal of the same array, for other segments."""
        self.places |= other.places
        self.counts |= other.counts
        self.positions |= other.positions
        self.end = max(self.end, other.end)

    def drop_replaced(self) -> None:
        """Remove samples beyond the end of the newest record. They are from steps that the engine discarded."""
        for sample in [sample for sample in self.positions if sample >= self.end]:
            del self.places[sample], self.counts[sample], self.positions[sample]


@dataclass
class JournalContent:
    """The content of one journal.

    about: facts about the capture. One journal per rank has them; in the others it is None. token_ids: int32 ids of
    each chunk, by first row. length, samples: number of rows, and numbers of samples by array; None and {} until the
    capture is closed. torn: number of bytes after the last intact record.
    """

    arrays: list[JournalArray]
    chunk_tokens: int
    segment_tokens: int
    codec: str
    about: dict[str, Any] | None
    token_ids: dict[int, np.ndarray] = field(default_factory=dict)
    length: int | None = None
    samples: dict[str, int] = field(default_factory=dict)
    torn: int = 0


class JournalTail:
    """Follows one journal: each `read` adds the records that were appended since the previous one.

    content: the content so far; None until the header is written.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self.content: JournalContent | None = None

    def read(self) -> None:
        """Read new records, up to the first one that is torn, damaged or not written yet.

        Raises FileNotFoundError if the journal was removed because its store is finished. Raises ValueError if the
        first record is not a header, and for an undamaged record that this format does not have.
        """
        with open(self._path, "rb") as file:
            file.seek(self._at)
            data = file.read()
        at = 0
        while at + FRAME.size <= len(data):
            size, crc = FRAME.unpack_from(data, at)
            record = data[at + FRAME.size : at + FRAME.size + size]
            if not size or len(record) < size or crc32c(record) != crc:
                break
            try:
                self._add(record)
            except (struct.error, LookupError, TypeError, AttributeError) as error:
                raise ValueError(f"it has a record that is not of this format ({error!r})") from error
            at += FRAME.size + size
        self._at += at
        if self.content is not None:
            self.content.torn = len(data) - at

    def _add(self, record: bytes) -> None:
        if self.content is not None:
            _read_record(self.content, record)
            return
        if record[:1] != HEADER:
            raise ValueError("it has no valid header")
        header = json.loads(record[1:])
        arrays = [JournalArray(ArraySpec(**spec)) for spec in header.pop("arrays")]
        content = JournalContent(arrays, **header)
        if content.chunk_tokens < 1 or content.segment_tokens < 1:
            raise ValueError("its header has no valid size of chunks")
        self.content = content


def read_journal(path: Path) -> JournalContent:
    """Read a journal up to its first torn or damaged record. Raises ValueError without an intact header."""
    tail = JournalTail(path)
    tail.read()
    if tail.content is None:
        raise ValueError("it has no valid header")
    return tail.content


def known_attrs(about: Mapping[str, Any]) -> dict[str, Any]:
    """The root attributes of a capture that were known at its start. about: `about` of one of its journals."""
    known = {key: value for key, value in about.items() if key not in _NOT_ATTRIBUTES}
    return {"start": 0, "tp": about.get("ranks", 1), **about.get("attrs", {}), **known}


def holds_rows(partial: Path) -> bool:
    """Whether any journal of a partial directory lists a chunk or a sample. Raises OSError."""
    for name in filter(is_journal, os.listdir(partial)):
        try:
            log = read_journal(partial / name)
        except ValueError:
            continue  # its header was not written
        if any(array.counts for array in log.arrays):
            return True
    return False


def _read_record(log: JournalContent, record: bytes) -> None:
    kind = record[:1]
    if kind == CLOSE:
        end = json.loads(record[1:])
        log.length, log.samples = end["length"], end["samples"]
    elif kind == CHUNK:
        _, first, count = CHUNK_HEAD.unpack_from(record)
        if not count:
            raise ValueError("it has a chunk without rows")  # readers would look for the next chunk at the same row
        at = CHUNK_HEAD.size
        for array in log.arrays:
            if not array.spec.per_sample:
                array.places[first] = np.frombuffer(record, "<u8", 2 * array.spec.local_layers, at).reshape(-1, 2)
                array.counts[first] = count
                at += 16 * array.spec.local_layers
        if at < len(record):
            log.token_ids[first] = np.frombuffer(record, "<i4", count, at)
    elif kind == ROWS:
        _, number, first, count = ROWS_HEAD.unpack_from(record)
        array = log.arrays[number]
        positions = np.frombuffer(record, "<i4", count, ROWS_HEAD.size)
        places = np.frombuffer(record, "<u8", 2 * count, ROWS_HEAD.size + 4 * count).reshape(count, 1, 2)
        for i in range(count):
            array.places[first + i], array.positions[first + i] = places[i], int(positions[i])
            array.counts[first + i] = 1
        array.end = first + count
