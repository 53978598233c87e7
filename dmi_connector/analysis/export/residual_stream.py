# SPDX-License-Identifier: Apache-2.0
"""The residual stream under vLLM's auxiliary layer ids, as trainers of draft models take it.

An id below the number of layers is the stream entering that layer (resid_pre). The number of layers is the stream after
the last one, before the final norm (resid_final).
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
    """The ids that a store with these root attributes holds, in ascending order.

    Raises ValueError where its number of layers is unknown.
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
    """The ids to export of every store, so that all files are alike: those wanted, by default those of the first store.

    ids_of: the ids that a store holds, by its root attributes, of which each is read once. Stores of later tokens alone
    do not count: no file is made of them. Raises ValueError where stores differ in what is exported.
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
    if all(same) or not any(same):  # what no store has is named when the first is written
        return list(known[0] if wanted is None else dict.fromkeys(wanted))
    number, every = same.index(False), sorted(set(known[0]).intersection(*known))
    use = ",".join(map(str, every))
    fix = f"give --layers {use}, which all have, or name fewer stores" if every else "name fewer stores"
    raise ValueError(
        f"export: {same.count(False)} of {len(same)} stores have other layers: {stores[number]} has"
        f" {list(known[number])}, not {list(known[0] if wanted is None else wanted)}; {fix}"
    )


def chosen_ids(capture: Capture, wanted: Sequence[int] | None) -> list[int]:
    """The ids to export: those wanted, by default all.

    Raises ValueError for a store without a residual stream, and for ids that it lacks.
    """
    known = layer_ids(capture.path, capture.attrs)
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
