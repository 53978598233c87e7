# SPDX-License-Identifier: Apache-2.0
"""Finds captures by the append-only index of a store directory, or without an index by the names of stores."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dmi_connector.store.format.locks import is_abandoned
from dmi_connector.store.format.paths import may_be_named
from dmi_connector.store.format.remote_path import Given, Place, RemotePath, local_path, place_of
from dmi_connector.store.format.schema import INDEX_NAME, PARTIAL_SUFFIX, listed_bytes
from dmi_connector.store.read.index_lines import LineTail, merge_line, read_index
from dmi_connector.store.read.metadata import NotACapture, read_attrs

FINISHED = ("complete", "incomplete")
"""States of finished stores."""
_ADDED = re.compile(r"(_[0-9]+)?(-|\Z)")
"""What may follow a request id: a number that vLLM appends, then the end, or a dash and a random suffix."""
_DRAFTS = {"draft_tokens_scheduled": "scheduled", "draft_tokens_accepted": "accepted"}
"""{name of a count of draft tokens in the index: its name in a store's attribute `draft_tokens`}."""
SCORES = ("max", "at", "min", "mean", "last")
"""Statistics of a probe's scores in the index."""
_OF_END = ("state", "reason", "finished", "bytes", "num_tokens", "prompt_len", "model", "scores", *_DRAFTS)
"""Fields of the line that is appended when a capture ends."""
_STORES = (".zarr", ".zarr" + PARTIAL_SUFFIX)


@dataclass(frozen=True)
class CaptureInfo:
    """One capture, as recorded in the index.

    state: "started", "complete", "incomplete", "failed", or "unfinished" (its writers have exited, and `dmi repair` may
    recover a store). reason: why the capture is not complete. started, finished: ISO 8601, UTC. bytes: size of the
    finished store without its root `zarr.json`. num_tokens: number of rows. prompt_len: number of tokens of the prompt.
    model: name of the model. Before the end of the capture, prompt_len and model are None. Index lines of format 1.1 or
    older lack both too, and `open_captures` then reads both from the store. draft_tokens_scheduled,
    draft_tokens_accepted: numbers of draft tokens that were verified, and that were accepted; None before the end, and
    without speculative decoding. scores: scores of probes, as in the store's attribute (docs/FORMAT.md, section 5);
    None before the end, and without probes.

    upload: "pending", "done" or "failed"; None without the server's option `upload`. url: destination of the upload.
    upload_reason: why the upload failed. remove_local: whether the local copy is removed after the upload.
    only_complete: whether the store stays local if it lacks rows, or if its request was aborted. If the local copy was
    removed, `store` is the URL.
    """

    store: Place
    key: str | None
    request_id: str | None
    state: str
    reason: str | None
    started: str
    finished: str | None
    bytes: int | None
    num_tokens: int | None
    prompt_len: int | None = None
    model: str | None = None
    upload: str | None = None
    url: str | None = None
    upload_reason: str | None = None
    remove_local: bool = False
    only_complete: bool = False
    draft_tokens_scheduled: int | None = None
    draft_tokens_accepted: int | None = None
    scores: Mapping[str, Any] | None = field(default=None, compare=False)


def unrecorded_stores(directory: Path) -> list[Path]:
    """Finished stores that the index lists as "started", except unreadable ones."""
    begun: dict[str, None] = {}
    for line in read_index(directory):
        if line.get("state") == "started":
            begun[line["store"]] = None
        elif "state" in line:
            begun.pop(line["store"], None)
    stores = [directory / name for name in begun]
    return [s for s in stores if s.is_dir() and (info := _scanned_or_failed(s)) and info.state in FINISHED]


def find_captures(
    directory: Given, key: str | None = None, request_id: str | None = None, on_error: str = "raise"
) -> list[CaptureInfo]:
    """Captures of a store directory, sorted by start time. Aborted and removed captures are left out.

    directory: a path, or a URL such as s3://bucket/prefix. key: only captures with this key. request_id: only captures
    of this request. It also matches the ids that vLLM derives from it: children of one request get a number as prefix
    (`0_id`), requests of the Responses API get one as suffix (`resp_xxxx_0`), and every request gets a random suffix
    (`id-xxxx`).

    This reads the directory's index. It does not open stores that the index lists as finished. Other stores of a local
    directory, such as copies, are found by their names (*.zarr), and each is opened once. With a key or request id,
    these are searched only if the index has no match. The state of a store that cannot be read is "failed".

    Raises ValueError for a directory that does not exist (a server creates its directory when it starts), for a
    directory whose stores are one level below, and for a store. In a directory without an index, raises ValueError for
    a damaged store too, unless on_error="skip".
    """
    check_text("key", key)
    check_text("request_id", request_id)
    place = place_of(directory)
    if isinstance(place, RemotePath):
        return indexed_captures(place, key, request_id)
    check_directory(place)
    if not (place / INDEX_NAME).exists():
        look = _scanned if on_error == "raise" else _scanned_or_failed
        return _wanted(map(look, _unnamed(place)), key, request_id)
    word = key if key is not None else request_id
    others = _unnamed(place) if word is None else []  # listed before the index is read: a capture may end in between
    lines = _lines(place, word)
    found = _wanted(_infos(place, lines), key, request_id)
    if word is not None and not found:
        others = _unnamed(place, word)
        lines = _lines(place, word)
    unnamed = map(_scanned_or_failed, (store for store in others if store.name not in lines))
    return sorted([*found, *_wanted(unnamed, key, request_id)], key=lambda info: info.started)


def check_text(name: str, value: object) -> None:
    """Raise ValueError unless the value of a filter is None or a string. Keys that are row numbers are strings too."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} {value!r} is not valid; give a string, as in {name}={str(value)!r}")


def check_directory(place: Path) -> None:
    """Raise ValueError if `place` is not a directory of stores. Any directory with an index is one."""
    if place.exists() and is_store(place) and not (place / INDEX_NAME).exists():
        raise ValueError(f"{place} is a store; give its directory, or open it with open_capture")
    if not place.is_dir():
        raise ValueError(f"{place} is not a directory; give a directory of stores")
    check_not_above(place)


def check_not_above(place: Path) -> None:
    """Raise ValueError for a directory that has no stores itself, but a subdirectory with stores."""
    if not place.is_dir() or is_store(place) or _holds_stores(place):
        return
    below = [inner for inner in sorted(place.iterdir()) if inner.is_dir() and _holds_stores(inner)]
    if below:
        more = f" or one of {len(below) - 1} more" if len(below) > 1 else ""
        raise ValueError(f"{place} holds no store, but directories in it do; give {below[0]}{more}")


def _holds_stores(directory: Path) -> bool:
    """Whether a directory has an index or stores. A directory that cannot be read has none."""
    try:
        with os.scandir(directory) as entries:
            return any(entry.name == INDEX_NAME or entry.name.endswith(_STORES) for entry in entries)
    except OSError:
        return False


def is_store(place: Place) -> bool:
    """Whether a path or URL names one store, not a directory of stores."""
    named = place.suffix == ".zarr" or (place.suffix == ".zip" and not (isinstance(place, Path) and place.is_dir()))
    return named or (isinstance(place, Path) and (place / "zarr.json").exists())


def indexed_captures(directory: Given, key: str | None = None, request_id: str | None = None) -> list[CaptureInfo]:
    """Like `find_captures`, but reads only the index. [] without an index."""
    place = place_of(directory)
    lines = _lines(place, key if key is not None else request_id)
    return _wanted(_infos(place, lines), key, request_id)


def _lines(place: Place, word: str | None) -> dict[str, dict[str, Any]]:
    """The merged index lines of each store, by name. word: as in `read_index`."""
    lines: dict[str, dict[str, Any]] = {}
    for line in read_index(place, word):
        lines[line["store"]] = merge_line(lines.get(line["store"], {}), line)
    return lines


def _infos(place: Place, lines: Mapping[str, dict[str, Any]]) -> list[CaptureInfo]:
    """The captures of index lines, except aborted and removed ones."""
    for line in lines.values():
        store = place / line["store"]
        if line.get("state", "started") != "started" or not isinstance(store, Path):
            continue
        partial = store.with_name(store.name + PARTIAL_SUFFIX)
        found = _scanned_or_failed(store) if store.is_dir() else None
        if found is not None:  # the finish line is not written yet, or was lost
            line |= {name: getattr(found, name) for name in _OF_END}
        elif is_abandoned(partial):
            line |= {"state": "unfinished", "reason": f"its writers ended and left {partial.name}: run dmi repair"}
    return [_info(place, line) for line in lines.values() if line.get("state") not in ("aborted", "removed")]


def _wanted(found: Iterable[CaptureInfo | None], key: str | None, request_id: str | None) -> list[CaptureInfo]:
    """The captures with the key and the request id, sorted by start time."""
    there = [c for c in found if c is not None and key in (None, c.key)]
    kept = [c for c in there if request_id is None or same_request(request_id, c.request_id)]
    return sorted(kept, key=lambda c: c.started)


def _unnamed(directory: Path, word: str = "") -> list[Path]:
    """Finished stores of a directory, by name. word: only stores that may have this key or request id."""
    return sorted(store for store in directory.glob("*.zarr") if may_be_named(store.name, word))


def _scanned(store: Path) -> CaptureInfo | None:
    """The `CaptureInfo` of a store; None if it was just removed, or is not a capture. Raises ValueError if damaged."""
    try:
        return info_of(store)
    except NotACapture:
        return None
    except ValueError as error:
        if not store.exists():
            return None
        raise ValueError(f"{error}; dmi verify {store.parent} lists all stores that are damaged") from error


def _scanned_or_failed(store: Path) -> CaptureInfo | None:
    """Like `_scanned`, but a damaged store gives a failed capture."""
    try:
        return info_of(store)
    except NotACapture:
        return None
    except ValueError as error:
        return CaptureInfo(store, None, None, "failed", str(error), "", None, None, None)


def info_of(store: Place) -> CaptureInfo:
    """The `CaptureInfo` of a finished store. Raises ValueError if the store is damaged, or not a store."""
    attrs = read_attrs(store)
    return CaptureInfo(
        store=store,
        key=attrs.get("key"),
        request_id=attrs.get("request_id"),
        state=FINISHED[0] if attrs["complete"] else FINISHED[1],
        reason=attrs["reason"],
        started=attrs.get("created") or "",
        finished=attrs.get("finished"),
        bytes=listed_bytes(attrs),
        num_tokens=attrs["num_tokens"],
        prompt_len=attrs["prompt_len"],
        model=attrs.get("model"),
        scores=attrs.get("scores"),
        **drafts_of(attrs),
    )


def drafts_of(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The counts of draft tokens in a store's root attribute, by their names in `CaptureInfo` and the index."""
    counts = attrs.get("draft_tokens", {})
    return {name: counts[key] for name, key in _DRAFTS.items() if key in counts}


def _info(directory: Place, line: Mapping[str, Any]) -> CaptureInfo:
    removed = isinstance(directory, Path) and line.get("local") is False and isinstance(line.get("url"), str)
    return CaptureInfo(
        store=place_of(line["url"], "url in the index") if removed else directory / line["store"],
        key=line.get("key"),
        request_id=line.get("request_id"),
        state=line.get("state", "started"),
        reason=line.get("reason"),
        started=line.get("created") or "",
        finished=line.get("finished"),
        bytes=line.get("bytes"),
        num_tokens=line.get("num_tokens"),
        prompt_len=line.get("prompt_len"),
        model=line.get("model"),
        upload=line.get("upload"),
        url=line.get("url"),
        upload_reason=line.get("upload_reason"),
        remove_local=line.get("remove_local") is True,
        only_complete=line.get("only_complete") is True,
        scores=line.get("scores"),
        **{name: line.get(name) for name in _DRAFTS},
    )


class IndexTail:
    """Follows the index of a store directory: each `read` returns the captures that ended since the previous one.

    new_only: as in `LineTail`. upload_failure: why the latest upload failed; None if it succeeded, or without uploads.
    """

    def __init__(self, directory: str | os.PathLike[str], new_only: bool = False) -> None:
        self._directory = local_path(directory)
        self._tail = LineTail(directory, new_only)
        self.upload_failure: str | None = None

    def read(self) -> list[CaptureInfo]:
        """Captures that ended since the last call, in order. Without `new_only`, the first call returns all.

        [] without an index. Aborted captures are left out. A replaced or truncated index is read from its start.
        """
        lines = self._tail.read()
        for line in lines:
            if line["event"] == "upload" and line.get("upload") in ("done", "failed"):
                self.upload_failure = line.get("upload_reason")
        ended = [line for line in lines if line["event"] == "finish" and line.get("state") != "aborted"]
        return [_info(self._directory, line) for line in ended]


def same_request(wanted: str, stored: str | None) -> bool:
    """Whether the request id in a store is `wanted`, or an id that vLLM derived from it; see `find_captures`."""
    if stored is None:
        return False
    child, _, rest = stored.partition("_")
    names = [stored, rest] if child.isdigit() and rest else [stored]
    return any(name.startswith(wanted) and _ADDED.match(name, len(wanted)) for name in names)
