# SPDX-License-Identifier: Apache-2.0
"""Pins the ring's memory for copies off the GPU, slice by slice, in a background thread.

The ring's pages are populated (faulted in) before they are pinned. Some machines need a minute for 16 GiB, and the
engine must not wait that long. Meanwhile the ring allocates extents only in its pinned part.
"""

from __future__ import annotations

import ctypes
import threading
import time

import torch
from vllm.logger import init_logger

from dmi_connector.store.write.ring import Ring

logger = init_logger("vllm.dmi_connector")

SLICE_BYTES = 256 << 20
"""Bytes per pinned slice. A multiple of the bytes of a copied slice (gpu_lane.py), so that no copy spans two pinned
slices.
"""
_POPULATED_BYTES = 16 << 20
"""Bytes that one madvise call populates. Other threads that map memory wait during the call."""
_MADV_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise, since Linux 5.14. Older kernels refuse it, and pinning then populates the pages."""
_CAPTURE_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: calls of this thread do not abort a graph capture in another thread."""


class PinnedRing:
    """Pins a ring from its start. When the constructor returns, at least `least` bytes or the whole ring are pinned.

    Raises RuntimeError if these bytes cannot be pinned. If later bytes cannot be pinned, an error is logged, and only
    the pinned part of the ring is used.
    """

    def __init__(self, ring: Ring, least: int, device: torch.device) -> None:
        self._ring, self._device = ring, device
        self._address = int(ring.memory.ctypes.data)
        self._pinned: list[int] = []  # addresses of the slices
        self._stop = threading.Event()
        self._begin = time.monotonic()
        ring.allow(0)
        try:
            self._pin_until(min(least, ring.nbytes))
        except RuntimeError:
            self._unpin()
            raise
        self._thread = threading.Thread(target=self._run, name="dmi-pin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop pinning, and unpin the memory. No copy may be running."""
        self._stop.set()
        self._thread.join()
        self._unpin()

    def _unpin(self) -> None:
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        try:
            relax_captures()
            self._pin_until(self._ring.nbytes)
        except RuntimeError as error:
            self._ring.allow(self._ring.usable, final=True)
            logger.error("%s. Only the first %d MiB of the ring are used", error, self._ring.usable >> 20)
            return
        if not self._stop.is_set():
            seconds = time.monotonic() - self._begin
            logger.info("dmi_connector: %d MiB of the ring pinned in %.1f s", self._ring.nbytes >> 20, seconds)

    def _pin_until(self, nbytes: int) -> None:
        """Pin slices until `nbytes` bytes are pinned, or `close` is called. Raises RuntimeError on failure."""
        ring = self._ring
        while ring.usable < nbytes and not self._stop.is_set():
            start, size = ring.usable, min(SLICE_BYTES, ring.nbytes - ring.usable)
            _populate(self._address + start, size, self._stop)
            error = torch.cuda.cudart().cudaHostRegister(self._address + start, size, 0)
            if int(error) != 0:
                raise RuntimeError(
                    f"host_buffer_bytes: {start + size} of {ring.nbytes} bytes could not be pinned ({error}); "
                    "give a smaller size, or raise the limit of locked memory (ulimit -l)"
                )
            self._pinned.append(self._address + start)
            ring.allow(start + size)


def _populate(address: int, nbytes: int, stop: threading.Event) -> None:
    """Populate pages without holding the GIL. Returns early if `stop` is set, or if the kernel refuses."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for at in range(0, nbytes, _POPULATED_BYTES):
        if stop.is_set() or libc.madvise(address + at, min(_POPULATED_BYTES, nbytes - at), _MADV_POPULATE_WRITE):
            return


def relax_captures() -> None:
    """Let the calling thread pin memory and query events while another thread captures a CUDA graph.

    Raises RuntimeError if the driver reports an error.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED)))
    if status:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode failed: CUDA error {status}")
