# SPDX-License-Identifier: Apache-2.0
"""Functions that the checks share: the end of an engine, its findings, and cosines of rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def end(llm: Any, stores: Iterable[str]) -> None:
    """End an engine of this process, once these stores are finished."""
    from dmi_connector import open_capture

    for _ in range(3):
        llm.llm_engine.step()  # exports the last rows; an engine in its own process runs these steps by itself
    for store in stores:
        open_capture(store, timeout=60, allow_incomplete=True)
    llm.llm_engine.engine_core.shutdown()


def take(out: str, name: str) -> dict[str, Any]:
    """Read and remove the findings that engine `name` has saved beside the result file `out`."""
    part = Path(f"{out}.{name}")
    found: dict[str, Any] = json.loads(part.read_text())
    part.unlink()
    return found


def cosines_of(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Cosines of rows, [..., rows]. got, want: [..., rows, width]."""
    norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(want, axis=-1)
    return np.asarray((got * want).sum(-1) / np.maximum(norms, 1e-30))
