# SPDX-License-Identifier: Apache-2.0
"""The residual stream under vLLM's auxiliary layer ids, as trainers of draft models take it.

An id below the number of layers is the stream entering that layer (resid_pre). The number of layers is the stream after
the last one, before the final norm (resid_final).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dmi_connector.store.read.capture import Capture
from dmi_connector.store.read.own_values import check_own_values


def layer_ids(capture: Capture) -> list[int]:
    """The ids that a store holds, in ascending order.

    Raises ValueError without a residual stream, and for a store whose number of layers is unknown.
    """
    hooks = capture.attrs["hooks"]
    found = list(hooks["resid_pre"]["layers"]) if "resid_pre" in hooks else []
    if "resid_final" in hooks:
        if "num_layers" not in capture.attrs:
            raise ValueError(f"{capture.path} has no num_layers attribute: the id of resid_final is unknown")
        found.append(int(capture.attrs["num_layers"]))
    return found


def chosen_ids(capture: Capture, wanted: Sequence[int] | None) -> list[int]:
    """The ids to export: those wanted, by default all.

    Raises ValueError for a store without a residual stream, and for ids that it lacks.
    """
    known = layer_ids(capture)
    if not known:
        raise ValueError(
            f"{capture.path} lacks resid_pre and resid_final, the residual stream; capture them (preset hidden-states)"
        )
    ids = known if wanted is None else list(dict.fromkeys(wanted))
    lacking = [i for i in ids if i not in known]
    if lacking or not ids:
        raise ValueError(
            f"layer_ids {lacking} are not in {capture.path}: it has {known} (hooks resid_pre, resid_final)"
        )
    return ids


def stream_rows(capture: Capture, ids: Sequence[int], rows: slice) -> np.ndarray:
    """Rows [rows, layers, hidden] of the stream in the stored dtype; reduced hooks as float32.

    Raises ValueError for projections.
    """
    last = capture.attrs.get("num_layers")
    parts = []
    for i in ids:
        hook, layer = ("resid_final", None) if i == last else ("resid_pre", i)
        check_own_values(capture, hook, layer)
        parts.append(capture.numpy(hook, layer, rows, convert=False))
    return np.stack(parts, axis=1)
