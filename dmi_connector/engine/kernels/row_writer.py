# SPDX-License-Identifier: Apache-2.0
"""`RowWriter` writes the values of one tap to the rows of their tokens, and reduces values that have a reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dmi_connector.engine.kernels.copy import CopyRows, copy_rows_torch
from dmi_connector.engine.kernels.linear import linear_rows
from dmi_connector.engine.kernels.reduce import ReduceRows, Target, as_words, reduce_layers_triton, zero_offset
from dmi_connector.reduce import Reduction

MAX_VALUES = 13
"""Maximum number of values per launch. A layer has no more if the hooks of `vllm-full` are selected."""


class RowWriter:
    """Writes the values of one tap. The constructor computes the arguments of all launches.

    widths, dtype: widths and dtype of the values. offsets: byte offset of each value in a row, a multiple of the
    element size. reductions: the reduction of each value, None without one. layer: the layer of the values, for the
    reductions. deferred: for each value, the byte offset in a row of the buffer to which it is copied unreduced
    (`DeferredReductions`); None if it is not deferred.
    """

    def __init__(
        self,
        widths: Sequence[int],
        dtype: torch.dtype,
        offsets: Sequence[int],
        reductions: Sequence[Reduction | None] = (),
        layer: int = 0,
        deferred: Sequence[int | None] = (),
    ) -> None:
        count = len(widths)
        self._offsets, self._layer = list(offsets), layer
        self._reductions, self._deferred = list(reductions) or [None] * count, list(deferred) or [None] * count
        self._alone: list[int] = []  # values that need a launch of their own
        name, joint = str(dtype).removeprefix("torch."), []
        for i, (offset, reduction, place) in enumerate(zip(offsets, self._reductions, self._deferred, strict=True)):
            if place is not None:
                joint.append((i, Target(widths[i], place, "deferred", 0)))
            elif reduction is None:
                joint.append((i, Target(widths[i], offset, "copy", 0)))
            elif reduction.at_end or (kernel := reduction.fused(name)) is None:
                self._alone.append(i)
            else:
                joint.append((i, Target(widths[i], offset, *kernel)))
        self._launches: list[tuple[list[int], CopyRows | ReduceRows]] = []
        plain = all(target.mode == "copy" for _, target in joint)
        for first in range(0, len(joint), MAX_VALUES):
            sources, targets = zip(*joint[first : first + MAX_VALUES], strict=True)
            copies = CopyRows([t.width for t in targets], dtype, [t.offset for t in targets]) if plain else None
            self._launches.append((list(sources), copies or ReduceRows(targets, dtype)))

    def __call__(
        self,
        rows: torch.Tensor,
        slots: torch.Tensor,
        values: Sequence[torch.Tensor],
        buffer: torch.Tensor | None = None,
    ) -> None:
        """Write `values[i][t]` to row `slots[t]`.

        rows: uint8 [slots, row bytes], contiguous. slots: int64 [>= tokens]. A negative slot marks padding: Triton
        skips it, and torch writes it to row 0, which is never read. values: [tokens, width] each. buffer: uint8
        [>= tokens, bytes], required for deferred values.
        """
        (self.in_triton if rows.is_cuda else self.in_torch)(rows, slots, values, buffer)

    def in_torch(
        self,
        rows: torch.Tensor,
        slots: torch.Tensor,
        values: Sequence[torch.Tensor],
        buffer: torch.Tensor | None = None,
    ) -> None:
        """The torch version of `in_triton`, for CPUs."""
        numbers = slots[: values[0].shape[0]]
        everything = zip(values, self._offsets, self._reductions, self._deferred, strict=True)
        for value, offset, reduction, place in everything:
            whole = value[: len(numbers)]
            if place is not None:
                assert buffer is not None
                copy_rows_torch(buffer, torch.arange(len(numbers), device=rows.device), [whole], [place])
                continue
            encoded = whole if reduction is None else as_words(reduction.encode(whole, self._layer, numbers))
            copy_rows_torch(rows, numbers, [encoded], [offset])

    def in_triton(
        self,
        rows: torch.Tensor,
        slots: torch.Tensor,
        values: Sequence[torch.Tensor],
        buffer: torch.Tensor | None = None,
    ) -> None:
        """Launch the kernels: one launch per MAX_VALUES values, and one for each value that cannot share a launch."""
        tokens = min(values[0].shape[0], slots.shape[0])
        if tokens == 0:
            return
        strides = [value.stride() for value in values]
        if any(columns != 1 for _, columns in strides):  # Inductor may choose such strides (`_TAGS` in taps/op.py)
            values = [value if value.stride(1) == 1 else value.contiguous() for value in values]
            strides = [value.stride() for value in values]
        for i in self._alone:
            reduction, none = self._reductions[i], zero_offset(rows.device)
            assert reduction is not None
            if reduction.one_kernel:
                linear_rows(rows, slots, values[i], reduction.head(self._layer, rows.device), self._offsets[i])
                continue
            reduce_layers_triton(rows, slots, values[i][:, None], none, reduction, [self._layer], self._offsets[i])
        for sources, launch in self._launches:
            mine, steps = [values[i] for i in sources], [strides[i][0] for i in sources]
            if isinstance(launch, CopyRows):
                launch(rows, slots, mine, steps, tokens)
            else:
                launch(rows, slots, mine, steps, tokens, rows if buffer is None else buffer)
