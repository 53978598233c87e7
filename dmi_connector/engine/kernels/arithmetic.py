# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the reducing kernels. Each result is bitwise equal to that of the torch encoders in `reduce/`. Rows
with NaN or an infinity may be encoded differently, but are decoded alike.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from dmi_connector.reduce.base import LEAST_SPAN
from dmi_connector.reduce.fp8 import LARGEST

INT8_MAX = tl.constexpr(127.0)
"""Largest magnitude of a stored int8."""
E4M3_MAX = tl.constexpr(LARGEST)
"""Largest e4m3 number."""
_NEAREST = tl.constexpr(12582912.0)
"""1.5 * 2**23. Added and subtracted again, it rounds a small float32 to the nearest integer, ties to even."""
_NEAREST_SUBNORMAL = tl.constexpr(24576.0)
"""1.5 * 2**14. Added and subtracted again, it rounds to a multiple of 2**-9, the step of subnormal e4m3 numbers."""
_LEAST_NORMAL = tl.constexpr(0.015625)
"""2**-6, the smallest normal e4m3 number."""
INFINITE, NAN = tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)
"""Bits of the float32 infinity and of a NaN. Without the sign bit, the bits of every NaN are larger than those of
infinity.
"""
_LEAST = tl.constexpr(LEAST_SPAN)
"""Rows and groups with a smaller span become zeros, so that no quotient overflows."""


@triton.jit
def load_row(x, columns, width: tl.constexpr):
    """float32 values at `columns`, 0 beyond the row."""
    return tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def size_of(value):
    """|value| of a float32 as an integer that sorts in the same order. NaN is the largest, while a maximum of floats
    ignores NaN.
    """
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def float_of(size):
    """The float32 of a `size_of`. Infinity becomes NaN: as a scale, NaN makes every decoded number NaN."""
    return tl.where(size < INFINITE, size, NAN).to(tl.float32, bitcast=True)


@triton.jit
def largest(x, width: tl.constexpr, BLOCK: tl.constexpr):
    """max|x| of a row, NaN if the row has a NaN or an infinity."""
    found = tl.zeros([BLOCK], tl.int32)
    for start in tl.static_range(0, width, BLOCK):
        found = tl.maximum(found, size_of(load_row(x, start + tl.arange(0, BLOCK), width)))
    return float_of(tl.max(found, 0))


@triton.jit
def quantise(value, inverse):
    """int8 of value * inverse."""
    scaled = value * inverse
    nearest = (scaled + _NEAREST) - _NEAREST
    return tl.minimum(tl.maximum(nearest, -INT8_MAX), INT8_MAX).to(tl.int8)


@triton.jit
def scale_of(span, steps: tl.constexpr):
    """span / steps."""
    return tl.div_rn(span, span * 0 + steps)


@triton.jit
def steps_over(steps: tl.constexpr, span):
    """steps / span, 0 if the span is below LEAST_SPAN."""
    large = span >= _LEAST
    return tl.where(large, tl.div_rn(span * 0 + steps, tl.where(large, span, 1.0)), 0.0)


@triton.jit
def nearest_e4m3(value):
    """Round a float32 to the nearest e4m3 number, ties to even, so that the conversion to e4m3 is exact."""
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << 19) - 1) + ((bits >> 20) & 1)) & ~((1 << 20) - 1)).to(tl.float32, bitcast=True)
    subnormal = (value + _NEAREST_SUBNORMAL) - _NEAREST_SUBNORMAL
    subnormal = tl.where(subnormal == 0, value * 0.0, subnormal)  # keeps the sign
    return tl.where(tl.abs(value) < _LEAST_NORMAL, subnormal, normal)


@triton.jit
def magnitude(raw, inside):
    """|value| as an integer that sorts in the same order, -1 where `inside` is false."""
    return tl.where(inside, size_of(raw.to(tl.float32)), -1)
