# SPDX-License-Identifier: Apache-2.0
"""Copies off the GPU in pieces, issued through the CUDA driver itself.

Every piece is three calls. The engine's thread waits while another holds the interpreter's lock, and through torch the
same takes several times as long with it (docs/PERFORMANCE.md).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_POINTER = ctypes.c_void_p


class PieceCopier:
    """Copies on two streams in turn, each piece waiting for the one before: between two of them the copy engine is free
    for others. Used by one thread, which has set the device and called `start`.
    """

    def __init__(self, piece_bytes: int, device: torch.device) -> None:
        self._piece_bytes = piece_bytes
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]
        self.start()  # creates the events
        self._handles = [
            (stream.cuda_stream, event.cuda_event) for stream, event in zip(self._streams, self._events, strict=True)
        ]
        self._turn = 0
        driver = ctypes.CDLL("libcuda.so.1")
        self._copy = _function(driver, "cuMemcpyDtoHAsync_v2", _POINTER, ctypes.c_uint64, ctypes.c_size_t, _POINTER)
        self._wait = _function(driver, "cuStreamWaitEvent", _POINTER, _POINTER, ctypes.c_uint)
        self._record = _function(driver, "cuEventRecord", _POINTER, _POINTER)

    def start(self) -> None:
        """Make the device's context the current one of the calling thread."""
        for event, stream in zip(self._events, self._streams, strict=True):
            event.record(stream)

    def copy(self, source: torch.Tensor, target: int, ready: torch.cuda.Event) -> torch.cuda.Event:
        """Copy `source` (uint8, contiguous, on the GPU) to the pinned memory at address `target`, after `ready`.

        Returns an event that follows; waiting for it sleeps. `source` must stay until then.
        """
        at, end = source.data_ptr(), source.data_ptr() + source.numel()
        turn, target = self._turn, target - at
        self._streams[turn].wait_event(ready)
        while at < end:
            nbytes = min(self._piece_bytes, end - at)
            stream, event = self._handles[turn]
            self._wait(stream, self._handles[1 - turn][1], 0)
            self._copy(target + at, at, nbytes, stream)
            self._record(event, stream)
            at, turn = at + nbytes, 1 - turn
        self._turn = turn
        copied = torch.cuda.Event(blocking=True)
        copied.record(self._streams[1 - turn])
        return copied


def _function(driver: ctypes.CDLL, name: str, *arguments: Any) -> Any:
    """A function of the driver that raises RuntimeError where it fails."""

    def check(status: int, _function: Any, _arguments: Any) -> int:
        if status:
            raise RuntimeError(f"{name} failed: CUDA error {status}")
        return status

    function = getattr(driver, name)
    function.argtypes, function.restype, function.errcheck = arguments, ctypes.c_int, check
    return function
