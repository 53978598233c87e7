# SPDX-License-Identifier: Apache-2.0
"""Refuses hooks whose stored rows are not the hook's own values."""

from __future__ import annotations

from dmi_connector.reduce import Reduction
from dmi_connector.store.read.arrays.own_values import OTHER_VALUES
from dmi_connector.store.read.reader import StoreReader


def check_own_values(
    capture: StoreReader, hook: str, layer: int | None = None, refused: tuple[type[Reduction], ...] = OTHER_VALUES
) -> None:
    """Raise ValueError for a hook that was stored with one of the `refused` reductions, KeyError for one that was not
    captured. layer: as in `StoreReader.reduction`.
    """
    for array in dict.fromkeys(source.array for source in capture.sources(hook, layer)):
        reduction = capture.reduction(array)
        if isinstance(reduction, refused):
            raise ValueError(
                f"{hook!r} was stored as {reduction.kind}, which this cannot be worked out from; capture it in full, or"
                " as int8"
            )
