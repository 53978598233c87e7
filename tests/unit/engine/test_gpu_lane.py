# SPDX-License-Identifier: Apache-2.0
"""The lane with CPU memory instead of CUDA: when it gathers, the order of delivery, and which chunks are lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from dmi_connector.engine.transfer import gpu_lane, staging
from dmi_connector.engine.transfer.staging import Index, Staged, Staging
from tests import storekit as kit
from tests.lanekit import BEHIND, CHUNK, Engine, Event, Lane, lost, simulate


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each gather."""
    return simulate(monkeypatch)


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
        each.ring.close()


def test_a_drained_lane_needs_no_memory_of_the_gpu(make: Callable[[int, int], Lane]) -> None:
    """Some rows wait for room, others are in staging memory and wait for their copy."""
    lane = make(2, 8)
    Event.link.clear()
    lane.lane.send([lane.chunk(n) for n in range(4)])
    assert lane.lane.staged and lane.lane.waiting
    threading.Timer(0.1, Event.link.set).start()
    lane.lane.drain()
    lane.rows.zero_()
    assert not lane.lane.staged and not lane.lane.waiting
    kit.until(lambda: len(lane.delivered) == 4)
    assert all(any(payload) for _, payload in lane.delivered)


def test_slices_of_copies_lie_as_those_of_the_ring(make: Callable[[int, int], Lane]) -> None:
    """The copier gets the address of the ring as its base, so a slice never crosses a slice boundary of the ring."""
    lane = make(2, 8)
    assert lane.lane.copier.given == (gpu_lane._SLICE_BYTES, lane.rows.device, lane.lane.ring.data_ptr())


def test_rows_arrive_in_order(make: Callable[[int, int], Lane], launches: list[int]) -> None:
    """Chunks with room are gathered at once. A callback runs after the chunks before it."""
    lane = make(8, 8)
    lane.lane.send([lane.chunk(n) for n in range(3)])
    lane.lane.then(lambda: lane.delivered.append((-1, b"")))
    lane.lane.send([lane.chunk(3)])
    kit.until(lambda: len(lane.delivered) == 5)
    assert lane.delivered == [*map(lane.wanted, range(3)), (-1, b""), lane.wanted(3)]
    assert launches == [6, 2]


def test_chunks_share_a_parcel_up_to_a_quarter_of_the_memory(
    make: Callable[[int, int], Lane], launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one launch, and for each parcel one copy, one extent and one message. Captures and hooks may differ."""
    lane, copies = make(16, 64), []
    copy = lane.lane.copier.copy
    monkeypatch.setattr(lane.lane.copier, "copy", lambda *a: (copies.append(a[0].numel()), copy(*a))[1])
    small = lane.capture(np.array([[8, 100, 0]]))  # its payloads do not end at a unit of 512 bytes
    chunks = [lane.chunk(n, small if n % 3 == 1 else None) for n in range(8)]
    lane.lane.send(chunks)
    kit.until(lambda: len(lane.delivered) == 8)
    wanted = [lane.wanted(n) for n in range(8)]
    for n in (1, 4, 7):
        wanted[n] = (n, lane.rows[2 * n : 2 * n + 2, 8:108].contiguous().numpy().tobytes())
    assert lane.delivered == wanted and launches == [10, 6]
    assert copies == [e.nbytes for e in lane.extents] and len(copies) == 2 and max(copies) <= 4 * CHUNK


def test_chunks_without_room_wait_in_the_cache(make: Callable[[int, int], Lane], launches: list[int]) -> None:
    """The engine's thread does not wait. When the link is unblocked, the lane gathers as many chunks as have room."""
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
    assert launches[0] == 6 and max(launches[1:]) > 2, "several chunks must share a launch"


def test_the_lane_gathers_tensors_made_in_inference_mode(make: Callable[[int, int], Lane], launches: list[int]) -> None:
    """vLLM runs in inference mode. The lane's thread does not, and cannot write tensors that were created in it."""
    Event.link.clear()
    lane = make(3, 32)
    chunks = [lane.chunk(n) for n in range(11)]
    with torch.inference_mode():
        lane.lane.send(chunks)
    Event.link.set()
    kit.until(lambda: len(lane.delivered) == 11)
    assert lane.delivered == [*map(lane.wanted, range(11))] and lost(*chunks) == [] and len(launches) > 1


def test_index_memory_is_used_again_once_its_gathers_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not reused earlier, never used by two gathers at a time, and not used for more rows than it has."""
    simulate(monkeypatch)
    index, event = Index(torch.device("cpu")), Event()
    event.of_link = True
    Event.link = threading.Event()
    few, many = np.arange(8).reshape(2, 4), np.arange(40_000).reshape(-1, 4)
    first, second = index.on_gpu(few), index.on_gpu(few + 1)
    index.until(event)
    third = index.on_gpu(few + 2)
    index.until(event)
    assert [t.tolist() for t in (first, second, third)] == [(few + n).tolist() for n in range(3)]
    assert len({t.data_ptr() for t in (first, second, third)}) == 3
    Event.link.set()
    again, large = index.on_gpu(few + 3), index.on_gpu(many)
    assert again.data_ptr() == first.data_ptr() and again.tolist() == (few + 3).tolist()
    assert large.tolist() == many.tolist() and large.data_ptr() not in (second.data_ptr(), third.data_ptr())


def test_chunks_of_many_steps_are_gathered_without_a_rest(make: Callable[[int, int], Lane]) -> None:
    """After there is room, the lane does not sleep between the chunks of different steps."""
    Event.link.clear()
    lane = make(1, 600)
    for n in range(500):  # one step per chunk
        lane.lane.send([lane.chunk(n % 32)])
    assert len(lane.lane.waiting) == 499
    rests: list[str] = []
    sleep = time.sleep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane.lane.staging, "reserve", lambda nbytes: Staged(0, nbytes))
        sleep(0.1)  # let the current sleep end
        patch.setattr(gpu_lane.time, "sleep", lambda s: (rests.append(threading.current_thread().name), sleep(s))[1])
        Event.link.set()
        kit.until(lambda: not lane.lane.waiting)
    assert rests.count("dmi-lane") < 5
    kit.until(lambda: len(lane.delivered) == 500)


def test_gathers_follow_the_engine_to_another_stream(
    make: Callable[[int, int], Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM creates its own stream when it is first asked for one."""
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
    """Other captures keep waiting. Under policy drop, chunks without room are lost."""
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


def test_chunks_are_gathered_in_order_until_there_is_enough(make: Callable[[int, int], Lane]) -> None:
    """Under policy drop, the first chunks without room are lost."""
    Event.link.clear()
    lane = make(2, 32)
    chunks = [lane.chunk(n) for n in range(6)]
    lane.lane.send(chunks)
    kit.until(lambda: not chunks[1].waits)
    lane.lane.gather_until(lambda: not chunks[2].waits, drop=True)
    assert lost(*chunks) == [(2, BEHIND)] and [p.waits for p in chunks] == [False] * 3 + [True] * 3
    lane.lane.gather_until(lambda: True, drop=True)
    assert len(lane.lane.waiting) == 3, "without a need, no chunk may be gathered"
    timer = threading.Timer(0.05, Event.link.set)
    timer.start()
    lane.lane.gather_until(lambda: not chunks[4].waits, drop=False)
    assert not chunks[3].waits and not chunks[4].waits
    kit.until(lambda: len(lane.delivered) == 5)
    assert lane.delivered == [*map(lane.wanted, (0, 1, 3, 4, 5))]
    timer.join()


def test_a_failure_costs_one_capture(
    make: Callable[[int, int], Lane], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a failed delivery or a failed gather, the next captures are exported."""
    lane = make(8, 32)
    bad = lane.chunk(0)
    monkeypatch.setattr(bad.capture.out, "parcel", lambda *_: (_ for _ in ()).throw(OSError("no")))
    lane.lane.send([bad])
    lane.lane.send([lane.chunk(1)])
    kit.until(lambda: len(lane.delivered) == 1)
    with monkeypatch.context() as patch:
        patch.setattr(gpu_lane, "gather_rows", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        failed = lane.chunk(2)
        lane.lane.send([failed])
    assert lost(failed) == [(2, "rows could not be gathered (RuntimeError: no memory)")]
    lane.lane.send([lane.chunk(3)])
    kit.until(lambda: len(lane.delivered) == 2)
    assert lane.delivered == [lane.wanted(1), lane.wanted(3)]


@pytest.mark.parametrize("waits", ["send", "flush", "gather_until", "drain"])
def test_nothing_waits_for_a_lane_that_has_failed(
    make: Callable[[int, int], Lane], monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """A copy fails as after a GPU error. The other rows wait for room that no copy will free."""
    lane = make(1, 8)
    monkeypatch.setattr(lane.lane.copier, "copy", lambda *_: (_ for _ in ()).throw(RuntimeError("no GPU")))
    chunks = [lane.chunk(n) for n in range(3)]
    lane.lane.send(chunks)
    if waits == "send":
        lane.lane._thread.join(kit.PATIENCE)
    calls: dict[str, Callable[[], None]] = {
        "send": lambda: lane.lane.send([lane.chunk(3)]),
        "flush": lambda: lane.lane.flush(chunks[2].capture, drop=False),
        "gather_until": lambda: lane.lane.gather_until(lambda: False, drop=False),
        "drain": lane.lane.drain,
    }
    with pytest.raises(RuntimeError, match=r"^rows can no longer be copied off cpu: no GPU$"):
        calls[waits]()
    lane.lane.waiting.clear()  # the fixture can end the lane


def test_copies_that_arrive_together_are_delivered_together(make: Callable[[int, int], Lane]) -> None:
    """The lane's thread sleeps once for all copies that end at the same time."""
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
        assert 1 <= slept.count(gpu_lane._BATCH_S) <= 3
    assert lane.delivered == [*map(lane.wanted, range(20))]


def test_a_failed_gather_gives_back_the_room_it_had(make: Callable[[int, int], Lane]) -> None:
    """Ring and staging memory are free again, and the next chunks use them."""
    lane = make(2, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_lane, "gather_rows", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        for n in (0, 2):
            failed = [lane.chunk(n), lane.chunk(n + 1)]
            lane.lane.send(failed)
            assert [number for number, _ in lost(*failed)] == [n, n + 1] and not any(t.waits for t in failed)
            assert lane.ring.used == 0 and not lane.lane.staging.used and not lane.lane.waiting
    assert lane.progress.report().gathered == 8, "failed chunks must count as gathered"
    lane.lane.send([lane.chunk(n) for n in range(4, 7)])
    kit.until(lambda: len(lane.delivered) == 3)
    assert lane.delivered == [*map(lane.wanted, range(4, 7))]


def test_a_chunk_without_ring_memory_keeps_no_staging_memory(make: Callable[[int, int], Lane]) -> None:
    lane = make(4, 1)
    lane.lane.send([lane.chunk(n) for n in range(3)])
    kit.until(lambda: len(lane.delivered) == 1)
    with lane.lane._changed:
        assert len(lane.lane.waiting) == 2 and sum(s.end - s.start for s in lane.lane.staging.used) <= CHUNK
    for n in range(2):
        lane.ring.release(lane.extents[n])
        kit.until(lambda n=n: len(lane.delivered) == n + 2)
    assert lane.delivered == [*map(lane.wanted, range(3))]


def test_chunks_with_other_fields_are_gathered_by_their_own_tables(make: Callable[[int, int], Lane]) -> None:
    """Captures with other hooks share a launch. Each is gathered with the fields of its own table."""
    lane = make(8, 8)
    halves = [lane.capture(np.array([[at, CHUNK // 4, 0]])) for at in (0, CHUNK // 4)]
    chunks = [lane.chunk(n, halves[n % 2]) for n in range(4)]
    lane.lane.send(chunks)
    kit.until(lambda: len(lane.delivered) == 4)
    for n, (number, data) in enumerate(lane.delivered):
        at = n % 2 * CHUNK // 4
        assert (number, data) == (n, lane.rows[2 * n : 2 * n + 2, at : at + CHUNK // 4].contiguous().numpy().tobytes())


def test_a_copy_fills_no_more_than_its_ring_memory(make: Callable[[int, int], Lane]) -> None:
    """Units of staging memory are larger than the copy."""
    lane = make(2, 4)
    lane.lane.staging.buffer.fill_(255)
    lane.lane.send([lane.chunk(3, lane.capture(np.array([[8, 100, 0]])))])
    kit.until(lambda: lane.delivered)
    assert lane.delivered == [(3, lane.rows[6:8, 8:108].contiguous().numpy().tobytes())]
    assert not lane.ring.memory[200:].any()


def test_gathered_rows_are_reported_when_their_gather_is_issued(make: Callable[[int, int], Lane]) -> None:
    Event.link.clear()
    lane = make(2, 32)
    lane.lane.send([lane.chunk(n) for n in range(5)])
    kit.until(lambda: len(lane.lane.waiting) == 3)
    assert lane.progress.report().gathered == 4, "only two chunks of two rows have room"
    Event.link.set()
    kit.until(lambda: len(lane.delivered) == 5)
    assert lane.progress.report().gathered == 10


def test_a_chunk_that_has_room_waits_for_earlier_ones_without(make: Callable[[int, int], Lane]) -> None:
    """Chunks are gathered in the order they were sent, even if a later one is smaller."""
    Event.link.clear()
    lane = make(3, 32)
    capture = lane.capture()
    lane.lane.send([lane.chunk(0, capture), lane.chunk(1, capture)])
    reserve = lane.lane.staging.reserve
    lane.lane.staging.reserve = lambda nbytes: None  # type: ignore[method-assign]
    lane.lane.send([lane.chunk(2, capture)])
    with lane.lane._changed:
        lane.lane.staging.reserve = reserve  # type: ignore[method-assign]
        later = lane.chunk(3, capture)
        lane.lane.send([later])
        assert later.waits and [t.first for t in lane.lane.waiting] == [4, 6]
    Event.link.set()
    kit.until(lambda: len(lane.delivered) == 4)
    assert lane.delivered == [*map(lane.wanted, range(4))]


class Done:
    """A fake event, complete or not."""

    def __init__(self, happened: bool = True) -> None:
        self.happened = happened

    def query(self) -> bool:
        return self.happened


def test_staging_memory_is_given_out_in_a_ring_of_whole_units() -> None:
    """Units have 512 bytes. Memory in use is not allocated again, and an empty buffer starts at its beginning."""
    staging = Staging(4 * 512, torch.device("cpu"))
    a, b, c = (staging.reserve(n) for n in (1, 512, 513))
    assert a and b and c and [(s.start, s.end) for s in (a, b, c)] == [(0, 512), (512, 1024), (1024, 2048)]
    assert staging.reserve(1) is None, "the buffer is full"
    a.copied = Done(False)  # type: ignore[assignment]
    b.copied = Done()  # type: ignore[assignment]
    assert staging.reserve(1) is None, "memory after the oldest extent in use must wait"
    a.copied = Done()  # type: ignore[assignment]
    assert staging.reserve(1025) is None, "only two units are free"
    d = staging.reserve(1024)
    assert d and (d.start, d.end) == (0, 1024) and staging.reserve(1) is None
    c.copied = d.copied = Done()  # type: ignore[assignment]
    e = staging.reserve(4 * 512)
    assert e and (e.start, e.end) == (0, 2048), "an empty buffer must start at its beginning"
    staging.cancel(e)
    f = staging.reserve(600)
    assert f and (f.start, f.end) == (0, 1024) and list(staging.used) == [f]
    with pytest.raises(ValueError, match="2049 bytes do not fit the staging buffer of 2048 bytes"):
        staging.reserve(2049)


def test_staging_memory_is_taken_back_without_assertions_too() -> None:
    """PYTHONOPTIMIZE removes `assert` statements."""
    optimised: dict[str, Any] = {"__name__": "optimised"}
    exec(compile(Path(staging.__file__).read_text(), "optimised", "exec", optimize=1), optimised)
    memory = optimised["Staging"](2 * 512, torch.device("cpu"))
    memory.cancel(memory.reserve(512))
    assert memory.reserve(1024) is not None


def test_the_speed_of_the_link_is_that_of_its_second_copy(
    make: Callable[[int, int], Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes per second, measured with a copy as large as both staging memory and ring allow."""
    lane, order = make(3, 2), list[tuple[str, int]]()

    class Timed:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing
            self.name, self.records = f"event {len(made)}", 0
            made.append(self)

        def record(self) -> None:
            self.records += 1
            order.append((self.name, int(lane.ring.memory[: 3 * CHUNK].sum())))
            lane.lane.staging.buffer.fill_(self.records)

        def synchronize(self) -> None:
            order.append((f"{self.name} is waited for", self.records))

        def elapsed_time(self, end: Timed) -> float:
            assert (self, end) == (made[0], made[1])
            return 0.5  # milliseconds

    made: list[Timed] = []
    lane.lane.staging.buffer.fill_(0)
    monkeypatch.setattr(gpu_lane.torch.cuda, "Event", Timed)
    assert lane.lane.link_bytes_per_second() == 2 * CHUNK / 0.0005
    copied = [("event 0", 0), ("event 1", 2 * CHUNK), ("event 0", 2 * CHUNK), ("event 1", 4 * CHUNK)]
    assert order == [*copied, ("event 1 is waited for", 2)]


def test_a_tensor_goes_to_its_place_in_the_ring(make: Callable[[int, int], Lane]) -> None:
    """It is copied in order with gathers."""
    lane = make(4, 4)
    extents = [lane.ring.alloc(CHUNK, 0) for _ in range(2)]
    source = torch.arange(100, dtype=torch.uint8) + 1
    assert extents[1] is not None
    lane.lane.send([lane.chunk(0)])
    lane.lane.send_tensor(source, extents[1].offset, lambda: lane.delivered.append((-1, b"")))
    lane.lane.send([lane.chunk(1)])
    kit.until(lambda: len(lane.delivered) == 3)
    assert [number for number, _ in lane.delivered] == [0, -1, 1]
    assert lane.ring.view(extents[1]).tobytes() == source.numpy().tobytes() + bytes(CHUNK - 100)


def test_a_lane_whose_copies_do_not_end_keeps_its_memory(
    make: Callable[[int, int], Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread still uses the memory. Rows that arrive later are delivered."""
    Event.link.clear()
    lane, closed, lines = make(4, 4), list[str](), list[str]()
    monkeypatch.setattr(lane.lane._pinned, "close", lambda: closed.append("closed"))
    monkeypatch.setattr(gpu_lane.logger, "error", lambda text, *values: lines.append(text % values))
    lane.lane.send([lane.chunk(0)])
    lane.lane.shutdown(0.01)
    assert closed == [] and lines == ["copies did not end within 0.01 s of the shutdown: their rows are missing"]
    Event.link.set()
    kit.until(lambda: len(lane.delivered) == 1)
    lane.lane.shutdown(kit.PATIENCE)
    assert closed == ["closed"]


def test_the_first_gather_of_a_request_is_compiled_before(
    make: Callable[[int, int], Lane], launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row is gathered with the table of all hooks, which then stays on the GPU."""
    lane, table = make(4, 4), np.array([[64, 128, 0]])
    lane.lane.staging.buffer.fill_(0)
    lane.lane.warm_up(table)
    assert launches == [1] and lane.lane._tables[id(table)].tolist() == table.tolist()
    assert lane.lane.staging.buffer[:128].tolist() == lane.rows[0, 64:192].tolist()
    assert not lane.lane.staging.buffer[128:].any()
