# SPDX-License-Identifier: Apache-2.0
"""Opens hooks of many stores as one lazy xarray Dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dmi_connector.captures.row_view import RowView
from dmi_connector.store.read.index import CaptureInfo

if TYPE_CHECKING:
    import xarray

_CHUNK_BYTES = 64 << 20
"""Maximum bytes of a dask chunk of a ragged array."""
_TOKENS = {"position": "positions", "token_id": "token_ids", "phase": "phase"}
"""{coordinate: field of `RowView.tokens`}."""


def dataset(infos: Sequence[CaptureInfo], views: Mapping[str, RowView], padded: bool = False) -> xarray.Dataset:
    """Rows of hooks in all stores as dask arrays, float32; integer hooks keep their dtype.

    Ragged (the default): the dimension `token` has the concatenated rows of all stores, with the coordinates `capture`
    (index of the store), `row`, `position`, `token_id` and `phase`. Missing rows are left out.

    Padded: the dimensions are `capture` and `row`, where `row` ends with the last row that any store has. For rows that
    a store does not have, `valid` is False, floats are NaN, integer hooks are 0, and `position`, `token_id` and `phase`
    are -1. A dask chunk is one layer of one store.

    Both have the coordinates `store` and `key` along `capture` (ragged: along `store_number`). A hook of several layers
    has the leading dimension `layer_NAME`. The dimension of the width is `NAME_width`. NAME is the hook without @layer.

    Raises ImportError without xarray and dask (`dmi_connector[xarray]`), and ValueError for logits or without hooks.
    """
    try:
        import dask.array
        import xarray
    except ImportError as error:
        raise ImportError("xarray: xarray or dask is not installed; install dmi_connector[xarray]") from error
    first = next(iter(views.values()), None)
    if first is None or any(view.sampled for view in views.values()):
        raise ValueError("xarray: give hooks with a row per token, such as 'resid_pre@3'; logits have none")
    tokens = first.tokens(fields=[*_TOKENS.values(), "store", "row"])
    longest = int(tokens["row"].max(initial=-1)) + 1
    rows = ("capture", "row") if padded else ("token",)
    coords: dict[str, Any] = {}
    if padded:
        coords["valid"] = (rows, _scattered(tokens, np.ones(len(tokens["row"]), bool), len(infos), longest, False))
    else:
        coords |= {"capture": (rows, tokens["store"]), "row": (rows, tokens["row"])}
    for name, field in _TOKENS.items():
        values = tokens[field]
        if padded:
            values = _scattered(tokens, values.astype(np.int32), len(infos), longest, -1)
        coords[name] = (rows, values)
    each = "capture" if padded else "store_number"
    coords |= {"store": (each, [info.store.name for info in infos]), "key": (each, [info.key or "" for info in infos])}
    variables = {}
    for name, view in views.items():
        hook = name.partition("@")[0]
        dims = [*([f"layer_{hook}"] if view.ndim == 3 else []), *rows, f"{hook}_width"]
        if view.ndim == 3:
            coords[f"layer_{hook}"] = (f"layer_{hook}", view.layers)
        lazy: Any = _Padded(view, tokens, len(infos), longest) if padded else view
        most = max(1, _CHUNK_BYTES // (view.width * view.dtype.itemsize))
        chunks = [*([1] if view.ndim == 3 else []), *((1, -1) if padded else (most,)), -1]
        meta = np.empty(0, view.dtype)
        variables[name] = (dims, dask.array.from_array(lazy, chunks=tuple(chunks), asarray=False, meta=meta))
    return xarray.Dataset(variables, coords)


def _scattered(
    tokens: Mapping[str, np.ndarray], values: np.ndarray, stores: int, longest: int, fill: Any
) -> np.ndarray:
    """Arrange values of the rows of a view as [stores, longest]. fill: value for rows that do not exist."""
    out = np.full((stores, longest), fill, values.dtype)
    out[tokens["store"], tokens["row"]] = values
    return out


class _Padded:
    """A view as an array [layers, stores, longest, width], or without layers.

    Dask indexes it with a slice or an integer per axis.
    """

    def __init__(self, view: RowView, tokens: Mapping[str, np.ndarray], stores: int, longest: int) -> None:
        self._view, self._rows = view, tokens["row"]
        self._begins = np.searchsorted(tokens["store"], np.arange(stores + 1))
        self.shape = (*view.shape[:-2], stores, longest, view.width)
        self.ndim, self.dtype = len(self.shape), view.dtype

    def __getitem__(self, index: tuple[Any, ...]) -> np.ndarray:
        single = [isinstance(part, int | np.integer) for part in index]  # dask may fuse the caller's index
        spans = [slice(part, part + 1) if one else part for part, one in zip(index, single, strict=True)]
        return self._read(*spans)[tuple(0 if one else slice(None) for one in single)]

    def _read(self, *index: slice) -> np.ndarray:
        *layers, stores, rows, columns = index
        numbers = range(self.shape[-3])[stores]
        fill: float = np.nan if self.dtype.kind == "f" else 0
        front = [len(range(self.shape[0])[layer]) for layer in layers]
        out = np.full((*front, len(numbers), self.shape[-2], self.shape[-1]), fill, self.dtype)
        for place, store in enumerate(numbers):
            own = slice(int(self._begins[store]), int(self._begins[store + 1]))
            out[..., place, self._rows[own], :] = self._view[(*layers, own)]
        return out[..., rows, columns]
