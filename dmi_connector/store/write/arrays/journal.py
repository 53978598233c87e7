# SPDX-License-Identifier: Apache-2.0
"""Journals: what lets the rows of a partial store outlive a killed writer (docs/FORMAT.md, section 10).

A shard's index is in its writer's memory until the shard is full or the capture ends. So each writer also keeps a
journal of its arrays of a capture, with one record for each chunk whose bytes are in the shard files. One writer's
journal begins with the facts of the capture.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.store.format.checksum import crc32c
from dmi_connector.store.write.arrays.shard_writer import FileCache

logger = logging.getLogger(__name__)

JOURNAL_PREFIX = ".journal-"
_HEADER, _CHUNK, _ROWS, _CLOSE = b"H", b"C", b"R", b"E"
"""Kinds of records. Headers and closes are JSON."""
_FRAME = struct.Struct("<II")  # length and crc32c of the record that follows; a length of 0 ends the journal
_CHUNK_HEAD = struct.Struct("<cQI")  # kind, first row, rows
_ROWS_HEAD = struct.Struct("<cIQI")  # kind, number of the array in the header, first sample, samples
Places = np.ndarray
"""uint64 [n, 2]: offset and length of n inner chunks of one shard file."""


def is_journal(name: str) -> bool:
    """Whether a file of a partial directory is a journal."""
    return name.startswith(JOURNAL_PREFIX)


class Journal:
    """Writes the journal of the arrays that one writer has of a capture.

    about: facts of the capture, None where another journal has them. With `about` the file is made at once, else with
    its first record. suffix: of its name, where several writers have segments of the same arrays.

    No method raises. A record that cannot be written is logged and the next one takes its place; its chunk is then as
    safe as without a journal.
    """

    def __init__(
        self,
        root: str,
        arrays: Sequence[ArraySpec],
        layout: PayloadLayout,
        files: FileCache,
        about: dict[str, Any] | None,
        suffix: str = "",
    ) -> None:
        name = f"{arrays[0].rank}-{arrays[0].name}" if arrays else f"rank{about['rank'] if about else ''}"
        self.path = os.path.join(root, JOURNAL_PREFIX + name + suffix)
        self._numbers = {spec.name: i for i, spec in enumerate(arrays)}
        header: dict[str, Any] = {"arrays": [spec.to_json() for spec in arrays], "codec": layout.codec}
        header |= {"chunk_tokens": layout.chunk_tokens, "segment_tokens": layout.segment_tokens, "about": about}
        self._header = _frame(_HEADER + json.dumps(header).encode())
        self._files, self._end, self._failed = files, 0, False
        if about is not None:
            self._write(self._header)

    def chunk(self, first: int, count: int, places: Sequence[bytes], token_ids: bytes) -> None:
        """Note a chunk of token rows.

        places: where it lies in the shard of each token array (`Places`), in the order of the arrays. token_ids: int32,
        or empty.
        """
        self._append(b"".join((_CHUNK_HEAD.pack(_CHUNK, first, count), *places, token_ids)))

    def rows(self, name: str, first: int, positions: Sequence[int], places: Sequence[bytes]) -> None:
        """Note rows of a per-sample array, with one place and one position each."""
        head = _ROWS_HEAD.pack(_ROWS, self._numbers[name], first, len(positions))
        self._append(b"".join((head, np.array(positions, "<i4").tobytes(), *places)))

    def close(self, length: int, samples: dict[str, int]) -> None:
        """Note how long the capture is, and close the file."""
        if self._end:
            self._append(_CLOSE + json.dumps({"length": length, "samples": samples}).encode())
        self.release()

    def release(self) -> None:
        """Close the file."""
        try:
            self._files.close(self.path)
        except OSError as error:
            self._warn(error)

    def _append(self, record: bytes) -> None:
        self._write(_frame(record) if self._end else self._header + _frame(record))

    def _write(self, data: bytes) -> None:
        try:
            fd = self._files.get(self.path)
            # Truncated only if needed: ext4 flushes a file that was truncated when it is closed.
            if not self._end and os.fstat(fd).st_size:
                os.ftruncate(fd, 0)
            wrote = os.pwrite(fd, data, self._end)
            if wrote < len(data):
                raise OSError(f"only {wrote} of {len(data)} bytes were written")
            self._end += wrote
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._failed:
            logger.warning("dmi: %s: some chunks cannot be salvaged if the writer is killed: %s", self.path, error)
        self._failed = True


def _frame(record: bytes) -> bytes:
    return _FRAME.pack(len(record), crc32c(record)) + record


@dataclass
class JournalArray:
    """What journals know of one array as its rank wrote it.

    places: by first row (for a per-sample array: by sample), where the chunk lies, one place a layer. counts: its rows.
    positions: token positions of samples.
    """

    spec: ArraySpec
    places: dict[int, Places] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)

    def add(self, other: JournalArray) -> None:
        """Take over what another journal knows of the same array: its writer had other segments."""
        self.places |= other.places
        self.counts |= other.counts
        self.positions |= other.positions


@dataclass
class JournalContent:
    """One journal, read back.

    length, samples: of a closed capture, else None and {}. torn: bytes at the end that are no whole record.
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


def read_journal(path: Path) -> JournalContent:
    """Read a journal up to its first record that is torn or damaged. Raises ValueError without a sound header."""
    data = path.read_bytes()
    records, at = [], 0
    while at + _FRAME.size <= len(data):
        size, crc = _FRAME.unpack_from(data, at)
        record = data[at + _FRAME.size : at + _FRAME.size + size]
        if not size or len(record) < size or crc32c(record) != crc:
            break
        records.append(record)
        at += _FRAME.size + size
    if not records or records[0][:1] != _HEADER:
        raise ValueError("it has no sound header")
    header = json.loads(records[0][1:])
    arrays = [JournalArray(ArraySpec(**spec)) for spec in header.pop("arrays")]
    log = JournalContent(arrays, **header, torn=len(data) - at)
    for record in records[1:]:
        _read_record(log, record)
    return log


def holds_rows(partial: Path) -> bool:
    """Whether any journal of a partial directory knows of a chunk or a sample. Raises OSError."""
    for name in filter(is_journal, os.listdir(partial)):
        try:
            log = read_journal(partial / name)
        except ValueError:
            continue  # not even its header was written
        if any(array.counts for array in log.arrays):
            return True
    return False


def _read_record(log: JournalContent, record: bytes) -> None:
    kind = record[:1]
    if kind == _CLOSE:
        end = json.loads(record[1:])
        log.length, log.samples = end["length"], end["samples"]
    elif kind == _CHUNK:
        _, first, count = _CHUNK_HEAD.unpack_from(record)
        at = _CHUNK_HEAD.size
        for array in log.arrays:
            if not array.spec.per_sample:
                array.places[first] = np.frombuffer(record, "<u8", 2 * array.spec.local_layers, at).reshape(-1, 2)
                array.counts[first] = count
                at += 16 * array.spec.local_layers
        if at < len(record):
            log.token_ids[first] = np.frombuffer(record, "<i4", count, at)
    elif kind == _ROWS:
        _, number, first, count = _ROWS_HEAD.unpack_from(record)
        array = log.arrays[number]
        positions = np.frombuffer(record, "<i4", count, _ROWS_HEAD.size)
        places = np.frombuffer(record, "<u8", 2 * count, _ROWS_HEAD.size + 4 * count).reshape(count, 1, 2)
        for i in range(count):
            array.places[first + i], array.positions[first + i] = places[i], int(positions[i])
            array.counts[first + i] = 1
