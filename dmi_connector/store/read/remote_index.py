# SPDX-License-Identifier: Apache-2.0
"""What lies below a prefix of an object store: stores, zip files, files of the index (docs/FORMAT.md, section 6)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dmi_connector.store.format.object_store import bucket_store, requests_for
from dmi_connector.store.format.remote_path import RemotePath
from dmi_connector.store.read.remote_files import RemoteFiles
from dmi_connector.store.read.thread_pool import in_fetch_threads

_INDEX = re.compile(r"index(-[A-Za-z0-9-]+)?\.jsonl")


@dataclass(frozen=True)
class Listing:
    """Names right below a prefix. stores: NAME.zarr, finished or not. zips: NAME.zip. indexes: files of the index."""

    stores: frozenset[str]
    zips: frozenset[str]
    indexes: tuple[str, ...]


def list_prefix(place: RemotePath) -> Listing:
    """One request for each 1,000 names. Raises as `requests_for` does."""
    prefix = f"{place.key}/" if place.key else ""
    with requests_for(place) as obstore:
        found = obstore.list_with_delimiter(bucket_store(place), prefix or None)
    folders = {path.rstrip("/")[len(prefix) :] for path in found["common_prefixes"]}
    names = {meta["path"][len(prefix) :] for meta in found["objects"]}
    return Listing(
        frozenset(name for name in folders if name.endswith(".zarr")),
        frozenset(name for name in names if name.endswith(".zip")),
        tuple(sorted(name for name in names if _INDEX.fullmatch(name))),
    )


def read_indexes(place: RemotePath, names: tuple[str, ...]) -> list[bytes]:
    """The index files of these names, in their order."""
    files, found = RemoteFiles(place), dict.fromkeys(names, b"")

    def fetch(name: str) -> None:
        found[name] = files.read(name)

    in_fetch_threads(fetch, names)
    return list(found.values())
