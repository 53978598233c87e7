# SPDX-License-Identifier: Apache-2.0
"""Finds values in a payload that no tap wrote (`check="poison"`).

The rows of a step are filled with the pattern UNWRITTEN before its forward.
"""

from __future__ import annotations

import numpy as np

from dmi_connector.dtypes import FLOATS
from dmi_connector.engine.model.coverage import UNWRITTEN
from dmi_connector.layout import ArraySpec, PayloadLayout

_BLOCK = 16
"""Number of consecutive bytes that must equal the pattern in a reduced row. Reduced values can be any bytes, so a
shorter match may be a coincidence.
"""


def unwritten(payload: np.ndarray, layout: PayloadLayout, rows: int) -> list[str]:
    """Hooks, with their layers, that have a value equal to the pattern in a chunk of `rows` rows.

    payload: uint8, in the layout `layout`.
    """
    found = []
    for spec, base in zip(layout.arrays, layout.bases, strict=True):
        if spec.per_sample:
            continue
        block = payload[base * rows : (base + spec.token_bytes) * rows]
        values = block.reshape(spec.local_layers, rows, spec.local_width * spec.itemsize)
        for layer in np.flatnonzero(_left(values, spec)):
            found.append(f"{spec.name} of layer {spec.layers[spec.first_layer + layer]}" if spec.layers else spec.name)
    return found


def _left(values: np.ndarray, spec: ArraySpec) -> np.ndarray:
    """Whether any value of a layer equals the pattern, bool [layers]. values: uint8 [layers, rows, bytes]."""
    if spec.reduce is None and (spec.dtype in FLOATS or spec.itemsize == 4):
        words = np.full(spec.itemsize // 2, UNWRITTEN, np.uint16).view(np.uint8)
        return np.asarray(_equal(values, words).any(axis=(1, 2)))
    size = min(_BLOCK, values.shape[2])
    pattern = np.resize(np.full(1, UNWRITTEN, np.uint16).view(np.uint8), size)
    whole = values[..., : values.shape[2] // size * size]
    return np.asarray(_equal(whole, pattern).any(axis=(1, 2)))


def _equal(values: np.ndarray, pattern: np.ndarray) -> np.ndarray:
    """Which elements of len(pattern) bytes equal the pattern: bool [layers, rows, elements]."""
    elements = values.reshape(*values.shape[:2], -1, len(pattern))
    return np.asarray((elements == pattern).all(axis=-1))
