# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the kernels that reduce values. Results are bitwise equal to those of the torch encoders in `reduce/`.

The exception is rows with a NaN or an infinity. Their bytes may differ, but decode to the same values.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from dmi_connector.reduce.base import LEAST_SPAN
from dmi_connector.reduce.fp8 import LARGEST

INT8_MAX = tl.constexpr(127.0)
"""Largest magnitude of an int8 that stores a finite value."""
E4M3_MAX = tl.constexpr(LARGEST)
"""Largest number in float8 e4m3."""
_NEAREST = tl.constexpr(12582912.0)
"""1.5 * 2**23. Adding and then subtracting it rounds a float32 below 2**22 to the nearest integer, ties to even."""
_NEAREST_SUBNORMAL = tl.constexpr(24576.0)
"""1.5 * 2**14. Adding and then subtracting it rounds to a multiple of 2**-9, the step of subnormal e4m3 numbers."""
_LEAST_NORMAL = tl.constexpr(0.015625)
"""2**-6, the smallest normal e4m3 number."""
INFINITE, NAN = tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)
"""Bits of infinity and of a NaN in float32. Without the sign bit, the bits of every NaN are larger than those of
infinity.
"""
_LEAST = tl.constexpr(LEAST_SPAN)
"""Rows and groups with a smaller span (max|x|, or max - min) become zeros, so that no quotient overflows."""


@triton.jit
def load_row(x, columns, width: tl.constexpr):
    """The values of the row at pointer `x` in `columns`, as float32; 0 for columns beyond `width`."""
    return tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def size_of(value):
    """The bits of |value| as int32. value: float32.

    The bits of a larger |value| are larger, and those of NaN are the largest. A maximum of floats would ignore NaN.
    """
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def float_of(size):
    """The float32 with the bits of `size_of`. Infinity becomes NaN: a scale of NaN makes every decoded value NaN."""
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
    """value * inverse as int8: rounded to the nearest integer, ties to even, and clipped to [-127, 127]."""
    scaled = value * inverse
    nearest = (scaled + _NEAREST) - _NEAREST
    return tl.minimum(tl.maximum(nearest, -INT8_MAX), INT8_MAX).to(tl.int8)


@triton.jit
def scale_of(span, steps: tl.constexpr):
    """span / steps, with IEEE 754 rounding."""
    return tl.div_rn(span, span * 0 + steps)


@triton.jit
def steps_over(steps: tl.constexpr, span):
    """steps / span, with IEEE 754 rounding; 0 if the span is below LEAST_SPAN."""
    large = span >= _LEAST
    return tl.where(large, tl.div_rn(span * 0 + steps, tl.where(large, span, 1.0)), 0.0)


@triton.jit
def e4m3_of(value):
    """The bits, uint8, of the e4m3 number nearest to a float32 in e4m3's range, ties to even.

    Triton cannot convert to e4m3 on GPUs below compute capability 8.9. There the bits are computed with integers.
    """
    exact = nearest_e4m3(value)
    if tl.target_info.cuda_capability_geq(8, 9):
        return exact.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = exact.to(tl.int32, bitcast=True)
    normal = ((bits & 0x7FFFFFFF) >> 20) - (120 << 3)  # the exponent's bias is 127 in float32, and 7 in e4m3
    subnormal = (tl.abs(exact) * 512.0).to(tl.int32)
    found = tl.where(tl.abs(exact) < _LEAST_NORMAL, subnormal, normal)
    return (found | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def nearest_e4m3(value):
    """Round a float32 in e4m3's range to the nearest e4m3 number, ties to even."""
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << 19) - 1) + ((bits >> 20) & 1)) & ~((1 << 20) - 1)).to(tl.float32, bitcast=True)
    subnormal = (value + _NEAREST_SUBNORMAL) - _NEAREST_SUBNORMAL
    subnormal = tl.where(subnormal == 0, value * 0.0, subnormal)  # keeps the sign
    return tl.where(tl.abs(value) < _LEAST_NORMAL, subnormal, normal)


@triton.jit
def magnitude(raw, inside):
    """`size_of` of values of any float dtype; -1 where `inside` is false."""
    return tl.where(inside, size_of(raw.to(tl.float32)), -1)
