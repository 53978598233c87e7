# SPDX-License-Identifier: Apache-2.0
"""Summarizes the scores of the probes of a store for the index, so that readers choose stores without opening them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.hook_table import PROBE
from dmi_connector.reduce.probe import TOP, Probe
from dmi_connector.store.read.arrays.hook_values import HookValues
from dmi_connector.store.read.files.open_files import files_of
from dmi_connector.store.read.hook_names import HookTable


def scores_of(partial: str, attrs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{name of a probe: {one of index.SCORES: [outputs], or [layers, outputs] for several layers}}, JSON-ready.

    partial: a store whose arrays are written. attrs: its root attributes. Missing rows are left out. `at`: position of
    the first row with the largest score, or with the first NaN. None stands for a value that is not finite.
    Autoencoders and probes of largest values have no summary. Raises OSError for arrays that cannot be read.
    """
    reduced = {name: hook.get("reduce", {}) for name, hook in attrs["hooks"].items()}
    probes = [name for name, about in reduced.items() if about.get("kind") == Probe.kind and about["form"] != TOP]
    there = np.ones(attrs["num_tokens"], bool)
    for start, stop in attrs["missing"]:
        there[start:stop] = False
    if not probes or not there.any():
        return {}
    try:
        values, table = HookValues(files_of(Path(partial)), attrs, Path(partial)), HookTable.of(attrs)
        found = {name: values.decoded(table.sources(name), None, True)[:, there] for name in probes}
    except ValueError as error:
        raise OSError(f"the scores of {partial} cannot be read: {error}") from error
    positions = int(attrs["start"]) + np.flatnonzero(there)
    return {
        name.removeprefix(PROBE): _short(rows if attrs["hooks"][name]["layers"] else rows[0], positions)
        for name, rows in found.items()
    }


def _short(rows: np.ndarray, positions: np.ndarray) -> dict[str, Any]:
    """Summarize one probe. rows: [..., tokens, outputs]."""
    with np.errstate(invalid="ignore", over="ignore"):
        found = {
            "max": rows.max(-2),
            "at": positions[rows.argmax(-2)],
            "min": rows.min(-2),
            "mean": rows.mean(-2, dtype=np.float64),
            "last": rows[..., -1, :],
        }
    return {what: _finite(values) for what, values in found.items()}


def _finite(values: np.ndarray) -> Any:
    kept = values.astype(object)
    kept[~np.isfinite(values)] = None
    return kept.tolist()
