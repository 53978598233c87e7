# SPDX-License-Identifier: Apache-2.0
"""Reads and decodes the values of a store's hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dmi_connector.reduce import Keeps, Reduction
from dmi_connector.store.format.remote_path import Place
from dmi_connector.store.read.arrays.chunk_reader import read_pieces
from dmi_connector.store.read.arrays.hook_array import HookArray, ShardPieces
from dmi_connector.store.read.arrays.stored_reduction import StoredReduction
from dmi_connector.store.read.files.store_files import StoreFiles
from dmi_connector.store.read.hook_names import Source
from dmi_connector.store.read.metadata import check_arrays

Tokens = slice | Sequence[int] | np.ndarray | None


def _arrays(sources: Sequence[Source]) -> list[str]:
    """The names of the arrays of sources, without duplicates."""
    return list(dict.fromkeys(source.array for source in sources))


def _check_one(hook: str, ways: int) -> None:
    """Raise ValueError if `ways`, the number of different reductions of a hook's layers, is above 1."""
    if ways > 1:
        raise ValueError(f"layers of {hook!r} were reduced in different ways; name one layer")


class HookValues:
    """Reads the values of hooks of one store.

    attrs: root attribute of the store. store: its location. documents: {array: content of its zarr.json}; None to read
    them from the store. Raises ValueError for arrays of another format.
    """

    def __init__(
        self, files: StoreFiles, attrs: dict[str, Any], store: Place, documents: dict[str, Any] | None = None
    ) -> None:
        self._files, self._attrs, self._store = files, attrs, store
        self._documents = check_arrays(files, attrs) if documents is None else documents
        self._arrays: dict[str, HookArray] = {}

    def decoded(self, sources: Sequence[Source], tokens: Tokens, convert: bool) -> np.ndarray:
        """Read decoded rows [sources, tokens, width].

        They are float32 if any of the arrays was reduced. Otherwise `convert` determines the dtype, as in `stored`.
        """
        by_array = {name: [s.index for s in sources if s.array == name] for name in _arrays(sources)}
        if any("reduce" in self._attrs["hooks"][name] for name in by_array):
            parts = [self._decoded(name, indexes, tokens) for name, indexes in by_array.items()]
            values = parts[0] if len(parts) == 1 else np.concatenate(parts)
        else:
            values = self.stored(by_array, tokens, convert)
        order = [i for name in by_array for i, source in enumerate(sources) if source.array == name]
        return values if order == sorted(order) else values[np.argsort(order)]

    def stored(self, by_array: dict[str, list[int]], tokens: Tokens, convert: bool = False) -> np.ndarray:
        """Read stored rows [layers, tokens, width] of arrays of the same dtype and width, one array after the other.

        by_array: {array: indexes along its layer axis}. convert: convert floats to float32. Otherwise rows have the
        stored dtype.
        """
        arrays = [self.array(name) for name in by_array]
        dtype = arrays[0].dtype
        rows = arrays[0].rows(tokens)
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        shape = (sum(map(len, by_array.values())), count, arrays[0].shape[2])
        widened = convert and dtype.kind not in "iu" and dtype != np.float32
        out = np.empty(shape, np.float32 if widened else arrays[0].bits)
        planned: list[ShardPieces] = []
        at = 0
        for array, indexes in zip(arrays, by_array.values(), strict=True):
            planned += array.plan(indexes, rows, out[at : at + len(indexes)])
            at += len(indexes)
        read_pieces(planned)
        return out if widened else out.view(dtype)

    def reduced(self, name: str) -> StoredReduction | None:
        """The reduction of an array; None if it was not reduced."""
        return StoredReduction.of(self._attrs["hooks"][name], self._store)

    def layers(self, name: str, indexes: Sequence[int]) -> list[int]:
        """The layer numbers at `indexes` along the layer axis of an array; 0 for a hook that exists once."""
        own = self._attrs["hooks"][name]["layers"]
        return [own[index] if own else 0 for index in indexes]

    def reduction(self, hook: str, sources: Sequence[Source]) -> Reduction | None:
        """The reduction of a hook's arrays; None if they were not reduced. Raises ValueError for several reductions."""
        found = {None if (reduced := self.reduced(name)) is None else reduced.reduction for name in _arrays(sources)}
        _check_one(hook, len(found))
        return found.pop()

    def width(self, name: str) -> int:
        """Width of a decoded row of an array."""
        reduced = self.reduced(name)
        return self.array(name).shape[2] if reduced is None else reduced.decoded_width

    def check_one_form(self, hook: str, sources: Sequence[Source]) -> None:
        """Raise ValueError if decoded rows of a hook's arrays do not fit into one array; see `_form`."""
        names = _arrays(sources)
        if len(names) > 1:
            _check_one(hook, len({self._form(name) for name in names}))

    def _form(self, name: str) -> tuple[int, Reduction | None]:
        """(decoded width; the reduction if it does not keep values, else None). Arrays of a hook must agree in both."""
        reduced = self.reduced(name)
        other = reduced is not None and Keeps.VALUES not in reduced.reduction.keeps
        return self.width(name), reduced.reduction if reduced is not None and other else None

    def array(self, name: str) -> HookArray:
        """The geometry of an array. Raises ValueError for an array of another format."""
        found = self._arrays.get(name)
        if found is None:
            found = HookArray.parse(self._files, name, self._documents[name], self._attrs["complete"])
            self._arrays[name] = found
        return found

    def _decoded(self, name: str, indexes: list[int], tokens: Tokens) -> np.ndarray:
        reduced = self.reduced(name)
        rows = self.stored({name: indexes}, tokens)
        return rows.astype(np.float32) if reduced is None else reduced.decode(rows, self.layers(name, indexes))
