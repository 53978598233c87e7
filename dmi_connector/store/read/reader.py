# SPDX-License-Identifier: Apache-2.0
"""Reads the hooks, token arrays and attributes of a finished store. captures/ computes more from these."""

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
from dmi_connector.store.format.remote_path import Given, Place, place_of
from dmi_connector.store.read.arrays.hook_values import HookValues, Tokens
from dmi_connector.store.read.arrays.shard_reader import decode_plain
from dmi_connector.store.read.arrays.stored_reduction import StoredReduction
from dmi_connector.store.read.files.open_files import files_of, zarr_store_of
from dmi_connector.store.read.hook_names import HookTable, Layers, Source
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.read.waiting import wait_for

if TYPE_CHECKING:
    import zarr


class CaptureIncomplete(RuntimeError):
    """The store says that rows are missing. reason: why. missing: [start, stop) rows, as far as known."""

    def __init__(self, path: Given, reason: str | None, missing: list[list[int]]) -> None:
        super().__init__(
            f"capture {path} is incomplete: {reason or 'no reason given'};"
            f" missing rows: {missing or 'unknown'}."
            " Open it with allow_incomplete=True to read what is there (missing rows read as zeros)"
        )
        self.path, self.reason, self.missing = str(path), reason, missing


WAIT_S = 60.0
"""Seconds to wait for a store by default."""


def finished_store(
    path: Given, timeout: float | None = None, allow_incomplete: bool = False
) -> tuple[Place, dict[str, Any]]:
    """Wait for a store and read its root attribute. Returns (place, attribute), the arguments of `StoreReader`.

    timeout: seconds, None for `WAIT_S`. Raises what `dmi_connector.open_capture` raises.
    """
    final = place_of(path)
    wait_for(final, WAIT_S if timeout is None else timeout)
    attrs = read_attrs(final)
    if not attrs["complete"] and not allow_incomplete:
        raise CaptureIncomplete(final, attrs["reason"], attrs["missing"])
    return final, attrs


def open_reader(path: Given, timeout: float | None = None, allow_incomplete: bool = False) -> StoreReader:
    """Open a store as `dmi_connector.open_capture` does, without the methods that `Capture` adds."""
    return StoreReader(*finished_store(path, timeout, allow_incomplete))


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


class StoreReader:
    """Reads one finished store. Made by `open_reader`.

    hooks: names that can be read, aliases included. layers: hook -> layer numbers ([] for a hook that exists once).
    complete, reason, missing: whether rows are missing, why, and which [start, stop) rows. prompt_len: tokens of the
    prompt. num_layers: layers of the model; negative layer numbers count from the last. attrs: the root attribute
    (docs/FORMAT.md, section 5).

    `in` says whether a hook is there, and a loop gives the names of `hooks`. `dmi prune` and retention do not remove
    the store until `close` or the end of a `with` block.
    """

    def __init__(self, path: Place, attrs: dict[str, Any]) -> None:
        # Nothing of ours removes stores of an object store, or zip files.
        held = share(path) if isinstance(path, Path) and not path.is_file() else None
        self._release = weakref.finalize(self, _close, held)
        self.files = files_of(path)
        self._read_from(path, attrs, HookValues(self.files, attrs, path))

    def _read_from(self, path: Place, attrs: dict[str, Any], values: HookValues) -> None:
        """Set all attributes that methods use, except those of `close`. values: those of the hooks of `attrs`."""
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
        """The Zarr group, by zarr-python."""
        import zarr  # slow to import, and to open a store with

        from dmi_connector.store.format import zarr_bfloat16  # noqa: F401 (importing it registers the dtype)

        return zarr.open_group(zarr_store_of(self.path), mode="r", zarr_format=3, use_consolidated=False)

    def close(self) -> None:
        """Let the store be removed."""
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
        """Whether a hook of this name is there."""
        return isinstance(name, str) and self._table.holds(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.hooks)

    # ---- tokens -----------------------------------------------------------------------------------------------------

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [tokens]."""
        return self._plain("token_ids")

    @property
    def positions(self) -> np.ndarray:
        """int32 [tokens]: position of each row in the request's tokens."""
        return self._plain("positions")

    @property
    def phase(self) -> np.ndarray:
        """uint8 [tokens]: 0 for prompt tokens, 1 for generated ones."""
        return self._plain("phase")

    @property
    def draft_index(self) -> np.ndarray:
        """uint8 [tokens]: which draft token of its step a generated token was, from 1 on; 0 if it was sampled, and in
        the prompt; 255 if that is not known (accepted after a pause of the engine).

        Raises KeyError without speculative decoding, and for a repaired store.
        """
        if DRAFT_INDEX not in schema.token_arrays(self.attrs):
            raise KeyError("draft_index: the request ran without speculative decoding, or its store was repaired")
        return self._plain(DRAFT_INDEX)

    @property
    def media(self) -> np.ndarray:
        """int32 [tokens]: number in `attrs["media"]` of the image (or the like) that a row's embedding comes from; -1
        for text.
        """
        positions, found = self.positions, np.full(int(self.attrs["num_tokens"]), -1, np.int32)
        for number, item in enumerate(self.attrs.get("media", ())):
            for start, stop in item["positions"]:
                found[(positions >= start) & (positions < stop)] = number
        return found

    @property
    def mrope_positions(self) -> np.ndarray:
        """int32 [tokens, axes]: position of each row on the axes of M-RoPE. Raises KeyError for models without it."""
        return self.numpy("mrope_positions")

    @property
    def logits_positions(self) -> np.ndarray:
        """int32 [samples]: position of the token whose logits each row of `logits` holds.

        Raises KeyError without logits.
        """
        self._table.sources("logits")
        return self._plain("logits_positions")

    def runs(self, most: int) -> Iterator[slice]:
        """Slices of at most `most` rows that together hold all rows that are not missing."""
        first = 0
        for start, stop in [*sorted(self.missing), [len(self.token_ids)] * 2]:
            for begin in range(first, start, most):
                yield slice(begin, min(begin + most, start))
            first = max(first, stop)

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def array(self, hook: str) -> zarr.Array:
        """The Zarr array that holds `hook`, [layers, tokens, width] (logits: [samples, vocab]).

        Raises KeyError for an unknown hook, ValueError for `resid_post` when it lies in two arrays.
        """
        names = {source.array for source in self._table.sources(hook)}
        if len(names) > 1:
            raise ValueError(f"hook {hook!r} lies in several arrays {sorted(names)}: use numpy() or torch()")
        import zarr

        array = self.group[names.pop()]
        assert isinstance(array, zarr.Array)
        return array

    def numpy(self, hook: str, layer: Layers = None, tokens: Tokens = None, convert: bool = True) -> np.ndarray:
        """Decoded values as float32; integer hooks keep their dtype.

        Shape: [tokens, width] for one layer, [layers, tokens, width] for `layer=None` and for a list of layers, in its
        order. Hooks that exist once, and logits, are always [tokens, width].

        layer: a layer number of the model, negative from its last, or a list of them. tokens: rows of the store, as a
        slice or a sequence of indexes (for logits: samples). convert: False leaves floats in the stored dtype (bfloat16
        is that of ml_dtypes), which is quicker; reduced hooks are decoded to float32 all the same.

        Raises KeyError for a hook or layer that was not captured, IndexError for rows that are not there, ValueError
        for what is no layer number, for an empty list, for layers of `resid_post` that were reduced to different rows,
        and, with the file's name, for damaged values, FileNotFoundError for a file that is gone.
        """
        sources = self.sources(hook, layer)
        self._values.check_one_form(hook, sources)
        values = self._values.decoded(sources, tokens, convert)
        return values if sources[0].layer is not None and (layer is None or np.ndim(layer)) else values[0]

    def stored(self, source: Source, tokens: Tokens = None) -> tuple[np.ndarray, StoredReduction | None]:
        """Rows [tokens, stored width] of one of `sources`, not decoded, and the reduction that was applied to them.

        Raises as `numpy`.
        """
        (rows,) = self._values.stored({source.array: [source.index]}, tokens)
        return rows, self._values.reduced(source.array)

    def sources(self, hook: str, layer: Layers = None) -> list[Source]:
        """Where a hook lies, or some layers of it: arrays, and indexes along their layer axes. Raises KeyError."""
        try:
            return self._table.chosen(hook, layer)
        except KeyError as error:
            raise KeyError(f"{self.path}: {error.args[0]}") from error

    def reduction(self, hook: str, layer: int | None = None) -> Reduction | None:
        """The reduction that was applied to `hook`, or to one layer, before it was stored; None without one.

        Raises ValueError where layers of `resid_post` were reduced in different ways and none is named.
        """
        return self._values.reduction(hook, self.sources(hook, layer))

    def shape(self, hook: str) -> tuple[int, ...]:
        """The shape of `numpy(hook)`. Reads no values. Raises as that."""
        sources = self.sources(hook)
        self._values.check_one_form(hook, sources)
        array, width = self._values.array(sources[0].array), self._values.width(sources[0].array)
        return (array.shape[1], width) if sources[0].layer is None else (len(sources), array.shape[1], width)

    def chunk_rows(self, hook: str) -> tuple[int, int]:
        """(rows of an inner chunk, rows of a shard file) of the array that holds a hook."""
        array = self._values.array(self.sources(hook)[0].array)
        return array.chunk_rows, array.segment_rows

    def _plain(self, name: str) -> np.ndarray:
        """A 1-D array."""
        try:
            return decode_plain(self.files, name, schema.token_arrays(self.attrs).get(name, "int32"))
        except ValueError as error:
            raise ValueError(f"{self.path}/{name}: {error}") from error
