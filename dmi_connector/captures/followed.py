# SPDX-License-Identifier: Apache-2.0
"""Reads the rows of a capture while it is written: `open_capture(path, follow=True)`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, overload

import numpy as np

from dmi_connector.captures.names import hook_and_layer, is_lens_name, names_rows
from dmi_connector.captures.own_values import check_keeps
from dmi_connector.hooks import HOOKS
from dmi_connector.layout import TOKEN_ARRAYS
from dmi_connector.store.format.remote_path import Given, Place, place_of
from dmi_connector.store.format.schema import SAMPLES_PER_SHARD
from dmi_connector.store.read.arrays.stored_reduction import StoredReduction
from dmi_connector.store.read.hook_names import HookTable, Source
from dmi_connector.store.read.partial import PartialStore
from dmi_connector.store.read.reader import WAIT_S, StoreReader
from dmi_connector.store.read.waiting import Watch, wait_for

_PAUSE_S = 0.1
"""Seconds between two polls of the journals."""
Rows = dict[str, np.ndarray]
Reader = TypeVar("Reader", bound=StoreReader)


def follow_capture(
    path: Given, timeout: float | None, open_finished: Callable[[Path], Reader]
) -> FollowedCapture[Reader]:
    """Open a capture that may still be written; see `open_capture`. open_finished: opens the finished store."""
    final = place_of(path)
    if not isinstance(final, Path):
        raise ValueError(f"follow=True: {final} is a URL; only stores on this machine can be followed")
    begun = _Begun(final)
    wait_for(final, WAIT_S if timeout is None else timeout, begun)
    return FollowedCapture(final, begun.partial, open_finished)


class _Begun:
    """Condition for `wait_for`: the capture has a finished store, or has begun to be written."""

    def __init__(self, final: Path) -> None:
        self._final, self.partial = final, PartialStore(final)

    def __call__(self, _final: Place) -> bool:
        try:
            self.partial.refresh()
        except FileNotFoundError:
            return self._final.exists()
        return self.partial.attrs() is not None


class FollowedCapture(Generic[Reader]):
    """One capture that may still be written. Made by `open_capture(path, follow=True)`.

    attrs: the root attributes known so far, including `hooks`. hooks: names that can be read. layers: {hook: layer
    numbers}. prompt_len: number of tokens of the prompt. finished: the `Capture` of the finished store. It is None
    until `follow` has seen the end of the capture, unless the capture had already ended when it was opened.
    """

    def __init__(self, path: Path, partial: PartialStore, open_finished: Callable[[Path], Reader]) -> None:
        self.path, self._partial, self._open_finished = path, partial, open_finished
        self._watch = Watch(path)
        self.finished: Reader | None = None
        self.attrs: dict[str, Any] = partial.attrs() or self._end().attrs
        self._table = HookTable.of(self.attrs)
        self.hooks: list[str] = self._table.names
        self.layers: dict[str, list[int]] = {name: self._table.layers(name) for name in self.hooks}
        self.prompt_len: int = self.attrs["prompt_len"]

    @property
    def complete(self) -> bool | None:
        """Whether the finished store has all rows; None until `finished` is set."""
        return None if self.finished is None else self.finished.complete

    @property
    def reason(self) -> str | None:
        """Why rows are missing; None until `finished` is set, and if the store is complete."""
        return None if self.finished is None else self.finished.reason

    @property
    def missing(self) -> list[list[int]]:
        """[start, stop) ranges of rows that the finished store lacks; [] until `finished` is set."""
        return [] if self.finished is None else self.finished.missing

    @overload
    def follow(self, names: str, pause: Callable[[], None] = ...) -> Iterator[tuple[int, np.ndarray]]: ...

    @overload
    def follow(
        self, names: list[str] | tuple[str, ...], pause: Callable[[], None] = ...
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]: ...

    def follow(
        self, names: str | list[str] | tuple[str, ...], pause: Callable[[], None] = lambda: time.sleep(_PAUSE_S)
    ) -> Iterator[tuple[int, Any]]:
        """Yield (first row, rows) in order, as rows are written, until the capture has ended.

        names: names as in `Capture[...]`, such as "resid_pre@20", or "token_ids", "positions", "phase". Rows of hooks
        are as in `Capture.numpy`: float32 [n, width], or [layers, n, width] if the name has no layer; integer hooks
        keep their dtype. Rows of the other names have the shape [n]. With a list of names, rows are a dict {name:
        array}. A writer writes `chunk_tokens` rows at a time. "logits" must be followed alone: it has one row per
        sampled token. A row of logits is yielded when 8 later ones are written, or at the end of the capture.

        Missing rows are left out. The rows after missing ones are yielded only when the capture has ended. pause:
        function that is called between polls.

        Raises KeyError for an unknown hook. Raises ValueError for an empty list, for "logits" with other names, and for
        a TransformerLens name of values that a reduction did not keep. While rows are yielded, raises CaptureFailed if
        the capture failed, was aborted or was removed, and ValueError for damaged rows.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        plan = {name: self._source(name) for name in wanted}
        if not plan:
            raise ValueError("follow([]) names no hook; give names of hooks")
        if len(plan) > 1 and any(of.sampled for of in plan.values()):
            raise ValueError("logits have a row for each sampled token; follow them alone")
        one = isinstance(names, str)
        return ((first, rows[wanted[0]] if one else rows) for first, rows in self._follow(plan, pause))

    def _source(self, name: str) -> _Named:
        """Resolve a name. Raises KeyError, and ValueError if a reduction did not keep the named values."""
        if name in TOKEN_ARRAYS:
            return _Named(name)
        hook, layer = hook_and_layer(name, self.attrs)
        sources = self._table.chosen(hook, layer)
        if is_lens_name(name, hook):
            for array in {source.array for source in sources}:
                reduced = StoredReduction.of(self.attrs["hooks"][array], self.path)
                check_keeps(hook, reduced.reduction if reduced is not None else None)
        return _Named(hook, layer, sources)

    def _follow(self, plan: Mapping[str, _Named], pause: Callable[[], None]) -> Iterator[tuple[int, Rows]]:
        at = 0
        while self.finished is None:
            found = self._written(plan, at)
            if found is not None:
                count, rows = found
                yield at, rows
                at += count
            elif not self._has_ended():
                pause()
        yield from self._rest(self.finished, plan, at)

    def _written(self, plan: Mapping[str, _Named], at: int) -> tuple[int, Rows] | None:
        """(number of rows, rows) from row `at` on; None if these rows are not written yet, or the capture has ended."""
        try:
            self._partial.refresh()
            hooks = {name: self._partial.rows(of.sources, at) for name, of in plan.items() if of.sources}
            ids = self._partial.token_ids(at) if len(hooks) < len(plan) else None
        except FileNotFoundError:
            return None
        if any(rows is None for rows in hooks.values()) or (ids is None and len(hooks) < len(plan)):
            return None
        count = len(ids) if ids is not None else next(iter(hooks.values())).shape[1]  # type: ignore[union-attr]
        positions = np.arange(at, at + count, dtype=np.int32) + np.int32(self.attrs["start"])
        tokens = {"token_ids": ids, "positions": positions, "phase": (positions >= self.prompt_len).astype(np.uint8)}
        return count, {n: of.shaped(hooks[n]) if n in hooks else tokens[n] for n, of in plan.items()}  # type: ignore

    def _has_ended(self) -> bool:
        """Whether the capture has ended. If so, open the store. Raises CaptureFailed if there will be no store."""
        if not self.path.exists():
            self._watch.check()
            return False
        self._end()
        return True

    def _end(self) -> Reader:
        self.finished = self._open_finished(self.path)
        self.attrs = self.finished.attrs
        return self.finished

    def _rest(self, cap: Reader, plan: Mapping[str, _Named], at: int) -> Iterator[tuple[int, Rows]]:
        """Yield the rows of the finished store starting at `at`, except missing ones."""
        if any(of.sampled for of in plan.values()):
            runs = _held(cap.logits_positions)
        else:
            runs = cap.runs(int(cap.attrs["chunk_tokens"]))
        for run in runs:
            if run.stop > at:
                first = max(run.start, at)
                tokens = slice(first, run.stop)
                yield first, {name: of.read(cap, tokens) for name, of in plan.items()}

    def close(self) -> None:
        """Close the finished store, so that it can be removed."""
        if self.finished is not None:
            self.finished.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, name: object) -> bool:
        """Whether `follow(name)` gives rows of a hook."""
        return names_rows(name, self._table, self.attrs)

    def __iter__(self) -> Iterator[str]:
        return iter(self.hooks)

    def __repr__(self) -> str:
        state = {None: "is written", True: "complete", False: f"incomplete: {self.reason}"}[self.complete]
        return f"{type(self).__name__}({str(self.path)!r}, {len(self.hooks)} hooks, {state})"


@dataclass(frozen=True)
class _Named:
    """A followed name: a hook, or a token array, which has no sources."""

    name: str
    layer: int | None = None
    sources: Sequence[Source] = ()

    @property
    def sampled(self) -> bool:
        return any(source.array in HOOKS and HOOKS[source.array].scope == "sampled" for source in self.sources)

    def shaped(self, rows: np.ndarray) -> np.ndarray:
        """Bring rows [sources, n, width] into the shape of `Capture.numpy`."""
        return rows if self.layer is None and self.sources[0].layer is not None else rows[0]

    def read(self, cap: StoreReader, tokens: slice) -> np.ndarray:
        """Rows of the finished store."""
        if self.sources:
            return cap.numpy(self.name, self.layer, tokens)
        found: np.ndarray = getattr(cap, self.name)[tokens]
        return found


def _held(positions: np.ndarray) -> Iterator[slice]:
    """Slices of samples that are not missing, each in one shard. positions: see `Capture.logits_positions`."""
    for at in range(0, len(positions), SAMPLES_PER_SHARD):
        held = np.flatnonzero(positions[at : at + SAMPLES_PER_SHARD] >= 0) + at
        for run in np.split(held, np.flatnonzero(np.diff(held) > 1) + 1):
            if len(run):
                yield slice(int(run[0]), int(run[-1]) + 1)
