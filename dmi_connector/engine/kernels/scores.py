# SPDX-License-Identifier: Apache-2.0
"""Reads scores out of rows, into the host's memory."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dmi_connector.engine.kernels.launch import Launch

_MOST_BLOCK = 1024
"""Most scores that one program copies."""


class ReadScores:
    """Copies some words of rows to the memory that has the slots of these rows, in one launch.

    places: int64 [values], on the device of the rows: words of 4 bytes from the start of a row.
    """

    def __init__(self, places: torch.Tensor) -> None:
        self._places, values = places, len(places)
        block = min(_MOST_BLOCK, triton.next_power_of_2(values))
        self._tiles = -(-values // block)
        self._launch = Launch(read_scores_kernel, [values, block], num_warps=1 if block <= 128 else 4)

    def __call__(self, rows: torch.Tensor, memory: torch.Tensor, slots: int, scores: int, count: int) -> None:
        """Copy the scores of `count` rows.

        rows: uint8 [slots, row bytes], contiguous. memory: int32, 1-D; pinned if the rows are on a GPU, whose kernel
        reads and writes it in place. The slots, int64 [count], begin at word `slots` of `memory` (an even number). The
        scores, float32 [count, values], are written from word `scores` on.
        """
        assert rows.dtype == torch.uint8 and memory.dtype == torch.int32 and slots % 2 == 0
        integers = [rows.stride(0) // 4]
        self._launch((count, self._tiles, 1), [rows, memory, self._places], integers, free=[slots, scores])


@triton.jit(do_not_specialize=["slots", "scores"])
def read_scores_kernel(rows, memory, places, slots, scores, row_words, values: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, blocks of their scores)."""
    row = tl.program_id(0)
    slot = tl.load((memory + slots).to(tl.pointer_type(tl.int64)) + row)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < values
    words = rows.to(tl.pointer_type(tl.int32)) + slot * row_words
    found = tl.load(words + tl.load(places + columns, mask=inside, other=0), mask=inside)
    tl.store(memory + scores + row * values + columns, found, mask=inside)
