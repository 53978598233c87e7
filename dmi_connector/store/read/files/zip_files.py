# SPDX-License-Identifier: Apache-2.0
"""Reads the files of a store in one uncompressed zip file, on a local file system or in an object store."""

from __future__ import annotations

import functools
import io
import os
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dmi_connector.store.format.remote_path import Place, RemotePath
from dmi_connector.store.read.files.remote_files import RemoteFile, look
from dmi_connector.store.read.files.store_files import MAPPED_BYTES, Buffer, LocalFile, StoredFile, StoreFiles

_HEADER = struct.Struct("<4s22xHH")
"""Local header of an entry. It ends with the lengths of the name and the extra field, which follow before the data."""
_BLOCK = 1 << 16
"""Number of bytes fetched at a time while the central directory of a remote zip file is read."""


class _Entry(NamedTuple):
    header: int
    nbytes: int


class Section(StoredFile):
    """The bytes [base, base + nbytes) of a file."""

    def __init__(self, file: StoredFile, base: int, nbytes: int) -> None:
        self._file, self._base, self._nbytes = file, base, nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._file.read(self._base + offset, max(0, min(nbytes, self._nbytes - offset)))

    def read_end(self, nbytes: int) -> bytes:
        return self.read(max(0, self._nbytes - nbytes), nbytes)

    def read_into(self, offset: int, parts: Sequence[Buffer]) -> None:
        if offset + sum(map(len, parts)) > self._nbytes:
            raise ValueError("the file ends before its chunks do")
        self._file.read_into(self._base + offset, parts)


class ZipFiles(StoreFiles):
    """The entries of a zip file."""

    def __init__(self, place: Place, entries: dict[str, _Entry]) -> None:
        self.place, self._entries = place, entries
        self.remote = isinstance(place, RemotePath)
        self._bases: dict[str, int] = {}

    def open(self, path: str) -> StoredFile:
        entry = self._entries.get(path)
        if entry is None:
            raise FileNotFoundError(f"{self}/{path} does not exist")
        base = self._base(path, entry)
        if isinstance(self.place, RemotePath):
            return Section(_whole(self.place), base, entry.nbytes)
        return LocalFile(str(self.place), base, entry.nbytes)

    def _base(self, path: str, entry: _Entry) -> int:
        """Offset of an entry's data, from the local header: the extra field in the central directory may differ."""
        if path not in self._bases:
            with _whole(self.place) as file:
                raw = file.read(entry.header, _HEADER.size)
            if len(raw) < _HEADER.size or not raw.startswith(b"PK\x03\x04"):
                raise ValueError(f"{self}/{path}: the zip file is damaged: the entry has no header")
            _, name, extra = _HEADER.unpack(raw)
            self._bases[path] = entry.header + 30 + name + extra
        return self._bases[path]

    def read(self, path: str) -> bytes:
        with self.open(path) as file:
            return file.read(0, self._entries[path].nbytes)

    def load(self, path: str) -> bytes | np.ndarray | None:
        entry = self._entries.get(path)
        if entry is None or isinstance(self.place, RemotePath) or entry.nbytes < MAPPED_BYTES:
            return super().load(path)
        return np.memmap(self.place, np.uint8, "r", self._base(path, entry), (entry.nbytes,))

    def names(self) -> set[str]:
        return set(self._entries)

    def size(self, path: str) -> int | None:
        entry = self._entries.get(path)
        return None if entry is None else entry.nbytes

    def __str__(self) -> str:
        return str(self.place)


def open_zip(place: Place) -> ZipFiles:
    """Open the store in a zip file, as written by `dmi export --to zip`: `zarr.json` at its top, entries uncompressed.

    Raises FileNotFoundError, and ValueError for other zip files.
    """
    if isinstance(place, RemotePath):
        return ZipFiles(place, _remote_entries(place, *look(place)))
    status = os.stat(place)
    return ZipFiles(place, _local_entries(place, status.st_mtime_ns, status.st_size))


@functools.lru_cache(maxsize=1024)
def _local_entries(place: Path, _changed: int, _size: int) -> dict[str, _Entry]:
    with open(place, "rb") as file:
        return _entries(place, file)


@functools.lru_cache(maxsize=1024)
def _remote_entries(place: RemotePath, size: int, _version: str | None) -> dict[str, _Entry]:
    return _entries(place, io.BufferedReader(_Seekable(_whole(place), size), _BLOCK))


def _whole(place: Place) -> StoredFile:
    if isinstance(place, Path):
        return LocalFile(str(place))
    return RemoteFile(place)


def _entries(place: Place, file: io.BufferedIOBase) -> dict[str, _Entry]:
    try:
        with zipfile.ZipFile(file) as archive:
            infos = [info for info in archive.infolist() if not info.filename.endswith("/")]
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise ValueError(f"{place} is not a readable zip file ({error})") from error
    packed = next((info.filename for info in infos if info.compress_type or info.flag_bits & 1), None)
    if packed is not None:
        raise ValueError(
            f"{place}: the entry {packed!r} is compressed or encrypted, so its parts cannot be read separately; write"
            " the zip file with dmi export --to zip, or with zip -0"
        )
    size = file.seek(0, os.SEEK_END)
    outside = next((i.filename for i in infos if i.header_offset < 0 or i.header_offset + i.file_size > size), None)
    if outside is not None:
        raise ValueError(f"{place}: the zip file is damaged: its entry {outside!r} lies outside it")
    found = {info.filename: _Entry(info.header_offset, info.file_size) for info in infos}
    if len(found) != len(infos):
        raise ValueError(f"{place} has several entries of one name; write the zip file with dmi export --to zip")
    return found


class _Seekable(io.RawIOBase):
    """A seekable file object of known size, for zipfile."""

    def __init__(self, file: StoredFile, size: int) -> None:
        self._stored, self._size, self._at = file, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self._stored.read(self._at, min(len(view), self._size - self._at))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)
