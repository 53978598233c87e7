# SPDX-License-Identifier: Apache-2.0
"""Overlap: in a full CUDA graph, taps run on a branch of the graph, in parallel with the model's kernels.

A tap mostly waits for the previous kernel and for memory. So while vLLM captures a whole step in one CUDA graph, the
taps of a compiled model write on a second CUDA stream. Before the next tap, the model's stream waits for that stream.

Until then nothing may overwrite the values that the tap reads. The branch holds references to the values, so the
allocator does not reuse their memory. The compiled model overwrites no buffer (`compilation.disable_buffer_reuse`).
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
    """A write on the branch that may still run.

    forward: vLLM's context of the forward that launched the write. written: an event that is recorded after the write.
    values: the tensors that the write reads.
    """

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
        """Context in which kernels are launched on the branch, after all kernels that the model has launched.

        forward: vLLM's context of the forward. values: the tensors that the kernels read.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        self._pending = _Pending(weakref.ref(forward), self._stream.record_event(), values)

    def join(self, forward: object) -> None:
        """Make the model's stream wait for the branch, if the pending write belongs to `forward`.

        A pending write of another forward is dropped: the capture of its graph has failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None and pending.forward() is forward:
            torch.cuda.current_stream().wait_event(pending.written)


branch_of = functools.cache(Branch)
"""The `Branch` of a device, made at the first call."""


def captured_branch(device: torch.device) -> Branch | None:
    """The branch to write on. None outside the capture of a full graph: a piecewise graph ends before the next tap."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    whole = forward_context.get_forward_context().cudagraph_runtime_mode != CUDAGraphMode.PIECEWISE
    return branch_of(device) if whole else None
