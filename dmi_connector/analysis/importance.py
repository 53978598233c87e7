# SPDX-License-Identifier: Apache-2.0
"""Importance of neurons: the mean |x| of each over the rows of many captures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from dmi_connector.captures.captures import of_one_model

if TYPE_CHECKING:
    from dmi_connector.captures.capture import Capture
    from dmi_connector.reduce.tally import Tally

BLOCK = 4096
"""Rows read at a time."""


def importance(captures: Capture | Iterable[Capture], hook: str, layer: int | None = None) -> np.ndarray:
    """Mean |x| of each neuron of a hook over all rows of `captures` that are not missing, float64 [width].

    layer: required if several layers were captured. For a hook stored as `topk`, values that were not stored are
    estimated from the sample (see `Tally.mean`). Without a sample they count as 0.

    Raises KeyError for a hook or layer that was not captured. Raises ValueError for projections, summaries, logits and
    integer hooks, for captures of several models or of different widths, and if there is no row.
    """
    total: Tally | None = None
    for capture in of_one_model(captures):
        for rows in capture.runs(BLOCK):
            one = capture.tally(hook, layer, rows)
            if total is not None and len(total.kept) != len(one.kept):
                raise ValueError(
                    f"{capture.path} has {len(one.kept)} values of {hook} per row, others {len(total.kept)}"
                )
            total = one if total is None else total + one
    if total is None:
        raise ValueError(f"no capture has a row of {hook!r}")
    return total.mean()
