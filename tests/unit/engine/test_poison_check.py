# SPDX-License-Identifier: Apache-2.0
"""Values that no tap wrote are found in every dtype. Values that a tap wrote are not."""

from __future__ import annotations

import numpy as np
import pytest

from dmi_connector.dtypes import ITEMSIZE
from dmi_connector.engine.model.coverage import UNWRITTEN
from dmi_connector.engine.transfer.poison_check import unwritten
from dmi_connector.layout import ArraySpec, PayloadLayout

ROWS = 6
PLAIN = [ArraySpec("z", dtype, (0, 2), 24) for dtype in ("bfloat16", "float16", "float32")]
PLAIN += [ArraySpec("topk_ids", "int32", (1, 2), 2), ArraySpec("topk_weights", "float32", (1,), 1)]
REDUCED = [ArraySpec("z", "uint8", (0, 2), width, reduce={"name": "int8"}) for width in (4, 40)]


def payload(layout: PayloadLayout, seed: int = 0) -> np.ndarray:
    """Random bytes. Floats are finite."""
    return np.random.default_rng(seed).integers(0, 0x70, layout.token_bytes * ROWS).astype(np.uint8)


@pytest.mark.parametrize("spec", [*PLAIN, *REDUCED], ids=lambda spec: f"{spec.dtype}-{spec.width}")
@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("row", [0, ROWS - 1])
def test_one_value_left_is_found(spec: ArraySpec, layer: int, row: int) -> None:
    layout = PayloadLayout((ArraySpec("ln1", "bfloat16", (0,), 8), spec))
    data = payload(layout)
    assert unwritten(data, layout, ROWS) == []
    start = layout.bases[1] * ROWS
    values = data[start : start + spec.token_bytes * ROWS].reshape(spec.n_layers, ROWS, -1)
    size = ITEMSIZE[spec.dtype] if spec.reduce is None else min(16, spec.local_width)
    first = values.shape[2] // size // 2 * size if spec.reduce is None else 0
    values[layer, row, first : first + size] = np.resize(np.array([UNWRITTEN], np.uint16).view(np.uint8), size)
    assert unwritten(data, layout, ROWS) == [f"{spec.name} of layer {spec.layers[layer]}"]


def test_a_hook_without_layers_has_no_layer_and_logits_are_not_checked() -> None:
    layout = PayloadLayout((ArraySpec("embed", "float32", (), 4), ArraySpec("logits", "float32", (), 16)))
    data = payload(layout)
    data[:4] = np.array([UNWRITTEN] * 2, np.uint16).view(np.uint8)
    assert unwritten(data, layout, ROWS) == ["embed"]


def test_ordinary_nans_are_not_the_pattern() -> None:
    layout = PayloadLayout((PLAIN[2],))
    assert unwritten(np.full(24 * 2 * ROWS, np.nan, np.float32).view(np.uint8), layout, ROWS) == []
