# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels that reduce values on their way into rows; the encoders of `reduce/` are their twins. Imported
only where a GPU (or Triton's interpreter) runs them.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

MODES = {"copy": 0, "int8": 1, "affine": 2, "fp8": 3, "round": 4, "topk": 5, "exact": 6, "groups": 7, "aside": 8}
COPY = tl.constexpr(MODES["copy"])
INT8 = tl.constexpr(MODES["int8"])
AFFINE = tl.constexpr(MODES["affine"])
FP8 = tl.constexpr(MODES["fp8"])
ROUND = tl.constexpr(MODES["round"])
GROUPS = tl.constexpr(MODES["groups"])
TOPK = tl.constexpr(MODES["topk"])
EXACT = tl.constexpr(MODES["exact"])
ASIDE = tl.constexpr(MODES["aside"])
_NEAREST = tl.constexpr(12582912.0)
"""Added and taken away again, it rounds a small float32 to the nearest whole number, ties to even."""
_LEAST = tl.constexpr(2.0**-100)
"""Rows (or groups) that reach no further are zeros: nothing divided by their largest value may overflow."""


@triton.jit
def _load(x, columns, width: tl.constexpr):
    return tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def _largest(x, width: tl.constexpr, BLOCK: tl.constexpr):
    """max|x| of a row."""
    found = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, width, BLOCK):
        found = tl.maximum(found, tl.abs(_load(x, start + tl.arange(0, BLOCK), width)))
    return tl.max(found, 0)


@triton.jit
def _quantise(value, inverse):
    """int8 of value * inverse."""
    scaled = value * inverse
    nearest = (scaled + _NEAREST) - _NEAREST
    return tl.minimum(tl.maximum(nearest, -127.0), 127.0).to(tl.int8)


@triton.jit
def _scale_of(span, steps: tl.constexpr):
    """span / steps."""
    return tl.div_rn(span, span * 0 + steps)


@triton.jit
def _steps_over(steps: tl.constexpr, span):
    """steps / span, 0 where the span is next to nothing."""
    large = span >= _LEAST
    return tl.where(large, tl.div_rn(span * 0 + steps, tl.where(large, span, 1.0)), 0.0)


@triton.jit
def _e4m3(value):
    """The float32 that is the nearest e4m3 number, ties to even, so that the conversion itself rounds nothing."""
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << 19) - 1) + ((bits >> 20) & 1)) & ~((1 << 20) - 1)).to(tl.float32, bitcast=True)
    subnormal = (value + 24576.0) - 24576.0  # steps of 2**-9
    subnormal = tl.where(subnormal == 0, value * 0.0, subnormal)  # which keeps the sign
    return tl.where(tl.abs(value) < 0.015625, subnormal, normal)


@triton.jit
def _encode(
    row, x, width: tl.constexpr, MODE: tl.constexpr, NUMBER: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write one row of `width` values as MODE says, TILE values at a time. NUMBER: mantissa bits dropped (ROUND),
    values of a group (GROUPS).
    """
    padded: tl.constexpr = (width + 3) // 4 * 4
    half: tl.constexpr = TILE // 2 if width <= TILE // 2 else TILE
    least: tl.constexpr = TILE // 4 if width <= TILE // 4 else half
    BLOCK: tl.constexpr = NUMBER if MODE == GROUPS and least < NUMBER else least
    if MODE == COPY:
        out = row.to(tl.pointer_type(x.dtype.element_ty))
        for start in tl.static_range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            tl.store(out + columns, tl.load(x + columns, mask=columns < width), mask=columns < width)
    elif MODE == ROUND:
        integer: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.float32 else tl.int16
        exponent: tl.constexpr = (
            0x7F800000 if x.dtype.element_ty == tl.float32 else (0x7C00 if x.dtype.element_ty == tl.float16 else 0x7F80)
        )
        out = row.to(tl.pointer_type(integer))
        for start in tl.static_range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            bits = tl.load(x + columns, mask=columns < width, other=0.0).to(integer, bitcast=True)
            odd = (bits >> NUMBER) & 1
            rounded = (bits + ((1 << (NUMBER - 1)) - 1) + odd) & ~((1 << NUMBER) - 1)
            tl.store(out + columns, tl.where((bits & exponent) == exponent, bits, rounded), mask=columns < width)
    elif MODE == INT8:
        largest = _largest(x, width, BLOCK)
        inverse = _steps_over(127.0, largest)
        out = row.to(tl.pointer_type(tl.int8))
        for start in tl.static_range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            tl.store(out + columns, _quantise(_load(x, columns, width), inverse), mask=columns < padded)
        tl.store((row + padded).to(tl.pointer_type(tl.float32)), _scale_of(largest, 127.0))
    elif MODE == GROUPS:
        count: tl.constexpr = (width + NUMBER - 1) // NUMBER
        out = row.to(tl.pointer_type(tl.int8))
        scales = (row + padded).to(tl.pointer_type(tl.uint16))
        for start in tl.static_range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            groups = tl.reshape(_load(x, columns, width), (BLOCK // NUMBER, NUMBER))
            bits = _scale_of(tl.max(tl.abs(groups), 1), 127.0).to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # the nearest bfloat16, ties to even
            scale = (bits << 16).to(tl.float32, bitcast=True)
            stored = _quantise(groups, _steps_over(1.0, scale)[:, None])
            tl.store(out + columns, tl.reshape(stored, (BLOCK,)), mask=columns < padded)
            numbers = start // NUMBER + tl.arange(0, BLOCK // NUMBER)
            tl.store(scales + numbers, bits.to(tl.uint16), mask=numbers < count)
        if count % 2:
            tl.store(scales + count, 0)
    elif MODE == AFFINE:
        low = tl.full([BLOCK], float("inf"), tl.float32)
        high = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in tl.static_range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            value = _load(x, columns, width)
            low = tl.where(columns < width, tl.minimum(low, value), low)
            high = tl.where(columns < width, tl.maximum(high, value), high)
        least, most = tl.min(low, 0), tl.max(high, 0)
        inverse = _steps_over(254.0, most - least)
        offset = (most + least) / 2 + 0.0  # never -0.0
        out = row.to(tl.pointer_type(tl.int8))
        for start in tl.static_range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            stored = _quantise(_load(x, columns, width) - offset, inverse)
            tl.store(out + columns, tl.where(columns < width, stored, 0), mask=columns < padded)
        ends = (row + padded).to(tl.pointer_type(tl.float32))
        tl.store(ends, _scale_of(most - least, 254.0))
        tl.store(ends + 1, offset)
    else:
        tl.static_assert(MODE == FP8)
        largest = _largest(x, width, BLOCK)
        inverse = _steps_over(448.0, largest)
        for start in tl.static_range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            scaled = _load(x, columns, width) * inverse
            exact = _e4m3(tl.minimum(tl.maximum(scaled, -448.0), 448.0))
            tl.store(row + columns, exact.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=columns < padded)
        tl.store((row + padded).to(tl.pointer_type(tl.float32)), _scale_of(largest, 448.0))


@triton.jit
def _reached(magnitude, K: tl.constexpr, LOWEST: tl.constexpr):
    """The greatest number that K of the magnitudes reach, found bit by bit; bits below LOWEST are zero."""
    least = 0
    for step in range(0, 31 - LOWEST):
        higher = least | (1 << (30 - step))
        enough = tl.sum((magnitude >= higher).to(tl.int32), 0) >= K
        least = tl.where(enough, higher, least)
    return least


@triton.jit
def _pick(magnitude, least, K: tl.constexpr):
    """Which K of the magnitudes are the largest, and their places in order. least: see `_reached`; of those that are
    equal to it the first.
    """
    above = magnitude > least
    tied = magnitude == least
    room = K - tl.sum(above.to(tl.int32), 0)
    # One scan counts both, side by side in one number.
    few: tl.constexpr = magnitude.shape[0] < 32768
    counter: tl.constexpr = tl.int32 if few else tl.int64
    half: tl.constexpr = 16 if few else 32
    counts = tl.cumsum(above.to(counter) + (tied.to(counter) << half), 0)
    ties = (counts >> half).to(tl.int32)
    chosen = above | (tied & (ties <= room))
    return chosen, (counts & ((1 << half) - 1)).to(tl.int32) + tl.minimum(ties, room) - 1


@triton.jit
def _magnitude(raw, inside):
    """|value| as an integer of the same order, -1 outside."""
    return tl.where(inside, raw.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)


@triton.jit
def _candidates(
    row, x, K: tl.constexpr, width: tl.constexpr, WIDE: tl.constexpr, PLACES: tl.constexpr, LOWEST: tl.constexpr
):  # fmt: skip
    """Columns, ascending, among which the K largest of a row are, and which of them count.

    Those of the K groups of 8 whose largest values are largest: a value that belongs to the K largest has no K groups
    that reach beyond its own. Of groups that tie the first K hold enough. Their numbers lie in `row` for a moment: so
    only a few values, not a whole row, are laid out anew.
    """
    if width < 16 * PLACES or width < 1024 or width > 8 * 65535:
        columns = tl.arange(0, WIDE)
        inside = columns < width
    else:
        every = tl.arange(0, WIDE)
        magnitude = _magnitude(tl.load(x + every, mask=every < width, other=0.0), every < width)
        best = tl.max(tl.reshape(magnitude, (WIDE // 8, 8)), 1)
        chosen, place = _pick(best, _reached(best, K, LOWEST), K)
        numbers = row.to(tl.pointer_type(tl.uint16))
        tl.store(numbers + place, tl.arange(0, WIDE // 8).to(tl.uint16), mask=chosen)
        tl.debug_barrier()
        places = tl.arange(0, PLACES)
        group = tl.load(numbers + places, mask=places < K, other=WIDE // 8).to(tl.int32)
        tl.debug_barrier()
        columns = tl.reshape(group[:, None] * 8 + tl.arange(0, 8)[None, :], (PLACES * 8,))
        inside = columns < width
    return columns, inside


@triton.jit
def _top(
    row, x, slot, width: tl.constexpr, MODE: tl.constexpr, NUMBER: tl.constexpr, WIDE: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """The K largest magnitudes, and a sample of S; NUMBER = S * 2**20 + K. PLACES: a power of two not below K."""
    K: tl.constexpr = NUMBER % (1 << 20)
    S: tl.constexpr = NUMBER // (1 << 20)
    # The low 16 bits of a bfloat16 are zero.
    lowest: tl.constexpr = 16 if x.dtype.element_ty == tl.bfloat16 else 0
    columns, inside = _candidates(row, x, K, width, WIDE, PLACES, lowest)
    raw = tl.load(x + columns, mask=inside, other=0.0)
    value = raw.to(tl.float32)
    magnitude = _magnitude(raw, inside)
    least = _reached(magnitude, K, lowest)
    chosen, place = _pick(magnitude, least, K)
    index_bytes: tl.constexpr = 2 if width <= 65536 else 4
    values_at: tl.constexpr = (K * index_bytes + 3) // 4 * 4
    if index_bytes == 2:
        tl.store(row.to(tl.pointer_type(tl.uint16)) + place, columns.to(tl.uint16), mask=chosen)
        if K % 2:
            tl.store(row.to(tl.pointer_type(tl.uint16)) + K, 0)
    else:
        tl.store(row.to(tl.pointer_type(tl.uint32)) + place, columns.to(tl.uint32), mask=chosen)
    out = row + values_at
    if MODE == EXACT:
        tl.store(out.to(tl.pointer_type(x.dtype.element_ty)) + place, raw, mask=chosen)
        if (K % 2) and x.dtype.element_ty != tl.float32:
            tl.store(out.to(tl.pointer_type(tl.uint16)) + K, 0)
    else:
        kept: tl.constexpr = (K + 3) // 4 * 4
        largest = tl.max(tl.abs(value), 0)
        tl.store(out.to(tl.pointer_type(tl.int8)) + place, _quantise(value, _steps_over(127.0, largest)), mask=chosen)
        rest = K + tl.arange(0, 4)
        tl.store(out + rest, (rest * 0).to(tl.uint8), mask=rest < kept)
        tl.store((out + kept).to(tl.pointer_type(tl.float32)), _scale_of(largest, 127.0))
    if S > 0:
        item: tl.constexpr = 1 if MODE != EXACT else (4 if x.dtype.element_ty == tl.float32 else 2)
        after: tl.constexpr = values_at + (K * item + 3) // 4 * 4 + (4 if MODE != EXACT else 0)
        mixed = ((magnitude >> 12) * 31 + columns) & 0xFFFFF
        total = tl.sum(tl.where(chosen, mixed, 0).to(tl.int64), 0) + slot * 40503
        start = (((total & 0x7FFFFFFF) * 1103515245) >> 20) % width
        tl.store((row + after).to(tl.pointer_type(tl.uint32)), start.to(tl.uint32))
        _sample(row + after + 4, x, start.to(tl.int32), least, width, MODE, S)


@triton.jit
def _sample(out, x, start, least, width: tl.constexpr, MODE: tl.constexpr, S: tl.constexpr):
    """S values from `start` on, width // S apart, round the end of the row, on a scale for those not above `least`."""
    BLOCK: tl.constexpr = 64
    stride: tl.constexpr = width // S
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, S, BLOCK):
        number = first + tl.arange(0, BLOCK)
        raw = tl.load(x + (start + number * stride) % width, mask=number < S, other=0.0)
        if MODE == EXACT:
            tl.store(out.to(tl.pointer_type(x.dtype.element_ty)) + number, raw, mask=number < S)
        else:
            magnitude = tl.abs(raw.to(tl.float32))
            known = magnitude.to(tl.int32, bitcast=True) > least
            largest = tl.maximum(largest, tl.where(known, 0.0, magnitude))
    if MODE == EXACT:
        if (S % 2) and x.dtype.element_ty != tl.float32:
            tl.store(out.to(tl.pointer_type(tl.uint16)) + S, 0)
    else:
        padded: tl.constexpr = (S + 3) // 4 * 4
        most = tl.max(largest, 0)
        inverse = _steps_over(127.0, most)
        for first in range(0, padded, BLOCK):
            number = first + tl.arange(0, BLOCK)
            raw = tl.load(x + (start + number * stride) % width, mask=number < S, other=0.0)
            quantised = _quantise(raw.to(tl.float32), inverse)
            tl.store(out.to(tl.pointer_type(tl.int8)) + number, quantised, mask=number < padded)
        tl.store((out + padded).to(tl.pointer_type(tl.float32)), _scale_of(most, 127.0))


@triton.jit
def _put(row, aside, offset, x, width: tl.constexpr, MODE: tl.constexpr, NUMBER: tl.constexpr, TILE: tl.constexpr):
    if MODE == ASIDE:
        _encode(aside + offset, x, width, COPY, 0, TILE)
    else:
        _encode(row + offset, x, width, MODE, NUMBER, TILE)


@triton.jit
def reduce_rows_kernel(
    rows, slots, buffer,
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12,
    row_bytes, buffer_bytes,
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12,
    w0: tl.constexpr, w1: tl.constexpr, w2: tl.constexpr, w3: tl.constexpr, w4: tl.constexpr, w5: tl.constexpr,
    w6: tl.constexpr, w7: tl.constexpr, w8: tl.constexpr, w9: tl.constexpr, w10: tl.constexpr, w11: tl.constexpr,
    w12: tl.constexpr,
    m0: tl.constexpr, m1: tl.constexpr, m2: tl.constexpr, m3: tl.constexpr, m4: tl.constexpr, m5: tl.constexpr,
    m6: tl.constexpr, m7: tl.constexpr, m8: tl.constexpr, m9: tl.constexpr, m10: tl.constexpr, m11: tl.constexpr,
    m12: tl.constexpr,
    n0: tl.constexpr, n1: tl.constexpr, n2: tl.constexpr, n3: tl.constexpr, n4: tl.constexpr, n5: tl.constexpr,
    n6: tl.constexpr, n7: tl.constexpr, n8: tl.constexpr, n9: tl.constexpr, n10: tl.constexpr, n11: tl.constexpr,
    n12: tl.constexpr,
    o0, o1, o2, o3, o4, o5, o6, o7, o8, o9, o10, o11, o12,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, values): one program reduces one row of one value. buffer: where values of mode "aside" go."""
    token = tl.program_id(0).to(tl.int64)
    value = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        row = rows + slot * row_bytes
        aside = buffer + token * buffer_bytes
        if value == 0:
            _put(row, aside, o0, x0 + token * s0, w0, m0, n0, TILE)
        elif value == 1:
            _put(row, aside, o1, x1 + token * s1, w1, m1, n1, TILE)
        elif value == 2:
            _put(row, aside, o2, x2 + token * s2, w2, m2, n2, TILE)
        elif value == 3:
            _put(row, aside, o3, x3 + token * s3, w3, m3, n3, TILE)
        elif value == 4:
            _put(row, aside, o4, x4 + token * s4, w4, m4, n4, TILE)
        elif value == 5:
            _put(row, aside, o5, x5 + token * s5, w5, m5, n5, TILE)
        elif value == 6:
            _put(row, aside, o6, x6 + token * s6, w6, m6, n6, TILE)
        elif value == 7:
            _put(row, aside, o7, x7 + token * s7, w7, m7, n7, TILE)
        elif value == 8:
            _put(row, aside, o8, x8 + token * s8, w8, m8, n8, TILE)
        elif value == 9:
            _put(row, aside, o9, x9 + token * s9, w9, m9, n9, TILE)
        elif value == 10:
            _put(row, aside, o10, x10 + token * s10, w10, m10, n10, TILE)
        elif value == 11:
            _put(row, aside, o11, x11 + token * s11, w11, m11, n11, TILE)
        else:
            _put(row, aside, o12, x12 + token * s12, w12, m12, n12, TILE)


@triton.jit
def reduce_layers_kernel(
    rows, slots, x, offsets, base, token_stride, layer_stride, row_bytes,
    width: tl.constexpr, MODE: tl.constexpr, NUMBER: tl.constexpr, WIDE: tl.constexpr, PLACES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, layers): one program reduces one row of one layer of a hook, to byte base + offsets[layer], a
    multiple of 16, of its token's row. NUMBER, PLACES: see `_encode` and `_top`. WIDE: a power of two, at least
    `width`.
    """
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    row = rows + slot * row_bytes + base + tl.multiple_of(tl.load(offsets + layer), 16)
    if slot >= 0:
        source = x + token * token_stride + layer * layer_stride
        if MODE == TOPK or MODE == EXACT:  # noqa: SIM109 (kernels know no tuples)
            _top(row, source, slot, width, MODE, NUMBER, WIDE, PLACES)
        else:
            _encode(row, source, width, MODE, NUMBER, TILE)
