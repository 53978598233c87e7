# SPDX-License-Identifier: Apache-2.0
"""Copies the probe scores of a step from its rows to host memory (engine/host_scores.py)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dmi_connector.engine.kernels.launch import Launch

_TOKENS, _BLOCK = 16, 64
"""Maximum number of tokens, and of scores per token, that a program copies. Writes of adjacent words are coalesced."""


class CopyScores:
    """Copies the scores in the rows of a step, in one launch.

    places: int64 [values], on the device of the rows: the offset of each score in a row, in words of 4 bytes.
    """

    def __init__(self, places: torch.Tensor) -> None:
        self._places, values = places, len(places)
        block = min(_BLOCK, triton.next_power_of_2(values))
        self._tiles = -(-values // block)
        self._launch = Launch(copy_scores_kernel, [values, _TOKENS, block], num_warps=1 if block <= 16 else 4)

    def __call__(self, rows: torch.Tensor, row_slots: torch.Tensor, slots: torch.Tensor, scores: torch.Tensor) -> None:
        """Copy the scores of token t from row `row_slots[t]` to line `slots[t]` of `scores`.

        rows: uint8 [slots, row bytes]. row_slots: int64 [>= tokens]. slots: int64 [tokens], vLLM's slots. scores: int32
        [lines, values], the bits of float32 scores. If the rows are on a GPU, `scores` is registered host memory, to
        which the kernel writes directly. All tensors are contiguous. A token is skipped if either slot is negative.
        """
        (self.in_triton if rows.is_cuda else self.in_torch)(rows, row_slots, slots, scores)

    def in_torch(self, rows: torch.Tensor, row_slots: torch.Tensor, slots: torch.Tensor, scores: torch.Tensor) -> None:
        """The torch version of `in_triton`, for CPUs."""
        row_slots = row_slots[: len(slots)]
        known = (row_slots >= 0) & (slots >= 0)
        scores[slots[known]] = rows.view(torch.int32)[row_slots[known]][:, self._places]

    def in_triton(self, rows: torch.Tensor, row_slots: torch.Tensor, slots: torch.Tensor, scores: torch.Tensor) -> None:
        """Launch the kernel."""
        assert (
            rows.dtype == torch.uint8 and scores.dtype == torch.int32 and row_slots.dtype == slots.dtype == torch.int64
        )
        assert slots.is_contiguous() and row_slots.is_contiguous() and len(row_slots) >= len(slots)
        if count := len(slots):
            grid = (-(-count // _TOKENS), self._tiles, 1)
            tensors = [rows, row_slots, slots, self._places, scores]
            self._launch(grid, tensors, [rows.stride(0) // 4], free=[count])


@triton.jit(do_not_specialize=["count"])
def copy_scores_kernel(
    rows,
    row_slots,
    slots,
    places,
    scores,
    count,
    row_words,
    values: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (tokens / TOKENS, scores / BLOCK)."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.load(row_slots + token, mask=token < count, other=-1)
    slot = tl.load(slots + token, mask=token < count, other=-1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + column, mask=column < values, other=0)
    copied = ((row >= 0) & (slot >= 0))[:, None] & (column < values)[None, :]
    words = rows.to(tl.pointer_type(tl.int32)) + row[:, None] * row_words + place[None, :]
    tl.store(scores + slot[:, None] * values + column[None, :], tl.load(words, mask=copied), mask=copied)
