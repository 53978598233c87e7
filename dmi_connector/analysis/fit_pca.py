# SPDX-License-Identifier: Apache-2.0
"""`dmi fit-pca`: principal components of captured hooks."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.analysis.new_file import new_file
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.captures.one_model import OneModel, is_named
from dmi_connector.hooks import HOOKS
from dmi_connector.reduce.basis import METADATA
from dmi_connector.reduce.pca import fit
from dmi_connector.store.format.remote_path import Given, local_path
from dmi_connector.wording import suggest

logger = logging.getLogger(__name__)

_ROWS = 4096
"""Rows read at a time."""


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
    for hook in hooks:
        _check(hook)
    one, kept = OneModel(model), []
    for store in stores:
        with _opened(store) as capture:
            own = capture.attrs.get("model")
            if model is None or is_named(own, model):
                one.check(capture.path, own)
                for hook in hooks:
                    _check_whole(capture, hook)
                kept.append(store)
    if model is not None and not kept:
        raise ValueError(f"fit-pca: no store is of the model {model}; dmi info names that of a store")
    with new_file(local_path(out), "fit-pca") as partial:
        return _fit(kept, hooks, rank, partial, layers)


def _opened(store: Given) -> Capture:
    """Open one store, which may lack rows. Open few at a time: each keeps a file descriptor open."""
    return open_capture(store, 0, allow_incomplete=True)


def _check(hook: str) -> None:
    """Raise ValueError for a hook that servers do not reduce."""
    known = HOOKS.get(hook)
    if known is not None and (known.scope == "sampled" or known.dtype == "int32"):
        raise ValueError(
            f"--hook {hook} cannot be reduced: it"
            f" {'holds whole numbers' if known.dtype == 'int32' else 'has a row for each sampled token alone'};"
            " leave it out"
        )


def _check_whole(capture: Capture, hook: str) -> None:
    """Raise KeyError for a hook that a store lacks, ValueError for an alias, and for one that was stored reduced."""
    if hook not in capture:
        near = suggest(hook, capture.hooks) or ";"
        raise KeyError(f"{capture.path} holds no {hook}{near} it holds {', '.join(capture.hooks)}")
    if hook not in capture.attrs["hooks"]:
        raise ValueError(f"{hook} is another name; give that of the array it lies in")
    if capture.reduction(hook) is not None:
        raise ValueError(f"{hook} of {capture.path} is reduced itself; fit on stores that hold it in full")


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
        with _opened(stores[0]) as first:
            own = first.layers[hook]
            wanted = own or [0]
            if own and layers is not None:
                found = (source for layer in layers for source in first.sources(hook, layer))
                wanted = list(dict.fromkeys(source.layer or 0 for source in found))
        for layer in wanted:
            basis, variance = fit(_rows(stores, hook, layer if own else None), rank)
            name = f"{hook}.{layer}"
            tensors |= {f"{name}.mean": basis.mean, f"{name}.components": basis.components, f"{name}.std": basis.std}
            tensors[f"{name}.variance"] = np.array([variance], np.float32)
            kept[name] = float((basis.std.astype(np.float64) ** 2).sum() / variance) if variance else 1.0
            about[hook] = {"width": len(basis.mean), "k": rank, "layers": wanted}
    try:
        save_file(tensors, out, metadata={METADATA: json.dumps({"hooks": about, "stores": len(stores)})})
    except SafetensorError as error:  # such as a full disk
        raise OSError(f"fit-pca: the basis cannot be written ({error}); give another -o") from error
    return kept


def _rows(stores: Sequence[Given], hook: str, layer: int | None) -> Iterator[np.ndarray]:
    """Yield the rows that are present and finite, in blocks [n, width].

    Logs how many are not finite. Raises ValueError if none is finite.
    """
    where = hook if layer is None else f"{hook} layer {layer}"
    count, bad = 0, 0
    for store in stores:
        with _opened(store) as capture:
            for rows in capture.runs(_ROWS):
                block = capture.numpy(hook, layer, rows)
                finite = np.isfinite(block).all(1)
                count, bad = count + len(block), bad + int((~finite).sum())
                if finite.any():
                    yield block[finite]
    if bad and bad == count:
        raise ValueError(
            f"fit-pca: each of the {count} rows of {where} holds a value that is not finite; give stores of a model"
            " that computes finite values there, or leave the layer out"
        )
    if bad:
        logger.warning(
            "fit-pca: %d of %d rows of %s hold a value that is not finite; they are left out", bad, count, where
        )
