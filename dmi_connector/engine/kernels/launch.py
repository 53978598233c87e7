# SPDX-License-Identifier: Apache-2.0
"""Launches compiled Triton kernels without Triton's own dispatch, which inspects every argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

DECODE_TOKENS = 512
"""Maximum number of tokens of a step that counts as a decode step. Kernels have a launch shape for decode steps."""

_ALIGN = 16
"""Bytes. Triton compiles a kernel again for pointers that are not multiples of this."""

Grid = tuple[int, int, int]


class Launch:
    """One kernel, whose last arguments are fixed. Each argument has the same dtype and device in every launch.

    At every launch Triton inspects each argument to find the compiled kernel. In steps without a CUDA graph, such as
    those with prompts, the GPU waits for this inspection. A `Launch` finds the compiled kernel by the alignment of the
    pointers and a few integers only.

    The kernel takes, in this order: `tensors`, the tuple `values`, `free`, `integers`, the tuple `strides`, `fixed`. If
    `values` is empty, the kernel takes neither tuple. fixed: arguments that are the same in every launch. options:
    launch options, such as num_warps.
    """

    def __init__(self, kernel: Any, fixed: Sequence[Any], **options: Any) -> None:
        self._kernel, self._fixed, self._options = kernel, tuple(fixed), options
        self._compiled: dict[tuple[int, ...], Any] = {}

    def __call__(
        self,
        grid: Grid,
        tensors: Sequence[torch.Tensor],
        integers: Sequence[int],
        values: Sequence[torch.Tensor] = (),
        strides: Sequence[int] = (),
        free: Sequence[int] = (),
    ) -> None:
        """Launch the kernel.

        grid: number of programs on each axis. integers, strides: integers for whose values Triton may specialize the
        kernel. free: integers for which it does not (`do_not_specialize`).
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        sources = [value.data_ptr() for value in values]
        alignment = [address % _ALIGN for address in (*addresses, *sources)]
        key = (*alignment, *integers, *strides)
        compiled = self._compiled.get(key)
        if compiled is None:  # always None under Triton's interpreter, which compiles nothing
            arguments = [*tensors, tuple(values), *free, *integers, tuple(strides)]
            arguments = arguments if values else [*tensors, *free, *integers]
            self._compiled[key] = self._kernel[grid](*arguments, *self._fixed, **self._options)
        elif values:  # addresses, because for a tensor the launcher asks the driver whether it is on this GPU
            compiled[grid](*addresses, tuple(sources), *free, *integers, tuple(strides), *self._fixed)
        else:
            compiled[grid](*addresses, *free, *integers, *self._fixed)
