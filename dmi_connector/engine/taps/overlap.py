# SPDX-License-Identifier: Apache-2.0
"""Overlap: in a full CUDA graph, taps run on a branch of the graph, in parallel with the model's kernels.

A tap mostly waits for the previous kernel and for memory. So while vLLM captures a whole step in one CUDA graph, a tap
of a compiled model writes on a second stream. The model's stream waits for it before the next tap.

Until then nothing may overwrite the values that the tap reads. The branch holds references to them, so the allocator
does not reuse their memory. The compiled model overwrites no buffer (`compilation.disable_buffer_reuse`).
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
    """A write on the branch that may be running. forward: vLLM's context of its forward. values: the tensors read."""

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
        """Launch on the branch, after all previous kernels of the model. values: the tensors that the branch reads."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        self._pending = _Pending(weakref.ref(forward), self._stream.record_event(), values)

    def join(self, forward: object) -> None:
        """Let the model wait for the branch. A write of an earlier forward, whose graph capture failed, is dropped."""
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
