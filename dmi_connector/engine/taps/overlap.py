# SPDX-License-Identifier: Apache-2.0
"""Overlap: taps of a captured step run on a branch of the CUDA graph, beside the model's kernels.

Most of a tap's time is waiting, for the kernel before it and for memory. So while vLLM captures a whole step in one
CUDA graph, a tap of a compiled model writes on a second stream. The next tap first lets the model's stream wait for
it.

Until then nothing may write into the memory of the values. The branch references them, so that the allocator does not
reuse the memory, and the compiled model overwrites no buffer (`compilation.disable_buffer_reuse`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from vllm import forward_context
from vllm.config import CUDAGraphMode


class _Pending(NamedTuple):
    """What a branch may still be doing. forward: vLLM's context of the forward it belongs to. values: what it reads."""

    forward: weakref.ref[object]
    written: torch.cuda.Event
    values: Sequence[torch.Tensor]


class Branch:
    """A branch of the CUDA graph that is being captured. One tap runs on it at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pending: _Pending | None = None

    @contextmanager
    def beside(self, forward: object, values: Sequence[torch.Tensor]) -> Iterator[None]:
        """Launch on the branch, after everything the model has launched. values: what is read there."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        self._pending = _Pending(weakref.ref(forward), self._stream.record_event(), values)

    def join(self, forward: object) -> None:
        """Let the model wait for the branch. What an earlier forward left, whose capture failed, is dropped."""
        pending, self._pending = self._pending, None
        if pending is not None and pending.forward() is forward:
            torch.cuda.current_stream().wait_event(pending.written)


branch_of = functools.cache(Branch)
"""The branch of a device."""


def captured_branch(device: torch.device) -> Branch | None:
    """The branch to write on. None outside full-graph capture: a piecewise graph ends before the next tap."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    whole = forward_context.get_forward_context().cudagraph_runtime_mode != CUDAGraphMode.PIECEWISE
    return branch_of(device) if whole else None
