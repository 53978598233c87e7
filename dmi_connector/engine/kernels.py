# SPDX-License-Identifier: Apache-2.0
"""The kernels of a capture: a `RowWriter` puts the values of a tap into their tokens' rows, reduced where that is
wanted, `reduce_layers` does so for one hook of many layers, and `gather_rows` takes rows out in store layout. Behind
each is a Triton kernel (triton_kernels.py, triton_reduce.py) and a torch twin.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from dmi_connector.reduce import Reduction

MAX_VALUES = 13
_SEARCHES = ("topk", "exact")
_GATHER_BLOCK = 1024
_GATHER_TOKENS = 8
DECODE_TOKENS = 512
"""Up to so many are few."""
_COPIES = {True: (1, 4096), False: (2, 2048)}
"""(tokens, values) that a copying program of 4 warps takes, for few tokens and for many (docs/PERFORMANCE.md)."""
_TILES = {True: (4096, 8), False: (2048, 4)}
"""(values that a reducing program takes at a time, its warps), for few tokens and for many (docs/REDUCTIONS.md): few
wait for memory, many for room on the GPU.
"""


class RowWriter:
    """Writes the values of one tap into their tokens' rows. What stays the same from step to step is worked out once.

    widths, dtype: of the values. offsets: byte of a row where each goes, multiples of the size of an element.
    reductions: how each is reduced first (None: not at all), layer: of all the values, for them. places: where a value
    is to go, as it is, into a row of a buffer instead (None: it is not).
    """

    def __init__(
        self,
        widths: Sequence[int],
        dtype: torch.dtype,
        offsets: Sequence[int],
        reductions: Sequence[Reduction | None] = (),
        layer: int = 0,
        places: Sequence[int | None] = (),
    ) -> None:
        count = len(widths)
        self._offsets, self._layer = list(offsets), layer
        self._reductions, self._places = list(reductions) or [None] * count, list(places) or [None] * count
        self._alone: list[int] = []  # those that take a kernel of their own (`Reduction.at_end`)
        name, parts = str(dtype).removeprefix("torch."), []
        for i, (offset, reduction, place) in enumerate(zip(offsets, self._reductions, self._places, strict=True)):
            if place is not None:
                parts.append(_Part(i, widths[i], place, "aside", 0))
            elif reduction is None:
                parts.append(_Part(i, widths[i], offset, "copy", 0))
            elif reduction.at_end:
                self._alone.append(i)
            else:
                parts.append(_Part(i, widths[i], offset, *reduction.fused(name)))
        plain = all(part.mode == "copy" for part in parts)
        groups = [parts[first : first + MAX_VALUES] for first in range(0, len(parts), MAX_VALUES)]
        self._launches = [_Copies(group, dtype) if plain else _Reductions(group) for group in groups]

    def __call__(
        self, rows: torch.Tensor, slots: torch.Tensor, values: list[torch.Tensor], buffer: torch.Tensor | None = None
    ) -> None:
        """Write ``values[i][t]`` to row ``slots[t]``.

        rows: uint8 [slots, row_bytes], contiguous. slots: int64 [>= tokens]; a negative slot marks padding, which is
        skipped (Triton) or sent to row 0, the null block nobody reads (torch). values: [tokens, width] each, last
        dimension contiguous, any row stride. buffer: uint8 [>= tokens, bytes], of whose row t `places` speak.
        """
        (self.in_triton if rows.is_cuda else self.in_torch)(rows, slots, values, buffer)

    def in_torch(
        self, rows: torch.Tensor, slots: torch.Tensor, values: list[torch.Tensor], buffer: torch.Tensor | None = None
    ) -> None:
        """The kernels' twin in plain torch, used on the CPU."""
        numbers = slots[: values[0].shape[0]]
        stored, offsets = [], []
        for value, offset, reduction, place in zip(values, self._offsets, self._reductions, self._places, strict=True):
            whole = value[: len(numbers)]
            if place is not None:
                assert buffer is not None
                copy_rows(buffer, torch.arange(len(numbers), device=rows.device), [whole], [place])
                continue
            encoded = whole if reduction is None else reduction.encode(whole, self._layer, numbers)
            # Bytes travel as words: what a reduction stores is a multiple of 4 bytes wide.
            stored.append(encoded.view(torch.int32) if encoded.dtype == torch.uint8 else encoded)
            offsets.append(offset)
        for dtype in dict.fromkeys(v.dtype for v in stored):
            part = [i for i, v in enumerate(stored) if v.dtype == dtype]
            copy_rows(rows, numbers, [stored[i] for i in part], [offsets[i] for i in part])

    def in_triton(
        self, rows: torch.Tensor, slots: torch.Tensor, values: list[torch.Tensor], buffer: torch.Tensor | None = None
    ) -> None:
        """One launch for up to MAX_VALUES values, and one for each that takes a kernel of its own."""
        tokens = min(values[0].shape[0], slots.shape[0])
        if tokens == 0:
            return
        strides = [value.stride() for value in values]
        if any(columns != 1 for _, columns in strides):  # as the compiler may lay them out (tap_op.py)
            values = [value if value.stride(1) == 1 else value.contiguous() for value in values]
            strides = [value.stride() for value in values]
        for i in self._alone:
            reduction, none = self._reductions[i], no_offset(rows.device)
            assert reduction is not None
            _reduce_layers_triton(rows, slots, values[i][:, None], none, reduction, [self._layer], self._offsets[i])
        for launch in self._launches:
            launch(rows, slots, values, strides, tokens, rows if buffer is None else buffer)


def copy_rows(rows: torch.Tensor, slots: torch.Tensor, values: list[torch.Tensor], offsets: list[int]) -> None:
    """Write values of one dtype to rows `slots` [tokens], as they are, with plain torch."""
    size = values[0].element_size()
    typed = rows.view(values[0].dtype)
    index = slots.clamp_min(0)
    for value, offset in zip(values, offsets, strict=True):
        start = offset // size
        typed[:, start : start + value.shape[1]].index_copy_(0, index, value)


class _Part(NamedTuple):
    """A value of a launch: which of the tap's it is, its width, where it goes, in which mode, with which number."""

    source: int
    width: int
    offset: int
    mode: str
    number: int


class _Launch:
    """A kernel and those of its arguments that stay the same, `constants`, which are its last.

    Of some 80 arguments Triton looks at each anew at every launch, to find what it has compiled for them. In steps
    without a CUDA graph, those with many prompt tokens, the GPU waits for that. Here the alignment of the pointers and
    a few integers tell.
    """

    def __init__(self, kernel: Any, constants: Sequence[int], **options: Any) -> None:
        self._kernel, self._constants, self._options = kernel, tuple(constants), options
        self._compiled: dict[tuple[int, ...], Any] = {}

    def __call__(
        self, grid: tuple[int, int, int], pointers: list[torch.Tensor], free: tuple[int, ...], integers: list[int]
    ) -> None:
        """Launch with `pointers`, `free`, `integers` and the constants as arguments, in this order. free: integers that
        nothing is compiled for (`do_not_specialize`).
        """
        addresses = [pointer.data_ptr() for pointer in pointers]
        key = (*[address & 15 for address in addresses], *integers)
        compiled = self._compiled.get(key)
        if compiled is None:  # and always so under Triton's interpreter
            self._compiled[key] = self._kernel[grid](*pointers, *free, *integers, *self._constants, **self._options)
        else:  # of a tensor the launcher would ask the driver whether its address is one of this GPU
            compiled[grid](*addresses, *free, *integers, *self._constants)


_Arguments = tuple[tuple[int, int, int], list[torch.Tensor], tuple[int, ...], list[int]]


class _Parts:
    """Up to MAX_VALUES values that one launch writes, for few tokens in one way, for many in another."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts, self._pad = parts, [0] * (MAX_VALUES - len(parts))
        self._sources = [part.source for part in parts]
        self._launches: dict[tuple[torch.device, bool], _Launch] = {}

    def _launch(self, device: torch.device, few: bool) -> _Launch:
        launch = self._launches.get((device, few))
        if launch is None:
            launch = self._launches[device, few] = self._made(few)
        return launch

    def _made(self, few: bool) -> _Launch:
        raise NotImplementedError

    def _first(self, rows: torch.Tensor, buffer: torch.Tensor, tokens: int, few: bool) -> _Arguments:
        """The arguments of a launch (see `_Launch`), but those of slots and values."""
        raise NotImplementedError

    def __call__(
        self,
        rows: torch.Tensor,
        slots: torch.Tensor,
        values: list[torch.Tensor],
        strides: list[tuple[int, ...]],
        tokens: int,
        buffer: torch.Tensor,
    ) -> None:
        few = tokens <= DECODE_TOKENS
        grid, (written, *others), free, integers = self._first(rows, buffer, tokens, few)
        mine = [values[source] for source in self._sources]
        mine += [mine[0]] * len(self._pad)
        steps = [*[strides[source][0] for source in self._sources], *self._pad]
        self._launch(rows.device, few)(grid, [written, slots, *others, *mine], free, [*integers, *steps])

    def _padded(self, numbers: Iterable[int]) -> list[int]:
        return [*numbers, *self._pad]


class _Copies(_Parts):
    """Values that are written as they are."""

    def __init__(self, parts: Sequence[_Part], dtype: torch.dtype) -> None:
        super().__init__(parts)
        self._dtype = dtype
        self._blocks = {few: sum(-(-part.width // block) for part in parts) for few, (_, block) in _COPIES.items()}

    def _made(self, few: bool) -> _Launch:
        from dmi_connector.engine.triton_kernels import write_rows_kernel

        constants = self._padded(part.width for part in self._parts)
        constants += self._padded(part.offset // self._dtype.itemsize for part in self._parts)
        return _Launch(write_rows_kernel, [*constants, *_COPIES[few]], num_warps=4)

    def _first(self, rows: torch.Tensor, buffer: torch.Tensor, tokens: int, few: bool) -> _Arguments:
        typed, tiles = rows.view(self._dtype), -(-tokens // _COPIES[few][0])
        return (tiles * self._blocks[few], 1, 1), [typed], (tokens,), [typed.stride(0)]


class _Reductions(_Parts):
    """Values of which some at least are reduced, or go to a buffer."""

    def _made(self, few: bool) -> _Launch:
        from dmi_connector.engine.triton_reduce import MODES, reduce_rows_kernel

        parts = self._parts
        constants = [*self._padded(p.width for p in parts), *self._padded(MODES[p.mode] for p in parts)]
        constants += [*self._padded(p.number for p in parts), *self._padded(p.offset for p in parts)]
        # Products are rounded before they are added to, as in the twin.
        tile, warps = _TILES[few]
        return _Launch(reduce_rows_kernel, [*constants, tile], num_warps=warps, enable_fp_fusion=False)

    def _first(self, rows: torch.Tensor, buffer: torch.Tensor, tokens: int, few: bool) -> _Arguments:
        return (tokens, len(self._parts), 1), [rows, buffer], (), [rows.stride(0), buffer.stride(0)]


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
        writer = RowWriter([values.shape[2]], values.dtype, [offset], [reduction], layer)
        writer.in_torch(rows, slots, [values[:, index]])


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
    tokens = min(values.shape[0], slots.shape[0])
    if tokens == 0:
        return
    mode, number = reduction.fused(str(values.dtype).removeprefix("torch."))
    source = reduction.before_layers(values, layers)
    launch = _layers_launch(mode, number, source.shape[2], _layers_how(mode, source.shape[2], tokens))
    integers = [base, source.stride(0), source.stride(1), rows.stride(0)]
    launch((tokens, len(layers), 1), [rows, slots, source, offsets], (), integers)


def _layers_how(mode: str, width: int, tokens: int) -> tuple[int, int]:
    """(values that a program takes at a time, its warps)."""
    tile, warps = _TILES[tokens <= DECODE_TOKENS]
    return tile, _top_warps(width, tokens) if mode in _SEARCHES else warps


@functools.cache
def _layers_launch(mode: str, number: int, width: int, how: tuple[int, int]) -> _Launch:
    from dmi_connector.engine.triton_reduce import MODES, reduce_layers_kernel

    tile, warps = how
    places = 1 << (number % (1 << 20) - 1).bit_length() if mode in _SEARCHES else 0
    constants = [width, MODES[mode], number, 1 << (width - 1).bit_length(), places, tile]
    return _Launch(reduce_layers_kernel, constants, num_warps=warps, enable_fp_fusion=False)


def _top_warps(width: int, tokens: int) -> int:
    """Warps of a search in a row: at most 64 values a thread where programs are few, else 128."""
    values = 64 if tokens <= 16 else 128
    return min(32, max(4, 1 << (-(-width // (32 * values)) - 1).bit_length()))


@functools.cache
def no_offset(device: torch.device) -> torch.Tensor:
    """int64 [1]: zero. Made once a device, and not first while a CUDA graph is captured."""
    return torch.zeros(1, dtype=torch.int64, device=device)


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
