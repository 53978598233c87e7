# SPDX-License-Identifier: Apache-2.0
"""Refuses hooks whose reduction does not keep the properties that a computation needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmi_connector.reduce import Keeps, Reduction
from dmi_connector.store.read.reader import StoreReader


def check_keeps(hook: str, reduction: Reduction | None, needs: Keeps = Keeps.VALUES) -> None:
    """Raise ValueError for a reduction that does not keep the properties `needs`."""
    if reduction is not None and needs not in reduction.keeps:
        raise ValueError(
            f"{hook!r} was stored as {reduction.kind}, from which this cannot be computed; capture it in full, or"
            " as int8"
        )


def check_own_values(capture: StoreReader, hook: str, layer: int | None = None, needs: Keeps = Keeps.VALUES) -> None:
    """Raise ValueError for a hook whose reduction does not keep the properties `needs`.

    layer: as in `StoreReader.reduction`. Raises KeyError for a hook that was not captured.
    """
    for array in dict.fromkeys(source.array for source in capture.sources(hook, layer)):
        check_keeps(hook, capture.reduction(array), needs)


def other_values(capture: StoreReader, hook: str, layer: int | None = None) -> Mapping[str, Any] | None:
    """The settings of a hook's reduction if it does not keep the hook's values, such as a projection; else None.

    Rows of two stores can be compared only if the results are equal. layer: as in `StoreReader.reduction`. Raises
    KeyError for a hook that was not captured.
    """
    reduction = capture.reduction(hook, layer)
    if reduction is None or Keeps.VALUES in reduction.keeps:
        return None
    settings: Mapping[str, Any] = capture.attrs["hooks"][capture.sources(hook, layer)[0].array]["reduce"]
    return settings
