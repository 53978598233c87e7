# SPDX-License-Identifier: Apache-2.0
"""Reads the lines of the append-only index of a store directory (docs/FORMAT.md, section 6)."""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dmi_connector.store.format.remote_path import Given, Place, RemotePath, local_path, place_of
from dmi_connector.store.format.schema import INDEX_NAME
from dmi_connector.store.read.files.remote_index import read_indexes

_PLAIN = re.compile(r"[A-Za-z0-9._-]+")
"""Keys and request ids that are written the same way in JSON and in the name of a store."""


_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("event", "state"), str),
    **dict.fromkeys(("key", "request_id", "reason", "created", "finished", "model"), (str, type(None))),
    **dict.fromkeys(("upload", "upload_reason", "url"), (str, type(None))),
    **dict.fromkeys(("bytes", "num_tokens", "prompt_len"), (int, type(None))),
    **dict.fromkeys(("draft_tokens_scheduled", "draft_tokens_accepted"), int),
    "scores": dict,
}
"""{field of a line: its types}."""


def read_index(directory: Given, word: str | None = None) -> Iterable[dict[str, Any]]:
    """The lines of the index, one by one; none without an index. Truncated and invalid lines are skipped.

    word: a key, or a part of a request id. Lines of stores without the word may be left out, unparsed.
    """
    texts = _texts(place_of(directory))
    if word is not None and _PLAIN.fullmatch(word):
        sought = word.encode()
        lines = [line for text in texts for line in _parse(_raws_with(text, sought))]
        if all(word in line["store"] for line in lines):  # then every line of these stores has the word
            return lines
    return (line for text in texts for line in _parse(_raws(text)))


def _texts(place: Place) -> list[bytes | mmap.mmap]:
    if isinstance(place, RemotePath):
        return [*read_indexes(place)]
    try:
        with open(place / INDEX_NAME, "rb") as index:
            empty = os.fstat(index.fileno()).st_size == 0
            return [] if empty else [mmap.mmap(index.fileno(), 0, access=mmap.ACCESS_READ)]
    except FileNotFoundError:
        return []


def _raws(text: bytes | mmap.mmap) -> Iterable[bytes]:
    return text.split(b"\n") if isinstance(text, bytes) else iter(text.readline, b"")


def _raws_with(text: bytes | mmap.mmap, word: bytes) -> Iterator[bytes]:
    at = text.find(word)
    while at >= 0:
        end = text.find(b"\n", at)
        end = end if end >= 0 else len(text)
        yield text[text.rfind(b"\n", 0, at) + 1 : end]
        at = text.find(word, end)


def _parse(raws: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for raw in raws:
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):  # a line that is being written, was truncated by a full disk, or is forged
            continue
        if isinstance(line, dict) and isinstance(line.get("store"), str) and "event" in line and _is_sound(line):
            yield line


def _is_sound(line: dict[str, Any]) -> bool:
    """Whether the fields of a line have the types that readers expect, and its store is a name without a directory."""
    for name, value in line.items():  # a loop, because an index may have a million lines
        if name in _TYPES and not isinstance(value, _TYPES[name]):
            return False
    return "/" not in line["store"]


def uploaded_stores(directory: Path) -> Iterator[tuple[str, str]]:
    """(name, URL) of each uploaded store in the index. Other lines of a long index are not parsed."""
    for text in _texts(directory):
        for line in _parse(_raws_with(text, b'"upload":"done"')):
            if line.get("upload") == "done" and isinstance(line.get("url"), str):
                yield line["store"], line["url"]


def merge_line(known: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the next index line of a store into `known`. A `start` line discards earlier lines."""
    if line["event"] == "start":
        return dict(line)
    if line["event"] == "remove" and known.get("upload") == "done":
        return {**known, "local": False}  # the store exists only at its URL
    return {**known, **line}


class LineTail:
    """Follows the index of a store directory: each `read` returns the lines that were appended since the previous one.

    new_only: return only lines that are appended from now on, so that a long index is not read.
    """

    def __init__(self, directory: str | os.PathLike[str], new_only: bool = False) -> None:
        self._path = local_path(directory) / INDEX_NAME
        self._at, self._file = 0, 0
        if new_only and self._path.exists():
            status = self._path.stat()
            self._at, self._file = status.st_size, status.st_ino

    def read(self, of: str | None = None) -> list[dict[str, Any]]:
        """New whole lines since the last call; [] without an index.

        A replaced or truncated index is read from its start. of: name of a store, to return only its lines. Lines
        without the name may then be skipped before parsing.
        """
        try:
            with open(self._path, "rb") as index:
                status = os.fstat(index.fileno())
                if status.st_ino != self._file or status.st_size < self._at:
                    self._at, self._file = 0, status.st_ino
                if status.st_size == self._at:
                    return []
                index.seek(self._at)
                text = index.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]  # the rest is still being written
        self._at += len(whole)
        raws = _raws_with(whole, of.encode()) if of is not None and _PLAIN.fullmatch(of) else whole.split(b"\n")
        return [line for line in _parse(raws) if of in (None, line["store"])]
