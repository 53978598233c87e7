# SPDX-License-Identifier: Apache-2.0
"""Reads the hooks, token arrays and attributes of a finished store."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from dmi_connector.layout import DRAFT_INDEX
from dmi_connector.reduce import Reduction
from dmi_connector.store.format import schema
from dmi_connector.store.format.locks import share
from dmi_connector.store.format.remote_path import Given, Place, is_gone, place_of
from dmi_connector.store.read.arrays.hook_values import HookValues, Tokens
from dmi_connector.store.read.arrays.shard_reader import decode_plain
from dmi_connector.store.read.arrays.stored_reduction import StoredReduction
from dmi_connector.store.read.files.open_files import files_of, zarr_store_of
from dmi_connector.store.read.hook_names import HookTable, Layers, Source
from dmi_connector.store.read.metadata import NotACapture, read_attrs
from dmi_connector.store.read.waiting import wait_for

if TYPE_CHECKING:
    import zarr


class CaptureIncomplete(RuntimeError):
    """Raised for a store that lacks rows. reason: why. missing: [start, stop) ranges of rows, as far as known."""

    def __init__(self, path: Given, reason: str | None, missing: list[list[int]]) -> None:
        super().__init__(
            f"capture {path} is incomplete: {reason or 'no reason given'};"
            f" missing rows: {missing or 'unknown'}."
            " Open it with allow_incomplete=True to read it (missing rows read as zeros)"
        )
        self.path, self.reason, self.missing = str(path), reason, missing


WAIT_S = 60.0
"""Default number of seconds to wait for a store."""


def finished_store(
    path: Given, timeout: float | None = None, allow_incomplete: bool = False
) -> tuple[Place, dict[str, Any]]:
    """Wait for a store and read its root attribute. Returns (place, attribute), for `StoreReader`.

    timeout: in seconds; None for `WAIT_S`. Raises like `dmi_connector.open_capture`.
    """
    final = place_of(path)
    wait_for(final, WAIT_S if timeout is None else timeout)
    try:
        attrs = read_attrs(final)
    except NotACapture as error:
        if is_gone(final):
            raise FileNotFoundError(f"{final} was removed just now") from error
        raise
    if not attrs["complete"] and not allow_incomplete:
        raise CaptureIncomplete(final, attrs["reason"], attrs["missing"])
    return final, attrs


def open_reader(path: Given, timeout: float | None = None, allow_incomplete: bool = False) -> StoreReader:
    """Open a store like `dmi_connector.open_capture`, but without the methods that `Capture` adds."""
    return StoreReader(*finished_store(path, timeout, allow_incomplete))


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


class StoreReader:
    """Reads one finished store. Made by `open_reader`.

    hooks: names that can be read, including aliases. layers: {hook: layer numbers}, [] for a hook that exists once.
    complete: whether the store has all rows. reason: why rows are missing, else None. missing: [start, stop) ranges of
    missing rows. prompt_len: number of tokens of the prompt. num_layers: number of layers of the model; negative layer
    numbers count from the last. attrs: the root attribute (docs/FORMAT.md, section 5).

    `in` tests whether a hook exists, and iteration yields the names in `hooks`. `dmi prune` and retention do not remove
    the store before `close` or the end of a `with` block.
    """

    def __init__(self, path: Place, attrs: dict[str, Any]) -> None:
        # This package removes no stores in object stores, and no zip files, so these need no lock.
        held = share(path) if isinstance(path, Path) and not path.is_file() else None
        self._release = weakref.finalize(self, _close, held)
        self.files = files_of(path)
        self._read_from(path, attrs, HookValues(self.files, attrs, path))

    def _read_from(self, path: Place, attrs: dict[str, Any], values: HookValues) -> None:
        """Set all attributes that methods use, except those of `close`. values: values of the hooks."""
        self.path, self.attrs, self._values = path, attrs, values
        self._table = HookTable.of(attrs)
        self.num_layers = self._table.num_layers
        self.hooks: list[str] = self._table.names
        self.layers: dict[str, list[int]] = {name: self._table.layers(name) for name in self.hooks}
        self.complete: bool = attrs["complete"]
        self.reason: str | None = attrs["reason"]
        self.missing: list[list[int]] = attrs["missing"]
        self.prompt_len: int = attrs["prompt_len"]

    @cached_property
    def group(self) -> zarr.Group:
        """The store as a Zarr group of zarr-python."""
        import zarr  # slow to import, and slow to open a store

        from dmi_connector.store.format import zarr_bfloat16  # noqa: F401 (importing it registers the dtype)

        return zarr.open_group(zarr_store_of(self.path), mode="r", zarr_format=3, use_consolidated=False)

    def close(self) -> None:
        """Release the lock, so that the store can be removed."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.attrs)

    def __repr__(self) -> str:
        state = "" if self.complete else f", incomplete: {self.reason}"
        counts = f"{self.attrs['num_tokens']} tokens, {len(self.hooks)} hooks"
        return f"{type(self).__name__}({str(self.path)!r}, {counts}{state})"

    def __contains__(self, name: object) -> bool:
        """Whether there is a hook with this name."""
        return isinstance(name, str) and self._table.holds(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.hooks)

    # ---- tokens -----------------------------------------------------------------------------------------------------

    @property
    def token_ids(self) -> np.ndarray:
        """Token ids, int32 [tokens]."""
        return self._plain("token_ids")

    @property
    def positions(self) -> np.ndarray:
        """Position of each row in the request's tokens, int32 [tokens]."""
        return self._plain("positions")

    @property
    def phase(self) -> np.ndarray:
        """Phase of each token, uint8 [tokens]: 0 for prompt tokens, 1 for all later ones."""
        return self._plain("phase")

    @property
    def draft_index(self) -> np.ndarray:
        """Number of each token among the draft tokens of its step, uint8 [tokens].

        Draft tokens count from 1. Sampled tokens and prompt tokens have 0. 255 means unknown: the results of two steps
        came at once, as after a pause of the engine.

        Raises KeyError without speculative decoding, and for a repaired store.
        """
        if DRAFT_INDEX not in schema.token_arrays(self.attrs):
            raise KeyError("draft_index: the request ran without speculative decoding, or its store was repaired")
        return self._plain(DRAFT_INDEX)

    @property
    def media(self) -> np.ndarray:
        """Index of each row's image or other item in `attrs["media"]`, int32 [tokens]; -1 for rows of text."""
        positions = self.positions
        found = np.full(len(positions), -1, np.int32)
        for number, item in enumerate(self.attrs.get("media", ())):
            for start, stop in item["positions"]:
                found[(positions >= start) & (positions < stop)] = number
        return found

    @property
    def mrope_positions(self) -> np.ndarray:
        """M-RoPE positions of each row, int32 [tokens, axes]. Raises KeyError for models without M-RoPE."""
        return self.numpy("mrope_positions")

    @property
    def logits_positions(self) -> np.ndarray:
        """Position of the token from which the model computed each row of `logits`, int32 [samples].

        It is -1 for a missing row. Raises KeyError without logits.
        """
        self.sources("logits")
        return self._plain("logits_positions")

    def runs(self, most: int) -> Iterator[slice]:
        """Yield slices of at most `most` rows, which together have all rows that are not missing."""
        first = 0
        for start, stop in [*sorted(self.missing), [len(self.token_ids)] * 2]:
            for begin in range(first, start, most):
                yield slice(begin, min(begin + most, start))
            first = max(first, stop)

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def array(self, hook: str) -> zarr.Array:
        """The Zarr array of a hook as stored, [layers, tokens, stored width] (for logits: [samples, vocab]).

        A hook that exists once has one layer. Values of a reduced hook are not decoded.

        Raises KeyError for an unknown hook, and ValueError for `resid_post` if it is in two arrays.
        """
        names = {source.array for source in self._table.sources(hook)}
        if len(names) > 1:
            raise ValueError(f"hook {hook!r} lies in several arrays {sorted(names)}: use numpy() or torch()")
        import zarr

        array = self.group[names.pop()]
        assert isinstance(array, zarr.Array)
        return array

    def numpy(self, hook: str, layer: Layers = None, tokens: Tokens = None, convert: bool = True) -> np.ndarray:
        """Read decoded values as float32; integer hooks keep their dtype.

        The shape is [tokens, width] for one layer, and [layers, tokens, width] for `layer=None` and for a list of
        layers, in the order of the list. Hooks that exist once, and logits, always have [tokens, width].

        layer: a layer number of the model, negative from the last layer, or a list of them. tokens: rows of the store
        (for logits: samples), as a slice or a sequence of indexes. convert: False returns floats in the stored dtype
        (bfloat16 of ml_dtypes), which is faster; reduced hooks are decoded to float32 in any case.

        Raises KeyError for a hook or layer that was not captured, IndexError for rows that do not exist, and
        FileNotFoundError for a file that is gone. Raises ValueError for an invalid layer number, for an empty list, for
        layers of `resid_post` with different reductions, and, naming the file, for damaged values.
        """
        sources = self.sources(hook, layer)
        self._values.check_one_form(hook, sources)
        values = self._values.decoded(sources, tokens, convert)
        return values if sources[0].layer is not None and (layer is None or np.ndim(layer)) else values[0]

    def stored(self, source: Source, tokens: Tokens = None) -> tuple[np.ndarray, StoredReduction | None]:
        """Read stored rows [tokens, stored width] of one of `sources`. Returns (rows, their reduction or None).

        Raises like `numpy`.
        """
        (rows,) = self._values.stored({source.array: [source.index]}, tokens)
        return rows, self._values.reduced(source.array)

    def sources(self, hook: str, layer: Layers = None) -> list[Source]:
        """The locations of a hook, or of some layers: arrays, and indexes along their layer axes. Raises KeyError."""
        try:
            return self._table.chosen(hook, layer)
        except KeyError as error:
            raise KeyError(f"{self.path}: {error.args[0]}") from error

    def reduction(self, hook: str, layer: int | None = None) -> Reduction | None:
        """The reduction of a hook, or of one layer of it; None if it was stored in full.

        Raises ValueError if layers of `resid_post` have different reductions and `layer` is None.
        """
        return self._values.reduction(hook, self.sources(hook, layer))

    def shape(self, hook: str, layer: Layers = None) -> tuple[int, ...]:
        """The shape of `numpy(hook, layer)`. Reads no values. Raises like `numpy`."""
        sources = self.sources(hook, layer)
        self._values.check_one_form(hook, sources)
        array, width = self._values.array(sources[0].array), self._values.width(sources[0].array)
        stacked = sources[0].layer is not None and (layer is None or np.ndim(layer))
        return (len(sources), array.shape[1], width) if stacked else (array.shape[1], width)

    def chunk_rows(self, hook: str) -> tuple[int, int]:
        """(rows of an inner chunk, rows of a shard file) of a hook's array."""
        array = self._values.array(self.sources(hook)[0].array)
        return array.chunk_rows, array.segment_rows

    def _plain(self, name: str) -> np.ndarray:
        """Read a 1-D array."""
        try:
            return decode_plain(self.files, name, schema.token_arrays(self.attrs).get(name, "int32"))
        except ValueError as error:
            raise ValueError(f"{self.path}/{name}: {error}") from error
