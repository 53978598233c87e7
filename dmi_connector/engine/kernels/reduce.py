# SPDX-License-Identifier: Apache-2.0
"""Reduces values and writes the results to rows: several values of one layer, or one hook of several layers."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dmi_connector.engine.kernels.copy import copy_rows_torch
from dmi_connector.engine.kernels.encode import COPY, DEFERRED, EXACT, MODES, TOPK, encode
from dmi_connector.engine.kernels.launch import DECODE_TOKENS, Launch
from dmi_connector.engine.kernels.top import encode_top
from dmi_connector.reduce import Reduction
from dmi_connector.reduce.topk import MOST

_SHAPES = {True: (4096, 8), False: (2048, 4)}
"""{whether a step has at most DECODE_TOKENS tokens: (elements that a program reduces at a time, warps of a program)}.
Measured on an H200. Such small steps are bound by memory latency, larger steps by occupancy.
"""
_AS_THEY_ARE = ("copy", "round", "deferred")
"""Modes that store values in their own dtype. Others also store 4-byte words, at multiples of 4 bytes."""
_SEARCHES = ("topk", "exact")
"""Modes that search a row for its largest values."""
_FEW_TOKENS, _THREAD_VALUES = 16, {True: 64, False: 128}
"""{whether a step has at most _FEW_TOKENS tokens: maximum number of elements per thread of a search}. Measured on an
H200.
"""


class Target(NamedTuple):
    """How one value of a launch is stored.

    width: elements per token. offset: byte offset in a row of the capture, or for mode "deferred" in a row of the
    buffer. mode, number: the result of `Reduction.fused`; "copy" and 0 for values without a reduction, "deferred" and 0
    for deferred values.
    """

    width: int
    offset: int
    mode: str
    number: int


class ReduceRows:
    """Reduces up to MAX_VALUES values of `dtype` in one launch. Values of mode "deferred" are copied to a buffer."""

    def __init__(self, targets: Sequence[Target], dtype: torch.dtype) -> None:
        units = [dtype.itemsize if target.mode in _AS_THEY_ARE else 4 for target in targets]
        assert all(target.offset % unit == 0 for target, unit in zip(targets, units, strict=True)), targets
        self._targets = targets
        self._launches: dict[tuple[torch.device, bool], Launch] = {}

    def __call__(
        self,
        rows: torch.Tensor,
        slots: torch.Tensor,
        values: Sequence[torch.Tensor],
        strides: Sequence[int],
        tokens: int,
        buffer: torch.Tensor,
    ) -> None:
        """Reduce `values[i][t]` and write the result to row `slots[t]`; a negative slot is skipped.

        rows: uint8 [slots, row bytes]. buffer: uint8 [>= tokens, bytes]. Both are contiguous. slots: int64 [>= tokens].
        values: [>= tokens, width] each; the last dimension is contiguous. strides: strides of their first dimension.
        """
        assert rows.dtype == torch.uint8 and rows.is_contiguous() and slots.dtype == torch.int64
        assert buffer.dtype == torch.uint8 and buffer.is_contiguous()
        launch = self._launch(rows.device, tokens <= DECODE_TOKENS)
        grid = (tokens, len(self._targets), 1)
        launch(grid, [rows, slots, buffer], [rows.stride(0), buffer.stride(0)], values, strides)

    def _launch(self, device: torch.device, decode: bool) -> Launch:
        if (device, decode) not in self._launches:
            widths, offsets, modes, numbers = zip(*self._targets, strict=True)
            tile, warps = _SHAPES[decode]
            fixed = [offsets, widths, tuple(MODES[mode] for mode in modes), numbers, tile]
            # Without FMA, products are rounded before the addition, as in torch.
            launch = Launch(reduce_rows_kernel, fixed, num_warps=warps, enable_fp_fusion=False)
            self._launches[device, decode] = launch
        return self._launches[device, decode]


def reduce_layers(
    rows: torch.Tensor,
    slots: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    reduction: Reduction,
    layers: Sequence[int],
    base: int = 0,
) -> None:
    """Reduce one hook of several layers, and write the results for token t to row `slots[t]`.

    rows: uint8 [slots, row bytes], contiguous. slots: int64 [>= tokens]; padding is negative. values: [tokens, layers,
    width]; the last dimension is contiguous. offsets: int64 [layers] on the same device, multiples of 16. layers: layer
    numbers. The result for `values[t, i]` goes to byte base + offsets[i] of the row.
    """
    (reduce_layers_triton if rows.is_cuda else reduce_layers_torch)(
        rows, slots, values, offsets, reduction, layers, base
    )


def reduce_layers_torch(
    rows: torch.Tensor,
    slots: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    reduction: Reduction,
    layers: Sequence[int],
    base: int = 0,
) -> None:
    """The torch version of `reduce_layers_triton`, for CPUs."""
    numbers = slots[: values.shape[0]]
    for index, (layer, offset) in enumerate(zip(layers, offsets.tolist(), strict=True)):
        assert offset % 16 == 0, offset  # as the kernel assumes
        encoded = as_words(reduction.encode(values[: len(numbers), index], layer, numbers))
        copy_rows_torch(rows, numbers, [encoded], [base + offset])


def as_words(encoded: torch.Tensor) -> torch.Tensor:
    """Encoded rows for `copy_rows_torch`, which copies whole elements: bytes are viewed as int32. See `Reduction`."""
    return encoded.view(torch.int32) if encoded.dtype == torch.uint8 else encoded


def reduce_layers_triton(
    rows: torch.Tensor,
    slots: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    reduction: Reduction,
    layers: Sequence[int],
    base: int = 0,
) -> None:
    """Run the part of the reduction that torch computes (`Reduction.before_layers`), then launch the kernel.

    If the reduction has no kernel mode (`Reduction.fused`), its torch encoder runs, and the kernel copies the results.
    """
    assert rows.dtype == torch.uint8 and rows.is_contiguous() and slots.dtype == offsets.dtype == torch.int64
    tokens = min(values.shape[0], slots.shape[0])
    if tokens == 0:
        return
    kernel = reduction.fused(str(values.dtype).removeprefix("torch."))
    if kernel is None:
        encoded = [reduction.encode(values[:tokens, i], layer, slots[:tokens]) for i, layer in enumerate(layers)]
        source = torch.stack([as_words(one) for one in encoded], dim=1)
    else:
        source = reduction.before_layers(values, layers)
    mode, number = kernel or ("copy", 0)
    assert source.stride(2) == 1
    width = source.shape[2]
    launch = _layers_launch(mode, number, width, _layers_shape(mode, width, tokens), source.dtype)
    integers = [base, source.stride(0), source.stride(1), rows.stride(0)]
    launch((tokens, len(layers), 1), [rows, slots, source, offsets], integers)


def _layers_shape(mode: str, width: int, tokens: int) -> tuple[int, int]:
    """(elements that a program of this launch reduces at a time, warps of a program)."""
    tile, warps = _SHAPES[tokens <= DECODE_TOKENS]
    return tile, _search_warps(width, tokens) if mode in _SEARCHES else warps


def _search_warps(width: int, tokens: int) -> int:
    """Warps per program of a search, 4 to 32. A thread has at most _THREAD_VALUES elements, if 32 warps are enough."""
    values = _THREAD_VALUES[tokens <= _FEW_TOKENS]
    return min(32, max(4, 1 << (-(-width // (32 * values)) - 1).bit_length()))


@functools.cache
def _layers_launch(mode: str, number: int, width: int, shape: tuple[int, int], dtype: torch.dtype) -> Launch:
    """The launch for these arguments, cached. dtype: dtype of the values, because a `Launch` compiles for one dtype."""
    tile, warps = shape
    sample, number = divmod(number, MOST + 1) if mode in _SEARCHES else (0, number)
    places = 1 << (number - 1).bit_length() if mode in _SEARCHES else 0
    fixed = [width, MODES[mode], number, sample, 1 << (width - 1).bit_length(), places, tile]
    return Launch(reduce_layers_kernel, fixed, num_warps=warps, enable_fp_fusion=False)


@functools.cache
def zero_offset(device: torch.device) -> torch.Tensor:
    """A zero, int64 [1], cached per device.

    The first call must precede CUDA graph capture. During capture, the write of the zero would only be recorded.
    """
    return torch.zeros(1, dtype=torch.int64, device=device)


@triton.jit
def reduce_rows_kernel(
    rows, slots, buffer, values, row_bytes, buffer_bytes, strides, offsets,
    WIDTHS: tl.constexpr, MODES_OF: tl.constexpr, NUMBERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, values). A program reduces one value of one token. MODES_OF, NUMBERS: see `encode`."""
    token = tl.program_id(0).to(tl.int64)
    value = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        for i in tl.static_range(len(WIDTHS)):
            if value == i:
                source = values[i] + token * strides[i]
                if MODES_OF[i] == DEFERRED:
                    encode(buffer + token * buffer_bytes + offsets[i], source, WIDTHS[i], COPY, 0, TILE)
                else:
                    encode(rows + slot * row_bytes + offsets[i], source, WIDTHS[i], MODES_OF[i], NUMBERS[i], TILE)


@triton.jit
def reduce_layers_kernel(
    rows, slots, x, offsets, base, token_stride, layer_stride, row_bytes,
    width: tl.constexpr, MODE: tl.constexpr, NUMBER: tl.constexpr, SAMPLE: tl.constexpr, WIDE: tl.constexpr,
    PLACES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, layers). A program reduces the values of one token and layer. MODE, NUMBER: see `encode`. In a
    search, NUMBER is K of `encode_top` and SAMPLE is S.
    """
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    row = rows + slot * row_bytes + base + tl.multiple_of(tl.load(offsets + layer), 16)
    if slot >= 0:
        source = x + token * token_stride + layer * layer_stride
        if MODE == TOPK or MODE == EXACT:  # noqa: SIM109 (Triton has no `in` for tuples)
            encode_top(row, source, slot, width, MODE, NUMBER, SAMPLE, WIDE, PLACES)
        else:
            encode(row, source, width, MODE, NUMBER, TILE)
