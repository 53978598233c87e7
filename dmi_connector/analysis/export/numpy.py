# SPDX-License-Identifier: Apache-2.0
"""Export as numpy's .npz files, one per store."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from dmi_connector.analysis.export.columns import TOKENS, columns_of
from dmi_connector.analysis.export.progress import Done, Progress, export_by_name
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.captures import Captures
from dmi_connector.captures.finite import FiniteCheck


def export(captures: Captures, out: Path, progress: Progress, finite: FiniteCheck, hook: str) -> Done:
    """Write `out/NAME.npz` for each store: token_ids, positions, phase [tokens], and each hook [tokens, width].

    Arrays are named as in `hook`. hook: comma-separated hooks, each with one layer, such as "resid_pre@3,q@3". Only one
    hook's array is in memory at a time.
    """
    columns = columns_of(captures, hook)

    def write(capture: Capture, path: Path) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name in TOKENS:
                _add(archive, name, getattr(capture, name))
            for column in columns:
                _add(archive, column.name, np.concatenate([*column.blocks(capture, finite)]))

    return export_by_name(captures, out, ".npz", write, progress, {"to": "numpy", "hook": hook}, finite)


def _add(archive: zipfile.ZipFile, name: str, values: np.ndarray) -> None:
    """Add an array, as `numpy.savez` does."""
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, values, allow_pickle=False)
