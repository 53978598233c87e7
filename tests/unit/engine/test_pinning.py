# SPDX-License-Identifier: Apache-2.0
"""The ring's memory is pinned in the background, and only pinned memory is allocated. A fake CUDA records the calls."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from dmi_connector.engine.transfer import pinning
from dmi_connector.engine.transfer.pinning import PinnedRing
from dmi_connector.store.write.ring import ALIGN, Ring
from tests import storekit as kit

SLICE = 2 * ALIGN
RING = 7 * ALIGN
"""Three whole slices and a short one."""
DEVICE = torch.device("cuda")


class Cuda:
    """A fake CUDA that records the pinned memory. go: an event that the background thread waits for. fails: whether
    pinning fails.
    """

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.go, self.fails = threading.Event(), False

    def register(self, address: int, nbytes: int, _flags: int) -> int:
        if threading.current_thread().name == "dmi-pin":
            assert self.go.wait(kit.PATIENCE)
        if self.fails:
            return 2
        self.pinned[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    cudart = SimpleNamespace(cudaHostRegister=fake.register, cudaHostUnregister=fake.unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(pinning, "relax_captures", lambda: None)
    monkeypatch.setattr(pinning, "SLICE_BYTES", SLICE)
    return fake


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring(RING)
    yield made
    os.close(made.fd)


@pytest.mark.parametrize(("least", "pinned"), [(1, SLICE), (SLICE, SLICE), (SLICE + 1, 2 * SLICE), (10 * RING, RING)])
def test_the_minimum_is_pinned_at_once_and_the_rest_later(cuda: Cuda, ring: Ring, least: int, pinned: int) -> None:
    memory = PinnedRing(ring, least, DEVICE)
    assert sum(cuda.pinned.values()) == ring.usable == pinned
    first = ring.alloc(pinned, 0)
    assert first is not None and ring.alloc(1, 0) is None, "memory that is not pinned must not be allocated"
    cuda.go.set()
    kit.until(lambda: ring.usable == RING)
    addresses = sorted(cuda.pinned)
    assert addresses == [ring.memory.ctypes.data + at for at in range(0, RING, SLICE)]
    assert sum(cuda.pinned.values()) == RING
    rest = ring.alloc(RING - pinned, 0)
    assert pinned == RING or (rest is not None and rest.offset == pinned)
    memory.close()
    assert cuda.pinned == {}


def test_a_waiting_alloc_gets_memory_as_soon_as_it_is_pinned(cuda: Cuda, ring: Ring) -> None:
    memory = PinnedRing(ring, 1, DEVICE)
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(ring.alloc(RING, kit.PATIENCE)))
    waiting.start()
    cuda.go.set()
    waiting.join()
    assert found[0] is not None
    memory.close()


def test_a_start_fails_if_the_minimum_cannot_be_pinned(cuda: Cuda, ring: Ring) -> None:
    cuda.fails = True
    with pytest.raises(RuntimeError, match=r"host_buffer_bytes: 8192 of 28672 bytes could not be pinned .*; give"):
        PinnedRing(ring, 1, DEVICE)


def test_a_start_that_fails_leaves_no_memory_pinned(cuda: Cuda, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    populate = pinning._populate
    monkeypatch.setattr(
        pinning, "_populate", lambda *given: (setattr(cuda, "fails", bool(cuda.pinned)), populate(*given))
    )
    with pytest.raises(RuntimeError, match="host_buffer_bytes: 16384 of 28672 bytes could not be pinned"):
        PinnedRing(ring, RING, DEVICE)
    assert cuda.pinned == {}


def test_the_ring_is_smaller_if_later_memory_cannot_be_pinned(
    cuda: Cuda, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(pinning.logger, "error", lambda text, *values: lines.append(text % values))
    memory = PinnedRing(ring, SLICE, DEVICE)
    cuda.fails = True
    cuda.go.set()
    memory._thread.join(kit.PATIENCE)
    assert ring.usable == SLICE
    with pytest.raises(ValueError, match=f"do not fit in the {SLICE} bytes of the ring: raise the limit of locked"):
        ring.alloc(SLICE + 1)  # without the error, the call would wait forever
    assert [line.partition(" bytes could")[2] for line in lines] == [
        " not be pinned (2); give a smaller size, or raise the limit of locked memory (ulimit -l)."
        " Only the first 0 MiB of the ring are used"
    ]
    memory.close()
    assert cuda.pinned == {}


@pytest.mark.parametrize("early", [False, True])
def test_the_thread_is_made_ready_for_its_gpu_and_says_how_long_it_took(
    early: bool, cuda: Cuda, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the engine ends before all memory is pinned, nothing is logged."""
    asked, lines = list[Any](), list[str]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.append((device, ring.usable)))
    monkeypatch.setattr(pinning, "relax_captures", lambda: asked.append(threading.current_thread().name))
    monkeypatch.setattr(pinning.logger, "info", lambda text, *values: lines.append(text % values))
    times = iter([100.0, 102.5])
    monkeypatch.setattr(pinning.time, "monotonic", lambda: next(times))
    memory = PinnedRing(ring, SLICE, DEVICE)
    memory._stop.set()
    cuda.go.set()
    memory._thread.join()
    ring.allow(SLICE)
    assert asked == [(DEVICE, SLICE), "dmi-pin"] and lines == []
    asked.clear()
    monkeypatch.setattr(memory, "_pin_until", asked.append)
    monkeypatch.setattr(ring, "nbytes", 5 << 20)
    if not early:
        memory._stop.clear()
    memory._run()
    assert asked == [(DEVICE, SLICE), "MainThread", 5 << 20]
    assert lines == ([] if early else ["dmi_connector: 5 MiB of the ring pinned in 2.5 s"])
    assert memory._thread.daemon
    memory.close()


def test_a_driver_that_refuses_leaves_the_ring_as_it_is(
    cuda: Cuda, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("no driver")

    lines: list[str] = []
    monkeypatch.setattr(pinning, "relax_captures", refuse)
    monkeypatch.setattr(pinning.logger, "error", lambda text, *values: lines.append(text % values))
    cuda.go.set()
    memory = PinnedRing(ring, SLICE, DEVICE)
    memory._thread.join()
    assert ring.usable == SLICE and lines == ["no driver. Only the first 0 MiB of the ring are used"]
    monkeypatch.setattr(ring, "usable", 3 << 20)
    memory._run()
    assert lines[1:] == ["no driver. Only the first 3 MiB of the ring are used"]
    memory.close()


def test_an_engine_that_ends_early_stops_pinning(cuda: Cuda, ring: Ring) -> None:
    memory = PinnedRing(ring, 1, DEVICE)
    memory._stop.set()
    cuda.go.set()
    memory.close()
    assert ring.usable < RING and cuda.pinned == {}


class Library:
    """A fake C library that records the calls of its functions. answers: their return values, in order."""

    def __init__(self, *answers: int) -> None:
        self.answers, self.calls = list(answers), list[tuple[Any, ...]]()
        self.madvise, self.cuThreadExchangeStreamCaptureMode = Function(self), Function(self)


class Function:
    def __init__(self, library: Library) -> None:
        self.library, self.argtypes = library, ()

    def __call__(self, *given: Any) -> int:
        self.library.calls.append(given)
        return self.library.answers.pop(0)


UNIT = 16 << 20


@pytest.mark.parametrize(
    ("nbytes", "answers", "sizes"),
    [
        (2 * UNIT + 5, [0, 0, 0], [UNIT, UNIT, 5]),
        (UNIT, [0], [UNIT]),
        (3 * UNIT, [0, -1], [UNIT, UNIT]),
        (1, [-1], [1]),
    ],
)
def test_memory_is_taken_from_the_system_in_parts(
    nbytes: int, answers: list[int], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the kernel refuses madvise, populating stops, and pinning populates the remaining pages."""
    library = Library(*answers)
    monkeypatch.setattr(pinning.ctypes, "CDLL", lambda name: library if name is None else None)
    pinning._populate(4096, nbytes, threading.Event())
    assert library.calls == [(4096 + n * UNIT, size, 23) for n, size in enumerate(sizes)] and library.answers == []
    assert library.madvise.argtypes == (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def test_an_engine_that_ends_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    library, stop = Library(), threading.Event()
    stop.set()
    monkeypatch.setattr(pinning.ctypes, "CDLL", lambda _name: library)
    pinning._populate(4096, 5, stop)
    assert library.calls == []


def test_captures_of_graphs_are_relaxed_for_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    library, names = Library(0, 401), list[str]()
    monkeypatch.setattr(pinning.ctypes, "CDLL", lambda name: (names.append(name), library)[1])
    pinning.relax_captures()
    with pytest.raises(RuntimeError, match=r"cuThreadExchangeStreamCaptureMode failed: CUDA error 401"):
        pinning.relax_captures()
    assert names == ["libcuda.so.1"] * 2
    assert [pointer._obj.value for (pointer,) in library.calls] == [2, 2]
