# SPDX-License-Identifier: Apache-2.0
"""How fast writers work: at a share of their time while an engine decodes and there is room, else at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dmi_connector.store.capture import CaptureHandle, CaptureSpec
from dmi_connector.store.pace import Pace, share_for
from dmi_connector.store.persist import Persistence
from dmi_connector.store.persist_settings import PersistSettings
from dmi_connector.store.process import Child
from dmi_connector.store.schema import ArraySpec
from dmi_connector.store.shard import FileCache
from dmi_connector.store.verify import verify_store
from dmi_connector.store.wire import Message
from dmi_connector.store.writer import Writer
from tests import storekit as kit

CHUNK, PROMPT = 128, 128
WIDE = ArraySpec("mlp_post", "bfloat16", tuple(range(8)), 512)
LOGITS = ArraySpec("logits", "float32", (), 33, per_sample=True)
RING = 16 << 20
LEAST = 0.25


@pytest.fixture
def paced() -> Iterator[Persistence]:
    persistence = Persistence(RING, settings=PersistSettings(least_share=LEAST))
    assert persistence.pool.processes[0].ready.wait(kit.PATIENCE)
    yield persistence
    assert persistence.shutdown(kit.PATIENCE)


def begin(persistence: Persistence, path: Path) -> CaptureHandle:
    return persistence.open_capture(CaptureSpec(str(path), (WIDE,), {"prompt_len": PROMPT, "model": "m"}))


def share(persistence: Persistence) -> float:
    """As a writer reads it."""
    pace = Pace(os.dup(persistence.pool._pace.fd))
    try:
        return pace.share
    finally:
        pace.close()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_share_grows_with_what_waits() -> None:
    assert [share_for(LEAST, used) for used in (0.0, 0.5, 0.625, 0.75, 1.0)] == [0.25, 0.25, 0.625, 1.0, 1.0]
    assert [share_for(1.0, used) for used in (0.0, 0.7, 1.0)] == [1.0, 1.0, 1.0]


def test_a_rest_lasts_as_long_as_the_share_asks() -> None:
    pace = Pace()
    began = time.monotonic()
    pace.rest(10.0)  # there is no limit yet
    assert time.monotonic() - began < 1
    other = Pace(os.dup(pace.fd))
    pace.share = 0.25
    assert other.share == pytest.approx(0.25, abs=1 / 255)
    began = time.monotonic()
    other.rest(0.02)
    assert time.monotonic() - began >= 0.055
    timer = threading.Timer(0.1, lambda: setattr(pace, "share", 1.0))
    timer.start()
    began = time.monotonic()
    other.rest(1000.0)
    assert time.monotonic() - began < kit.PATIENCE
    timer.join()
    for each in (pace, other):
        each.close()
        each.close()


def test_writers_hurry_when_much_waits_and_when_nobody_decodes(paced: Persistence, tmp_path: Path) -> None:
    """With the writer stopped all that is sent waits."""
    assert share(paced) == 1.0
    handle = begin(paced, tmp_path / "a.zarr")
    values = kit.random_bits(WIDE, 14 * CHUNK)
    pid = paced.pool.processes[0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        seen = []
        for first in range(0, 14 * CHUNK, CHUNK):  # of 1 MiB each
            payload = np.ascontiguousarray(values[:, first : first + CHUNK]).view("u1").ravel()
            kit.put(paced, payload, handle, first, CHUNK)
            seen.append(share(paced))
        assert seen[:8] == pytest.approx([LEAST] * 8, abs=0.01)
        assert seen[12:] == [1.0, 1.0] and seen == sorted(seen) and LEAST < seen[9] < 1.0
    finally:
        os.kill(pid, signal.SIGCONT)
    kit.until(lambda: paced.ring.used == 0)
    assert share(paced) == pytest.approx(LEAST, abs=0.01)
    second = begin(paced, tmp_path / "b.zarr")
    handle.close(14 * CHUNK, token_ids=np.zeros(14 * CHUNK, np.int32))
    assert share(paced) < 1.0, "another capture is open"
    second.abort()
    assert share(paced) == 1.0
    assert paced.flush(kit.PATIENCE) and verify_store(tmp_path / "a.zarr") == []


def test_a_large_ring_is_no_reason_to_wait_longer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dmi_connector.store.pool.ROOM_BYTES", 2 << 20)
    persistence = Persistence(RING, settings=PersistSettings(least_share=LEAST))
    handle, rows = begin(persistence, tmp_path / "a.zarr"), kit.random_bits(WIDE, CHUNK).view("u1").ravel()
    writer = persistence.pool.processes[0]
    assert writer.ready.wait(kit.PATIENCE)
    os.kill(writer.pid, signal.SIGSTOP)
    for first, expected in ((0, LEAST), (CHUNK, 1.0)):
        kit.put(persistence, rows, handle, first, CHUNK)
        assert share(persistence) == pytest.approx(expected, abs=0.01)
    os.kill(writer.pid, signal.SIGCONT)
    handle.abort()
    assert persistence.shutdown(kit.PATIENCE)


def test_writers_hurry_at_the_end_whatever_is_open(tmp_path: Path) -> None:
    """A capture of several ranks stays open when its engine dies."""
    persistence = Persistence(RING, settings=PersistSettings(least_share=LEAST))
    spec = CaptureSpec(str(tmp_path / "a.zarr"), (WIDE,), {"prompt_len": 1, "model": "m"}, ranks=2)
    handle = persistence.open_capture(spec)
    kit.put(persistence, kit.random_bits(WIDE, CHUNK).view("u1").ravel(), handle, 0, CHUNK)
    assert share(persistence) == pytest.approx(LEAST, abs=0.01)
    persistence.abandon("the engine ended")
    assert handle.state == "open"
    seen: list[float] = []
    flush = persistence.flush
    persistence.flush = lambda timeout=None: (seen.append(share(persistence)), flush(timeout))[1]  # type: ignore
    assert persistence.shutdown(kit.PATIENCE) and seen == [1.0]


def test_a_capture_that_cannot_begin_is_not_waited_for(paced: Persistence, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no process"):
        patch.setattr(paced.pool, "group", lambda *_: (_ for _ in ()).throw(OSError("no process")))
        begin(paced, tmp_path / "a.zarr")
    handle = begin(paced, tmp_path / "b.zarr")
    assert share(paced) == 1.0
    kit.put(paced, kit.random_bits(WIDE, CHUNK).view("u1").ravel(), handle, 0, CHUNK)
    assert share(paced) < 1.0
    handle.abort()
    assert share(paced) == 1.0


def test_which_rows_are_of_generated_tokens(
    paced: Persistence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks up to the last row of the prompt, counted from where the capture begins, are none."""
    attrs = {"prompt_len": 3 * CHUNK, "start": CHUNK, "model": "m"}
    handle = paced.open_capture(CaptureSpec(str(tmp_path / "a.zarr"), (WIDE, LOGITS), attrs))
    sent: list[Message] = []
    post = Child.post
    monkeypatch.setattr(Child, "post", lambda child, message: (sent.append(message), post(child, message))[1])
    for first in range(0, 4 * CHUNK, CHUNK):
        kit.put(paced, kit.random_bits(WIDE, CHUNK).view("u1").ravel(), handle, first, CHUNK)
    kit.put_rows(paced, handle, "logits", kit.random_bits(LOGITS, 1), 0, 400)
    assert [m["paced"] for m in sent] == [False, False, True, True, True]
    handle.abort()


def test_generated_rows_are_written_at_leisure(paced: Persistence, tmp_path: Path) -> None:
    """A quarter of the writer's time. A busy machine only makes it less."""
    chunks, pid = 40, paced.pool.processes[0].pid
    payload = kit.random_bits(WIDE, CHUNK).view("u1").ravel()
    handle = paced.open_capture(CaptureSpec(str(tmp_path / "a.zarr"), (WIDE,), {"prompt_len": 1, "model": "m"}))
    worked, began = cpu_seconds(pid), time.monotonic()
    for number in range(chunks):
        kit.until(lambda: paced.ring.used < RING // 4)  # so that there is room all the time
        kit.put(paced, payload, handle, number * CHUNK, CHUNK)
    kit.until(lambda: paced.ring.used == 0)
    lasted, worked = time.monotonic() - began, cpu_seconds(pid) - worked
    handle.close(chunks * CHUNK, token_ids=np.zeros(chunks * CHUNK, np.int32))
    assert paced.flush(kit.PATIENCE) and verify_store(tmp_path / "a.zarr") == []
    assert worked > 0.05, "too little to say anything"
    assert worked / lasted < 0.35


def test_rows_of_prompts_are_written_without_a_rest(tmp_path: Path) -> None:
    class Rests(list[float]):
        def rest(self, worked: float) -> None:
            self.append(worked)

    ring, answers, rests = kit.random_bits(WIDE, CHUNK).view("u1").ravel(), [], Rests()
    writer = Writer(ring, answers.append, FileCache(4), rests)  # type: ignore[arg-type]
    grid = {"chunk_tokens": CHUNK, "segment_tokens": CHUNK, "codec": "zstd"}
    writer.handle({"type": "open", "id": 1, "partial": str(tmp_path), "arrays": [WIDE.to_json()], "bases": [0], **grid})
    for seq, paced in enumerate((False, True)):
        where = {"id": 1, "seq": seq, "offset": 0, "first": seq * CHUNK, "count": CHUNK}
        writer.handle({"type": "chunk", **where, "paced": paced})
        assert answers.pop() == {"ack": seq} and len(rests) == paced
    assert 0 < rests[0] < 10
