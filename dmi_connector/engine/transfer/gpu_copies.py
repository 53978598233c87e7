# SPDX-License-Identifier: Apache-2.0
"""Copies off the GPU in slices, issued through the CUDA driver.

A slice takes three calls. Each call from Python that releases the interpreter's lock must get it back from the engine's
thread, some hundred times for one chunk of wide rows. So numba compiles the loop over slices, and a whole chunk is one
call without the lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from vllm.logger import init_logger

logger = init_logger("vllm.dmi_connector")

_NUMBER = ctypes.c_int64  # of addresses and handles too: numba turns mixes of signed and unsigned numbers into floats
_DRIVER = {
    "cuMemcpyDtoHAsync_v2": (_NUMBER, _NUMBER, _NUMBER, _NUMBER),
    "cuStreamWaitEvent": (_NUMBER, _NUMBER, ctypes.c_uint),
    "cuEventRecord": (_NUMBER, _NUMBER),
}
_Loop = Callable[..., tuple[int, int]]


class SliceCopier:
    """Copies on two streams in turn. Each slice waits for the one before; in between the copy engine is free for
    others.

    A slice ends at a multiple of `slice_bytes` after address `base`. Used by one thread, which has set the device and
    called `start`.
    """

    def __init__(self, slice_bytes: int, device: torch.device, base: int = 0) -> None:
        self._slice_bytes, self._base = slice_bytes, base
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]
        self._use_device()  # creates the events
        self._handles = [
            handle
            for stream, event in zip(self._streams, self._events, strict=True)
            for handle in (stream.cuda_stream, event.cuda_event)
        ]
        self._turn = 0
        # PyDLL keeps the interpreter's lock: where the loop is not compiled, that costs less than releasing it.
        driver = ctypes.PyDLL("libcuda.so.1")
        self._loop = make_loop(*(_function(driver, name, kinds) for name, kinds in _DRIVER.items()))

    def start(self) -> None:
        """Make the device's context the current one of this thread, and compile the loop, which takes seconds."""
        self._use_device()
        self._loop = compiled(self._loop)

    def _use_device(self) -> None:
        for event, stream in zip(self._events, self._streams, strict=True):
            event.record(stream)

    def copy(self, source: torch.Tensor, target: int, ready: torch.cuda.Event) -> torch.cuda.Event:
        """Copy `source` (uint8, contiguous, on the GPU) to the pinned memory at address `target`, after `ready`.

        Returns an event that follows the copy; waiting for it sleeps. `source` must stay until then. Raises
        RuntimeError.
        """
        self._streams[self._turn].wait_event(ready)
        first = self._slice_bytes - (target - self._base) % self._slice_bytes
        self._turn, status = self._loop(
            *self._handles, self._turn, target, source.data_ptr(), source.numel(), first, self._slice_bytes
        )
        if status:
            raise RuntimeError(f"a copy off the GPU could not be issued: CUDA error {status}")
        copied = torch.cuda.Event(blocking=True)
        copied.record(self._streams[1 - self._turn])
        return copied


def make_loop(copy: Callable[..., int], wait: Callable[..., int], record: Callable[..., int]) -> _Loop:
    """A loop over slices that calls these functions of the driver. numba can compile it."""

    def loop(
        stream: int,
        event: int,
        other: int,
        others: int,
        turn: int,
        target: int,
        source: int,
        nbytes: int,
        first: int,
        step: int,
    ) -> tuple[int, int]:
        """Copy `nbytes` bytes in slices of `first`, then `step`, on `stream` (turn 0) and `other` in turn.

        event, others: of the last slices on the two streams. Returns whose turn is next, and the driver's first error
        or 0.
        """
        at, status, size = 0, 0, min(first, nbytes)
        while at < nbytes and status == 0:
            if turn == 0:
                mine, done, before = stream, event, others
            else:
                mine, done, before = other, others, event
            status = wait(mine, before, 0)
            if status == 0:
                status = copy(target + at, source + at, size, mine)
            if status == 0:
                status = record(done, mine)
            at, turn = at + size, 1 - turn
            size = min(step, nbytes - at)
        return turn, status

    return loop


def compiled(loop: _Loop) -> _Loop:
    """`loop` as machine code that runs without the interpreter's lock; `loop` itself where numba cannot compile it."""
    try:
        import numba

        fast: _Loop = numba.njit(nogil=True)(loop)
        fast(0, 0, 0, 0, 0, 0, 0, 0, 1, 1)  # compiles it; there is nothing to copy
    except Exception as error:  # it also raises ImportError for a numpy that it does not know
        logger.warning("numba cannot compile a loop (%s): copies off the GPU are issued from Python", error)
        return loop
    return fast


def _function(driver: ctypes.CDLL, name: str, arguments: tuple[Any, ...]) -> Any:
    function = getattr(driver, name)
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function
