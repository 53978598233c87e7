# SPDX-License-Identifier: Apache-2.0
"""Reads the stores of running requests: their entries in the list, and the rows written so far."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.captures.capture import Capture
from dmi_connector.store.format.locks import is_abandoned
from dmi_connector.store.format.schema import PARTIAL_SUFFIX
from dmi_connector.store.read.arrays.hook_array import HookArray
from dmi_connector.store.read.arrays.hook_values import HookValues, Tokens
from dmi_connector.store.read.arrays.indexing import each_of
from dmi_connector.store.read.index import CaptureInfo
from dmi_connector.store.read.journal import is_journal
from dmi_connector.store.read.partial import PartialStore, partial_of
from dmi_connector.store.read.waiting import Watch

RUNNING = "running"
"""State of a running request, in addition to the states of `CaptureInfo`."""
_LOGITS = "logits"
_PARTIAL = ".zarr" + PARTIAL_SUFFIX


class RunningCapture(Capture):
    """The rows of a running request, up to the last row that all hooks had when this object was made.

    It reads the files of the writers without a lock. Reading raises FileNotFoundError once the store is renamed.
    """

    def __init__(self, path: Path, partial: PartialStore, attrs: dict[str, Any], ids: np.ndarray) -> None:
        attrs = {**attrs, "num_tokens": len(ids), "missing": [], "complete": True, "reason": None}
        self._ids, self._written, self.files = ids, _WrittenValues(partial, attrs), partial.files
        self._read_from(path, attrs, self._written)

    def close(self) -> None:
        """Does nothing: no file is open."""

    def _plain(self, name: str) -> np.ndarray:
        if name == "token_ids":
            return self._ids
        if name == "logits_positions":
            return self._written.sampled
        positions = np.arange(len(self._ids), dtype=np.int32) + np.int32(self.attrs["start"])
        return {"positions": positions, "phase": (positions >= self.prompt_len).astype(np.uint8)}[name]


class _WrittenValues(HookValues):
    """Values of a store that is being written. sampled: like `Capture.logits_positions`, for the samples so far."""

    def __init__(self, partial: PartialStore, attrs: dict[str, Any]) -> None:
        self._partial, self.sampled = partial, partial.sampled(_LOGITS)
        documents = partial.documents(attrs["num_tokens"], len(self.sampled))
        super().__init__(partial.files, attrs, partial.path, documents)

    def stored(self, by_array: dict[str, list[int]], tokens: Tokens, convert: bool = False) -> np.ndarray:
        found = [self._rows(self.array(name), index, tokens) for name, indexes in by_array.items() for index in indexes]
        values = np.stack(found)
        return values.astype(np.float32) if convert and values.dtype.kind not in "iu" else values

    def _rows(self, array: HookArray, index: int, tokens: Tokens) -> np.ndarray:
        """Rows [tokens, stored width] of one layer."""
        rows = each_of(array.rows(tokens))
        out = np.empty((len(rows), array.shape[2]), array.dtype)
        chunks = rows // array.chunk_rows * array.chunk_rows
        for first in np.unique(chunks).tolist():
            values = self._partial.stored(array.name, index, first, 1 if array.per_sample else None)
            assert values is not None  # `PartialStore.written` has counted these rows
            out[chunks == first] = values[rows[chunks == first] - first]
        return out


class RunningStores:
    """The running requests of one directory. only: name of the only store to show, None for all.

    Files that have not changed since the last call are not read again.
    """

    def __init__(self, directory: Path, only: str | None) -> None:
        self._directory, self._only, self._lock = directory, only, threading.Lock()
        self._known: dict[str, _Running] = {}

    def infos(self) -> list[CaptureInfo]:
        """The entries for the list, with the state RUNNING and the number of rows so far."""
        with os.scandir(self._directory) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(_PARTIAL)]
        found = [self._find(name.removesuffix(PARTIAL_SUFFIX)) for name in names]
        there = set(found)
        with self._lock:
            self._known = {name: one for name, one in self._known.items() if one in there or one.lost}
        return [info for one in found if one is not None and (info := one.info()) is not None]

    def open(self, name: str) -> RunningCapture | None:
        """The rows so far of a running request, by the name of its store. None if the store is finished or unknown.

        Raises CaptureFailed for a request that has ended without a store, if `open` was called while the request was
        running, or if its partial store is still there.
        """
        running = self._find(name)
        if running is None:
            return None
        capture = running.open()
        if capture is None:
            with self._lock:
                self._known.pop(name, None)
        return capture

    def _find(self, name: str) -> _Running | None:
        with self._lock:
            if name in self._known:
                return self._known[name]
            if not (name.endswith(".zarr") and name == Path(name).name and self._only in (None, name)):
                return None
            partial = partial_of(self._directory / name)
            if partial.is_symlink() or not partial.is_dir():
                return None
            return self._known.setdefault(name, _Running(self._directory / name))


class _Running:
    """One running request. Thread-safe."""

    def __init__(self, final: Path) -> None:
        self._final, self._lock, self._opened = final, threading.Lock(), False
        self._partial, self._watch = PartialStore(final), Watch(final)
        self._seen: dict[str, int] = {}
        self._attrs: dict[str, Any] | None = None
        self._ids = np.zeros(0, np.int32)

    def info(self) -> CaptureInfo | None:
        """The entry for the list. None if the request has ended or has not begun, or if no process writes its store."""
        with self._lock:
            there, attrs, count = self._look(), self._attrs, self._length()
        if not there or attrs is None or is_abandoned(self._partial.path):
            return None
        started, model = attrs.get("created") or "", attrs.get("model")
        line = (self._final, attrs.get("key"), attrs.get("request_id"), RUNNING, None, started, None, None, count)
        return CaptureInfo(*line, attrs["prompt_len"], model)

    def open(self) -> RunningCapture | None:
        """The rows so far; None if the store is finished, or if the journals do not have the request yet.

        Raises CaptureFailed if the request has ended without a store.
        """
        with self._lock:
            there = self._look()
            if self._final.exists():
                return None
            self._watch.check()
            if not there or self._attrs is None:
                return None
            self._opened = True
            return RunningCapture(self._final, self._partial, self._attrs, self._ids[: self._length()])

    @property
    def lost(self) -> bool:
        """Whether the request was opened before and has no finished store. `RunningStores` then keeps this object, so
        that `open` can say why.
        """
        return self._opened and not self._final.exists()

    def _look(self) -> bool:
        """Read new records of the journals. Returns whether the partial store still exists."""
        path = self._partial.path
        try:
            with os.scandir(path) as entries:
                sizes = {entry.name: entry.stat().st_size for entry in entries if is_journal(entry.name)}
            if sizes != self._seen:
                self._partial.refresh()
                self._seen, self._attrs = sizes, self._partial.attrs()
        except FileNotFoundError:
            return path.exists()  # journals are removed shortly before the store is renamed
        if self._attrs is not None:
            self._ids = self._partial.written(self._ids)
        return True

    def _length(self) -> int:
        """Number of rows that can be shown. If logits are captured, rows whose logits have not arrived are left out."""
        attrs = self._attrs or {}
        if _LOGITS not in attrs.get("hooks", {}):
            return len(self._ids)
        sampled = self._partial.sampled(_LOGITS)
        end = int(sampled[-1]) + 1 if len(sampled) else attrs["prompt_len"] - 1
        return min(len(self._ids), max(end - attrs["start"], 0))
