# SPDX-License-Identifier: Apache-2.0
"""The pace of writers. They use a share of their time while the ring is sure to hold all coming rows, or while an
engine decodes and the ring has room. Otherwise they work without rests.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write import pace as pace_module
from dmi_connector.store.write.arrays.shard_writer import FileCache
from dmi_connector.store.write.child_process import Child
from dmi_connector.store.write.coordinator.capture_record import CaptureRecord
from dmi_connector.store.write.messages import Message
from dmi_connector.store.write.pace import LATE_S, SOON_S, SURE, Pace, Shares, shares_for
from dmi_connector.store.write.settings import WriteSettings
from dmi_connector.store.write.writer import Writer
from tests import storekit as kit
from tests.trackerkit import ask, generate, make_tracker

CHUNK, PROMPT = 128, 128
WIDE = ArraySpec("mlp_post", "bfloat16", tuple(range(8)), 512)
LOGITS = ArraySpec("logits", "float32", (), 33, per_sample=True)
CHUNK_BYTES = CHUNK * (WIDE.token_bytes + 8)
TAKEN = -(-CHUNK_BYTES // 4096) * 4096
"""Bytes of the ring that a chunk takes."""
RING = 16 * TAKEN
LEAST = 0.25
ROWS = {"mlp_post": kit.random_bits(WIDE, 40 * CHUNK)}


@pytest.fixture
def paced() -> Iterator[kit.Store]:
    stores = kit.Store(RING, settings=WriteSettings(least_share=LEAST))
    assert stores.pool.processes[0].ready.wait(kit.PATIENCE)
    yield stores
    assert stores.shutdown(kit.PATIENCE)


def begin(stores: kit.Store, path: Path, most_rows: int | None = None, **options: Any) -> CaptureRecord:
    attrs = {"prompt_len": PROMPT, **options.pop("attrs", {})}
    return stores.open(path, WIDE, attrs=attrs, segment=1024, codec="zstd", most_rows=most_rows, **options)


def send(stores: kit.Store, record: CaptureRecord, first: int) -> None:
    stores.put(record, ROWS, first, CHUNK)


def shares(stores: kit.Store) -> Shares:
    """The shares as a writer reads them."""
    pace = Pace(os.dup(stores.pool._pace.fd))
    try:
        return pace.shares
    finally:
        pace.close()


def share(stores: kit.Store) -> float:
    """The share of a writer's time for rows of generated tokens."""
    return shares(stores).generated


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_share_grows_as_the_ring_fills() -> None:
    """The ring may not hold all coming rows here, so rows of prompts are written at once."""
    grown = [shares_for(LEAST, used, 9.0) for used in (0.0, 0.5, 0.625, 0.75, 1.0)]
    assert [s.generated for s in grown] == [0.25, 0.25, 0.625, 1.0, 1.0] and {s.prompt for s in grown} == {1.0}
    assert [shares_for(1.0, used, 9.0) for used in (0.0, 0.7, 1.0)] == [(1.0, 1.0)] * 3


def test_writers_do_not_hurry_while_the_ring_is_sure_to_hold_all() -> None:
    for used, to_come in ((0.0, SURE), (SURE, 0.0), (0.5, 0.45), (0.0, 0.0)):
        assert shares_for(LEAST, used, to_come) == (LEAST, LEAST)
    for used, to_come in ((0.0, 0.96), (0.5, 0.46)):
        assert shares_for(LEAST, used, to_come) == (LEAST, 1.0)


class Clock:
    """A clock for `Pace`, which only its sleep moves on. then: called after each sleep."""

    def __init__(self, patch: pytest.MonkeyPatch, then: Callable[[], None] = lambda: None) -> None:
        self.now, self._then = 1000.0, then
        patch.setattr(pace_module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= pace_module._SLICE_S
        self.now += seconds
        self._then()

    def lasts(self, pace: Pace, worked: float, generated: bool, since: float) -> float:
        """Seconds of a rest."""
        began = self.now
        pace.rest(worked, generated, since)
        return self.now - began


SLICE = pytest.approx(0, abs=pace_module._SLICE_S)


@pytest.mark.parametrize("generated", [True, False])
def test_a_rest_ends_once_the_rows_have_waited_long_enough(monkeypatch: pytest.MonkeyPatch, generated: bool) -> None:
    """The coordinator does not change the shares meanwhile."""
    clock, pace = Clock(monkeypatch), Pace()
    pace.shares = Shares(0.01, 0.01)
    assert clock.lasts(pace, 1000.0, generated, since=clock.now - LATE_S) == 0
    assert clock.lasts(pace, 1000.0, generated, since=clock.now - LATE_S + 0.3) - 0.3 == SLICE
    lasted = clock.lasts(pace, 1.0, generated, since=clock.now - LATE_S / 2)
    share = 0.01 + 0.99 * (LATE_S / 2 + lasted - SOON_S) / (LATE_S - SOON_S)  # at the end of the rest
    assert lasted == pytest.approx(1 / share - 1, abs=0.05), "a share of a hundredth alone would rest for 99 seconds"
    pace.close()


def test_a_rest_lasts_as_long_as_the_share_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[float] = []

    def change() -> None:
        if clock.now >= 1000.5 and not changed:
            pace.shares = Shares(1.0, 0.01)
            changed.append(clock.now)

    pace = Pace()
    clock = Clock(monkeypatch)
    assert clock.lasts(pace, 10.0, True, clock.now) == 0, "no share is set yet"
    other = Pace(os.dup(pace.fd))
    pace.shares = Shares(0.25, 0.5)
    assert other.shares == pytest.approx((0.25, 0.5), abs=1 / 255)
    for generated, lasted in ((True, 0.06), (False, 0.02)):
        assert clock.lasts(other, 0.02, generated, clock.now) == pytest.approx(lasted, rel=0.02)
    clock = Clock(monkeypatch, change)
    assert clock.lasts(other, 1000.0, True, clock.now) - 0.5 == SLICE, "the share changes during the rest"
    assert changed
    for each in (pace, other):
        each.close()
        each.close()


def test_writers_hurry_when_much_waits_and_when_nobody_decodes(paced: kit.Store, tmp_path: Path) -> None:
    """The writer is stopped, so all sent chunks wait."""
    assert share(paced) == 1.0
    record = begin(paced, tmp_path / "a.zarr")
    pid = paced.pool.processes[0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        seen = []
        for first in range(0, 14 * CHUNK, CHUNK):
            send(paced, record, first)
            seen.append(share(paced))
        assert seen[:8] == pytest.approx([LEAST] * 8, abs=0.01)
        assert seen[12:] == [1.0, 1.0] and seen == sorted(seen) and LEAST < seen[9] < 1.0
    finally:
        os.kill(pid, signal.SIGCONT)
    kit.until(lambda: paced.ring.used == 0)
    assert share(paced) == pytest.approx(LEAST, abs=0.01)
    second = begin(paced, tmp_path / "b.zarr")
    paced.close(record, 14 * CHUNK)
    assert share(paced) < 1.0, "another capture is still open"
    paced.abort(second)
    assert share(paced) == 1.0
    assert paced.flush(kit.PATIENCE) and verify_store(tmp_path / "a.zarr") == []


def test_only_room_bytes_of_a_larger_ring_count_for_the_pace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dmi_connector.store.write.coordinator.writer_pool.ROOM_BYTES", 2 * TAKEN)
    stores = kit.Store(RING, settings=WriteSettings(least_share=LEAST))
    record = begin(stores, tmp_path / "a.zarr")
    writer = stores.pool.processes[0]
    assert writer.ready.wait(kit.PATIENCE)
    os.kill(writer.pid, signal.SIGSTOP)
    try:
        for first, expected in ((0, LEAST), (CHUNK, 1.0)):
            send(stores, record, first)
            assert share(stores) == pytest.approx(expected, abs=0.01)
    finally:
        os.kill(writer.pid, signal.SIGCONT)
    stores.abort(record)
    assert stores.shutdown(kit.PATIENCE)


def test_writers_hurry_at_the_shutdown_even_with_an_open_capture(tmp_path: Path) -> None:
    """A capture of several ranks stays open when its engine dies."""
    stores = kit.Store(RING, settings=WriteSettings(least_share=LEAST))
    record = begin(stores, tmp_path / "a.zarr", attrs={"prompt_len": 1}, ranks=2)
    send(stores, record, 0)
    assert share(stores) == pytest.approx(LEAST, abs=0.01)
    stores.captures.abandon_all(Loss.of(Cause.ENGINE_ENDED))
    assert record.state == "open"
    seen: list[float] = []
    flush = stores.captures.flush
    stores.captures.flush = lambda timeout=None: (seen.append(share(stores)), flush(timeout))[1]  # type: ignore
    assert stores.shutdown(kit.PATIENCE) and seen == [1.0]


def test_a_capture_that_cannot_begin_does_not_slow_the_writers(paced: kit.Store, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no process"):
        patch.setattr(paced.pool, "assign_writers", lambda *_: (_ for _ in ()).throw(OSError("no process")))
        begin(paced, tmp_path / "a.zarr")
    record = begin(paced, tmp_path / "b.zarr")
    assert share(paced) == 1.0
    send(paced, record, 0)
    assert share(paced) < 1.0
    paced.abort(record)
    assert share(paced) == 1.0


def test_chunks_after_the_prompt_and_rows_of_logits_count_as_generated(
    paced: kit.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the prompt is counted from the start of the capture."""
    attrs = {"prompt_len": 3 * CHUNK, "start": CHUNK, "model": "m"}
    record = paced.open(tmp_path / "a.zarr", WIDE, LOGITS, attrs=attrs, segment=1024)
    sent: list[Message] = []
    post = Child.post
    monkeypatch.setattr(Child, "post", lambda child, message: (sent.append(message), post(child, message))[1])
    for first in range(0, 4 * CHUNK, CHUNK):
        send(paced, record, first)
    paced.put_rows(record, "logits", kit.random_bits(LOGITS, 1), 0, 400)
    assert [m["generated"] for m in sent] == [False, False, True, True, True]
    paced.abort(record)


def test_generated_rows_take_only_a_share_of_the_writers_time(paced: kit.Store, tmp_path: Path) -> None:
    """The share is a quarter. On a busy machine it is even less."""
    chunks, pid = 40, paced.pool.processes[0].pid
    record = begin(paced, tmp_path / "a.zarr", attrs={"prompt_len": 1})
    worked, began = cpu_seconds(pid), time.monotonic()
    for number in range(chunks):
        kit.until(lambda: paced.ring.used < RING // 4)  # there is always room
        send(paced, record, number * CHUNK)
    kit.until(lambda: paced.ring.used == 0)
    lasted, worked = time.monotonic() - began, cpu_seconds(pid) - worked
    paced.close(record, chunks * CHUNK)
    assert paced.flush(kit.PATIENCE) and verify_store(tmp_path / "a.zarr") == []
    assert 0 < worked < 0.35 * lasted


def test_writers_rest_before_each_chunk_for_the_work_on_the_last_one(tmp_path: Path) -> None:
    class Rests(list[tuple[float, bool, float]]):
        def rest(self, *rest: Any) -> None:
            self.append(rest)

    ring, answers, rests = np.zeros(CHUNK_BYTES, "u1"), [], Rests()
    writer = Writer(ring, answers.append, FileCache(4), rests)  # type: ignore[arg-type]
    layout = PayloadLayout((WIDE,), CHUNK, CHUNK, "zstd")
    writer.handle({"type": "layout", "number": 0, "layout": layout.to_json()})
    where = {"partial": str(tmp_path), "layout": 0, "arrays": [0], "about": None, "leads": True}
    writer.handle({"type": "open", "id": 1, **where})
    for seq, generated in enumerate((False, True, True)):
        where = {"id": 1, "seq": seq, "offset": 0, "first": seq * CHUNK, "count": CHUNK}
        writer.handle({"type": "chunk", **where, "generated": generated, "sent": 10.0 + seq})
        assert answers.pop() == {"ack": seq}
    assert [rest[1:] for rest in rests] == [(False, 10.0), (True, 11.0), (True, 12.0)] and rests[0][0] == 0
    assert all(0 < worked < 10 for worked, *_ in rests[1:])


def test_prompt_rows_are_paced_while_the_ring_can_hold_all_that_may_come(paced: kit.Store, tmp_path: Path) -> None:
    """The ring has room for 15 chunks. One is kept free. Rows that have arrived are no longer expected, and
    neither are those of an ended capture.
    """
    pid = paced.pool.processes[0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        few, many = begin(paced, tmp_path / "a.zarr", 8 * CHUNK), begin(paced, tmp_path / "b.zarr", 7 * CHUNK)
        send(paced, few, 0)
        assert shares(paced) == pytest.approx((LEAST, 1.0), abs=0.01), "15 chunks may come, and one must be kept free"
        paced.abort(few)
        send(paced, many, 0)
        assert shares(paced) == pytest.approx((LEAST, LEAST), abs=0.01), "only 8 chunks may come"
        unknown = begin(paced, tmp_path / "c.zarr")
        assert shares(paced).prompt == pytest.approx(LEAST, abs=0.01), "the share must stay until the next chunk"
        send(paced, unknown, 0)
        assert shares(paced).prompt == 1.0
    finally:
        os.kill(pid, signal.SIGCONT)
    for record in (many, unknown):
        paced.abort(record)
    assert shares(paced) == (1.0, 1.0)


def test_the_bytes_to_come_follow_from_the_most_rows_of_a_capture(paced: kit.Store, tmp_path: Path) -> None:
    """With logits they are unknown, because the logits of all requests of a step are sent together."""

    def most(rows: int | None, *arrays: ArraySpec) -> int:
        record = paced.open(tmp_path / "a.zarr", *arrays, most_rows=rows)
        found = record.to_come
        paced.abort(record)
        return found

    assert most(128, WIDE) == CHUNK_BYTES and most(0, WIDE) == 0
    assert most(None, WIDE) > 1 << 50 and most(10, WIDE, LOGITS) > 1 << 50


def test_no_bytes_are_to_come_once_all_captures_have_ended(tmp_path: Path) -> None:
    """They end with a close, an abort or the death of their writer."""
    stores = kit.Store(RING, 2, settings=WriteSettings(least_share=LEAST))
    records = [begin(stores, tmp_path / f"{i}.zarr", 8 * CHUNK) for i in range(4)]
    assert stores.captures._to_come == 4 * 8 * CHUNK_BYTES
    for record in records:
        send(stores, record, 0)
    assert stores.captures._to_come == 4 * 7 * CHUNK_BYTES
    stores.close(records[0], CHUNK)
    stores.abort(records[1])
    assert stores.captures._to_come == 2 * 7 * CHUNK_BYTES
    for process in stores.pool.processes:
        assert process.ready.wait(kit.PATIENCE)
        os.kill(process.pid, signal.SIGKILL)
    for record in records[2:]:
        stores.close(record, CHUNK)
    assert stores.captures._to_come == 0 and stores.flush(kit.PATIENCE)
    unknown = begin(stores, tmp_path / "u.zarr")
    send(stores, unknown, 0)
    stores.abort(unknown)
    assert stores.captures._to_come == 0 and stores.shutdown(kit.PATIENCE)


def test_rows_that_have_waited_long_are_written_without_a_new_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rests of a writer end when the rows have waited for three seconds. Its share would ask for many more."""
    clock, pace, ring, answers = Clock(monkeypatch), Pace(), np.zeros(CHUNK_BYTES, "u1"), []
    pace.shares = Shares(0.004, 0.004)
    writer = Writer(ring, answers.append, FileCache(4), pace)
    layout = PayloadLayout((WIDE,), CHUNK, CHUNK, "zstd")
    writer.handle({"type": "layout", "number": 0, "layout": layout.to_json()})
    where = {"partial": str(tmp_path), "layout": 0, "arrays": [0], "about": None, "leads": True}
    writer.handle({"type": "open", "id": 1, **where})
    sent = clock.now
    for seq in range(14):
        writer._worked = 0.1  # CPU seconds for the chunk before it
        where = {"id": 1, "seq": seq, "offset": 0, "first": seq * CHUNK, "count": CHUNK}
        writer.handle({"type": "chunk", **where, "generated": False, "sent": sent})
        assert answers.pop() == {"ack": seq}
    assert SOON_S < clock.now - sent <= LATE_S
    pace.close()


@pytest.mark.parametrize(
    ("tokens", "output", "most"),
    [
        (None, True, 44),
        (None, False, 40),
        ([10, None], True, 34),
        ([10, 30], True, 20),
        ([0, 1000], True, 44),
        ([60, None], True, 0),
    ],
)
def test_the_engine_says_how_many_rows_may_come(
    tmp_path: Path, tokens: list[int | None] | None, output: bool, most: int
) -> None:
    """The prompt has 40 tokens, and at most 4 are generated."""
    params = {"include_output_tokens": output, "dmi": {"tokens": tokens} if tokens else {}}
    tracker, request = make_tracker(tmp_path), ask(params, prompt=40)
    request.max_tokens = 4
    tracker.on_new_request(request)  # type: ignore[arg-type]
    steps, _ = generate(tracker, request, 2)
    assert [o.most_rows for step in steps for o in step.opens] == [most]
