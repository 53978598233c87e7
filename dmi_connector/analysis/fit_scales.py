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
"""Factor by which the range is wider than that of the rows on which it is fitted."""


def fit_scales(
    stores: Sequence[Given],
    hooks: Sequence[str],
    out: str | os.PathLike[str],
    layers: Sequence[int] | None = None,
    model: str | None = None,
    margin: float = MARGIN,
    project: str | None = None,
) -> dict[str, int]:
    """Fit a scale for each dimension of each layer of `hooks`, and write all to `out`, a new safetensors file.

    The range of a dimension is its largest magnitude in any row, times `margin`. It reads the stores once for each hook
    and layer. Missing rows are skipped. So are rows with a NaN or an infinity; a warning says how many.
    layers, model: as in `fit_pca`. project: a reduction such as "rp(512)", which projects the rows first.

    Returns {"HOOK.LAYER": number of rows}. Raises ValueError for a margin below 1, another reduction than `rp`,
    hooks that cannot be reduced, are stored reduced or differ between stores, stores of several models, a model without
    a store, no row, no finite row; KeyError for a hook or layer that was not captured; FileExistsError; OSError, before
    the fit, if `out` cannot be written.
    """
    if not 1 <= margin < float("inf"):
        raise ValueError(f"--margin {margin} is not valid; give a factor of 1 or more")
    projection = None if project is None else parse_projection(project)

    def fit(hook: str, blocks: Iterator[np.ndarray]) -> LayerFit:
        width = 0

        def rows() -> Iterator[np.ndarray]:
            nonlocal width
            for block in blocks:
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
    """(largest magnitude of each dimension [width], number of rows). Raises ValueError without a row."""
    largest, count = np.zeros(0), 0
    for block in blocks:
        own = np.abs(block).max(0)
        if count and len(own) != len(largest):
            raise ValueError(f"fit-scales: stores hold {len(own)} and {len(largest)} values of {hook}; give one model")
        largest, count = np.maximum(largest, own) if count else own, count + len(block)
    if not count:
        raise ValueError(f"fit-scales: no store holds a row of {hook}; give stores with rows")
    return largest, count
