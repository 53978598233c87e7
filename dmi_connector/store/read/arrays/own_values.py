# SPDX-License-Identifier: Apache-2.0
"""Whether the rows of a hook are its own values, or something else that a reduction made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmi_connector.reduce import Reduction
from dmi_connector.reduce.attn import AttentionSummary
from dmi_connector.reduce.pca import Pca
from dmi_connector.reduce.projection import RandomProjection

if TYPE_CHECKING:
    from dmi_connector.store.read.capture import Capture

OTHER_VALUES: tuple[type[Reduction], ...] = (RandomProjection, Pca, AttentionSummary)
"""Decoded rows of these are not the hook's values, whatever their width. Those of others are, rounded or with zeros."""
NO_LENGTHS: tuple[type[Reduction], ...] = (Pca, AttentionSummary)
"""Decoded rows of these have not the hook's norms and angles. Random projections keep both, about."""


def check_own_values(
    capture: Capture, hook: str, layer: int | None = None, refused: tuple[type[Reduction], ...] = OTHER_VALUES
) -> None:
    """Raise ValueError for a hook that was stored with one of the `refused` reductions, KeyError for one that was not
    captured. layer: as in `Capture.reduction`.
    """
    for array in dict.fromkeys(source.array for source in capture.sources(hook, layer)):
        reduction = capture.reduction(array)
        if isinstance(reduction, refused):
            raise ValueError(
                f"{hook!r} was stored as {reduction.kind}, which this cannot be worked out from; capture it in full, or"
                " as int8"
            )
