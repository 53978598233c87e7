# SPDX-License-Identifier: Apache-2.0
"""Export of the experts of each token, as in vLLM's `CompletionOutput.routed_experts`: `routed_experts_N.npy`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dmi_connector.analysis.export.progress import Done, Progress, export_each, row_blocks
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.captures import Captures
from dmi_connector.captures.finite import FiniteCheck

_BEHIND = ("router_logits", "topk_weights")
"""Float hooks of the router. If one of their values in a row is not finite, the experts of that row mean nothing."""
_ROWS = 4096
"""Number of rows read at a time."""


def export(
    captures: Captures,
    out: Path,
    progress: Progress,
    finite: FiniteCheck,
    number_by: str = "order",
    prompt_start: int = 0,
) -> Done:
    """Write `out/routed_experts_N.npy` for each store, with the result of `Capture.routed_experts`.

    N is the number of the capture. finite: what happens to stores whose router_logits or topk_weights are not finite.
    Stores that hold neither hook are exported without this check. number_by: see `number_captures`. prompt_start: as in
    `Capture.routed_experts`. Raises the errors of `export_each` and `Capture.routed_experts`.
    """

    def write(capture: Capture, path: Path) -> None:
        _check(capture, finite)
        with open(path, "wb") as file:
            np.save(file, capture.routed_experts(prompt_start), allow_pickle=False)

    settings = {"to": "routed-experts", "prompt_start": prompt_start}

    def path_of(number: int) -> Path:
        return Path(f"routed_experts_{number}.npy")

    return export_each(captures, out, path_of, write, progress, settings, finite, number_by)


def _check(capture: Capture, finite: FiniteCheck) -> None:
    """Raise NotFinite for a NaN or an infinity in hooks of _BEHIND, unless `finite` keeps them."""
    for hook in _BEHIND:
        for layer in capture.layers.get(hook, []):
            for rows in row_blocks(int(capture.attrs["num_tokens"]), _ROWS):
                finite.check(capture.path, capture.numpy(hook, layer, rows, convert=False), rows.start)
