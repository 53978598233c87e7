# SPDX-License-Identifier: Apache-2.0
"""Triton functions that encode one row of values, one function per mode.

On a CPU, the torch encoders in `reduce/` run instead of these functions. A GPU runs a torch encoder only for a
reduction without a mode (`Reduction.fused`). The modes "topk" and "exact" are in top.py.

Each function encodes the `width` values at `x` to the bytes at `row`, BLOCK values at a time.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from dmi_connector.engine.kernels.arithmetic import (
    E4M3_MAX,
    INFINITE,
    INT8_MAX,
    e4m3_of,
    float_of,
    largest,
    load_row,
    quantise,
    scale_of,
    size_of,
    steps_over,
)
from dmi_connector.reduce.channel import LOST

MODES = {
    "copy": 0,
    "int8": 1,
    "affine": 2,
    "fp8": 3,
    "round": 4,
    "topk": 5,
    "exact": 6,
    "groups": 7,
    "channel": 8,
    "deferred": 9,
}
"""Mode -> its number in kernels. Reductions return these modes (`Reduction.fused`), except two: "copy" is for values
without a reduction, and "deferred" for values that are copied to a buffer and reduced at the end of the step.
"""
COPY = tl.constexpr(MODES["copy"])
INT8 = tl.constexpr(MODES["int8"])
AFFINE = tl.constexpr(MODES["affine"])
FP8 = tl.constexpr(MODES["fp8"])
ROUND = tl.constexpr(MODES["round"])
GROUPS = tl.constexpr(MODES["groups"])
CHANNEL = tl.constexpr(MODES["channel"])
TOPK = tl.constexpr(MODES["topk"])
EXACT = tl.constexpr(MODES["exact"])
DEFERRED = tl.constexpr(MODES["deferred"])
LOST_STEP = tl.constexpr(LOST)
"""The int8 value that int8(channel=FILE) stores for a value that is not finite."""


@triton.jit
def encode(row, x, width: tl.constexpr, MODE: tl.constexpr, NUMBER: tl.constexpr, TILE: tl.constexpr):
    """Encode a row. MODE: one of MODES, except "topk", "exact" and "deferred".

    NUMBER: number of mantissa bits to drop (ROUND), or of values per group (GROUPS). TILE: maximum number of values to
    encode at a time, a power of two. GROUPS encodes at least one whole group at a time.
    """
    half: tl.constexpr = TILE // 2 if width <= TILE // 2 else TILE
    BLOCK: tl.constexpr = TILE // 4 if width <= TILE // 4 else half
    if MODE == COPY:
        _copy(row, x, width, BLOCK)
    elif MODE == ROUND:
        _round(row, x, width, NUMBER, BLOCK)
    elif MODE == INT8:
        _int8(row, x, width, BLOCK)
    elif MODE == GROUPS:
        _groups(row, x, width, NUMBER, NUMBER if BLOCK < NUMBER else BLOCK)
    elif MODE == CHANNEL:
        _channel(row, x, width, BLOCK)
    elif MODE == AFFINE:
        _affine(row, x, width, BLOCK)
    else:
        tl.static_assert(MODE == FP8)
        _fp8(row, x, width, BLOCK)


@triton.jit
def _copy(row, x, width: tl.constexpr, BLOCK: tl.constexpr):
    out = row.to(tl.pointer_type(x.dtype.element_ty))
    for start in tl.static_range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tl.store(out + columns, tl.load(x + columns, mask=columns < width), mask=columns < width)


@triton.jit
def _round(row, x, width: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr):
    integer: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.float32 else tl.int16
    # Infinities and NaNs are not rounded. All their exponent bits are set.
    exponent: tl.constexpr = (
        0x7F800000 if x.dtype.element_ty == tl.float32 else (0x7C00 if x.dtype.element_ty == tl.float16 else 0x7F80)
    )
    out = row.to(tl.pointer_type(integer))
    for start in tl.static_range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        bits = tl.load(x + columns, mask=columns < width, other=0.0).to(integer, bitcast=True)
        odd = (bits >> DROP) & 1
        rounded = (bits + ((1 << (DROP - 1)) - 1) + odd) & ~((1 << DROP) - 1)
        # A value that would round to infinity is truncated.
        rounded = tl.where((rounded & exponent) == exponent, bits & ~((1 << DROP) - 1), rounded)
        tl.store(out + columns, tl.where((bits & exponent) == exponent, bits, rounded), mask=columns < width)


@triton.jit
def _int8(row, x, width: tl.constexpr, BLOCK: tl.constexpr):
    padded: tl.constexpr = (width + 3) // 4 * 4
    span = largest(x, width, BLOCK)
    inverse = steps_over(INT8_MAX, span)
    out = row.to(tl.pointer_type(tl.int8))
    for start in tl.static_range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tl.store(out + columns, quantise(load_row(x, columns, width), inverse), mask=columns < padded)
    tl.store((row + padded).to(tl.pointer_type(tl.float32)), scale_of(span, INT8_MAX))


@triton.jit
def _groups(row, x, width: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    padded: tl.constexpr = (width + 3) // 4 * 4
    count: tl.constexpr = (width + GROUP - 1) // GROUP
    out = row.to(tl.pointer_type(tl.int8))
    scales = (row + padded).to(tl.pointer_type(tl.uint16))
    for start in tl.static_range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        groups = tl.reshape(load_row(x, columns, width), (BLOCK // GROUP, GROUP))
        bits = size_of(scale_of(float_of(tl.max(size_of(groups), 1)), INT8_MAX))
        # Round the scale to the nearest bfloat16, ties to even. Rounding the bits of a NaN could give a number.
        bits = tl.where(bits > INFINITE, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
        scale = (bits << 16).to(tl.float32, bitcast=True)
        stored = quantise(groups, steps_over(1.0, scale)[:, None])
        tl.store(out + columns, tl.reshape(stored, (BLOCK,)), mask=columns < padded)
        numbers = start // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(scales + numbers, bits.to(tl.uint16), mask=numbers < count)
    if count % 2:
        tl.store(scales + count, 0)


@triton.jit
def _channel(row, x, width: tl.constexpr, BLOCK: tl.constexpr):
    """x: the values divided by the scales of their dimensions, the result of `Reduction.before`."""
    padded: tl.constexpr = (width + 3) // 4 * 4
    out = row.to(tl.pointer_type(tl.int8))
    for start in tl.static_range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = load_row(x, columns, width)
        finite = size_of(value) < INFINITE
        stored = quantise(tl.where(finite, value, 0.0), 1.0)
        tl.store(out + columns, tl.where(finite, stored, LOST_STEP), mask=columns < padded)


@triton.jit
def _affine(row, x, width: tl.constexpr, BLOCK: tl.constexpr):
    padded: tl.constexpr = (width + 3) // 4 * 4
    low = tl.full([BLOCK], float("inf"), tl.float32)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    sizes = tl.zeros([BLOCK], tl.int32)
    for start in tl.static_range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = load_row(x, columns, width)
        low = tl.where(columns < width, tl.minimum(low, value), low)
        high = tl.where(columns < width, tl.maximum(high, value), high)
        sizes = tl.maximum(sizes, size_of(value))
    size = tl.max(sizes, 0)
    least = tl.min(low, 0)
    most = tl.where(size < INFINITE, tl.max(high, 0), float_of(size))
    inverse = steps_over(2 * INT8_MAX, most - least)
    offset = (most + least) / 2 + 0.0  # never -0.0
    out = row.to(tl.pointer_type(tl.int8))
    for start in tl.static_range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        stored = quantise(load_row(x, columns, width) - offset, inverse)
        tl.store(out + columns, tl.where(columns < width, stored, 0), mask=columns < padded)
    ends = (row + padded).to(tl.pointer_type(tl.float32))
    tl.store(ends, scale_of(most - least, 2 * INT8_MAX))
    tl.store(ends + 1, offset)


@triton.jit
def _fp8(row, x, width: tl.constexpr, BLOCK: tl.constexpr):
    padded: tl.constexpr = (width + 3) // 4 * 4
    span = largest(x, width, BLOCK)
    inverse = steps_over(E4M3_MAX, span)
    for start in tl.static_range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        scaled = load_row(x, columns, width) * inverse
        bits = e4m3_of(tl.minimum(tl.maximum(scaled, -E4M3_MAX), E4M3_MAX))
        tl.store(row + columns, bits, mask=columns < padded)
    tl.store((row + padded).to(tl.pointer_type(tl.float32)), scale_of(span, E4M3_MAX))
