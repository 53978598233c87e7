# SPDX-License-Identifier: Apache-2.0
"""`dmi fit-scales`: the scales of int8(channel=file) and rp(k,channel=file), from captured hooks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dmi_connector.analysis.fit_rows import LayerFit, fit_file
from dmi_connector.reduce import parse_projection
from dmi_connector.reduce.scales import Scales, scales_of
from dmi_connector.store.format.remote_path import Given

MARGIN = 1.1
"""Default ratio of the fitted range to the largest magnitude in the rows."""


def fit_scales(
    stores: Sequence[Given],
    hooks: Sequence[str],
    out: str | os.PathLike[str],
    layers: Sequence[int] | None = None,
    model: str | None = None,
    margin: float = MARGIN,
    project: str | None = None,
) -> dict[str, int]:
    """Fit a scale for each dimension of each layer of `hooks`, and write the scales to a new safetensors file `out`.

    The range of a dimension is its largest magnitude in any row, times `margin`. The stores are read once per hook and
    layer. Missing rows are skipped. Rows with a NaN or an infinity are skipped too, and a warning counts them.

    layers, model: as in `fit_pca`. project: a projection such as "rp(512)", applied to the rows first; None: none.

    Returns {"HOOK.LAYER": number of rows}.

    Raises ValueError if `margin` is below 1 or not finite, and if `project` is not a projection or does not fit the
    width. Raises ValueError for a hook that cannot be reduced, is stored reduced, or has another width in another
    store. Raises ValueError for stores of several models, for a model without a store, and if the stores have no finite
    row. Raises KeyError for a hook or layer that was not captured, FileExistsError if `out` exists, and OSError before
    the fit if `out` cannot be written.
    """
    if not 1 <= margin < float("inf"):
        raise ValueError(f"--margin {margin} is not valid; give a factor of 1 or more")
    projection = None if project is None else parse_projection(project)

    def fit(hook: str, blocks: Iterator[np.ndarray]) -> LayerFit:
        width = 0

        def rows() -> Iterator[np.ndarray]:
            nonlocal width
            for block in blocks:
                if width and block.shape[1] != width:
                    raise ValueError(
                        f"fit-scales: stores hold {width} and {block.shape[1]} values of {hook}; give stores of one "
                        "model"
                    )
                width = block.shape[1]
                if projection is not None:
                    projection.check(width)
                    block = projection.rows_projected(block)
                yield block

        largest, count = _largest(hook, rows())
        about: dict[str, Any] = {"width": width}
        if projection is not None:
            about |= {"projection": projection.settings(), "projected": len(largest)}
        return LayerFit({"scale": scales_of(largest, margin)}, about, count)

    return {name: int(count) for name, count in fit_file(Scales, stores, hooks, out, layers, model, fit).items()}


def _largest(hook: str, blocks: Iterator[np.ndarray]) -> tuple[np.ndarray, int]:
    """(largest magnitude of each dimension [width], number of rows). Raises ValueError if there is no row."""
    largest, count = np.zeros(0), 0
    for block in blocks:
        own = np.abs(block).max(0)
        largest, count = np.maximum(largest, own) if count else own, count + len(block)
    if not count:
        raise ValueError(f"fit-scales: no store holds a row of {hook}; give stores with rows")
    return largest, count
