# SPDX-License-Identifier: Apache-2.0
"""Helpers of analyses: which rows of a capture are present, and whether a hook has one row per token."""

from __future__ import annotations

from typing import Any

import numpy as np

from dmi_connector.captures.capture import Capture
from dmi_connector.captures.token_fields import known_ids, rows_present

BLOCK = 4096
"""Rows read at a time."""


def present_rows(capture: Capture) -> np.ndarray:
    """Which rows are not missing, bool [tokens]."""
    return rows_present(capture.attrs)


def known_tokens(capture: Capture) -> np.ndarray:
    """Which rows have a known token id, bool [tokens]. A salvaged store may have 0 in place of a lost id."""
    return known_ids(capture.attrs, capture.token_ids)


def attribute(capture: Capture, name: str) -> Any:
    """A root attribute of a store. Raises ValueError if the store lacks it, as stores of other programs may."""
    if name not in capture.attrs:
        raise ValueError(f"{capture.path} has no attribute {name!r}, which is needed here; capture it again")
    return capture.attrs[name]


def check_one_layer(capture: Capture, hook: str, layer: int | None) -> None:
    """Raise ValueError for logits, which do not have one row per token. Raise as `check_layer` does for other hooks."""
    if hook == "logits":
        raise ValueError("logits have a row for each sampled token, not for each token; name another hook")
    check_layer(capture, hook, layer)


def check_layer(capture: Capture, hook: str, layer: int | None) -> None:
    """Raise ValueError if several layers were captured and `layer` is None.

    Raises KeyError for a hook or layer that was not captured.
    """
    if len(capture.sources(hook, layer)) > 1:
        raise ValueError(f"{hook!r} has the layers {capture.layers[hook]} in {capture.path}; name one of them")


def hook_rows(capture: Capture, hook: str, layer: int | None, rows: slice | np.ndarray) -> np.ndarray:
    """Rows [n, width] of a hook that `check_one_layer` accepts."""
    values = capture.numpy(hook, layer, rows)
    return values[0] if values.ndim == 3 else values
