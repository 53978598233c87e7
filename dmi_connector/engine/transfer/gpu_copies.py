# SPDX-License-Identifier: Apache-2.0
"""Copies memory off the GPU in slices, with calls of the CUDA driver.

A slice takes three calls, none of which waits for the GPU. The calls do not release the GIL. Otherwise the thread would
have to reacquire the GIL from the engine's thread, some hundred times per chunk of wide rows.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_NUMBER = ctypes.c_int64  # also for addresses and handles
_DRIVER = {
    "cuMemcpyDtoHAsync_v2": (_NUMBER, _NUMBER, _NUMBER, _NUMBER),
    "cuStreamWaitEvent": (_NUMBER, _NUMBER, ctypes.c_uint),
    "cuEventRecord": (_NUMBER, _NUMBER),
}


class SliceCopier:
    """Copies slices on two streams in turn. Each slice waits for the previous one. Between two slices the copy engine
    can serve other copies.

    A slice ends at a multiple of `slice_bytes` after address `base`, or at the end of the copy. Only one thread may use
    a copier. That thread has to set the device and call `start`.
    """

    def __init__(self, slice_bytes: int, device: torch.device, base: int = 0) -> None:
        self._slice_bytes, self._base = slice_bytes, base
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]
        self.start()  # creates the events
        self._handles = [
            (stream.cuda_stream, event.cuda_event) for stream, event in zip(self._streams, self._events, strict=True)
        ]
        self._turn = 0
        driver = ctypes.PyDLL("libcuda.so.1")
        self._copy, self._wait, self._record = (_function(driver, name, kinds) for name, kinds in _DRIVER.items())

    def start(self) -> None:
        """Make the device's context current in this thread."""
        for event, stream in zip(self._events, self._streams, strict=True):
            event.record(stream)

    def copy(self, source: torch.Tensor, target: int, ready: torch.cuda.Event) -> torch.cuda.Event:
        """Copy `source` (uint8, contiguous, on the GPU) to the pinned memory at address `target`, after `ready`.

        Returns an event that is recorded after the copy. A thread that waits for the event sleeps instead of polling.
        `source` must stay allocated until the event. Raises RuntimeError if the driver reports an error.
        """
        self._streams[self._turn].wait_event(ready)
        size = min(self._slice_bytes - (target - self._base) % self._slice_bytes, source.numel())
        address, at = source.data_ptr(), 0
        while at < source.numel():
            self._issue(target + at, address + at, size)
            at += size
            size = min(self._slice_bytes, source.numel() - at)
        copied = torch.cuda.Event(blocking=True)
        copied.record(self._streams[1 - self._turn])
        return copied

    def _issue(self, target: int, source: int, nbytes: int) -> None:
        """Issue the copy of one slice after the previous slice. The next slice goes to the other stream."""
        (stream, event), (_, before) = self._handles[self._turn], self._handles[1 - self._turn]
        status = self._wait(stream, before, 0) or self._copy(target, source, nbytes, stream)
        if status := status or self._record(event, stream):
            raise RuntimeError(f"a copy off the GPU could not be issued: CUDA error {status}")
        self._turn = 1 - self._turn


def _function(driver: ctypes.CDLL, name: str, arguments: tuple[Any, ...]) -> Any:
    function = getattr(driver, name)
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function
