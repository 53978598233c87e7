# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, imported only where a GPU (or Triton's interpreter) runs them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _copy(row, x, stride, width: tl.constexpr, start: tl.constexpr, token, block, keep, BLOCK: tl.constexpr):
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = (columns < width) & keep
    tl.store(row + start + columns, tl.load(x + token * stride + columns, mask=mask), mask=mask)


@triton.jit
def write_rows_kernel(
    rows, slots, x0, x1, x2, x3, x4, s0, s1, s2, s3, s4,
    w0: tl.constexpr, w1: tl.constexpr, w2: tl.constexpr, w3: tl.constexpr, w4: tl.constexpr,
    o0: tl.constexpr, o1: tl.constexpr, o2: tl.constexpr, o3: tl.constexpr, o4: tl.constexpr,
    row_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of all values): block b copies BLOCK elements of the value it falls into."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots + token)
    keep = slot >= 0
    row = rows + slot * row_stride
    b1: tl.constexpr = (w0 + BLOCK - 1) // BLOCK
    b2: tl.constexpr = b1 + (w1 + BLOCK - 1) // BLOCK
    b3: tl.constexpr = b2 + (w2 + BLOCK - 1) // BLOCK
    b4: tl.constexpr = b3 + (w3 + BLOCK - 1) // BLOCK
    if block < b1:
        _copy(row, x0, s0, w0, o0, token, block, keep, BLOCK)
    elif block < b2:
        _copy(row, x1, s1, w1, o1, token, block - b1, keep, BLOCK)
    elif block < b3:
        _copy(row, x2, s2, w2, o2, token, block - b2, keep, BLOCK)
    elif block < b4:
        _copy(row, x3, s3, w3, o3, token, block - b3, keep, BLOCK)
    else:
        _copy(row, x4, s4, w4, o4, token, block - b4, keep, BLOCK)


@triton.jit
def gather_rows_kernel(
    rows, slots, pieces, payload, count, row_units, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (pieces, token tiles): one program copies one piece of TOKENS rows. Units are 4 bytes."""
    piece = pieces + tl.program_id(0) * 3
    source = tl.load(piece) // 4
    units = tl.load(piece + 1) // 4
    target = tl.load(piece + 2) // 4 * count
    first = tl.program_id(1) * TOKENS
    for token in range(first, min(first + TOKENS, count)):
        row = rows + tl.load(slots + token) * row_units + source
        out = payload + target + token * units
        for start in range(0, units, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < units
            tl.store(out + columns, tl.load(row + columns, mask=mask), mask=mask)
