# SPDX-License-Identifier: Apache-2.0
"""Maps the slots that vLLM assigned to the tokens of a step to slots in a pool."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dmi_connector.engine.kernels.launch import Launch

_BLOCK = 256
"""Tokens per program."""


class Lookup:
    """Looks up the pool slots of the tokens of a step, in one launch.

    size: number of slots per page.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._launch = Launch(lookup_kernel, [size, _BLOCK], num_warps=4)

    def __call__(self, slots: torch.Tensor, table: torch.Tensor, found: torch.Tensor) -> None:
        """Write `table[slot // size] * size + slot % size` of each token to `found`; -1 where there is no page.

        slots: int64 [tokens], vLLM's slots; padding is negative. table: int64 [entries], the index of a page, or -1 for
        none. found: int64 [>= tokens]. All are contiguous and on one device. A slot beyond the table has no page.
        """
        (self.in_triton if table.is_cuda else self.in_torch)(slots, table, found)

    def in_torch(self, slots: torch.Tensor, table: torch.Tensor, found: torch.Tensor) -> None:
        """The torch version of `in_triton`, for CPUs."""
        entries = slots // self.size
        known = (slots >= 0) & (entries < len(table))
        pages = table[torch.where(known, entries, 0)]
        found[: len(slots)] = torch.where(known & (pages >= 0), pages * self.size + slots % self.size, -1)

    def in_triton(self, slots: torch.Tensor, table: torch.Tensor, found: torch.Tensor) -> None:
        """Launch the kernel."""
        assert slots.dtype == found.dtype == table.dtype == torch.int64
        assert slots.is_contiguous() and table.is_contiguous() and found.is_contiguous() and len(found) >= len(slots)
        if len(slots):
            grid = (-(-len(slots) // _BLOCK), 1, 1)
            self._launch(grid, [slots, table, found], (), free=[len(slots), len(table)])


@triton.jit(do_not_specialize=["count", "entries"])
def lookup_kernel(slots, table, found, count, entries, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (tokens / BLOCK): one program looks up BLOCK tokens."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < count
    slot = tl.load(slots + token, mask=inside, other=-1)
    entry = slot // SIZE
    known = (slot >= 0) & (entry < entries)
    page = tl.load(table + entry, mask=known, other=-1)
    tl.store(found + token, tl.where(page >= 0, page * SIZE + slot % SIZE, -1), mask=inside)
