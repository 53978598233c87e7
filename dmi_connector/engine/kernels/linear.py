# SPDX-License-Identifier: Apache-2.0
"""Applies a linear head, such as a probe, to values, and writes its outputs to rows. In torch: `Probe.before`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from dmi_connector.engine.kernels.launch import Launch
from dmi_connector.reduce.base import LinearHead

OUTPUTS_OF = {"none": 0, "sigmoid": 1, "softmax": 2}
"""Output function of a head -> its number in the kernel."""
_SIGMOID = tl.constexpr(OUTPUTS_OF["sigmoid"])
_SOFTMAX = tl.constexpr(OUTPUTS_OF["softmax"])
_TOGETHER = 4
"""Maximum number of outputs per program, except for softmax, which needs all outputs in one program. A decode step has
few tokens, so several programs share a token, and each reads a part of the weights.
"""
_WEIGHTS, _LEAST, _WARPS = 4096, 256, 8
"""Weights that a program reads at a time, minimum number of columns at a time, and warps per program. A thread then
reads 16 weights at a time, in four loads of 16 bytes.
"""

_UNROLLED = tl.constexpr(4)
"""Maximum number of column blocks for which the kernel's loop is unrolled."""


def linear_rows(rows: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, head: LinearHead, offset: int) -> None:
    """Apply a head to `values[t]`, and write its outputs, float32, to row `slots[t]`; a negative slot is skipped.

    rows: uint8 [slots, row bytes], contiguous. offset: byte offset in a row. Row bytes and `offset` are multiples of 4.
    slots: int64 [>= tokens]. values: [tokens, width] of a float dtype, last dimension contiguous. Sums are in float32.
    """
    assert rows.dtype == torch.uint8 and rows.is_contiguous() and slots.dtype == torch.int64
    assert values.stride(1) == 1 and head.weight.is_contiguous() and offset % 4 == 0
    tokens = min(values.shape[0], slots.shape[0])
    if tokens:
        outputs, width = head.weight.shape
        launch, tiles = _launch(width, outputs, head.output, values.dtype, rows.device)
        tensors = [rows.view(torch.float32), slots, values, head.weight, head.bias]
        launch((tokens, tiles, 1), tensors, [rows.stride(0) // 4, values.stride(0)], free=[offset // 4])


@functools.cache
def _launch(width: int, outputs: int, output: str, dtype: torch.dtype, device: torch.device) -> tuple[Launch, int]:
    """(the cached launch, programs per token). dtype: of the values. A `Launch` compiles for one dtype and device."""
    tile = triton.next_power_of_2(outputs if output == "softmax" else min(outputs, _TOGETHER))
    block = min(triton.next_power_of_2(width), max(_LEAST, _WEIGHTS // tile))
    fixed = [width, outputs, OUTPUTS_OF[output], tile, block]
    return Launch(linear_rows_kernel, fixed, num_warps=_WARPS, enable_fp_fusion=True), -(-outputs // tile)


@triton.jit
def _products(x, weight, outputs, start, width: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr):
    """Weights times values for BLOCK columns starting at `start`: float32 [outputs, BLOCK]. x: values of a token."""
    columns = start + tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    real = (outputs < OUTPUTS)[:, None] & inside[None, :]
    return tl.load(weight + outputs[:, None] * width + columns[None, :], mask=real, other=0.0) * value[None, :]


@triton.jit(do_not_specialize=["place"])
def linear_rows_kernel(
    rows, slots, x, weight, bias, place, row_words, stride,
    width: tl.constexpr, OUTPUTS: tl.constexpr, OUTPUT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, tiles of TILE outputs). Values and weights are loaded without waiting for the slot.

    place: offset of the outputs in a row, in 4-byte words. row_words: words per row. stride: row stride of x.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    outputs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    sums = tl.zeros([TILE, BLOCK], tl.float32)
    if width <= _UNROLLED * BLOCK:  # unrolled: all loads are issued together. More would not fit in registers
        for start in tl.static_range(0, width, BLOCK):
            sums += _products(x + token * stride, weight, outputs, start, width, OUTPUTS, BLOCK)
    else:
        for start in range(0, width, BLOCK):
            sums += _products(x + token * stride, weight, outputs, start, width, OUTPUTS, BLOCK)
    real = outputs < OUTPUTS
    found = tl.sum(sums, 1) + tl.load(bias + outputs, mask=real, other=0.0)
    if OUTPUT == _SIGMOID:
        found = 1.0 / (1.0 + tl.exp(-found))
    elif OUTPUT == _SOFTMAX:
        found = tl.where(real, found, float("-inf"))
        powers = tl.exp(found - tl.max(found, 0))
        found = powers / tl.sum(powers, 0)
    if slot >= 0:
        tl.store(rows + slot * row_words + place + outputs, found, mask=real)
