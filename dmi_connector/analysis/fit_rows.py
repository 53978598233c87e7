# SPDX-License-Identifier: Apache-2.0
"""Common code of the `dmi fit-*` commands: reading rows of stores, and writing the fitted file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmi_connector.analysis.new_file import new_file
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.captures.one_model import OneModel, is_named
from dmi_connector.hooks import HOOKS
from dmi_connector.reduce.fitted_file import FittedFile
from dmi_connector.store.format.remote_path import Given, local_path
from dmi_connector.wording import suggest

logger = logging.getLogger(__name__)

_ROWS = 4096
"""Rows read at a time."""


class LayerFit(NamedTuple):
    """The fit of one layer of a hook.

    tensors: {NAME: values}, see `FittedFile`. about: the hook's entry in the file, without `layers`. result: a number
    for the user, such as the share of the variance.
    """

    tensors: dict[str, np.ndarray]
    about: dict[str, Any]
    result: float


def fit_file(
    kind: type[FittedFile],
    stores: Sequence[Given],
    hooks: Sequence[str],
    out: str | os.PathLike[str],
    layers: Sequence[int] | None,
    model: str | None,
    fit: Callable[[str, Iterator[np.ndarray]], LayerFit],
) -> dict[str, float]:
    """Fit each layer of `hooks`, and write the fits to `out`, a new safetensors file of `kind`.

    Missing rows are skipped. Rows with a NaN or an infinity are skipped too, and a warning counts them.

    layers: layer numbers; negative numbers count from the last layer; None: all captured layers. model: use only stores
    of this model, as in `open_captures`; None: all stores must be of the same model. fit: function that takes a hook
    and its rows in blocks [n, width], and returns the fit of one layer.

    Returns {"HOOK.LAYER": result of the fit}. Raises the errors of `stores_of`, `finite_rows` and `fit`. Raises
    KeyError for a layer that was not captured, FileExistsError if `out` exists, and OSError if `out` cannot be written:
    before the fit, or after it if the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    command = kind.command.removeprefix("dmi ")
    kept = stores_of(stores, hooks, model, command)
    with new_file(local_path(out), command) as partial:
        tensors: dict[str, np.ndarray] = {}
        about: dict[str, Any] = {}
        results: dict[str, float] = {}
        for hook in hooks:
            wanted = layers_of(kept[0], hook, layers)
            for layer in wanted:
                found, name = fit(hook, finite_rows(kept, hook, layer, command)), f"{hook}.{layer or 0}"
                tensors |= {f"{name}.{key}": np.ascontiguousarray(value) for key, value in found.tensors.items()}
                about[hook] = {**found.about, "layers": [number or 0 for number in wanted]}
                results[name] = found.result
        try:
            save_file(tensors, partial, metadata={kind.metadata: json.dumps({"hooks": about, "stores": len(kept)})})
        except SafetensorError as error:  # such as a full disk
            raise OSError(f"{command}: the {kind.what} cannot be written ({error}); give another -o") from error
    return results


def stores_of(stores: Sequence[Given], hooks: Sequence[str], model: str | None, command: str) -> list[Given]:
    """The stores to fit on: those of `model`, or all stores, which must then be of one model.

    command: the command in error messages. Raises ValueError for a hook that cannot be reduced, is stored reduced or is
    an alias, for stores of several models, and for a model without a store. Raises KeyError for a hook that was not
    captured.
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
        raise ValueError(f"{command}: no store is of the model {model}; dmi info names the model of a store")
    return kept


def layers_of(store: Given, hook: str, layers: Sequence[int] | None) -> list[int | None]:
    """The layers to fit; [None] for a hook that exists once.

    layers: layer numbers; negative numbers count from the last layer; None: all captured layers.
    """
    with _opened(store) as capture:
        own = capture.layers[hook]
        if not own:
            return [None]
        if layers is None:
            return list(own)
        return list(dict.fromkeys(source.layer for layer in layers for source in capture.sources(hook, layer)))


def _opened(store: Given) -> Capture:
    """Open one store, which may lack rows. Open few stores at a time, because each keeps a file descriptor open."""
    return open_capture(store, 0, allow_incomplete=True)


def _check(hook: str) -> None:
    """Raise ValueError for a hook that servers do not reduce."""
    known = HOOKS.get(hook)
    if known is not None and (known.scope == "sampled" or known.dtype == "int32"):
        raise ValueError(
            f"--hook {hook} cannot be reduced: it"
            f" {'holds integers' if known.dtype == 'int32' else 'has a row only for each sampled token'};"
            " leave it out"
        )


def _check_whole(capture: Capture, hook: str) -> None:
    """Raise KeyError for a hook that the store lacks, and ValueError for a name with a layer, an alias, or a hook that
    is stored reduced.
    """
    alone, _, layer = hook.partition("@")
    if layer and alone in capture:
        raise ValueError(f"--hook {hook} names a layer; write --hook {alone} --layer {layer}")
    if hook not in capture:
        near = suggest(hook, capture.hooks) or ";"
        raise KeyError(f"{capture.path} holds no {hook}{near} it holds {', '.join(capture.hooks)}")
    if hook not in capture.attrs["hooks"]:
        raise ValueError(f"{hook} is an alias; give the name of the stored hook")
    if capture.reduction(hook) is not None:
        raise ValueError(f"{hook} of {capture.path} is stored reduced; fit on stores that hold it in full")


def finite_rows(stores: Sequence[Given], hook: str, layer: int | None, command: str) -> Iterator[np.ndarray]:
    """Yield the rows that are present and finite, in blocks [n, width].

    Logs the number of rows that are not finite. Raises ValueError if there are rows and none is finite.
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
            f"{command}: each of the {count} rows of {where} holds a value that is not finite; give stores of a model"
            " that computes finite values there, or leave the layer out"
        )
    if bad:
        logger.warning(
            "%s: %d of %d rows of %s hold a value that is not finite; they are left out", command, bad, count, where
        )
