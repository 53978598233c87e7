# SPDX-License-Identifier: Apache-2.0
"""`dmi fit-pca`: principal components of captured hooks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.reduce.basis import METADATA
from dmi_connector.reduce.pca import fit
from dmi_connector.store.read.capture import Capture, open_capture

_ROWS = 4096
"""Rows read at a time."""


def fit_pca(
    stores: Sequence[str | os.PathLike[str]],
    hooks: Sequence[str],
    rank: int,
    out: str | os.PathLike[str],
    layers: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Fit a basis of `rank` components for each layer of `hooks`, and write all to `out`, a new safetensors file.

    It reads the stores once for each hook and layer, and needs 8 width² bytes of memory. Missing rows are left out.
    Returns {"HOOK.LAYER": share of the variance kept, 0 to 1}. Raises ValueError for hooks that are stored reduced or
    differ between stores, too few rows, or a rank beyond the width; KeyError for a hook or layer that was not captured;
    FileExistsError.
    """
    from safetensors.numpy import save_file

    if os.path.exists(out):
        raise FileExistsError(f"{os.fspath(out)} exists; give a new name")
    captures = [open_capture(store, 0, allow_incomplete=True) for store in stores]
    tensors: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {}
    kept: dict[str, float] = {}
    for hook in hooks:
        for capture in captures:
            if hook not in capture:
                raise KeyError(f"{capture.path} holds no {hook}; it holds {', '.join(capture.hooks)}")
            if capture.reduction(hook) is not None:
                raise ValueError(f"{hook} of {capture.path} is reduced itself; fit on stores that hold it in full")
        if len({capture.array(hook).name for capture in captures}) != 1 or hook not in captures[0].attrs["hooks"]:
            raise ValueError(f"{hook} is another name; give that of the array it lies in")
        own = captures[0].layers[hook] or [0]
        wanted = own if layers is None or not captures[0].layers[hook] else list(layers)
        for layer in wanted:
            basis, variance = fit(_rows(captures, hook, layer if captures[0].layers[hook] else None), rank)
            name = f"{hook}.{layer}"
            tensors |= {f"{name}.mean": basis.mean, f"{name}.components": basis.components, f"{name}.std": basis.std}
            tensors[f"{name}.variance"] = np.array([variance], np.float32)
            kept[name] = float((basis.std.astype(np.float64) ** 2).sum() / variance) if variance else 1.0
            about[hook] = {"width": len(basis.mean), "k": rank, "layers": wanted}
    own_name = Path(out).with_name(f".{Path(out).name}.{os.getpid()}")
    save_file(tensors, own_name, metadata={METADATA: json.dumps({"hooks": about, "stores": len(captures)})})
    os.rename(own_name, out)
    return kept


def _rows(captures: Sequence[Capture], hook: str, layer: int | None) -> Iterator[np.ndarray]:
    """The rows that are not missing, in blocks [n, width]."""
    for capture in captures:
        for rows in capture.runs(_ROWS):
            yield capture.numpy(hook, layer, rows)
