# SPDX-License-Identifier: Apache-2.0
"""What lets a partial store outlive a killed writer (docs/FORMAT.md, section 10): a lock and journals.

The index of a shard file lies in its writer's memory until the file is full or the capture ends. So each group of
arrays also keeps a journal in the partial directory, one record for every chunk whose bytes are in the shard files;
the first group's begins with the facts of the capture.

The lock is a shared flock on the partial directory, held by every process that may still write there. The kernel
drops it when the process ends in whatever way, where a process id written down could by then, or in another
container, belong to somebody else; and a lock on the directory outlasts the removal of its files and its renaming.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.store.schema import ArraySpec
from dmi_connector.store.shard import FileCache, crc32c

logger = logging.getLogger(__name__)

JOURNAL_PREFIX = ".journal-"
_FRAME = struct.Struct("<II")  # length and crc32c of the record that follows; a length of 0 ends the journal
_CHUNK = struct.Struct("<cQI")  # kind, first row, rows
_ROWS = struct.Struct("<cIQI")  # kind, number of the array in the header, first sample, samples
_HEADER, _CLOSE = b"H", b"E"  # kinds of the records that are JSON
_KIND_CHUNK, _KIND_ROWS = b"C", b"R"
_LOCKED_WITHIN_S = 10.0
Places = np.ndarray  # uint64 [n, 2]: offset and length of n inner chunks of one shard file


def is_journal(name: str) -> bool:
    """Whether a file of a partial directory belongs to this module; a finished store holds none."""
    return name.startswith(JOURNAL_PREFIX)


def remove_journals(partial: str) -> None:
    """Remove what this module keeps in a directory that is about to become a store. Raises OSError."""
    for name in filter(is_journal, os.listdir(partial)):
        os.unlink(os.path.join(partial, name))


class Hold:
    """The lock of a process that writes to a partial directory, which is created if missing.

    Waits for a repair of a directory of that name to end. Raises OSError. On a file system without flock it goes on
    without: `claim` fails there.
    """

    def __init__(self, partial: str) -> None:
        self._partial = partial
        while True:
            os.makedirs(partial, exist_ok=True)
            try:
                self._fd = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # a repair removed it just now
            try:
                fcntl.flock(self._fd, fcntl.LOCK_SH)
            except OSError as error:
                logger.warning("dmi: %s cannot be locked: %s", partial, error)
            if not self.over():
                return

    def over(self) -> bool:
        """Whether the directory has lost its partial name. The lock is given up then."""
        if _has_name(self._fd, self._partial):
            return False
        self.release()
        return True

    def release(self) -> None:
        """Give up the lock."""
        os.close(self._fd)


@contextlib.contextmanager
def claim(partial: str | os.PathLike[str]) -> Iterator[bool]:
    """Keep writers out of a partial directory. Gives False if one holds it, or has just given it its final name.

    Raises OSError where the file system has no such locks.
    """
    fd = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = _has_name(fd, partial)
    except BlockingIOError:
        alone = False
    except OSError as error:
        os.close(fd)
        raise OSError(error.errno, f"whether it is still written cannot be told, as locks fail: {error}") from error
    try:
        yield alone
    finally:
        os.close(fd)


def is_abandoned(partial: str | os.PathLike[str]) -> bool:
    """Whether a partial directory is there that no process holds. False where that cannot be told: so of a directory
    that a writer made just now and has yet to lock, before anything is in it.
    """
    try:
        if not os.listdir(partial) and time.time() - os.stat(partial).st_mtime < _LOCKED_WITHIN_S:
            return False
        with claim(partial) as alone:
            return alone
    except OSError:
        return False


def share(store: str | os.PathLike[str]) -> int:
    """Descriptor of a finished store that keeps it from being removed for as long as it is open, here or in a child.

    Raises FileNotFoundError where the store was removed just now.
    """
    fd = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
    except OSError as error:
        logger.warning("dmi: %s cannot be locked and may be removed while it is read: %s", store, error)
    try:
        if not os.path.samestat(os.stat(store), os.fstat(fd)):
            raise FileNotFoundError(f"{store} was removed just now")
    except FileNotFoundError:
        os.close(fd)
        raise
    return fd


def _has_name(fd: int, path: str | os.PathLike[str]) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


class Journal:
    """Writes the journal of one group of arrays. The file appears with its first record; at once with `about`, what a
    salvage has to know of the capture.

    No method raises: a record that cannot be written is logged, the next one takes its place, and the chunk it was
    for is as safe as it would be without a journal.
    """

    def __init__(
        self,
        root: str,
        arrays: Sequence[ArraySpec],
        chunk_tokens: int,
        segment_tokens: int,
        codec: str,
        files: FileCache,
        about: dict[str, Any] | None,
    ) -> None:
        self.path = os.path.join(
            root, f"{JOURNAL_PREFIX}{arrays[0].rank}-{arrays[0].name}" if arrays else JOURNAL_PREFIX
        )
        self._numbers = {spec.name: i for i, spec in enumerate(arrays)}
        header: dict[str, Any] = {"arrays": [vars(spec) for spec in arrays], "codec": codec}
        header |= {"chunk_tokens": chunk_tokens, "segment_tokens": segment_tokens, "about": about}
        self._header = _frame(_HEADER + json.dumps(header).encode())
        self._files, self._end, self._failed = files, 0, False
        if arrays and about is not None:
            self._write(self._header)

    def chunk(self, first: int, count: int, places: Sequence[bytes], token_ids: bytes) -> None:
        """Note a chunk of token rows: where it lies in the shard of each token array (their `Places`, in the order of
        the arrays), and its token ids (int32, or none).
        """
        self._append(b"".join((_CHUNK.pack(_KIND_CHUNK, first, count), *places, token_ids)))

    def rows(self, name: str, first: int, positions: Sequence[int], places: Sequence[bytes]) -> None:
        """Note rows of a per-sample array, one place and one position each."""
        head = _ROWS.pack(_KIND_ROWS, self._numbers[name], first, len(positions))
        self._append(b"".join((head, np.array(positions, "<i4").tobytes(), *places)))

    def close(self, length: int, samples: dict[str, int]) -> None:
        """Note how long the capture is, and let go of the file."""
        if self._end:
            self._append(_CLOSE + json.dumps({"length": length, "samples": samples}).encode())
        self.release()

    def release(self) -> None:
        """Let go of the file."""
        try:
            self._files.close(self.path)
        except OSError as error:
            self._warn(error)

    def _append(self, record: bytes) -> None:
        self._write(_frame(record) if self._end else self._header + _frame(record))

    def _write(self, data: bytes) -> None:
        try:
            fd = self._files.get(self.path)
            # Not truncated for nothing: ext4 would flush even an empty file for that when it is closed.
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
class Part:
    """What a journal knows of one array as its rank wrote it.

    places: where the chunk that begins at a token row (a sample, for a per-sample array) lies, one place a layer.
    counts: its rows. positions: those of samples.
    """

    spec: ArraySpec
    places: dict[int, Places] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)


@dataclass
class Log:
    """One journal, read back. length, samples: None and {} unless the capture was closed. torn: bytes at its end that
    are no whole record.
    """

    parts: list[Part]
    chunk_tokens: int
    segment_tokens: int
    codec: str
    about: dict[str, Any] | None
    token_ids: dict[int, np.ndarray] = field(default_factory=dict)
    length: int | None = None
    samples: dict[str, int] = field(default_factory=dict)
    torn: int = 0


def read_journal(path: Path) -> Log:
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
    parts = [Part(ArraySpec(**spec)) for spec in header.pop("arrays")]
    log = Log(parts, **header, torn=len(data) - at)
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
        if any(part.counts for part in log.parts):
            return True
    return False


def _read_record(log: Log, record: bytes) -> None:
    kind = record[:1]
    if kind == _CLOSE:
        end = json.loads(record[1:])
        log.length, log.samples = end["length"], end["samples"]
    elif kind == _KIND_CHUNK:
        _, first, count = _CHUNK.unpack_from(record)
        at = _CHUNK.size
        for part in log.parts:
            if not part.spec.per_sample:
                part.places[first] = np.frombuffer(record, "<u8", 2 * part.spec.n_layers, at).reshape(-1, 2)
                part.counts[first] = count
                at += 16 * part.spec.n_layers
        if at < len(record):
            log.token_ids[first] = np.frombuffer(record, "<i4", count, at)
    elif kind == _KIND_ROWS:
        _, number, first, count = _ROWS.unpack_from(record)
        part = log.parts[number]
        positions = np.frombuffer(record, "<i4", count, _ROWS.size)
        places = np.frombuffer(record, "<u8", 2 * count, _ROWS.size + 4 * count).reshape(count, 1, 2)
        for i in range(count):
            part.places[first + i], part.positions[first + i] = places[i], int(positions[i])
            part.counts[first + i] = 1
