# SPDX-License-Identifier: Apache-2.0
"""Values that small steps reduce at their end, for all layers at once (`Reduction.at_end`).

In a decode step a projection or a search for the largest values waits far longer than it computes: for one layer after
the other that would cost more than the model's own kernels do. So taps put such values aside, and one operation a hook
reduces them when the last layer is done. Steps of many tokens fill the GPU with each layer; they reduce at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dmi_connector.engine.kernels import no_offset, reduce_layers
from dmi_connector.layout import ITEMSIZE, ROW_ALIGN, ROW_BYTES_ALIGN, Segment
from dmi_connector.reduce import Reduction

MOST_TOKENS = 256
MOST_BYTES = 512 << 20
SCRATCH = 64 << 20
"""Bytes that projections may allocate at a time: vLLM's memory profile does not see them."""


@dataclass(frozen=True)
class _Hook:
    """One hook in the buffer: `layers` rows of `width` values side by side, from byte `start` of a token's row on.

    offsets: int64 [layers], where they go in a token's row of the cache, in bytes.
    """

    reduction: Reduction
    layers: tuple[int, ...]
    dtype: torch.dtype
    width: int
    start: int
    offsets: torch.Tensor


class AtEnd:
    """The buffer of one model, and what becomes of its content.

    tokens: steps of more do without it, MOST_TOKENS unless the buffer would take more than MOST_BYTES; 0 where no
    hook is reduced so. buffer: uint8 [tokens, bytes]. Made before vLLM measures how much memory is left for the cache.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self._places: dict[int, int] = {}  # byte offset in the cache's rows -> in the buffer's
        self._hooks: list[_Hook] = []
        end = 0
        mine = [s for s in segments if s.reduction is not None and s.reduction.at_end]
        for name in dict.fromkeys(s.hook for s in mine):
            of_hook = [s for s in mine if s.hook == name]
            first, start = of_hook[0], -(-end // ROW_ALIGN) * ROW_ALIGN
            step = first.width * ITEMSIZE[first.dtype]
            self._places |= {s.offset: start + i * step for i, s in enumerate(of_hook)}
            offsets = torch.tensor([s.offset for s in of_hook], dtype=torch.int64, device=device)
            layers = tuple(s.layer for s in of_hook)
            assert first.reduction is not None
            self._hooks.append(_Hook(first.reduction, layers, getattr(torch, first.dtype), first.width, start, offsets))
            end = start + step * len(of_hook)
        row_bytes = -(-end // ROW_BYTES_ALIGN) * ROW_BYTES_ALIGN
        self.tokens = min(MOST_TOKENS, MOST_BYTES // row_bytes) if row_bytes else 0
        self.buffer = torch.empty(self.tokens, row_bytes, dtype=torch.uint8, device=device)
        no_offset(device)  # made now: a CUDA graph that made it would not have filled it yet

    def takes(self, tokens: int) -> bool:
        """Whether a step of `tokens` puts values aside."""
        return 0 < tokens <= self.tokens

    def places(self, offsets: Sequence[int]) -> list[int | None]:
        """Where in a row of `buffer` values are put aside that go to byte `offsets` of a row of the cache; None for
        those that are not.
        """
        return [self._places.get(offset) for offset in offsets]

    def reduce(self, rows: torch.Tensor, slots: torch.Tensor, tokens: int) -> None:
        """Reduce what the taps of this step put aside, and write it to the rows `slots`."""
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
