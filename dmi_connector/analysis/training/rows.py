# SPDX-License-Identifier: Apache-2.0
"""Which rows of a capture are present, and whether a hook has one row per token."""

from __future__ import annotations

from typing import Any

import numpy as np

from dmi_connector.captures.capture import Capture
from dmi_connector.captures.token_fields import known_ids, rows_present

BLOCK = 4096
"""Rows read at a time."""


def present_rows(capture: Capture) -> np.ndarray:
    """bool [tokens]: which rows are not missing."""
    return rows_present(capture.attrs)


def known_tokens(capture: Capture) -> np.ndarray:
    """bool [tokens]: of which rows the token is known. A salvaged store may have 0 in the place of lost ones."""
    return known_ids(capture.attrs, capture.token_ids)


def attribute(capture: Capture, name: str) -> Any:
    """A root attribute that this package writes. Raises ValueError if another program wrote the store without it."""
    if name not in capture.attrs:
        raise ValueError(f"{capture.path} has no attribute {name!r}, which is needed here; capture it again")
    return capture.attrs[name]


def check_one_layer(capture: Capture, hook: str, layer: int | None) -> None:
    """Raise ValueError for a hook that does not have one row per token, KeyError for one that was not captured."""
    if hook == "logits":
        raise ValueError("logits have a row for each sampled token, not for each token; name another hook")
    check_layer(capture, hook, layer)


def check_layer(capture: Capture, hook: str, layer: int | None) -> None:
    """Raise ValueError if several layers were captured and `layer` is None, KeyError if it was not captured."""
    if len(capture.sources(hook, layer)) > 1:
        raise ValueError(f"{hook!r} has the layers {capture.layers[hook]} in {capture.path}; name one of them")


def hook_rows(capture: Capture, hook: str, layer: int | None, rows: slice | np.ndarray) -> np.ndarray:
    """Rows [n, width] of a hook that `check_one_layer` accepts."""
    values = capture.numpy(hook, layer, rows)
    return values[0] if values.ndim == 3 else values
