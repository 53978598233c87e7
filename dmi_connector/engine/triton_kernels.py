# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, imported only where a GPU (or Triton's interpreter) runs them."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _copy(
    rows, slots, x, stride, width: tl.constexpr, start, block, row_stride, count, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    columns = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = columns < width
    for first in range(tl.program_id(0).to(tl.int64) * TOKENS, count, tl.num_programs(0) * TOKENS):
        token = first + tl.arange(0, TOKENS)[:, None]
        real = token < count
        slot = tl.load(slots + token, mask=real, other=-1)
        # The load does not wait for the slots: only the store needs them. Most rows are not read again soon (.cs).
        value = tl.load(x + token * stride + columns, mask=inside & real)
        tl.store(rows + slot * row_stride + start + columns, value, mask=inside & (slot >= 0), cache_modifier=".cs")


@triton.jit(do_not_specialize=["count"])
def write_rows_kernel(
    rows, slots,
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12,
    count, row_stride,
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12,
    w0: tl.constexpr, w1: tl.constexpr, w2: tl.constexpr, w3: tl.constexpr, w4: tl.constexpr, w5: tl.constexpr,
    w6: tl.constexpr, w7: tl.constexpr, w8: tl.constexpr, w9: tl.constexpr, w10: tl.constexpr, w11: tl.constexpr,
    w12: tl.constexpr,
    o0, o1, o2, o3, o4, o5, o6, o7, o8, o9, o10, o11, o12,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles or fewer, blocks of all values): block b copies TOKENS x BLOCK elements of the value it falls
    into, one tile after the other.
    """
    block = tl.program_id(1)
    b1: tl.constexpr = (w0 + BLOCK - 1) // BLOCK
    b2: tl.constexpr = b1 + (w1 + BLOCK - 1) // BLOCK
    b3: tl.constexpr = b2 + (w2 + BLOCK - 1) // BLOCK
    b4: tl.constexpr = b3 + (w3 + BLOCK - 1) // BLOCK
    b5: tl.constexpr = b4 + (w4 + BLOCK - 1) // BLOCK
    b6: tl.constexpr = b5 + (w5 + BLOCK - 1) // BLOCK
    b7: tl.constexpr = b6 + (w6 + BLOCK - 1) // BLOCK
    b8: tl.constexpr = b7 + (w7 + BLOCK - 1) // BLOCK
    b9: tl.constexpr = b8 + (w8 + BLOCK - 1) // BLOCK
    b10: tl.constexpr = b9 + (w9 + BLOCK - 1) // BLOCK
    b11: tl.constexpr = b10 + (w10 + BLOCK - 1) // BLOCK
    b12: tl.constexpr = b11 + (w11 + BLOCK - 1) // BLOCK
    if block < b1:
        _copy(rows, slots, x0, s0, w0, o0, block, row_stride, count, TOKENS, BLOCK)
    elif block < b2:
        _copy(rows, slots, x1, s1, w1, o1, block - b1, row_stride, count, TOKENS, BLOCK)
    elif block < b3:
        _copy(rows, slots, x2, s2, w2, o2, block - b2, row_stride, count, TOKENS, BLOCK)
    elif block < b4:
        _copy(rows, slots, x3, s3, w3, o3, block - b3, row_stride, count, TOKENS, BLOCK)
    elif block < b5:
        _copy(rows, slots, x4, s4, w4, o4, block - b4, row_stride, count, TOKENS, BLOCK)
    elif block < b6:
        _copy(rows, slots, x5, s5, w5, o5, block - b5, row_stride, count, TOKENS, BLOCK)
    elif block < b7:
        _copy(rows, slots, x6, s6, w6, o6, block - b6, row_stride, count, TOKENS, BLOCK)
    elif block < b8:
        _copy(rows, slots, x7, s7, w7, o7, block - b7, row_stride, count, TOKENS, BLOCK)
    elif block < b9:
        _copy(rows, slots, x8, s8, w8, o8, block - b8, row_stride, count, TOKENS, BLOCK)
    elif block < b10:
        _copy(rows, slots, x9, s9, w9, o9, block - b9, row_stride, count, TOKENS, BLOCK)
    elif block < b11:
        _copy(rows, slots, x10, s10, w10, o10, block - b10, row_stride, count, TOKENS, BLOCK)
    elif block < b12:
        _copy(rows, slots, x11, s11, w11, o11, block - b11, row_stride, count, TOKENS, BLOCK)
    else:
        _copy(rows, slots, x12, s12, w12, o12, block - b12, row_stride, count, TOKENS, BLOCK)


@triton.jit(do_not_specialize=["count"])
def gather_rows_kernel(
    rows, index, segments, payload, count, row_units, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (segments, row tiles): one program copies one segment of TOKENS rows. Units are 4 bytes."""
    segment = segments + tl.program_id(0) * 3
    source = tl.load(segment) // 4
    units = tl.load(segment + 1) // 4
    base = tl.load(segment + 2) // 4
    first = tl.program_id(1) * TOKENS
    for row in range(first, min(first + TOKENS, count)):
        entry = index + row * 4
        data = rows + tl.load(entry) * row_units + source
        block = tl.load(entry + 1) // 4 + base * tl.load(entry + 2)
        out = payload + block + tl.load(entry + 3) * units
        for start in range(0, units, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < units
            tl.store(out + columns, tl.load(data + columns, mask=mask), mask=mask)
