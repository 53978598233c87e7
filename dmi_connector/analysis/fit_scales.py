# SPDX-License-Identifier: Apache-2.0
"""`dmi fit-scales`: the scales of int8(channel=file), from captured hooks."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from dmi_connector.analysis.fit_rows import finite_rows, layers_of, stores_of
from dmi_connector.analysis.new_file import new_file
from dmi_connector.reduce.scales import METADATA, scales_of
from dmi_connector.store.format.remote_path import Given, local_path

MARGIN = 1.1
"""By how much the range is wider than the rows that it is fitted on, as a factor."""


def fit_scales(
    stores: Sequence[Given],
    hooks: Sequence[str],
    out: str | os.PathLike[str],
    layers: Sequence[int] | None = None,
    model: str | None = None,
    margin: float = MARGIN,
) -> dict[str, int]:
    """Fit a scale for each dimension of each layer of `hooks`, and write all to `out`, a new safetensors file.

    The range of a dimension is its largest magnitude in any row, times `margin`. It reads the stores once for each hook
    and layer. Missing rows are skipped. So are rows with a NaN or an infinity; a warning says how many.
    layers, model: as in `fit_pca`.

    Returns {"HOOK.LAYER": number of rows}. Raises ValueError for a margin below 1, hooks that cannot be reduced, are
    stored reduced or differ between stores, stores of several models, a model without a store, no row, no finite row;
    KeyError for a hook or layer that was not captured; FileExistsError; OSError, before the fit, if `out` cannot be
    written.
    """
    if not 1 <= margin < float("inf"):
        raise ValueError(f"--margin {margin} is not valid; give a factor of 1 or more")
    kept = stores_of(stores, hooks, model, "fit-scales")
    with new_file(local_path(out), "fit-scales") as partial:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        tensors: dict[str, np.ndarray] = {}
        about: dict[str, Any] = {}
        counts: dict[str, int] = {}
        for hook in hooks:
            wanted = layers_of(kept[0], hook, layers)
            for layer in wanted:
                name = f"{hook}.{layer or 0}"
                largest, counts[name] = _largest(kept, hook, layer)
                tensors[f"{name}.scale"] = scales_of(largest, margin)
                about[hook] = {"width": len(largest), "layers": [number or 0 for number in wanted]}
        try:
            save_file(tensors, partial, metadata={METADATA: json.dumps({"hooks": about, "stores": len(kept)})})
        except SafetensorError as error:  # such as a full disk
            raise OSError(f"fit-scales: the scales cannot be written ({error}); give another -o") from error
    return counts


def _largest(stores: Sequence[Given], hook: str, layer: int | None) -> tuple[np.ndarray, int]:
    """(largest magnitude of each dimension [width], number of rows). Raises ValueError without a row."""
    largest, count = np.zeros(0), 0
    for block in finite_rows(stores, hook, layer, "fit-scales"):
        own = np.abs(block).max(0)
        if count and len(own) != len(largest):
            raise ValueError(f"fit-scales: stores hold {len(own)} and {len(largest)} values of {hook}; give one model")
        largest, count = np.maximum(largest, own) if count else own, count + len(block)
    if not count:
        raise ValueError(f"fit-scales: no store holds a row of {hook}; give stores with rows")
    return largest, count
