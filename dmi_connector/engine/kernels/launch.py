# SPDX-License-Identifier: Apache-2.0
"""Launches of Triton kernels that skip Triton's own look at every argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

DECODE_TOKENS = 512
"""Steps of at most this many tokens use the decode launch shape."""

_ALIGN = 16
"""Triton compiles for pointers that are multiples of this, and for others."""

Grid = tuple[int, int, int]


class Launch:
    """One kernel with fixed last arguments.

    At every launch Triton looks at each argument to find what it has compiled for it. In steps without a CUDA graph,
    such as those of prompts, the GPU waits for that. Here the alignment of the pointers and a few integers are the key.

    The kernel takes, in this order: `tensors`, the tuple `values`, `free`, `integers`, the tuple `strides`, `fixed`.
    The two tuples are left out where `values` is empty. fixed: arguments that are the same in every launch. options:
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
        """Launch.

        integers, strides: compiled for. free: integers that nothing is compiled for (`do_not_specialize`).
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        sources = [value.data_ptr() for value in values]
        alignment = [address % _ALIGN for address in (*addresses, *sources)]
        key = (*alignment, *integers, *strides)
        compiled = self._compiled.get(key)
        if compiled is None:  # always so under Triton's interpreter, which compiles nothing
            arguments = [*tensors, tuple(values), *free, *integers, tuple(strides)]
            arguments = arguments if values else [*tensors, *free, *integers]
            self._compiled[key] = self._kernel[grid](*arguments, *self._fixed, **self._options)
        elif values:  # addresses, not tensors: of a tensor the launcher would ask the driver whether it is on this GPU
            compiled[grid](*addresses, tuple(sources), *free, *integers, tuple(strides), *self._fixed)
        else:
            compiled[grid](*addresses, *free, *integers, *self._fixed)
