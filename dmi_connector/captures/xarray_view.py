# SPDX-License-Identifier: Apache-2.0
"""Opens a store as a lazy xarray Dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from dmi_connector.captures.names import hook_and_layer, is_lens_name
from dmi_connector.captures.own_values import check_own_values
from dmi_connector.dtypes import numpy_dtype
from dmi_connector.hooks import ALIASES, HOOKS
from dmi_connector.store.format.schema import layer_numbers
from dmi_connector.store.read.arrays.indexing import each_of, split_index
from dmi_connector.store.read.hook_names import RESID_POST
from dmi_connector.store.read.reader import StoreReader

if TYPE_CHECKING:
    import xarray

_SHOWN = ("model", "request_id", "key", "prompt_len", "complete", "reason", "created")
"""Root attributes that the Dataset also has, unless they are null."""


class LazyHook:
    """A hook that is read when it is indexed (see `split_index`), for dask.array.from_array."""

    def __init__(self, capture: StoreReader, hook: str, layer: int | None = None) -> None:
        self._capture, self._hook, self._layer = capture, hook, layer
        self.shape = capture.shape(hook, layer)
        self.ndim = len(self.shape)
        info = capture.attrs["hooks"][capture.sources(hook, layer)[0].array]
        stored = numpy_dtype(info["dtype"])
        self.dtype = stored if stored.kind in "iu" and "reduce" not in info else np.dtype(np.float32)

    def __getitem__(self, index: Any) -> Any:
        axes = dict(zip(("layer", "row")[-self.ndim + 1 :], self.shape, strict=False))
        (*layers, rows), rest = split_index(index, axes, repr(self._hook))
        if not layers:
            return self._capture.numpy(self._hook, self._layer, rows)[rest]
        chosen = [self._capture.layers[self._hook][place] for place in each_of(layers[0])]
        values = np.empty((len(chosen), len(each_of(rows)), self.shape[-1]), self.dtype)
        for found, number in zip(values, chosen, strict=True):
            found[:] = self._capture.numpy(self._hook, number, rows)
        return values[rest]


def dataset(capture: StoreReader, hooks: Iterable[str]) -> xarray.Dataset:
    """Hooks of a capture as dask arrays, float32; integer hooks keep their dtype. hooks: names as in `cap[...]`.

    Dimensions: `layer`, `token`, and the width, which is `hidden` for hooks with the width of the residual stream, else
    `q_width` and so on. Hooks that exist once, and names of one layer such as `q@3`, have no layer dimension. If hooks
    have different layers, those with the most common ones share the dimension `layer`, and the others have a dimension
    such as `layer_0+4`. Logits have `sample` instead of `token`.

    Coordinates: the layer numbers; `position` (an index: `ds.sel(position=5)`), `token_id` and `phase` of each token,
    and `missing` in an incomplete store; `sample_position` of each row of logits. A dask chunk is one layer, and the
    rows of one shard file.

    Raises ImportError without xarray and dask (`dmi_connector[xarray]`), and KeyError for a hook that was not captured.
    For TransformerLens' names, raises ValueError for hooks whose reduction does not keep their values.
    """
    try:
        import dask.array
        import xarray
    except ImportError as error:
        raise ImportError("xarray: xarray or dask is not installed; install dmi_connector[xarray]") from error
    names = {name: hook_and_layer(name, capture.attrs) for name in hooks}
    for name, (hook, layer) in names.items():
        if is_lens_name(name, hook):
            check_own_values(capture, hook, layer)
    numbers = {
        name: tuple(capture.layers[hook]) if layer is None else ()
        for name, (hook, layer) in names.items()
        if capture.sources(hook, layer)
    }
    usual = Counter(layers for layers in numbers.values() if layers).most_common(1)
    coords: dict[str, Any] = _token_coords(capture)
    variables = {}
    for name, (hook, layer) in names.items():
        lazy = LazyHook(capture, hook, layer)
        dims = ["sample" if hook == "logits" else "token", _width_name(capture, hook, lazy.shape[-1])]
        chunks = [capture.chunk_rows(hook)[1], -1]
        if numbers[name]:
            along = "layer" if numbers[name] == usual[0][0] else f"layer_{layer_numbers(numbers[name])}"
            dims, chunks = [along, *dims], [1, *chunks]
            coords[along] = (along, list(numbers[name]))
        if hook == "logits":
            coords["sample_position"] = ("sample", capture.logits_positions)
        values = dask.array.from_array(lazy, chunks=tuple(chunks), asarray=False, meta=np.empty(0, lazy.dtype))
        variables[name] = (dims, values)
    attrs = {name: value for name in _SHOWN if (value := capture.attrs.get(name)) is not None}
    return xarray.Dataset(variables, coords, {**attrs, "store": str(capture.path)}).set_xindex("position")


def _token_coords(capture: StoreReader) -> dict[str, Any]:
    coords = {
        "position": ("token", capture.positions),
        "token_id": ("token", capture.token_ids),
        "phase": ("token", capture.phase),
    }
    if not capture.complete:
        missing = np.zeros(capture.attrs["num_tokens"], bool)
        for start, stop in capture.missing:
            missing[start:stop] = True
        coords["missing"] = ("token", missing)
    return coords


def _width_name(capture: StoreReader, name: str, width: int) -> str:
    """Name of a hook's width dimension. It is `hidden` for the residual stream, so that xarray can add such hooks."""
    known = HOOKS.get("resid_pre" if name == RESID_POST else ALIASES.get(name, name))
    hidden = capture.attrs.get("dims", {}).get("hidden")
    return "hidden" if known is not None and known.width == "H" and width == hidden else f"{name}_width"
