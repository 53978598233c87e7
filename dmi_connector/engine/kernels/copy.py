# SPDX-License-Identifier: Apache-2.0
"""Copies values of one dtype into rows, without a reduction."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dmi_connector.engine.kernels.launch import DECODE_TOKENS, Launch

_SHAPES = {True: (1, 4096), False: (2, 2048)}
"""{whether a step is a decode step: (tokens, elements per token) of a program with 4 warps}. Measured on an H200."""


class CopyRows:
    """Copies up to MAX_VALUES values in one launch.

    widths: elements of each value. offsets: byte offset of each value in a row, a multiple of the element size.
    """

    def __init__(self, widths: Sequence[int], dtype: torch.dtype, offsets: Sequence[int]) -> None:
        assert all(offset % dtype.itemsize == 0 for offset in offsets), offsets
        self._dtype = dtype
        self._launches: dict[tuple[torch.device, bool], tuple[Launch, int]] = {}
        self._widths, self._offsets = tuple(widths), tuple(offset // dtype.itemsize for offset in offsets)

    def __call__(
        self,
        rows: torch.Tensor,
        slots: torch.Tensor,
        values: Sequence[torch.Tensor],
        strides: Sequence[int],
        tokens: int,
    ) -> None:
        """Copy `values[i][t]` to row `slots[t]`; a negative slot is skipped.

        rows: uint8 [slots, row bytes], contiguous. slots: int64. values: [>= tokens, width] each. strides: row strides
        of the values, whose last dimension is contiguous.
        """
        assert rows.dtype == torch.uint8 and rows.is_contiguous() and slots.dtype == torch.int64
        decode = tokens <= DECODE_TOKENS
        typed = rows.view(self._dtype)
        launch, blocks = self._launch(rows.device, decode)
        tiles = -(-tokens // _SHAPES[decode][0])
        launch((tiles * blocks, 1, 1), [typed, slots], [typed.stride(0)], values, strides, [tokens])

    def _launch(self, device: torch.device, decode: bool) -> tuple[Launch, int]:
        """(the launch, number of programs for one tile of tokens)."""
        if (device, decode) not in self._launches:
            tile, block = _SHAPES[decode]
            firsts = (0, *itertools.accumulate(-(-width // block) for width in self._widths))
            launch = Launch(copy_rows_kernel, [self._offsets, self._widths, firsts, tile, block], num_warps=4)
            self._launches[device, decode] = launch, firsts[-1]
        return self._launches[device, decode]


def copy_rows_torch(
    rows: torch.Tensor, slots: torch.Tensor, values: Sequence[torch.Tensor], offsets: Sequence[int]
) -> None:
    """The torch version of `CopyRows`. slots: int64 [tokens]; padding is written to row 0, which is never read."""
    size = values[0].element_size()
    typed = rows.view(values[0].dtype)
    index = slots.clamp_min(0)
    for value, offset in zip(values, offsets, strict=True):
        start = offset // size
        typed[:, start : start + value.shape[1]].index_copy_(0, index, value)


@triton.jit
def _copy(
    row, x, stride, width: tl.constexpr, start, token, block, real, keep, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    columns = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = columns < width
    # Decode steps (TOKENS == 1) load values before the slots are known, because only tl.store needs the slots. Larger
    # steps wait for the slots, and do not load the values of tokens without a row. `.cs` marks the stored cache lines
    # for early eviction, because most rows are not read again soon.
    if TOKENS == 1:
        loaded = inside & real
    else:
        loaded = inside & keep
    value = tl.load(x + token * stride + columns, mask=loaded)
    tl.store(row + start + columns, value, mask=inside & keep, cache_modifier=".cs")


@triton.jit(do_not_specialize=["count"])
def copy_rows_kernel(
    rows, slots, values, count, row_stride, strides, offsets,
    WIDTHS: tl.constexpr, FIRSTS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles x blocks of all values). A program copies TOKENS x BLOCK elements of one value.

    Strides and offsets are in elements. FIRSTS: index of the first block of each value, then the number of blocks.
    Adjacent programs copy adjacent blocks of the same rows.
    """
    BLOCKS: tl.constexpr = FIRSTS[len(WIDTHS)]
    token = (tl.program_id(0) // BLOCKS).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    block = tl.program_id(0) % BLOCKS
    real = token < count
    slot = tl.load(slots + token, mask=real, other=-1)
    keep = slot >= 0
    row = rows + slot * row_stride
    for i in tl.static_range(len(WIDTHS)):
        if (block >= FIRSTS[i]) & (block < FIRSTS[i + 1]):
            _copy(
                row, values[i], strides[i], WIDTHS[i], offsets[i], token, block - FIRSTS[i], real, keep, TOKENS, BLOCK
            )
