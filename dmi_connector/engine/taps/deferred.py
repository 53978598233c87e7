# SPDX-License-Identifier: Apache-2.0
"""Deferred reductions: a small step reduces the values of all layers together, after the last layer.

In a decode step, the launch latency of a projection or a top-k is far longer than its computation. If each layer
launched them, they would take longer than the model's own kernels. So taps copy the values to a buffer, and one
operation per hook reduces the values after the last layer. In a larger step the values of one layer fill the GPU, so
each layer is reduced by itself.

Reductions with `Reduction.at_end` are deferred, except those with `one_kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dmi_connector.dtypes import ITEMSIZE
from dmi_connector.engine.gpu_memory import freed_in_sleep, kept_in_sleep
from dmi_connector.engine.kernels.reduce import reduce_layers, zero_offset
from dmi_connector.layout import ROW_ALIGN, ROW_BYTES_ALIGN, RowField
from dmi_connector.reduce import Reduction

MOST_TOKENS = 256
"""Maximum number of tokens of a step that defers reductions."""
MOST_BYTES = 512 << 20
"""Maximum bytes of the buffer. If a token needs many bytes, the buffer holds fewer than MOST_TOKENS tokens."""
SCRATCH = 64 << 20
"""Maximum bytes that reductions allocate at a time (`Reduction.scratch`). vLLM's memory profile does not include these
bytes. If one layer of an autoencoder needs more for MOST_TOKENS tokens, the buffer holds fewer tokens.
"""


@dataclass(frozen=True)
class _Hook:
    """One hook in the buffer. A row of the buffer holds `width` values of each layer, from byte `start` on.

    dtype, width: of the values before reduction. offsets: int64 [layers], byte offsets in a row for the reduced values.
    """

    reduction: Reduction
    layers: tuple[int, ...]
    dtype: torch.dtype
    width: int
    start: int
    offsets: torch.Tensor


class DeferredReductions:
    """The buffer for the deferred values of one model, and their reductions.

    tokens: maximum number of tokens of a step that uses the buffer; 0 if no hook is reduced at the end, or if one token
    would need more than MOST_BYTES or SCRATCH. buffer: uint8 [tokens, bytes], allocated before vLLM measures the memory
    that is left for the cache. Sleep frees it.
    """

    def __init__(self, fields: Sequence[RowField], device: torch.device, may_sleep: bool = False) -> None:
        self._places: dict[int, int] = {}  # byte offset in a captured row -> in a row of the buffer
        self._hooks: list[_Hook] = []
        end = 0
        mine = [f for f in fields if (r := f.reduction) is not None and r.at_end and not r.one_kernel]
        for name in dict.fromkeys(f.hook for f in mine):
            of_hook = [f for f in mine if f.hook == name]
            first, start = of_hook[0], -(-end // ROW_ALIGN) * ROW_ALIGN
            step = first.width * ITEMSIZE[first.dtype]
            self._places |= {f.offset: start + i * step for i, f in enumerate(of_hook)}
            assert all(f.offset % ROW_ALIGN == 0 for f in of_hook), of_hook  # as `reduce_layers` needs
            offsets = kept_in_sleep(partial(_offsets, of_hook, device), device, may_sleep)
            layers = tuple(f.layer for f in of_hook)
            assert first.reduction is not None
            self._hooks.append(_Hook(first.reduction, layers, getattr(torch, first.dtype), first.width, start, offsets))
            end = start + step * len(of_hook)
        row_bytes = -(-end // ROW_BYTES_ALIGN) * ROW_BYTES_ALIGN
        scratch = max((f.reduction.scratch(f.width, f.dtype) for f in mine if f.reduction is not None), default=0)
        fit = min(MOST_BYTES // row_bytes, SCRATCH // max(scratch, 1)) if row_bytes else 0
        self.tokens = min(MOST_TOKENS, fit)
        shape = self.tokens, row_bytes
        buffer = lambda: torch.empty(shape, dtype=torch.uint8, device=device)  # noqa: E731
        self.buffer = freed_in_sleep(buffer, device, may_sleep) if self.tokens else buffer()
        kept_in_sleep(lambda: zero_offset(device), device, may_sleep)  # allocated before a CUDA graph is captured

    def takes(self, tokens: int) -> bool:
        """Whether a step of `tokens` tokens defers its reductions."""
        return 0 < tokens <= self.tokens

    def places(self, offsets: Sequence[int]) -> list[int | None]:
        """Byte offset of each value in a row of `buffer`, or None if not deferred. offsets: byte offsets in a row."""
        return [self._places.get(offset) for offset in offsets]

    def reduce(self, rows: torch.Tensor, slots: torch.Tensor, tokens: int) -> None:
        """Reduce the values that this step deferred, and write the results to rows `slots`.

        rows: uint8 [slots, row bytes]. slots: int64 [>= tokens]. tokens: number of tokens of the step.
        """
        if not self.takes(tokens):
            return
        for hook in self._hooks:
            count, first = len(hook.layers), hook.start // hook.dtype.itemsize
            values = self.buffer.view(hook.dtype)[:tokens, first : first + count * hook.width]
            values = values.unflatten(1, (count, hook.width))
            scratch = tokens * hook.reduction.scratch(hook.width, str(hook.dtype).removeprefix("torch."))
            at_once = max(1, SCRATCH // scratch) if scratch else count
            for start in range(0, count, at_once):
                part = slice(start, start + at_once)
                reduce_layers(rows, slots, values[:, part], hook.offsets[part], hook.reduction, hook.layers[part])


def _offsets(fields: Sequence[RowField], device: torch.device) -> torch.Tensor:
    """The byte offsets of the fields in a row, int64 [fields]."""
    return torch.tensor([f.offset for f in fields], dtype=torch.int64, device=device)
