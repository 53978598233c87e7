# SPDX-License-Identifier: Apache-2.0
"""The lane off the GPU, with CPU memory in place of CUDA: when it gathers, in which order it delivers, what is lost."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from dmi_connector.engine.transfer import gpu_lane, pinning
from dmi_connector.engine.transfer.chunk_transfer import CaptureExport, ChunkTransfer, Progress
from dmi_connector.engine.transfer.gpu_lane import DeviceLane
from dmi_connector.store.format.completeness import Cause
from dmi_connector.store.write.ring import Extent, Ring
from tests import storekit as kit

ROW_BYTES, ROWS = 2048, 8
CHUNK = ROW_BYTES * 2
"""Bytes of the chunks here: two rows."""
TABLE = np.array([[0, ROW_BYTES, 0]])
BEHIND = Cause.FELL_BEHIND.value[1]


class Event:
    """Happened at once, unless the link is held up."""

    link = threading.Event()

    def __init__(self, **_: Any) -> None:
        self.of_link = False

    def record(self, *_: Any) -> None:
        return

    def query(self) -> bool:
        return not self.of_link or self.link.is_set()

    def synchronize(self) -> None:
        if self.of_link:
            assert self.link.wait(kit.PATIENCE)


class Copier:
    """Copies when it is asked; the events say so when the link goes on."""

    def __init__(self, *_: Any) -> None:
        return

    def start(self) -> None:
        return

    @staticmethod
    def copy(source: torch.Tensor, target: int, _ready: Event) -> Event:
        ctypes.memmove(target, source.data_ptr(), source.numel())
        copied = Event()
        copied.of_link = True
        return copied


class Lane:
    """A lane, the chunks sent to it and what became of them."""

    def __init__(self, chunks_in_staging: int, chunks_in_ring: int) -> None:
        self.rows = torch.randint(0, 255, (ROWS * 8, ROW_BYTES), dtype=torch.uint8)
        self.ring = Ring(chunks_in_ring * CHUNK)
        self.extents: list[Extent] = []
        self.delivered: list[tuple[int, bytes]] = []
        self.progress = Progress()
        self.lane = DeviceLane(self.ring, chunks_in_staging * CHUNK, self.rows)

    def capture(self) -> CaptureExport:
        """A capture that notes what is delivered. It keeps the ring memory."""

        def chunk(extent: Extent, first: int, count: int) -> None:
            assert count == 2
            self.extents.append(extent)
            self.delivered.append((first // 2, self.ring.view(extent).tobytes()))

        layout: Any = SimpleNamespace(payload=SimpleNamespace(token_bytes=ROW_BYTES), table=TABLE)
        out: Any = SimpleNamespace(chunk=chunk)
        return CaptureExport(1, layout, out, 0, self.ring, self.progress)

    def chunk(self, number: int, capture: CaptureExport | None = None) -> ChunkTransfer:
        """Rows 2 * number and the one after."""
        return ChunkTransfer(capture or self.capture(), 2 * number, np.array([2 * number, 2 * number + 1]))

    def wanted(self, number: int) -> tuple[int, bytes]:
        return number, self.rows[2 * number : 2 * number + 2].numpy().tobytes()


def lost(*transfers: ChunkTransfer) -> list[tuple[int, str]]:
    """(number, reason) of chunks that were given up."""
    found = {loss.rows: loss.words for t in transfers for loss in t.capture.losses}
    return [(start // 2, words) for rows, words in found.items() for start, _ in rows]


class Engine:
    """The stream that the engine's thread works on; other threads have theirs."""

    stream: ClassVar[object] = object()

    @classmethod
    def current(cls, _device: object) -> object:
        return cls.stream if threading.current_thread() is threading.main_thread() else object()


_streams: list[object] = []


@contextmanager
def chosen(stream: object) -> Iterator[None]:
    _streams.append(stream)
    try:
        yield
    finally:
        _streams.pop()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each gather took."""
    found: list[int] = []
    gather = gpu_lane.gather_rows
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    for name, fake in (
        ("Event", Event),
        ("current_stream", Engine.current),
        ("stream", chosen),
        ("set_device", lambda _device: None),
        ("cudart", lambda: cudart),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(gpu_lane, "SliceCopier", Copier)
    monkeypatch.setattr(pinning, "relax_captures", lambda: None)

    def gather_rows(rows: torch.Tensor, index: torch.Tensor, *rest: torch.Tensor) -> None:
        assert _streams == [Engine.stream], "kernels on another stream slow down graphs that are replayed later"
        found.append(len(index))
        gather(rows, index, *rest)

    monkeypatch.setattr(gpu_lane, "gather_rows", gather_rows)
    Event.link = threading.Event()
    Event.link.set()
    return found


@pytest.fixture
def make(launches: list[int]) -> Iterator[Callable[[int, int], Lane]]:
    made: list[Lane] = []

    def one(staging: int, ring: int) -> Lane:
        made.append(Lane(staging, ring))
        return made[-1]

    yield one
    Event.link.set()
    for each in made:
        each.lane.finish_gathers(kit.PATIENCE)
        each.lane.shutdown(kit.PATIENCE)
        assert not each.lane._thread.is_alive()
        os.close(each.ring.fd)


def test_rows_arrive_in_order(make: Callable[[int, int], Lane], launches: list[int]) -> None:
    """In one gather where there is room, behind them what was to run then."""
    lane = make(8, 8)
    lane.lane.send([lane.chunk(n) for n in range(3)])
    lane.lane.then(lambda: lane.delivered.append((-1, b"")))
    lane.lane.send([lane.chunk(3)])
    kit.until(lambda: len(lane.delivered) == 5)
    assert lane.delivered == [*map(lane.wanted, range(3)), (-1, b""), lane.wanted(3)]
    assert launches == [6, 2]


def test_chunks_without_room_wait_in_the_cache(make: Callable[[int, int], Lane], launches: list[int]) -> None:
    """The engine's thread goes on; as the link does, more is gathered, as much at a time as there is room for."""
    Event.link.clear()
    lane = make(3, 32)
    chunks = [lane.chunk(n) for n in range(11)]
    lane.lane.send(chunks)
    kit.until(lambda: [p.waits for p in chunks] == [False] * 3 + [True] * 8)
    later = lane.chunk(11)
    lane.lane.send([later])
    time.sleep(0.05)
    assert later.waits and lane.delivered == []
    Event.link.set()
    kit.until(lambda: len(lane.delivered) == 12)
    assert lane.delivered == [*map(lane.wanted, range(12))] and sum(launches) == 24
    assert launches[0] == 6 and max(launches[1:]) > 2, "several chunks share a launch"


def test_chunks_of_many_steps_are_gathered_without_a_rest(make: Callable[[int, int], Lane]) -> None:
    """Chunks of many steps wait: once there is room they are gathered without a rest between steps."""
    Event.link.clear()
    lane = make(1, 600)
    for n in range(500):  # of a step each
        lane.lane.send([lane.chunk(n % 32)])
    assert len(lane.lane.waiting) == 499
    rests: list[str] = []
    sleep = time.sleep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane.lane.staging, "reserve", lambda nbytes: gpu_lane.Staged(0, nbytes))
        sleep(0.1)  # the rest it is in
        patch.setattr(gpu_lane.time, "sleep", lambda s: (rests.append(threading.current_thread().name), sleep(s))[1])
        Event.link.set()
        kit.until(lambda: not lane.lane.waiting)
    assert rests.count("dmi-lane") < 5
    kit.until(lambda: len(lane.delivered) == 500)


def test_gathers_follow_the_engine_to_another_stream(
    make: Callable[[int, int], Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM makes one of its own when it is first asked for one."""
    Event.link.clear()
    lane = make(2, 32)
    a, b = lane.capture(), lane.capture()
    monkeypatch.setattr(Engine, "stream", object())
    chunks = [lane.chunk(n, capture) for n, capture in enumerate((a, a, b, a))]
    lane.lane.send(chunks)
    assert [p.waits for p in chunks] == [False, False, True, True]
    monkeypatch.setattr(Engine, "stream", object())
    lane.lane.flush(b, drop=True)
    Event.link.set()
    kit.until(lambda: len(lane.delivered) == 3)
    assert lost(*chunks) == [(2, BEHIND)]
    assert lane.delivered == [*map(lane.wanted, (0, 1, 3))]


def test_a_full_ring_is_waited_for(make: Callable[[int, int], Lane]) -> None:
    lane = make(8, 2)
    lane.lane.send([lane.chunk(n) for n in range(4)])
    kit.until(lambda: len(lane.delivered) == 2)
    assert len(lane.lane.waiting) == 2
    for extent in lane.extents:
        lane.ring.release(extent)
    kit.until(lambda: len(lane.delivered) == 4)
    assert lane.delivered == [*map(lane.wanted, range(4))]


def test_a_flush_gathers_the_chunks_of_one_capture_first(make: Callable[[int, int], Lane]) -> None:
    """The others go on waiting. Under policy drop what finds no room is lost."""
    Event.link.clear()
    lane = make(2, 32)
    a, b, c = lane.capture(), lane.capture(), lane.capture()
    chunks = [lane.chunk(n, capture) for n, capture in enumerate((a, a, b, b, c, c))]
    lane.lane.send(chunks)
    kit.until(lambda: not chunks[1].waits)
    lane.lane.flush(b, drop=True)
    assert lost(*chunks) == [(2, BEHIND), (3, BEHIND)]
    assert [p.lost for p in chunks] == [False, False, True, True, False, False]
    timer = threading.Timer(0.05, Event.link.set)
    timer.start()
    lane.lane.flush(c, drop=False)
    assert not any(p.waits for p in chunks)
    kit.until(lambda: len(lane.delivered) == 4)
    assert lane.delivered == [*map(lane.wanted, (0, 1, 4, 5))]
    timer.join()


def test_a_failure_costs_one_capture(
    make: Callable[[int, int], Lane], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A delivery that fails, and a gather: the next ones go on."""
    lane = make(8, 32)
    bad = lane.chunk(0)
    monkeypatch.setattr(bad.capture.out, "chunk", lambda *_: (_ for _ in ()).throw(OSError("no")))
    lane.lane.send([bad, lane.chunk(1)])
    kit.until(lambda: len(lane.delivered) == 1)
    with monkeypatch.context() as patch:
        patch.setattr(gpu_lane, "gather_rows", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        failed = lane.chunk(2)
        lane.lane.send([failed])
    assert lost(failed) == [(2, "rows could not be gathered (RuntimeError: no memory)")]
    assert failed.extent is not None and failed.extent.refs == 0, "its ring memory is given back"
    lane.lane.send([lane.chunk(3)])
    kit.until(lambda: len(lane.delivered) == 2)
    assert lane.delivered == [lane.wanted(1), lane.wanted(3)]


def test_copies_that_arrive_together_are_delivered_together(make: Callable[[int, int], Lane]) -> None:
    """However many copies end at once: the lane's thread sleeps once for them."""
    Event.link.clear()
    lane = make(32, 32)
    for n in range(20):
        lane.lane.send([lane.chunk(n)])
    with pytest.MonkeyPatch.context() as patch:
        slept: list[float] = []
        sleep = time.sleep
        patch.setattr(gpu_lane.time, "sleep", lambda s: (slept.append(s), sleep(s))[1])
        Event.link.set()
        kit.until(lambda: len(lane.delivered) == 20)
        assert 1 <= slept.count(gpu_lane._BREATH_S) <= 3
    assert lane.delivered == [*map(lane.wanted, range(20))]
