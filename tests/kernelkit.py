# SPDX-License-Identifier: Apache-2.0
"""What the tests of kernels share. Kernels run in Triton's interpreter, or compiled on a GPU with TEST_RUNNER=GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dmi_connector.layout import HEADER_BYTES, ROW_ALIGN, ROW_BYTES_ALIGN
from tests import runner

DEVICE = torch.device("cuda:0" if runner.GPU else "cpu")
NARROW = "bfloat16" if runner.GPU else "float16"
"""The float of 16 bits for kernels that compute: the interpreter computes nothing in bfloat16."""
ROWS = 41
"""Rows of a small buffer. Row 0 is the null block: there the torch twins write padding."""
UNTOUCHED = 7
"""Each byte of rows that nothing was written to."""


def side_by_side(sizes: Sequence[int]) -> tuple[list[int], int]:
    """(byte of a row where each value of these bytes begins, bytes of the row)."""
    offsets, end = [], HEADER_BYTES
    for size in sizes:
        offsets.append(end)
        end += -(-size // ROW_ALIGN) * ROW_ALIGN
    return offsets, -(-end // ROW_BYTES_ALIGN) * ROW_BYTES_ALIGN


def random_slots(tokens: int) -> torch.Tensor:
    """int64 [tokens]: different rows of ROWS, none of them the null block."""
    return torch.randperm(ROWS - 1, device=DEVICE)[:tokens] + 1


def untouched(count: int, row_bytes: int) -> torch.Tensor:
    """uint8 [count, row_bytes]."""
    return torch.full((count, row_bytes), UNTOUCHED, dtype=torch.uint8, device=DEVICE)
