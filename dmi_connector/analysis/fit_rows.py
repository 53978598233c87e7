# SPDX-License-Identifier: Apache-2.0
"""The rows of stores that fits read: `dmi fit-pca` and `dmi fit-scales`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.captures.one_model import OneModel, is_named
from dmi_connector.hooks import HOOKS
from dmi_connector.store.format.remote_path import Given
from dmi_connector.wording import suggest

logger = logging.getLogger(__name__)

_ROWS = 4096
"""Rows read at a time."""


def stores_of(stores: Sequence[Given], hooks: Sequence[str], model: str | None, command: str) -> list[Given]:
    """The stores to fit on: those of `model`, or all, which then must be of one model. command: what errors name.

    Raises ValueError for hooks that cannot be reduced, are stored reduced or are aliases, stores of several models, a
    model without a store; KeyError for a hook that was not captured.
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
        raise ValueError(f"{command}: no store is of the model {model}; dmi info names that of a store")
    return kept


def layers_of(store: Given, hook: str, layers: Sequence[int] | None) -> list[int | None]:
    """The layers to fit; [None] for a hook that exists once. layers: numbers, negative from the last; None: all."""
    with _opened(store) as capture:
        own = capture.layers[hook]
        if not own:
            return [None]
        if layers is None:
            return list(own)
        return list(dict.fromkeys(source.layer for layer in layers for source in capture.sources(hook, layer)))


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


def finite_rows(stores: Sequence[Given], hook: str, layer: int | None, command: str) -> Iterator[np.ndarray]:
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
            f"{command}: each of the {count} rows of {where} holds a value that is not finite; give stores of a model"
            " that computes finite values there, or leave the layer out"
        )
    if bad:
        logger.warning(
            "%s: %d of %d rows of %s hold a value that is not finite; they are left out", command, bad, count, where
        )
