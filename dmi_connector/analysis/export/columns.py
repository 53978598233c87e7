# SPDX-License-Identifier: Apache-2.0
"""Hooks as columns of exports with one row per token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmi_connector.analysis.export.progress import row_blocks
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.captures import Captures, named_rows
from dmi_connector.captures.finite import FiniteCheck
from dmi_connector.captures.row_view import RowView
from dmi_connector.reduce import Keeps

TOKENS = ("token_ids", "positions", "phase")
"""Arrays of each store: int32, int32, and uint8 (0: prompt, 1: generated)."""


@dataclass(frozen=True)
class Column:
    """One hook in one layer, as one column of an export.

    name: the column's name, as given in the command. layer: None for a hook that exists once. width: values per row,
    with the heads concatenated. form: what `_form` returns for the first store.
    """

    name: str
    hook: str
    layer: int | None
    width: int
    form: tuple[int, Mapping[str, Any] | None]

    def blocks(self, capture: Capture, finite: FiniteCheck) -> Iterator[np.ndarray]:
        """Yield the rows of each slice of `parts`, [n, width], float32 or the stored integer dtype.

        Raises NotFinite for a NaN or an infinity, unless `finite` keeps them. Raises ValueError for a store whose rows
        have another width, or are values of another projection.
        """
        if _form(capture, self.hook, self.layer) != self.form:
            raise ValueError(f"{capture.path} holds rows of {self.name!r} of another width or reduction; leave it out")
        for rows in parts(capture):
            values = finite.check(capture.path, capture.numpy(self.hook, self.layer, rows), rows.start)
            yield values.reshape(len(values), self.width)


def _form(capture: Capture, hook: str, layer: int | None) -> tuple[int, Mapping[str, Any] | None]:
    """(width of a full row; settings of the reduction if its values are not those of the hook, else None)."""
    facts, reduction = capture.attrs["hooks"][capture.sources(hook, layer)[0].array], capture.reduction(hook, layer)
    if reduction is None:
        return facts["width"], None
    return facts["reduce"]["width"], None if Keeps.VALUES in reduction.keeps else facts["reduce"]


def parts(capture: Capture) -> list[slice]:
    """Slices of rows to read at a time. A store without rows has one empty slice."""
    return [*row_blocks(len(capture.token_ids))] or [slice(0, 0)]


def check_column(view: RowView, name: str) -> None:
    """Raise ValueError for several layers, and for a hook that does not have one row per token."""
    if view.sampled:
        raise ValueError(f"{name!r} has a row for each sampled token, not for each token; name another hook")
    if len(view.shape) == 3:
        raise ValueError(f"{name!r} has layers {view.layers}; name one, as in '{name}@{view.layers[0]}'")


def columns_of(captures: Captures, hooks: str) -> list[Column]:
    """The columns of comma-separated hooks, such as "resid_pre@3,q@3".

    Raises ValueError as `check_column` does, and KeyError for a hook that the stores lack.
    """
    found = []
    for name in dict.fromkeys(map(str.strip, hooks.split(","))):
        view = named_rows(captures, name)
        check_column(view, name)
        layer = view.layers[0] if view.layer is not None and view.layers else None
        with captures[0] as first:
            found.append(Column(name, view.hook, layer, view.width, _form(first, view.hook, layer)))
    return found
