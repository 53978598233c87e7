# SPDX-License-Identifier: Apache-2.0
"""Export of routing as arrays in the form of vLLM's `CompletionOutput.routed_experts`: `routed_experts_N.npy`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dmi_connector.analysis.export.progress import Done, Progress, export_each
from dmi_connector.store.read.capture import Capture
from dmi_connector.store.read.captures import Captures


def export(captures: Captures, out: Path, progress: Progress, number_by: str = "order", prompt_start: int = 0) -> Done:
    """Write `out/routed_experts_N.npy`, see `Capture.routed_experts`."""

    def write(capture: Capture, path: Path) -> None:
        with open(path, "wb") as file:
            np.save(file, capture.routed_experts(prompt_start), allow_pickle=False)

    settings = {"to": "routed-experts", "prompt_start": prompt_start}
    return export_each(captures, out, lambda n: Path(f"routed_experts_{n}.npy"), write, progress, settings, number_by)
