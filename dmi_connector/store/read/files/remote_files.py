# SPDX-License-Identifier: Apache-2.0
"""Reads files of a store in S3, by byte ranges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from dmi_connector.store.format.object_store import RemoteError, bucket_store, requests_for
from dmi_connector.store.format.remote_path import RemotePath
from dmi_connector.store.read.files.store_files import Buffer, StoredFile, StoreFiles

_BEYOND = "status 416"
"""Part of the error message for a range that begins at or after the end of an object."""
_BLOCK_BYTES = 8 << 20
"""Number of bytes per read when an object is copied."""


class RemoteFile(StoredFile):
    """An object. Each read sends a request; opening sends none. Raises like `requests_for`."""

    def __init__(self, place: RemotePath) -> None:
        self._place = place

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self.fetch(offset, nbytes)) if nbytes else b""

    def read_end(self, nbytes: int) -> bytes:
        options: Any = {"range": {"suffix": nbytes}}
        with requests_for(self._place) as obstore:
            return bytes(obstore.get(bucket_store(self._place), self._place.key, options=options).bytes())

    def read_into(self, offset: int, parts: Sequence[Buffer]) -> None:
        data, at = self.fetch(offset, sum(map(len, parts))), 0
        for part in parts:
            if at + len(part) > len(data):
                raise ValueError("the file ends before its chunks do")
            part[:] = data[at : at + len(part)]
            at += len(part)

    def fetch(self, offset: int, nbytes: int) -> memoryview:
        """`nbytes` bytes starting at `offset`, or fewer at the end of the object, without a copy."""
        try:
            with requests_for(self._place) as obstore:
                return memoryview(
                    obstore.get_range(bucket_store(self._place), self._place.key, start=offset, length=nbytes)
                )
        except RemoteError as error:
            if _BEYOND not in str(error):
                raise
            return memoryview(b"")


def look(place: RemotePath) -> tuple[int, str | None]:
    """(size in bytes, ETag) of an object. Raises like `requests_for`."""
    with requests_for(place) as obstore:
        meta = obstore.head(bucket_store(place), place.key)
    return meta["size"], meta["e_tag"]


def check_bucket(place: RemotePath) -> None:
    """Raise FileNotFoundError if the bucket does not exist. `look` cannot tell this from a missing object.

    Other errors are ignored, because an access key may not be allowed to list.
    """
    with suppress(RemoteError), requests_for(place) as obstore:
        next(iter(obstore.list(bucket_store(place), f"{place.key}/")), None)


class RemoteFiles(StoreFiles):
    """The objects below a prefix."""

    remote = True

    def __init__(self, root: RemotePath) -> None:
        self.root = root
        self._sizes: dict[str, int] | None = None

    def open(self, path: str) -> RemoteFile:
        return RemoteFile(self.root / path)

    def read(self, path: str) -> bytes:
        place = self.root / path
        with requests_for(place) as obstore:
            return bytes(obstore.get(bucket_store(place), place.key).bytes())

    def names(self) -> set[str]:
        return set(self._listed())

    def size(self, path: str) -> int | None:
        return self._listed().get(path)

    def blocks(self, path: str) -> Iterator[bytes]:
        place = self.root / path
        with requests_for(place) as obstore:
            for block in obstore.get(bucket_store(place), place.key).stream(_BLOCK_BYTES):
                yield bytes(block)

    def _listed(self) -> dict[str, int]:
        """Sizes by path. They are listed only once, because a finished store does not change."""
        if self._sizes is None:
            prefix = f"{self.root.key}/"
            with requests_for(self.root) as obstore:
                pages = obstore.list(bucket_store(self.root), prefix)
                self._sizes = {meta["path"][len(prefix) :]: meta["size"] for page in pages for meta in page}
        return self._sizes

    def __str__(self) -> str:
        return str(self.root)
