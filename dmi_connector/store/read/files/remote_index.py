# SPDX-License-Identifier: Apache-2.0
"""Lists a prefix of an object store: stores, zip files and indexes (docs/FORMAT.md, section 6)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from dmi_connector.store.format.object_store import bucket_store, requests_for
from dmi_connector.store.format.remote_path import RemotePath
from dmi_connector.store.format.schema import INDEX_FOLDER, INDEX_NAME
from dmi_connector.store.read.files.remote_files import RemoteFiles, look
from dmi_connector.store.read.files.thread_pool import in_fetch_threads


@dataclass(frozen=True)
class Listing:
    """Names directly below a prefix.

    stores: NAME.zarr, finished or not. zips: NAME.zip. indexed: whether there is an index.
    """

    stores: frozenset[str]
    zips: frozenset[str]
    indexed: bool


def list_prefix(place: RemotePath) -> Listing:
    """List a prefix, with one request per 1,000 names. Raises like `requests_for`."""
    prefix = f"{place.key}/" if place.key else ""
    with requests_for(place) as obstore:
        found = obstore.list_with_delimiter(bucket_store(place), prefix or None)
    folders = {path.rstrip("/")[len(prefix) :] for path in found["common_prefixes"]}
    names = {meta["path"][len(prefix) :] for meta in found["objects"]}
    return Listing(
        frozenset(name for name in folders if name.endswith(".zarr")),
        frozenset(name for name in names if name.endswith(".zip")),
        INDEX_NAME in names or INDEX_FOLDER in folders,
    )


def finished_below(place: RemotePath, names: Iterable[str]) -> set[str]:
    """The stores that have a root `zarr.json`, which is uploaded last. This sends one request per store.

    Raises like `requests_for`, except FileNotFoundError.
    """
    found: set[str] = set()

    def ask(name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            look(place / name / "zarr.json")
            found.add(name)

    in_fetch_threads(ask, names)
    return found


def read_indexes(place: RemotePath) -> list[bytes]:
    """The content of `index.jsonl`, which was copied from a directory, then of each index that an upload wrote.

    The content is b"" if `index.jsonl` does not exist. Raises like `requests_for`.
    """
    folder = RemoteFiles(place / INDEX_FOLDER)
    parts = [f"{INDEX_FOLDER}/{name}" for name in sorted(folder.names()) if name.endswith(".jsonl")]
    files, found = RemoteFiles(place), dict.fromkeys([INDEX_NAME, *parts], b"")

    def fetch(name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            found[name] = files.read(name)

    in_fetch_threads(fetch, found)
    return list(found.values())
