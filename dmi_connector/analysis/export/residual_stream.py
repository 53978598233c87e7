# SPDX-License-Identifier: Apache-2.0
"""The residual stream, indexed by vLLM's auxiliary layer ids, which trainers of draft models use too.

In a model with N layers, ids 0 to N - 1 are the inputs of the layers (resid_pre). Id N is the output of the last layer,
before the final norm (resid_final).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dmi_connector.captures.capture import Capture
from dmi_connector.captures.captures import Captures
from dmi_connector.captures.own_values import check_own_values
from dmi_connector.store.format.remote_path import Place, RemotePath
from dmi_connector.store.read.files.thread_pool import in_fetch_threads, in_threads
from dmi_connector.store.read.metadata import read_attrs


def layer_ids(store: Place, attrs: Mapping[str, Any]) -> list[int]:
    """The layer ids that a store holds, in ascending order. attrs: its root attributes.

    Raises ValueError if the store has resid_final but no attribute `num_layers`.
    """
    hooks = attrs["hooks"]
    found = list(hooks["resid_pre"]["layers"]) if "resid_pre" in hooks else []
    if "resid_final" in hooks:
        if "num_layers" not in attrs:
            raise ValueError(f"{store} has no num_layers attribute: the id of resid_final is unknown")
        found.append(int(attrs["num_layers"]))
    return found


def ids_of_all(
    captures: Captures, ids_of: Callable[[Place, Mapping[str, Any]], list[int]], wanted: Sequence[int] | None
) -> list[int]:
    """The layer ids to export from every store, so that all files have the same layers.

    Stores without the first tokens of their request are ignored, because they are not exported. ids_of: takes a store
    and its root attributes, and returns the ids that the store holds. wanted: the ids to export; None: those of the
    first store.

    Raises ValueError if only some stores have the ids in `wanted`, or if `wanted` is None and the stores differ.
    """
    all_ids: list[tuple[int, ...] | None] = [None] * len(captures)

    def look(number: int) -> None:
        store = captures.infos[number].store
        if not (attrs := read_attrs(store)).get("start", 0):
            all_ids[number] = tuple(ids_of(store, attrs))

    remote = any(isinstance(info.store, RemotePath) for info in captures.infos)
    (in_fetch_threads if remote else in_threads)(look, range(len(captures)))
    stores = [info.store for info, ids in zip(captures.infos, all_ids, strict=True) if ids is not None]
    known = [ids for ids in all_ids if ids is not None] or [()]
    same = [ids == known[0] if wanted is None else set(wanted) <= set(ids) for ids in known]
    if all(same) or not any(same):  # if all stores lack an id, `chosen_ids` raises the error
        return list(known[0] if wanted is None else dict.fromkeys(wanted))
    number, every = same.index(False), sorted(set(known[0]).intersection(*known))
    use = ",".join(map(str, every))
    fix = f"give --layers {use}, which all have, or name fewer stores" if every else "name fewer stores"
    raise ValueError(
        f"export: {same.count(False)} of {len(same)} stores have other layers: {stores[number]} has"
        f" {list(known[number])}, not {list(known[0] if wanted is None else wanted)}; {fix}"
    )


def chosen_ids(capture: Capture, wanted: Sequence[int] | None) -> list[int]:
    """The layer ids to export from one store: `wanted` without duplicates; None: all ids of the store.

    Raises ValueError for a store without a residual stream, for ids that it lacks, and for an empty `wanted`.
    """
    known = layer_ids(capture.path, capture.attrs)
    if not known:
        raise ValueError(
            f"{capture.path} lacks resid_pre and resid_final, the residual stream; capture them (preset hidden-states)"
        )
    ids = known if wanted is None else list(dict.fromkeys(wanted))
    if not ids:
        raise ValueError(f"layer ids: none is named; {capture.path} has {known} (hooks resid_pre, resid_final)")
    lacking = [i for i in ids if i not in known]
    if lacking:
        raise ValueError(
            f"layer ids {lacking} are not in {capture.path}: it has {known} (hooks resid_pre, resid_final)"
        )
    return ids


def stream_rows(capture: Capture, ids: Sequence[int], rows: slice) -> np.ndarray:
    """The residual stream [rows, layers, hidden] in the stored dtype. Reduced hooks are decoded to float32.

    Raises ValueError for hooks that are stored as projections.
    """
    last = capture.attrs.get("num_layers")
    parts = []
    for i in ids:
        hook, layer = ("resid_final", None) if i == last else ("resid_pre", i)
        check_own_values(capture, hook, layer)
        parts.append(capture.numpy(hook, layer, rows, convert=False))
    return np.stack(parts, axis=1)
