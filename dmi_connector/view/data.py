# SPDX-License-Identifier: Apache-2.0
"""Lists the captures for the page, and opens their stores."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.analysis.stats import statistics
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.captures.captures import open_captures
from dmi_connector.store.format.remote_path import local_path
from dmi_connector.store.format.schema import INDEX_NAME
from dmi_connector.store.read.index import CaptureInfo, info_of
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.read.verify import unseen, verify_store
from dmi_connector.view.running import RunningCapture, RunningStores
from dmi_connector.view.texts_index import TextIndex

_SHOWN = ("model", "architecture", "dtype", "request_id", "key", "created", "finish_reason", "codec", "format_version")
"""Root attributes that the page shows."""


class NoSuchStore(LookupError):
    """The directory has no finished store with this name."""

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(f"{name!r} is not a finished store of {directory}; reload the list")


@dataclass
class Library:
    """The finished stores and running requests of one directory. only: name of the only store to show, None for all.

    No store stays open between two calls, so `dmi prune` and retention can remove stores.
    """

    directory: Path
    only: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _seen: tuple[object, ...] = ()
    _running: RunningStores = field(init=False, repr=False)
    _listed: dict[str, tuple[CaptureInfo, str]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._running = RunningStores(self.directory, self.only)

    @classmethod
    def at(cls, path: Path) -> Library:
        """The library of a store directory, or of one store."""
        path = local_path(path).resolve()
        one = (path / "zarr.json").exists() or path.suffix == ".zarr"
        return cls(path.parent, path.name) if one else cls(path)

    def page(self, search: str, first: int, count: int, texts: TextIndex, again: bool = False) -> dict[str, Any]:
        """Captures [first, first + count) of those that match the search, newest first, as JSON.

        search: words that must all occur in the name, key, request id, model, state or text of a capture; case is
        ignored. again: the page already shows the list, so only new stores are read, not the whole index. In the
        result, `pending` is the number of captures whose texts were not searched yet; the next call continues with
        them. `running` is the number of running requests.
        """
        running = {info.store.name: (info, _text(info)) for info in self._running.infos()}
        # A request that is both running and finished has just ended. The finished store replaces the running request.
        every = running | (self._with_new() if again else self._stores())
        newest = sorted(every.values(), key=lambda one: one[0].started, reverse=True) if running else every.values()
        found, pending = texts.search(newest, search.lower().split())
        return {
            "running": len(running),
            "directory": str(self.directory),
            "total": len(found),
            "pending": pending,
            "first": first,
            "captures": [{**_line(info), "text": texts.prompt(info)} for info in found[first : first + count]],
        }

    def all(self) -> Iterator[Capture]:
        """All stores that can be opened, newest first. The caller closes each."""
        for name in list(self._stores()):
            with contextlib.suppress(LookupError, OSError, ValueError):
                yield self.open(name)

    def open(self, name: str) -> Capture:
        """Open a store by its name. The capture of a running request has the rows written so far.

        Raises NoSuchStore if the directory has no such store. Raises CaptureFailed for a request that has ended without
        a store, if `open` was called while the request was running, or if its partial store is still there.
        """
        running = self._running.open(name)
        return running if running is not None else open_capture(self._path(name), timeout=0, allow_incomplete=True)

    def verify(self, name: str) -> dict[str, Any]:
        """The result of `dmi verify` for a store, as JSON.

        problems: damage. not_finite: hooks with values that are not finite. unseen: see `verify.unseen`; None if the
        root attributes cannot be read. Raises NoSuchStore.
        """
        path = self._path(name)
        said: dict[bool, list[str]] = {True: [], False: []}
        for problem in verify_store(path):
            said[problem.damage].append(f"{problem.where}: {problem.what}")
        try:
            attrs = read_attrs(path)
        except ValueError:  # the problems include it
            attrs = {}
        return {"problems": said[True], "not_finite": said[False], "unseen": unseen(attrs) if attrs else None}

    def _path(self, name: str) -> Path:
        path = self.directory / name
        # `_listed` is looked at first, so that a growing index is not read for each response.
        known = name in self._listed or name in self._stores()
        # A listed name may still be a link to another place.
        if known and path.is_dir() and path.resolve().parent == self.directory.resolve():
            return path
        raise NoSuchStore(name, self.directory)

    def _stores(self) -> dict[str, tuple[CaptureInfo, str]]:
        """{name: (info, searched text)}, newest first. Read again if the directory or its index has changed."""
        with self._lock:
            now = tuple(_stamp(path) for path in (self.directory, self.directory / INDEX_NAME))
            if now != self._seen:
                self._listed = {info.store.name: (info, _text(info)) for info in self._found()}
                self._seen = now
            return self._listed

    def _with_new(self) -> dict[str, tuple[CaptureInfo, str]]:
        """Like `_stores`, but lists the directory and opens only stores that are not known yet."""
        if self.only is not None or not self._seen:
            return self._stores()
        with self._lock, os.scandir(self.directory) as entries:
            names = {e.name for e in entries if e.name.endswith(".zarr") and e.is_dir(follow_symlinks=False)}
            every = {name: one for name, one in self._listed.items() if name in names}
            for name in names - every.keys():
                with contextlib.suppress(ValueError):  # damaged stores, and those that are not captures, are not listed
                    info = info_of(self.directory / name)
                    every[name] = (info, _text(info))
            self._listed = dict(sorted(every.items(), key=lambda item: item[1][0].started, reverse=True))
            return self._listed

    def _found(self) -> list[CaptureInfo]:
        if self.only is not None:  # other entries of its directory may not be captures
            store = self.directory / self.only
            return [info_of(store)] if store.is_dir() else []
        infos = open_captures(self.directory, incomplete=True).infos
        mine = [info for info in infos if info.store.parent == self.directory]
        # `_path` refuses links to other places.
        return [info for info in mine[::-1] if isinstance(info.store, Path) and not info.store.is_symlink()]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:  # a directory without an index
        return None
    return found.st_mtime_ns, found.st_size


def _text(info: CaptureInfo) -> str:
    return " ".join(str(v) for v in (info.store.name, info.key, info.request_id, info.model, info.state) if v).lower()


def _line(info: CaptureInfo) -> dict[str, Any]:
    return {
        "name": info.store.name,
        "key": info.key,
        "model": info.model and Path(info.model).name,
        "state": info.state,
        "started": info.started,
        "tokens": info.num_tokens,
        "prompt": info.prompt_len,
        "bytes": info.bytes,
    }


def ranges(rows: np.ndarray) -> list[list[int]]:
    """Rows as [start, stop) ranges, as in `Capture.missing`."""
    rows = np.unique(rows)
    runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    return [[int(run[0]), int(run[-1]) + 1] for run in runs if len(run)]


def describe(capture: Capture) -> dict[str, Any]:
    """The facts about a store that the page needs before it requests values, as JSON.

    `rows` of a hook: [start, stop) ranges of rows that have a value; None if all rows that are not missing have one.
    """
    sampled = capture.logits_positions if "logits" in capture.attrs["hooks"] else np.zeros(0, np.int32)
    sampled = sampled[sampled >= 0] - int(capture.attrs["start"])  # a lost sample has the position -1
    hooks = [
        {
            "name": name,
            "layers": capture.layers[name],
            "dtype": hook["dtype"],
            "width": capture.shape(name)[-1],
            "reduce": hook.get("reduce", {}).get("kind"),
            "rows": ranges(sampled) if name == "logits" else None,
            "statistics": [
                {"name": s.name, "index": s.index_name, "signed": s.signed} for s in statistics(capture, name)
            ],
        }
        for name, hook in capture.attrs["hooks"].items()
    ]
    return {
        "name": capture.path.name,
        "tokens": capture.attrs["num_tokens"],
        "prompt": capture.prompt_len,
        "start": capture.attrs["start"],
        "running": isinstance(capture, RunningCapture),
        "complete": capture.complete,
        "reason": capture.reason,
        "missing": capture.missing,
        "hooks": hooks,
        "heads": capture.attrs.get("dims", {}).get("heads", 0),
        "attrs": {name: capture.attrs.get(name) for name in _SHOWN},
        "versions": json.dumps(capture.attrs.get("versions", {})),
    }
