# SPDX-License-Identifier: Apache-2.0
"""Reads scores of probes for many stores from the index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dmi_connector.hooks import PROBE
from dmi_connector.store.read.index import SCORES, CaptureInfo
from dmi_connector.wording import suggest


def scores(infos: Sequence[CaptureInfo], probe: str, what: str) -> np.ndarray:
    """See `Captures.scores`."""
    if what not in SCORES:
        raise ValueError(f"what {what!r} is not valid; use {', '.join(map(repr, SCORES))}")
    name = probe.removeprefix(PROBE)
    found = [(info.scores or {}).get(name) for info in infos]
    values = [None if one is None else np.array(one[what], np.float32) for one in found]  # None becomes NaN
    shapes = {value.shape for value in values if value is not None}
    if not shapes:
        known = {name for info in infos for name in info.scores or {}}
        raise KeyError(
            f"none of {len(infos)} stores has scores of a probe {name!r}{suggest(name, known) or ';'} they have scores"
            f" of: {', '.join(sorted(known)) or 'none'}"
        )
    if len(shapes) > 1:
        raise ValueError(
            f"stores have different outputs or layers of probe {name!r}: their scores have the shapes {sorted(shapes)};"
            " choose stores of one shape with filter(where)"
        )
    (shape,) = shapes
    return np.stack([np.full(shape, np.nan, np.float32) if value is None else value for value in values])
