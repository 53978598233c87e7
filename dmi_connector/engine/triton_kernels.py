# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, imported only where a GPU (or Triton's interpreter) runs them."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _copy(
    row, x, stride, width: tl.constexpr, start, token, block, real, keep, BLOCK: tl.constexpr
):  # fmt: skip
    columns = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = columns < width
    # The load does not wait for the slots: only the store needs them. Most rows are not read again soon (.cs).
    value = tl.load(x + token * stride + columns, mask=inside & real)
    tl.store(row + start + columns, value, mask=inside & keep, cache_modifier=".cs")


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
    """Grid (token tiles x blocks of all values): a program copies TOKENS x BLOCK elements of the value its block falls
    into. Blocks of one row are neighbours, as its memory is.
    """
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
    blocks: tl.constexpr = b12 + (w12 + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    block = tl.program_id(0) % blocks
    real = token < count
    slot = tl.load(slots + token, mask=real, other=-1)
    keep = slot >= 0
    row = rows + slot * row_stride
    if block < b1:
        _copy(row, x0, s0, w0, o0, token, block, real, keep, BLOCK)
    elif block < b2:
        _copy(row, x1, s1, w1, o1, token, block - b1, real, keep, BLOCK)
    elif block < b3:
        _copy(row, x2, s2, w2, o2, token, block - b2, real, keep, BLOCK)
    elif block < b4:
        _copy(row, x3, s3, w3, o3, token, block - b3, real, keep, BLOCK)
    elif block < b5:
        _copy(row, x4, s4, w4, o4, token, block - b4, real, keep, BLOCK)
    elif block < b6:
        _copy(row, x5, s5, w5, o5, token, block - b5, real, keep, BLOCK)
    elif block < b7:
        _copy(row, x6, s6, w6, o6, token, block - b6, real, keep, BLOCK)
    elif block < b8:
        _copy(row, x7, s7, w7, o7, token, block - b7, real, keep, BLOCK)
    elif block < b9:
        _copy(row, x8, s8, w8, o8, token, block - b8, real, keep, BLOCK)
    elif block < b10:
        _copy(row, x9, s9, w9, o9, token, block - b9, real, keep, BLOCK)
    elif block < b11:
        _copy(row, x10, s10, w10, o10, token, block - b10, real, keep, BLOCK)
    elif block < b12:
        _copy(row, x11, s11, w11, o11, token, block - b11, real, keep, BLOCK)
    else:
        _copy(row, x12, s12, w12, o12, token, block - b12, real, keep, BLOCK)


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
