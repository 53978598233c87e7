# SPDX-License-Identifier: Apache-2.0
"""One number of each row of a hook, by layer and token."""

from __future__ import annotations

import numpy as np

from dmi_connector.analysis.neurons import check_neuron
from dmi_connector.analysis.training.rows import BLOCK, check_one_layer, hook_rows
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.own_values import check_own_values
from dmi_connector.reduce import Keeps


def hook_heat(capture: Capture, hook: str, neuron: int | None = None) -> tuple[np.ndarray, list[str]]:
    """(one number for each row of a hook, float32 [layers, tokens]; a label for each layer).

    The number is the Euclidean norm of the row or, with `neuron`, the value of the row with that index. A hook that
    exists once has one layer. Missing rows are NaN. The store is read in blocks.

    Raises KeyError for a hook that was not captured. Raises ValueError for logits, for a neuron that does not exist or
    whose values a reduction did not keep, and for norms of integers, principal components and summaries.
    """
    check_one_layer(capture, hook, next(iter(capture.layers.get(hook, [])), None))
    layers: list[int | None] = [*capture.layers[hook]] or [None]
    found = np.full((len(layers), len(capture.token_ids)), np.nan, np.float32)
    for at, layer in enumerate(layers):
        if neuron is not None:
            check_neuron(capture, hook, neuron, layer)
        else:
            check_own_values(capture, hook, layer, Keeps.NORMS)
        for rows in capture.runs(BLOCK):
            values = hook_rows(capture, hook, layer, rows)
            if neuron is not None:
                found[at, rows] = values[:, neuron]
                continue
            if values.dtype.kind in "iu":
                raise ValueError(f"{hook!r} holds integers, whose norm means nothing; name a neuron")
            found[at, rows] = np.linalg.norm(values, axis=1)
    return found, [hook if layer is None else str(layer) for layer in layers]
