# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of kernels. Kernels run in Triton's interpreter, or compiled on a GPU with TEST_RUNNER=GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dmi_connector.layout import HEADER_BYTES, ROW_ALIGN, ROW_BYTES_ALIGN
from tests import runner

DEVICE = torch.device("cuda:0" if runner.GPU else "cpu")
NARROW = "bfloat16" if runner.GPU else "float16"
"""The 16-bit float type for kernels that compute. Triton's interpreter does not compute in bfloat16."""
ROWS = 41
"""Number of rows of a small buffer. Row 0 is the null block, where the torch twins write padding."""
UNTOUCHED = 7
"""The fill byte of rows that were not written."""


def side_by_side(sizes: Sequence[int]) -> tuple[list[int], int]:
    """(byte offset of each value in a row, bytes of the row) for adjacent values of these sizes."""
    offsets, end = [], HEADER_BYTES
    for size in sizes:
        offsets.append(end)
        end += -(-size // ROW_ALIGN) * ROW_ALIGN
    return offsets, -(-end // ROW_BYTES_ALIGN) * ROW_BYTES_ALIGN


def random_slots(tokens: int) -> torch.Tensor:
    """Distinct random slots, int64 [tokens]. Slot 0, the null block, is not among them."""
    return torch.randperm(ROWS - 1, device=DEVICE)[:tokens] + 1


def untouched(count: int, row_bytes: int) -> torch.Tensor:
    """Rows filled with UNTOUCHED, uint8 [count, row_bytes]."""
    return torch.full((count, row_bytes), UNTOUCHED, dtype=torch.uint8, device=DEVICE)
