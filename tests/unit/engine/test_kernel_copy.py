# SPDX-License-Identifier: Apache-2.0
"""The kernel that copies values into rows equals its torch twin."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from dmi_connector.engine.kernels import copy as copy_kernel
from dmi_connector.engine.kernels.row_writer import RowWriter
from tests import kernelkit as kit

CASES = [
    ("bfloat16", [64, 128, 32], 1),
    ("bfloat16", [2560, 33, 1024, 16, 8, 4, 2, 640, 1, 96, 12, 24, 48, 2049, 6], 5),
    ("float32", [1030, 7], 9),
    ("int32", [1, 1], 3),
    ("float16", [1500, 20], 17),
]


@pytest.mark.parametrize(("dtype", "widths", "tokens"), CASES, ids=lambda part: str(part).replace(" ", ""))
def test_copied_rows_equal_those_of_the_torch_twin(
    dtype: str, widths: list[int], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are contiguous, strided, or in column-major order. Padding is skipped."""
    monkeypatch.setattr(copy_kernel, "DECODE_TOKENS", 4)  # these sizes then use both launch shapes
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    offsets, row_bytes = kit.side_by_side([width * kind.itemsize for width in widths])
    slots = kit.random_slots(tokens)
    if tokens > 2:
        slots[1] = -1
    values = []
    for width in widths:
        wide = (torch.randn(tokens, 2 * width + 5, device=kit.DEVICE) * 100).to(kind)
        values.append(wide[:, 3 : 3 + width] if width % 2 else wide[:, :width].contiguous())
    values[-1] = values[-1].t().contiguous().t()
    twin, rows = kit.untouched(kit.ROWS, row_bytes), kit.untouched(kit.ROWS, row_bytes)
    writer = RowWriter(widths, kind, offsets)
    writer.in_torch(twin, slots, values)
    for _ in range(2):  # the second launch uses the compiled kernel of the first
        rows.fill_(kit.UNTOUCHED)
        writer.in_triton(rows, slots, values)
    twin[0] = rows[0] = kit.UNTOUCHED
    assert torch.equal(rows, twin)
    assert not (rows[slots[-1]] == kit.UNTOUCHED).all()
