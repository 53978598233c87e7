# SPDX-License-Identifier: Apache-2.0
"""The kernels of a capture: `write_rows` puts values into their tokens' rows, `reduce_rows` and `reduce_layers` reduce
them first, and `gather_rows` takes rows out in store layout. One public function each, with a Triton kernel
(triton_kernels.py, triton_reduce.py) and a torch twin behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from dmi_connector.reduce import Reduction

MAX_VALUES = 13
_BLOCK = 2048
_GATHER_BLOCK = 1024
_GATHER_TOKENS = 8
# Up to this many tokens one program takes one token with 4 warps, above it two with 8 (measured on an H200).
_DECODE_TOKENS = 512


def write_rows(rows: torch.Tensor, slots: torch.Tensor, values: list[torch.Tensor], offsets: list[int]) -> None:
    """Write ``values[i][t]`` at byte ``offsets[i]`` of row ``slots[t]``.

    rows: uint8 [slots, row_bytes], contiguous. slots: int64 [>= tokens]; a negative slot marks padding, which is
    skipped (Triton) or sent to row 0, the null block nobody reads (torch). values: [tokens, width] each, one dtype,
    last dimension contiguous, any row stride. offsets: multiples of the size of an element.
    """
    if rows.is_cuda:
        for first in range(0, len(values), MAX_VALUES):
            _write_rows_triton(rows, slots, values[first : first + MAX_VALUES], offsets[first : first + MAX_VALUES])
    else:
        write_rows_torch(rows, slots, values, offsets)


def write_rows_torch(rows: torch.Tensor, slots: torch.Tensor, values: list[torch.Tensor], offsets: list[int]) -> None:
    """The kernel's twin in plain torch, used on the CPU."""
    size = values[0].element_size()
    typed = rows.view(values[0].dtype)
    index = slots[: values[0].shape[0]].clamp_min(0)
    for value, offset in zip(values, offsets, strict=True):
        start = offset // size
        typed[:, start : start + value.shape[1]].index_copy_(0, index, value[: index.shape[0]])


def _write_rows_triton(rows: torch.Tensor, slots: torch.Tensor, values: list[torch.Tensor], offsets: list[int]) -> None:
    from dmi_connector.engine.triton_kernels import write_rows_kernel

    size = values[0].element_size()
    tokens = min(values[0].shape[0], slots.shape[0])
    if tokens == 0:
        return
    typed = rows.view(values[0].dtype)
    widths, starts = [v.shape[1] for v in values], [o // size for o in offsets]
    blocks = sum(-(-w // _BLOCK) for w in widths)
    for value in values:
        assert value.stride(1) == 1, "taps take values whose last dimension is contiguous"
    pad = MAX_VALUES - len(values)
    tile, warps = (1, 4) if tokens <= _DECODE_TOKENS else (2, 8)
    write_rows_kernel[(-(-tokens // tile), blocks)](
        typed,
        slots,
        *(values + [values[0]] * pad),
        *([v.stride(0) for v in values] + [0] * pad),
        *(widths + [0] * pad),
        *(starts + [0] * pad),
        tokens,
        typed.stride(0),
        TOKENS=tile,
        BLOCK=_BLOCK,
        num_warps=warps,
        **_launch_options(rows.device),
    )


def reduce_rows(
    rows: torch.Tensor,
    slots: torch.Tensor,
    values: list[torch.Tensor],
    offsets: list[int],
    reductions: Sequence[Reduction | None],
    layer: int,
    buffer: torch.Tensor | None = None,
    places: Sequence[int | None] = (),
) -> None:
    """Like `write_rows`, each value reduced first (None: as it is). `layer`: of all the values.

    buffer: uint8 [>= tokens, bytes]; a value with a place goes as it is to that byte of row t of it instead.
    """
    write = _reduce_rows_triton if rows.is_cuda else reduce_rows_torch
    write(rows, slots, values, offsets, reductions, layer, buffer, places)


def reduce_rows_torch(
    rows: torch.Tensor,
    slots: torch.Tensor,
    values: list[torch.Tensor],
    offsets: list[int],
    reductions: Sequence[Reduction | None],
    layer: int,
    buffer: torch.Tensor | None = None,
    places: Sequence[int | None] = (),
) -> None:
    """The kernel's twin in plain torch, used on the CPU."""
    numbers = slots[: values[0].shape[0]]
    values = [v[: len(numbers)] for v in values]
    stored, starts = [], []
    for value, offset, reduction, place in zip(values, offsets, reductions, places or repeat(None), strict=False):
        if place is not None:
            assert buffer is not None
            write_rows_torch(buffer, torch.arange(len(numbers), device=rows.device), [value], [place])
        else:
            encoded = value if reduction is None else reduction.encode(value, layer, numbers)
            # Bytes travel as words: what a reduction stores is a multiple of 4 bytes wide.
            stored.append(encoded.view(torch.int32) if encoded.dtype == torch.uint8 else encoded)
            starts.append(offset)
    for dtype in dict.fromkeys(v.dtype for v in stored):
        part = [i for i, v in enumerate(stored) if v.dtype == dtype]
        write_rows_torch(rows, slots, [stored[i] for i in part], [starts[i] for i in part])


class _Part(NamedTuple):
    """A value of a launch: where it goes, in which mode of the kernel, with which number."""

    value: torch.Tensor
    offset: int
    mode: str
    number: int


def _reduce_rows_triton(
    rows: torch.Tensor,
    slots: torch.Tensor,
    values: list[torch.Tensor],
    offsets: list[int],
    reductions: Sequence[Reduction | None],
    layer: int,
    buffer: torch.Tensor | None = None,
    places: Sequence[int | None] = (),
) -> None:
    """One launch for up to MAX_VALUES values, and one for each that takes a kernel of its own (`Reduction.at_end`)."""
    dtype = str(values[0].dtype).removeprefix("torch.")
    parts: list[_Part] = []
    for value, offset, reduction, place in zip(values, offsets, reductions, places or repeat(None), strict=False):
        assert value.stride(1) == 1, "taps take values whose last dimension is contiguous"
        if place is not None:
            parts.append(_Part(value, place, "aside", 0))
        elif reduction is None:
            parts.append(_Part(value, offset, "copy", 0))
        elif reduction.at_end:
            none = no_offset(rows.device)
            _reduce_layers_triton(rows, slots, value[:, None], none, reduction, [layer], offset)
        else:
            parts.append(_Part(value, offset, *reduction.fused(dtype)))
    for first in range(0, len(parts), MAX_VALUES):
        _reduce_parts(rows, slots, parts[first : first + MAX_VALUES], rows if buffer is None else buffer)


def _reduce_parts(rows: torch.Tensor, slots: torch.Tensor, parts: Sequence[_Part], buffer: torch.Tensor) -> None:
    from dmi_connector.engine import triton_reduce

    values = [part.value for part in parts]
    tokens = min(values[0].shape[0], slots.shape[0])
    if tokens == 0:
        return
    pad = MAX_VALUES - len(parts)
    tile, warps = _tile(tokens)
    triton_reduce.reduce_rows_kernel[(tokens, len(parts))](
        rows,
        slots,
        buffer,
        *(values + [values[0]] * pad),
        *([value.stride(0) for value in values] + [0] * pad),
        *([value.shape[1] for value in values] + [0] * pad),
        *([triton_reduce.MODES[part.mode] for part in parts] + [0] * pad),
        *([part.number for part in parts] + [0] * pad),
        *([part.offset for part in parts] + [0] * pad),
        rows.stride(0),
        buffer.stride(0),
        TILE=tile,
        num_warps=warps,
        enable_fp_fusion=False,  # products are rounded before they are added to, as in the twin
        **_launch_options(rows.device),
    )


def reduce_layers(
    rows: torch.Tensor,
    slots: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    reduction: Reduction,
    layers: Sequence[int],
) -> None:
    """Reduce one hook of many layers and write it to rows.

    values: [tokens, layers, width], last dimension contiguous. offsets: int64 [layers] on the same device, bytes.
    """
    if rows.is_cuda:
        _reduce_layers_triton(rows, slots, values, offsets, reduction, layers)
    else:
        reduce_layers_torch(rows, slots, values, offsets, reduction, layers)


def reduce_layers_torch(
    rows: torch.Tensor,
    slots: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    reduction: Reduction,
    layers: Sequence[int],
) -> None:
    """The kernel's twin in plain torch, used on the CPU."""
    for index, (layer, offset) in enumerate(zip(layers, offsets.tolist(), strict=True)):
        reduce_rows_torch(rows, slots, [values[:, index]], [offset], [reduction], layer)


def _reduce_layers_triton(
    rows: torch.Tensor,
    slots: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    reduction: Reduction,
    layers: Sequence[int],
    base: int = 0,
) -> None:
    """base: added to all offsets."""
    from dmi_connector.engine import triton_reduce

    tokens = min(values.shape[0], slots.shape[0])
    if tokens == 0:
        return
    mode, number = reduction.fused(str(values.dtype).removeprefix("torch."))
    source = reduction.before_layers(values, layers)
    width = source.shape[2]
    tile, warps = _tile(tokens)
    searches = mode in ("topk", "exact")
    triton_reduce.reduce_layers_kernel[(tokens, len(layers))](
        rows,
        slots,
        source,
        offsets,
        base,
        source.stride(0),
        source.stride(1),
        rows.stride(0),
        width,
        triton_reduce.MODES[mode],
        number,
        WIDE=1 << (width - 1).bit_length(),
        PLACES=1 << (number % (1 << 20) - 1).bit_length() if searches else 0,
        TILE=tile,
        num_warps=_top_warps(width, tokens) if searches else warps,
        enable_fp_fusion=False,
        **_launch_options(rows.device),
    )


def _tile(tokens: int) -> tuple[int, int]:
    """(values that a program takes at a time, its warps), measured on an H200 (docs/REDUCTIONS.md): few tokens wait
    for memory, many for room on the GPU.
    """
    return (4096, 8) if tokens <= _DECODE_TOKENS else (2048, 4)


def _top_warps(width: int, tokens: int) -> int:
    """Warps of a search in a row: at most 64 values a thread where programs are few, else 128."""
    values = 64 if tokens <= 16 else 128
    return min(32, max(4, 1 << (-(-width // (32 * values)) - 1).bit_length()))


@functools.cache
def no_offset(device: torch.device) -> torch.Tensor:
    """int64 [1]: zero. Made once a device, and not first while a CUDA graph is captured."""
    return torch.zeros(1, dtype=torch.int64, device=device)


@functools.cache
def _launch_options(device: torch.device) -> dict[str, bool]:
    """Programmatic dependent launch where the GPU has it (compute capability 9)."""
    early = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}


def gather_index(slots: np.ndarray, block: int) -> np.ndarray:
    """Index entries (see `gather_rows`) of rows that together make the payload at byte `block`. int64 [count, 4]."""
    count = len(slots)
    index = np.empty((count, 4), np.int64)
    index[:, 0], index[:, 1], index[:, 2], index[:, 3] = slots, block, count, np.arange(count)
    return index


def gather_rows(rows: torch.Tensor, index: torch.Tensor, segments: torch.Tensor, payload: torch.Tensor) -> None:
    """Gather rows into payloads in store layout: segment after segment, each [rows of the payload, bytes].

    rows: uint8 [slots, row_bytes], contiguous. index: int64 [n, 4]: slot, byte offset of the row's payload in
    `payload` (a multiple of 16), rows of that payload, number of the row in it. segments: int64 [m, 3] on the same
    device: byte offset in a row, bytes, byte offset in a payload divided by its rows. payload: uint8.
    """
    if rows.is_cuda:
        _gather_rows_triton(rows, index, segments, payload)
    else:
        gather_rows_torch(rows, index, segments, payload)


def gather_rows_torch(rows: torch.Tensor, index: torch.Tensor, segments: torch.Tensor, payload: torch.Tensor) -> None:
    """The gather kernel's twin in plain torch, used on the CPU."""
    for start in index[:, 1].unique().tolist():
        mine = index[index[:, 1] == start]
        count = int(mine[0, 2])
        picked = rows[mine[:, 0]]
        for source, nbytes, base in segments.tolist():
            begin = start + base * count
            block = payload[begin : begin + nbytes * count].view(count, nbytes)
            block.index_copy_(0, mine[:, 3], picked[:, source : source + nbytes])


def _gather_rows_triton(rows: torch.Tensor, index: torch.Tensor, segments: torch.Tensor, payload: torch.Tensor) -> None:
    from dmi_connector.engine.triton_kernels import gather_rows_kernel

    count = index.shape[0]
    unit = torch.int32  # every hook's width in bytes is a multiple of 4, and rows of int32 vectorise to 16 bytes
    gather_rows_kernel[(segments.shape[0], -(-count // _GATHER_TOKENS))](
        rows.view(unit),
        index,
        segments,
        payload.view(unit),
        count,
        rows.shape[1] // 4,
        TOKENS=_GATHER_TOKENS,
        BLOCK=_GATHER_BLOCK,
        num_warps=4,
    )
