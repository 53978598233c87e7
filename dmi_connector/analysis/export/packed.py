# SPDX-License-Identifier: Apache-2.0
"""Packs the rows of one hook into contexts of equal length, the format of data sets for autoencoders."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dmi_connector.analysis.export.columns import check_column
from dmi_connector.captures.captures import Captures, named_rows
from dmi_connector.captures.finite import WHAT, FiniteCheck, NotFinite, not_finite
from dmi_connector.captures.lens_names import lens_name, split_name, why_not_equal
from dmi_connector.captures.own_values import check_own_values
from dmi_connector.captures.row_choice import RowChoice

_STEP_BYTES = 16 << 20
"""Bytes of float32 values read at a time."""


class PackedRows:
    """The rows of all stores, concatenated and split into contexts of `context_size` rows.

    hook: such as "resid_pre@3". In the attribute, a negative layer is replaced by its number. skip: rows left out at
    the start of each store. finite: what happens to contexts with values that are not finite. name: TransformerLens'
    name of the hook, or `hook` if TransformerLens has no equivalent. contexts: number of contexts. left: number of rows
    at the end that do not fill a context.

    Raises ValueError for a hook of several layers without a layer, for logits, projections and summaries, and if the
    rows do not fill one context.
    """

    def __init__(
        self, captures: Captures, hook: str, context_size: int, skip: int = 0, finite: FiniteCheck | None = None
    ) -> None:
        self._finite = FiniteCheck() if finite is None else finite
        self._view = named_rows(captures, hook, RowChoice(skip))
        found, layer = self._view.hook, self._view.layer
        assert layer is None or isinstance(layer, int)
        check_column(self._view, hook)
        with captures[0] as first:
            named = lens_name(found, layer)
            if named is not None and why_not_equal(split_name(named)[0], first.attrs) is not None:
                named = None
            check_own_values(first, found, layer)  # the view refuses stores with other reductions
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
        """Number of contexts to read at a time."""
        return max(1, _STEP_BYTES // (4 * self.context_size * self.width))

    def read(self, first: int, stop: int) -> np.ndarray:
        """Contexts [first, stop) as float32 [contexts, context_size, width]."""
        rows = self._view.read(slice(first * self.context_size, stop * self.context_size))
        return rows.astype(np.float32, copy=False).reshape(-1, self.context_size, self.width)

    def batches(self, first: int, stop: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield contexts [first, stop) in batches of up to `step` contexts.

        A batch is (one past its last context; values of its contexts, float32 [contexts, context_size, width]; their
        token ids, int32 [contexts, context_size]). Contexts that `finite` skips are left out. A thread reads the next
        batch ahead.
        """

        def read(begin: int) -> tuple[int, np.ndarray, np.ndarray]:
            end = min(begin + self.step, stop)
            return end, self.read(begin, end), self.token_ids(begin, end)

        with ThreadPoolExecutor(1, "dmi-export") as ahead:
            coming = ahead.submit(read, first)
            for begin in range(first, stop, self.step):
                end, values, ids = coming.result()
                if end < stop:
                    coming = ahead.submit(read, end)
                wanted = self.wanted(begin, end, not_finite(values.reshape(-1, self.width)))
                yield (end, values, ids) if wanted.all() else (end, values[wanted], ids[wanted])

    def wanted(self, first: int, stop: int, bad: np.ndarray) -> np.ndarray:
        """Which of the contexts [first, stop) are written, bool [contexts].

        bad: int64 [n], indexes of the rows that are not finite, relative to context `first`. Raises NotFinite as
        `finite` says.
        """
        self._finite.see_all(self._view.stores, *self._view.origins(first * self.context_size + bad))
        wanted = np.ones(stop - first, bool)
        if self._finite.policy == "skip":
            wanted[bad // self.context_size] = False
        return wanted

    def warnings(self, written: int) -> tuple[str, ...]:
        """A warning about contexts that were left out, or about stores whose values are not finite; () without these.

        written: number of contexts written. Raises NotFinite if no context was written.
        """
        if not written:
            store, row = next(iter(self._finite.first.items()))
            raise NotFinite(f"export: no context is left: each holds {WHAT}, the first in row {row} of {store}")
        if written < self.contexts:
            return (f"{self.contexts - written} contexts left out: {WHAT}",)
        return (f"{len(self._finite.first)} stores kept: {WHAT}",) if self._finite.first else ()

    def token_ids(self, first: int, stop: int) -> np.ndarray:
        """Token ids of contexts [first, stop), int32 [contexts, context_size]."""
        rows = slice(first * self.context_size, stop * self.context_size)
        return self._view.tokens(rows, ["token_ids"])["token_ids"].reshape(-1, self.context_size)
