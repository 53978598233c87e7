# SPDX-License-Identifier: Apache-2.0
"""`dmi fit-pca`: principal components of captured hooks."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.analysis.fit_rows import finite_rows, layers_of, stores_of
from dmi_connector.analysis.new_file import new_file
from dmi_connector.reduce.basis import METADATA
from dmi_connector.reduce.pca import fit
from dmi_connector.store.format.remote_path import Given, local_path


def fit_pca(
    stores: Sequence[Given],
    hooks: Sequence[str],
    rank: int,
    out: str | os.PathLike[str],
    layers: Sequence[int] | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """Fit a basis of `rank` components for each layer of `hooks`, and write all to `out`, a new safetensors file.

    It reads the stores once for each hook and layer, and needs 8 width² bytes of memory. Missing rows are skipped. So
    are rows with a NaN or an infinity; a warning says how many.
    layers: layer numbers; negative numbers count from the last layer; None: all captured layers. model: uses only
    stores of this model, as in `open_captures`; None: all stores must be of one model.

    Returns {"HOOK.LAYER": share of the variance kept, 0 to 1}. Raises ValueError for hooks that cannot be reduced, are
    stored reduced or differ between stores, stores of several models, a model without a store, too few rows, no finite
    row, or a rank above the width; KeyError for a hook or layer that was not captured; FileExistsError;
    OSError, before the fit, if `out` cannot be written.
    """
    kept = stores_of(stores, hooks, model, "fit-pca")
    with new_file(local_path(out), "fit-pca") as partial:
        return _fit(kept, hooks, rank, partial, layers)


def _fit(
    stores: Sequence[Given], hooks: Sequence[str], rank: int, out: Path, layers: Sequence[int] | None
) -> dict[str, float]:
    """Fit the bases and write them to `out`. Returns the shares of `fit_pca`."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    tensors: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {}
    kept: dict[str, float] = {}
    for hook in hooks:
        wanted = layers_of(stores[0], hook, layers)
        for layer in wanted:
            basis, variance = fit(finite_rows(stores, hook, layer, "fit-pca"), rank)
            name = f"{hook}.{layer or 0}"
            tensors |= {f"{name}.mean": basis.mean, f"{name}.components": basis.components, f"{name}.std": basis.std}
            tensors[f"{name}.variance"] = np.array([variance], np.float32)
            kept[name] = float((basis.std.astype(np.float64) ** 2).sum() / variance) if variance else 1.0
            about[hook] = {"width": len(basis.mean), "k": rank, "layers": [layer or 0 for layer in wanted]}
    try:
        save_file(tensors, out, metadata={METADATA: json.dumps({"hooks": about, "stores": len(stores)})})
    except SafetensorError as error:  # such as a full disk
        raise OSError(f"fit-pca: the basis cannot be written ({error}); give another -o") from error
    return kept
