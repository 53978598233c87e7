# SPDX-License-Identifier: Apache-2.0
"""`dmi fit-pca`: principal components of captured hooks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np

from dmi_connector.analysis.fit_rows import LayerFit, fit_file
from dmi_connector.reduce.basis import Basis
from dmi_connector.reduce.pca import fit
from dmi_connector.store.format.remote_path import Given


def fit_pca(
    stores: Sequence[Given],
    hooks: Sequence[str],
    rank: int,
    out: str | os.PathLike[str],
    layers: Sequence[int] | None = None,
    model: str | None = None,
    group: int = 0,
) -> dict[str, float]:
    """Fit a basis of `rank` components for each layer of `hooks`, and write all bases to `out`, a new safetensors file.

    The stores are read once per hook and layer. The fit keeps a float64 matrix [width, width] in memory (with a group:
    [group, group] for each group), and computing it needs several more of that size. Missing rows are skipped. Rows
    with a NaN or an infinity are skipped too, and a warning counts them.

    layers: layer numbers; negative numbers count from the last layer; None: all captured layers. model: use only stores
    of this model, as in `open_captures`; None: all stores must be of one model. group: number of adjacent dimensions,
    such as head_dim, that get a basis of `rank` components of their own; 0: one basis for the whole row.

    Returns {"HOOK.LAYER": share of the variance kept, 0 to 1}.

    Raises ValueError for an alias, and for a hook that cannot be reduced, is stored reduced, or has different widths.
    Raises ValueError for stores of several models, for a model without a store, for too few rows, and if no row is
    finite. Raises ValueError for a rank above the width or the group, and for a group that does not divide the width.
    Raises KeyError for a hook or layer that was not captured, FileExistsError if `out` exists, and OSError before the
    fit if `out` cannot be written.
    """

    def fit_layer(_hook: str, blocks: Iterator[np.ndarray]) -> LayerFit:
        basis, variance = fit(blocks, rank, group)
        tensors = {"mean": basis.mean, "components": basis.components, "std": basis.std}
        tensors["variance"] = np.array([variance], np.float32)
        kept = float((basis.std.astype(np.float64) ** 2).sum() / variance) if variance else 1.0
        about = {"width": len(basis.mean), "k": rank} | ({"group": group} if group else {})
        return LayerFit(tensors, about, kept)

    return fit_file(Basis, stores, hooks, out, layers, model, fit_layer)
