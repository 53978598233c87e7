# SPDX-License-Identifier: Apache-2.0
"""The Triton encoder of topk: keeps the values with the largest magnitudes, and a sample. In torch: `reduce.topk`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from dmi_connector.engine.kernels.arithmetic import (
    INT8_MAX,
    float_of,
    magnitude,
    quantise,
    scale_of,
    size_of,
    steps_over,
)
from dmi_connector.engine.kernels.encode import EXACT
from dmi_connector.reduce.topk import HASH_ROW, HASH_STEP

_HASH_ROW = tl.constexpr(HASH_ROW)
_HASH_STEP = tl.constexpr(HASH_STEP)
"""Constants of the hash that chooses where a sample starts (`reduce.topk`)."""
_LEAST_GROUPED = tl.constexpr(1024)
"""Narrower rows are searched without groups (see `_candidates`), because groups would save nothing."""
_MOST_GROUPED = tl.constexpr(8 * 65535)
"""Wider rows are searched without groups, because the indexes of their groups of 8 do not fit uint16."""


@triton.jit
def _reached(sizes, K: tl.constexpr, LOWEST: tl.constexpr):
    """The K-th largest of `sizes`, found bit by bit. sizes: results of `magnitude`; bits below LOWEST are zero."""
    least = 0
    for step in range(0, 31 - LOWEST):
        higher = least | (1 << (30 - step))
        enough = tl.sum((sizes >= higher).to(tl.int32), 0) >= K
        least = tl.where(enough, higher, least)
    return least


@triton.jit
def _pick(sizes, least, K: tl.constexpr):
    """(mask of the K largest of `sizes`; for each of these, its index among them in column order). least: the result of
    `_reached`. Of the sizes equal to `least`, the first are chosen.
    """
    above = sizes > least
    tied = sizes == least
    room = K - tl.sum(above.to(tl.int32), 0)
    # One scan counts both masks, in the two halves of an integer.
    few: tl.constexpr = sizes.shape[0] < 1 << 15
    counter: tl.constexpr = tl.int32 if few else tl.int64
    half: tl.constexpr = 16 if few else 32
    counts = tl.cumsum(above.to(counter) + (tied.to(counter) << half), 0)
    ties = (counts >> half).to(tl.int32)
    chosen = above | (tied & (ties <= room))
    return chosen, (counts & ((1 << half) - 1)).to(tl.int32) + tl.minimum(ties, room) - 1


@triton.jit
def _candidates(
    row, x, K: tl.constexpr, width: tl.constexpr, WIDE: tl.constexpr, PLACES: tl.constexpr, LOWEST: tl.constexpr
):  # fmt: skip
    """(ascending columns that contain the K largest magnitudes of a row; mask of the columns inside the row).

    Wide rows are cut into groups of 8 values. The K groups with the largest maxima contain the K largest magnitudes.
    The indexes of these groups are passed between threads through the memory of `row`, which is overwritten later. So
    only a few values move between threads, instead of the whole row.
    """
    if width < 16 * PLACES or width < _LEAST_GROUPED or width > _MOST_GROUPED:
        columns = tl.arange(0, WIDE)
        inside = columns < width
    else:
        every = tl.arange(0, WIDE)
        sizes = magnitude(tl.load(x + every, mask=every < width, other=0.0), every < width)
        best = tl.max(tl.reshape(sizes, (WIDE // 8, 8)), 1)
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
def encode_top(
    row, x, slot, width: tl.constexpr, MODE: tl.constexpr, K: tl.constexpr, S: tl.constexpr, WIDE: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Write the K values with the largest magnitudes, and a sample of S values. MODE: TOPK or EXACT. WIDE: a power of
    two, at least `width`. PLACES: a power of two, at least K. slot: the slot of the row, for the hash of the sample.
    """
    # The low 16 bits of a bfloat16 are zero.
    lowest: tl.constexpr = 16 if x.dtype.element_ty == tl.bfloat16 else 0
    columns, inside = _candidates(row, x, K, width, WIDE, PLACES, lowest)
    raw = tl.load(x + columns, mask=inside, other=0.0)
    value = raw.to(tl.float32)
    sizes = magnitude(raw, inside)
    least = _reached(sizes, K, lowest)
    chosen, place = _pick(sizes, least, K)
    index_bytes: tl.constexpr = 2 if width <= 1 << 16 else 4
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
        largest = float_of(tl.max(sizes, 0))
        tl.store(out.to(tl.pointer_type(tl.int8)) + place, quantise(value, steps_over(INT8_MAX, largest)), mask=chosen)
        rest = K + tl.arange(0, 4)
        tl.store(out + rest, (rest * 0).to(tl.uint8), mask=rest < kept)
        tl.store((out + kept).to(tl.pointer_type(tl.float32)), scale_of(largest, INT8_MAX))
    if S > 0:
        item: tl.constexpr = 1 if MODE != EXACT else (4 if x.dtype.element_ty == tl.float32 else 2)
        after: tl.constexpr = values_at + (K * item + 3) // 4 * 4 + (4 if MODE != EXACT else 0)
        mixed = ((sizes >> 12) * 31 + columns) & 0xFFFFF
        total = tl.sum(tl.where(chosen, mixed, 0).to(tl.int64), 0) + slot * _HASH_ROW
        start = (((total & 0x7FFFFFFF) * _HASH_STEP) >> 20) % width
        tl.store((row + after).to(tl.pointer_type(tl.uint32)), start.to(tl.uint32))
        _sample(row + after + 4, x, start.to(tl.int32), least, width, MODE, S)


@triton.jit
def _sample(out, x, start, least, width: tl.constexpr, MODE: tl.constexpr, S: tl.constexpr):
    """Write S values: from column `start` on, at intervals of width // S, wrapping around at the end of the row. Values
    whose `size_of` is larger than `least` do not affect the scale.
    """
    BLOCK: tl.constexpr = 64
    stride: tl.constexpr = width // S
    largest = tl.zeros([BLOCK], tl.int32)
    for first in range(0, S, BLOCK):
        number = first + tl.arange(0, BLOCK)
        raw = tl.load(x + (start + number * stride) % width, mask=number < S, other=0.0)
        if MODE == EXACT:
            tl.store(out.to(tl.pointer_type(x.dtype.element_ty)) + number, raw, mask=number < S)
        else:
            size = size_of(raw.to(tl.float32))
            largest = tl.maximum(largest, tl.where(size > least, 0, size))
    if MODE == EXACT:
        if (S % 2) and x.dtype.element_ty != tl.float32:
            tl.store(out.to(tl.pointer_type(tl.uint16)) + S, 0)
    else:
        padded: tl.constexpr = (S + 3) // 4 * 4
        most = float_of(tl.max(largest, 0))
        inverse = steps_over(INT8_MAX, most)
        for first in range(0, padded, BLOCK):
            number = first + tl.arange(0, BLOCK)
            raw = tl.load(x + (start + number * stride) % width, mask=number < S, other=0.0)
            quantised = quantise(raw.to(tl.float32), inverse)
            tl.store(out.to(tl.pointer_type(tl.int8)) + number, quantised, mask=number < padded)
        tl.store((out + padded).to(tl.pointer_type(tl.float32)), scale_of(most, INT8_MAX))
