# SPDX-License-Identifier: Apache-2.0
"""Finds stores below a prefix of an object store, and detects stores that cannot be opened."""

from __future__ import annotations

from collections.abc import Sequence

from dmi_connector.store.format.remote_path import Place, RemotePath
from dmi_connector.store.read.files.remote_index import list_prefix
from dmi_connector.store.read.files.thread_pool import in_fetch_threads, in_threads
from dmi_connector.store.read.index import CaptureInfo, indexed_captures, info_of
from dmi_connector.store.read.metadata import NotACapture
from dmi_connector.store.read.reader import open_reader


def is_unreadable(info: CaptureInfo) -> bool:
    """Whether a store was found by its name, but could not be opened."""
    return info.state == "failed" and not info.started


def opening(infos: Sequence[CaptureInfo]) -> tuple[list[CaptureInfo], list[tuple[Place, str]]]:
    """Try to open stores. Returns (captures that can be opened, [(store, reason)] of those that cannot)."""
    reasons: dict[int, str] = {}

    def look(number: int) -> None:
        try:
            open_reader(infos[number].store, timeout=0, allow_incomplete=True).close()
        except (ValueError, OSError) as error:
            reasons[number] = str(error)

    remote = any(isinstance(info.store, RemotePath) for info in infos)
    (in_fetch_threads if remote else in_threads)(look, range(len(infos)))
    kept = [info for number, info in enumerate(infos) if number not in reasons]
    return kept, [(infos[number].store, reasons[number]) for number in sorted(reasons)]


def below_prefix(place: RemotePath, on_error: str) -> list[CaptureInfo]:
    """Captures below a prefix, sorted by start time. Each store that the index lacks is opened.

    on_error: for damaged stores, "raise" raises ValueError, and "skip" returns them with the state "failed". Raises
    ValueError if the prefix has neither a store nor an index.
    """
    listed = list_prefix(place)
    if not (listed.stores or listed.zips or listed.indexed):
        raise ValueError(f"{place} holds no store and no index; give the prefix of stores, as in s3://bucket/captures")
    known = {info.store.name: info for info in (indexed_captures(place) if listed.indexed else ())}
    found = [known[name] for name in listed.stores if name in known]
    unknown = [place / name for name in sorted((listed.stores - known.keys()) | listed.zips)]
    opened: list[CaptureInfo] = []

    def look(store: RemotePath) -> None:
        try:
            info = _uploaded(store)
        except ValueError as error:
            if on_error == "raise":
                raise
            info = CaptureInfo(store, None, None, "failed", str(error), "", None, None, None)
        if info is not None:
            opened.append(info)

    in_fetch_threads(look, unknown)
    return sorted([*found, *opened], key=lambda info: (info.started, info.store.name))


def _uploaded(store: RemotePath) -> CaptureInfo | None:
    """The `CaptureInfo` of a store; None if it is not a capture, or if its root `zarr.json` is not uploaded yet."""
    try:
        return info_of(store)
    except NotACapture:
        return None
