# SPDX-License-Identifier: Apache-2.0
"""Rows of one hook in contexts of equal length, as data sets of autoencoders have them."""

from __future__ import annotations

import functools

import numpy as np

from dmi_connector.store.format.remote_path import Place
from dmi_connector.store.read.captures import Captures, named_rows
from dmi_connector.store.read.lens_names import lens_name, split_name, why_not_equal
from dmi_connector.store.read.open_files import files_of
from dmi_connector.store.read.own_values import check_own_values
from dmi_connector.store.read.shard_reader import decode_plain

_STEP_BYTES = 16 << 20
"""float32 bytes that are read at a time."""


class PackedRows:
    """The rows of all stores one after the other, cut into contexts of `context_size` rows.

    hook: such as "resid_pre@3"; in place of a negative layer it has the layer's number. skip: rows left out at the
    start of each store. name: TransformerLens' name of the hook, or its own. contexts: their number. left: rows that do
    not fill a context.

    Raises ValueError for a hook without a layer, for projections and summaries, and where no context is full.
    """

    def __init__(self, captures: Captures, hook: str, context_size: int, skip: int = 0) -> None:
        self._view = named_rows(captures, hook, skip)
        found, layer = self._view.hook, self._view.layer
        if len(self._view.shape) == 3:
            raise ValueError(
                f"{hook!r} has layers {self._view.layers}; name one, as in '{hook}@{self._view.layers[0]}'"
            )
        with captures[0] as first:
            named = lens_name(found, layer)
            if named is not None and why_not_equal(split_name(named)[0], first.attrs) is not None:
                named = None
            check_own_values(first, found, layer)  # the view refuses stores that were reduced in another way
        if layer is not None and layer < 0:
            layer = self._view.layers[0]
            hook, named = f"{found}@{layer}", named and lens_name(found, layer)
        self.hook, self.name = hook, hook if "hook_" in hook else named or hook
        self.context_size, self.width = context_size, self._view.width
        self.contexts, self.left = divmod(len(self._view), context_size) if context_size > 0 else (0, 0)
        if not self.contexts:
            raise ValueError(
                f"the stores hold {len(self._view)} rows of {hook!r}, too few for a context of {context_size}; use"
                " another --context-size, at least 1"
            )

    @property
    def step(self) -> int:
        """Contexts to read at a time."""
        return max(1, _STEP_BYTES // (4 * self.context_size * self.width))

    def read(self, first: int, stop: int) -> np.ndarray:
        """Contexts [first, stop) as float32 [contexts, context_size, width]."""
        rows = self._view.read(slice(first * self.context_size, stop * self.context_size))
        return rows.astype(np.float32, copy=False).reshape(-1, self.context_size, self.width)

    def token_ids(self, first: int, stop: int) -> np.ndarray:
        """Their tokens, int32 [contexts, context_size]."""
        stores, rows = self._view.origins(slice(first * self.context_size, stop * self.context_size))
        ids = np.empty(len(rows), np.int32)
        for store in np.unique(stores):
            there = stores == store
            ids[there] = _token_ids(self._view.stores[store])[rows[there]]
        return ids.reshape(-1, self.context_size)


@functools.lru_cache(maxsize=4)
def _token_ids(store: Place) -> np.ndarray:
    try:
        return decode_plain(files_of(store), "token_ids", "int32")
    except ValueError as error:
        raise ValueError(f"{store}/token_ids: {error}") from error
