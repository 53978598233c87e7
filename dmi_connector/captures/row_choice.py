# SPDX-License-Identifier: Apache-2.0
"""Chooses rows of stores: by phase, by a mask, after a token, or the last ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np

from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.captures.token_fields import plain_array, rows_present, store_fields
from dmi_connector.store.format.remote_path import RemotePath
from dmi_connector.store.read.files.open_files import files_of
from dmi_connector.store.read.files.thread_pool import in_fetch_threads, in_threads
from dmi_connector.store.read.index import CaptureInfo
from dmi_connector.store.read.metadata import read_attrs

PHASES = {"prompt": 0, "generated": 1}
Mask = Callable[[Capture], Any]


@dataclass(frozen=True)
class RowChoice:
    """Options that choose the rows of each store. A row must pass all given options.

    skip: number of rows to leave out at the start of each store, such as 1 for the first token, whose norm is often
    large. phase: "prompt" or "generated". after: a token id, or several; only rows after the first row with one of
    these ids are chosen, such as those after </think>. A store without such a row gives no rows. mask: a function that
    takes an open `Capture` and returns one boolean per row (for logits, per sample). last: maximum number of rows per
    store; the last rows that pass the other options are chosen. `last=1` is the last token, and with phase="prompt" the
    last token of the prompt.

    Missing rows are left out after all other options, so if the last row is missing, `last=1` does not choose another
    one. phase and after read token arrays of every store, and mask opens every store. Raises ValueError for invalid
    values.
    """

    skip: int = 0
    phase: str | None = None
    after: int | Collection[int] | None = None
    mask: Mask | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        if not _is_whole(self.skip) or self.skip < 0:
            raise ValueError(f"skip {self.skip!r} is not valid; use 0 or more rows")
        if self.phase is not None and self.phase not in [*PHASES]:
            raise ValueError(f"phase {self.phase!r} is not valid; use 'prompt' or 'generated'")
        markers = self.after if isinstance(self.after, Collection) else [self.after]
        if self.after is not None and not all(map(_is_whole, markers)):
            raise ValueError(f"after {self.after!r} is not valid; use a token id, or a list of token ids")
        if self.last is not None and (not _is_whole(self.last) or self.last < 1):
            raise ValueError(f"last {self.last!r} is not valid; use 1 row or more")

    def of(self, infos: Sequence[CaptureInfo], counts: Sequence[int], sampled: bool = False) -> Runs:
        """The chosen rows of stores. counts: number of rows (for logits, of samples) of each store.

        Raises ValueError for a mask of another shape, for damaged token arrays, and for a store whose number of rows is
        not the one in `counts`.
        """
        found: list[np.ndarray] = [np.empty((0, 2), np.int64)] * len(infos)

        def look(number: int) -> None:
            found[number] = self._runs(infos[number], counts[number], sampled)

        if self._reads or not all(info.state == "complete" for info in infos):
            remote = any(isinstance(info.store, RemotePath) for info in infos)
            (in_fetch_threads if remote else in_threads)(look, range(len(infos)))
        else:
            for number in range(len(infos)):
                look(number)
        stores = np.repeat(np.arange(len(infos)), [len(runs) for runs in found])
        runs = np.concatenate(found) if found else np.empty((0, 2), np.int64)
        return Runs(stores, runs[:, 0], np.concatenate([[0], np.cumsum(runs[:, 1] - runs[:, 0])]))

    @property
    def _reads(self) -> bool:
        """Whether the stores must be read."""
        return (self.phase, self.after, self.mask) != (None, None, None)

    def _runs(self, info: CaptureInfo, count: int, sampled: bool) -> np.ndarray:
        """[start, stop) of runs of chosen rows of one store, in order, int64 [runs, 2]."""
        complete = info.state == "complete"
        if complete and not self._reads:
            start = self.skip if self.last is None else max(self.skip, count - self.last)
            return np.array([[start, count]] if start < count else [], np.int64).reshape(-1, 2)
        kept = self._chosen(info, count, complete, sampled)
        if self.last is not None:
            kept[np.flatnonzero(kept)[: -self.last]] = False
        if not complete and sampled:
            at = plain_array(info.store, files_of(info.store), "logits_positions", "int32")
            kept &= _of_length(count, info, "logits_positions", at) >= 0
        elif not complete:
            kept &= _of_length(count, info, "missing", rows_present(read_attrs(info.store)))
        edges = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]]).astype(np.int8)))
        return edges.astype(np.int64).reshape(-1, 2)

    def _chosen(self, info: CaptureInfo, count: int, complete: bool, sampled: bool) -> np.ndarray:
        """Whether each row passes all options but `last`, bool [rows]."""
        kept = np.arange(count) >= self.skip
        wanted = {"phase": self.phase, "token_ids": self.after}
        names = [name for name, value in wanted.items() if value is not None]
        fields = store_fields(info.store, names, complete, sampled) if names else {}
        fields = {name: _of_length(count, info, name, values) for name, values in fields.items()}
        if self.phase is not None:
            kept &= fields["phase"] == PHASES[self.phase]
        if self.after is not None:
            markers = list(self.after) if isinstance(self.after, Collection) else [self.after]
            found = np.flatnonzero(np.isin(fields["token_ids"], markers))
            kept[: found[0] + 1 if len(found) else count] = False
        if self.mask is not None:
            with open_capture(info.store, timeout=0, allow_incomplete=True) as capture:
                given = np.asarray(self.mask(capture))
            if given.dtype != bool or given.shape != (count,):
                raise ValueError(
                    f"mask: it returned {given.dtype} of shape {given.shape} for {info.store}; return a boolean for"
                    f" each of its {count} rows"
                )
            kept &= given
        return kept


def _of_length(count: int, info: CaptureInfo, name: str, values: np.ndarray) -> np.ndarray:
    """The values of `name`, one per row. Raises ValueError for another number of rows than `count`."""
    if len(values) != count:
        raise ValueError(
            f"{info.store}/{name} has {len(values)} values, the store has {count} rows; dmi verify says what is damaged"
        )
    return values


def _is_whole(value: object) -> bool:
    return isinstance(value, SupportsIndex) and not isinstance(value, bool | np.ndarray)


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of consecutive rows of stores, in the order of a view, int64.

    stores: index of the store of each run. firsts: first row of each run in its store. begins: first row of each run in
    the view, followed by the number of rows of the view.
    """

    stores: np.ndarray
    firsts: np.ndarray
    begins: np.ndarray

    @property
    def rows(self) -> int:
        """Number of rows of the view."""
        return int(self.begins[-1])

    def origins(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index of the store, row in that store) of rows of the view, both int64 [n]."""
        run = np.searchsorted(self.begins, numbers, "right") - 1
        return self.stores[run], self.firsts[run] + numbers - self.begins[run]

    def span(self, begin: int, count: int) -> slice | np.ndarray:
        """Rows [begin, begin + count) of the view, as rows of their store. All must be in one store."""
        run = int(self.begins.searchsorted(begin, "right")) - 1
        if begin + count <= self.begins[run + 1]:
            first = int(self.firsts[run] + begin - self.begins[run])
            return slice(first, first + count)
        return self.origins(np.arange(begin, begin + count))[1]

    def blocks(self, chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Split the view into parts that each lie in one chunk of `chunk` rows of a store.

        Returns int64 arrays (index of the store, first row in the store, number of rows) of the parts. The rows of a
        part are in ascending order, but need not be consecutive.
        """
        ends = self.firsts + np.diff(self.begins)
        counts = (ends - 1) // chunk - self.firsts // chunk + 1
        run = np.repeat(np.arange(len(ends)), counts)
        number = self.firsts[run] // chunk + np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
        start = np.maximum(number * chunk, self.firsts[run])
        stop = np.minimum((number + 1) * chunk, ends[run])
        store = self.stores[run]
        new = np.flatnonzero((np.diff(store, prepend=-1) != 0) | (np.diff(number, prepend=-1) != 0))
        rows = np.add.reduceat(stop - start, new) if len(new) else np.empty(0, np.int64)
        return store[new], start[new], rows
