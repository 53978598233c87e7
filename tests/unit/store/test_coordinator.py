# SPDX-License-Identifier: Apache-2.0
"""The engine's side of stores with a real coordinator: its stores, and what survives when either side dies."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmi_connector.captures.capture import open_capture
from dmi_connector.layout import TOKEN_ARRAYS, ArraySpec, PayloadLayout
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.format.schema import hooks_attribute
from dmi_connector.store.read.index import find_captures
from dmi_connector.store.read.index_lines import read_index
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.client import StoreClient
from dmi_connector.store.write.coordinator import coordinator as coordinator_module
from dmi_connector.store.write.coordinator.coordinator import Coordinator, Outbox, RemoteRing, State
from dmi_connector.store.write.finish.commit import Commit
from dmi_connector.store.write.finish.repair import repair
from dmi_connector.store.write.messages import Decoder, pack_array
from dmi_connector.store.write.ring import Ring
from dmi_connector.store.write.settings import WriteSettings
from tests import storekit as kit
from tests.storekit import IDS, PATIENCE, VALUES, Q, begin, send, until

LOGITS = ArraySpec("logits", "float32", (), 32)


@pytest.fixture
def client() -> Iterator[StoreClient]:
    c = StoreClient(1 << 20, 2)
    yield c
    c.shutdown(PATIENCE)


def coordinator(client: StoreClient) -> int:
    """Wait until the coordinator runs. Returns its process id."""
    assert client._child.ready.wait(PATIENCE)
    return client._child.pid


def test_a_client_that_ended_keeps_no_memory_of_its_ring() -> None:
    """A user's process may start many engines."""
    before = open_rings()
    client = StoreClient(1 << 20)
    assert open_rings() > before
    client.shutdown(PATIENCE)
    assert open_rings() == before


def open_rings() -> int:
    """Number of descriptors and mappings of rings in this process."""
    gc.collect()
    links = (os.path.realpath(path) for path in Path("/proc/self/fd").iterdir())
    return sum("memfd:dmi-ring" in line for line in (*links, *Path("/proc/self/maps").read_text().splitlines()))


def test_coordinator_and_writers_import_no_torch_vllm_or_zarr() -> None:
    modules = "dmi_connector.store.write.coordinator.coordinator, dmi_connector.store.write.writer"
    code = f"import sys, {modules}; print(sorted({{'torch', 'vllm', 'zarr'}} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-P", "-c", code], text=True) == "[]\n"


def test_a_capture_through_the_coordinator_holds_what_was_sent(client: StoreClient, tmp_path: Path) -> None:
    capture = begin(client, tmp_path / "a.zarr", (Q, LOGITS))
    for first in (0, 128, 256):
        send(client, capture, first)
    logits = kit.random_bits(LOGITS, 3)
    extent = client.ring.alloc(logits.nbytes, PATIENCE)
    assert extent is not None
    client.ring.view(extent)[:] = logits.view("u1").ravel()
    client.rows(extent, [(capture, "logits", i, 249 + i, i * LOGITS.token_bytes) for i in range(3)])
    capture.close(300, {"logits": 3}, IDS)
    assert client.flush(PATIENCE) and capture.state == "complete" and client.ring.used == 0
    assert verify_store(tmp_path / "a.zarr") == []
    cap = open_capture(tmp_path / "a.zarr", timeout=0)
    np.testing.assert_array_equal(kit.bits(cap.numpy("q")), VALUES)
    np.testing.assert_array_equal(kit.bits(cap.numpy("logits")), logits)
    stats = client.stats()
    assert stats["started"] == 1 and stats["open"] == stats["closing"] == stats["incomplete"] == 0
    assert stats["backlog_bytes"] == 0 and stats["bytes_stored"] >= stats["bytes_raw"]
    assert stats["complete"] == 1 and stats["bytes_raw"] >= VALUES.nbytes and stats["errors"] == []


@pytest.mark.parametrize(("what", "reason"), [("token", "holds token 5, not 1"), ("position", "carry other positions")])
def test_rows_of_another_request_are_found(client: StoreClient, tmp_path: Path, what: str, reason: str) -> None:
    capture = begin(client, tmp_path / "a.zarr")
    ids = IDS.copy()
    ids[98] = 5
    send(client, capture, 0, start=int(what == "position"), ids=ids if what == "token" else IDS)
    capture.close(128, {}, IDS[:128])
    assert client.flush(PATIENCE) and capture.state == "incomplete" and reason in str(capture.reason)
    assert client.stats()["incomplete"] == client.counts()["incomplete.other"] == 1 and client.stats()["complete"] == 0
    assert not open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True).complete


def test_captures_take_root_attributes_of_their_layout(client: StoreClient, tmp_path: Path) -> None:
    layout = client.register(PayloadLayout((Q,)), {"model": "tiny", "seed": None})
    own = {"prompt_len": 3, "seed": 1}, {"prompt_len": 3}
    captures = [client.open_capture(layout, str(tmp_path / f"{n}.zarr"), attrs) for n, attrs in enumerate(own)]
    for capture in captures:
        capture.close(0, {}, [])
    assert client.flush(PATIENCE) and [capture.state for capture in captures] == ["complete"] * 2
    attrs = [read_attrs(tmp_path / f"{n}.zarr") for n in range(2)]
    assert [(one["model"], one["seed"]) for one in attrs] == [("tiny", 1), ("tiny", None)]


def test_captures_without_rows_are_incomplete_after_the_shutdown(tmp_path: Path) -> None:
    client = StoreClient(1 << 20, 1)
    client.open_capture(client.register(PayloadLayout((Q,))), str(tmp_path / "a.zarr"), {"prompt_len": 3})
    assert client.shutdown(PATIENCE)
    [found] = find_captures(tmp_path)
    assert found.state == "incomplete"


def test_ends_of_captures_travel_with_other_answers() -> None:
    """Without another message, they are delayed briefly. The reader sees messages in their original order."""
    reader, writer = os.pipe()
    outbox = Outbox(writer)
    ends = [{"done": n} for n in range(3)]
    for end in ends:
        outbox.put(end)
    outbox.put(7)
    decoder, found = Decoder(), []
    while {"free": [7]} not in found:
        found += list(decoder.feed(os.read(reader, 1 << 16)))
    assert found == [*ends, {"free": [7]}]
    outbox.put({"done": 4})
    assert list(decoder.feed(os.read(reader, 1 << 16))) == [{"done": 4}], "the end must be sent without another message"
    outbox.close()
    os.close(reader)
    os.close(writer)


def test_a_capture_that_cannot_be_opened_fails_alone(client: StoreClient, tmp_path: Path) -> None:
    bad = client.open_capture(client.register(PayloadLayout((Q,))), str(tmp_path / "not-a-store"), {"prompt_len": 3})
    extent = client.ring.alloc(100, PATIENCE)
    assert extent is not None
    bad.chunk(extent, 0, 1)
    bad.close(1, {}, [1])
    good = begin(client, tmp_path / "a.zarr")
    send(client, good, 0)
    good.close(128, {}, IDS[:128])
    assert client.flush(PATIENCE) and bad.state == "failed" and "must end in .zarr" in str(bad.reason)
    assert good.state == "complete" and client.ring.used == 0
    errors = client.stats()["errors"]
    assert errors == [str(bad.reason), f"{bad.path} is failed: {bad.reason}"], (
        "the coordinator's note must come before the end"
    )


def test_chunks_of_several_captures_share_an_extent(client: StoreClient, tmp_path: Path) -> None:
    """One capture cannot be opened, and the rows of another one are refused. The others are complete."""
    bad = client.open_capture(client.register(PayloadLayout((Q,))), str(tmp_path / "not-a-store"), {"prompt_len": 3})
    good = [begin(client, tmp_path / f"{n}.zarr") for n in range(3)]
    payload = kit.chunk_payload(0)
    size = -(-payload.nbytes // 512) * 512
    extent = client.ring.alloc(4 * size, PATIENCE)
    assert extent is not None
    for n in (1, 2, 3):
        client.ring.view(extent)[n * size : n * size + payload.nbytes] = payload
    parts = [(bad, 0, 128, 0), (good[0], 0, 128, size), (good[1], 5, 128, 2 * size), (good[2], 0, 128, 3 * size)]
    good[0].parcel(extent, parts)
    bad.close(128, {}, IDS[:128])
    for capture in good:
        capture.close(128, {}, IDS[:128])
    assert client.flush(PATIENCE) and client.ring.used == 0
    assert [capture.state for capture in (bad, *good)] == ["failed", "complete", "incomplete", "complete"]
    for n in (0, 2):
        cap = open_capture(tmp_path / f"{n}.zarr", timeout=0)
        np.testing.assert_array_equal(kit.bits(cap.numpy("q")), VALUES.view("f4")[:, :128].view("u4"))


def test_chunks_of_a_lost_capture_cost_the_others_nothing(
    client: StoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their chunks are in the same extent, and the coordinator was replaced in between."""
    monkeypatch.setattr("dmi_connector.store.write.client.SHORT_LIFE_S", 0.0)
    lost = begin(client, tmp_path / "lost.zarr")
    os.kill(coordinator(client), signal.SIGKILL)
    until(lambda: lost.state == "failed")
    good = begin(client, tmp_path / "a.zarr")
    payload = kit.chunk_payload(0)
    extent = client.ring.alloc(payload.nbytes, PATIENCE)
    assert extent is not None
    client.ring.view(extent)[:] = payload
    lost.parcel(extent, [(lost, 0, 128, 0), (good, 0, 128, 0)])
    good.close(128, {}, IDS[:128])
    assert client.flush(PATIENCE) and good.state == "complete" and client.ring.used == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_capture_that_cannot_be_closed_still_ends(client: StoreClient, tmp_path: Path, ranks: int) -> None:
    """It keeps its rows. With several ranks it fails, because no rank knows the rows of the others."""
    layout = client.register(PayloadLayout((Q,), segment_tokens=256))
    attrs = {"prompt_len": 250, "model": "tiny"}
    capture = client.open_capture(layout, str(tmp_path / "a.zarr"), attrs, "r", "k", 0, ranks)
    send(client, capture, 0)
    capture.close(300, {}, IDS[:299])
    assert client.flush(PATIENCE) and client.ring.used == 0
    assert capture.state == ("incomplete" if ranks == 1 else "failed") and "299 token_ids" in str(capture.reason)
    if ranks == 1:
        found = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
        assert "299 token_ids" in str(found.reason)
        np.testing.assert_array_equal(kit.bits(found.numpy("q")), VALUES.view("f4")[:, :128].view("u4"))
    again = begin(client, tmp_path / "b.zarr")
    send(client, again, 0)
    again.close(128, {}, IDS[:128])
    assert client.flush(PATIENCE) and again.state == "complete"


def test_a_killed_coordinator_fails_open_captures_and_is_replaced(
    client: StoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmi_connector.store.write.client.SHORT_LIFE_S", 0.0)
    lost = begin(client, tmp_path / "lost.zarr")
    send(client, lost, 0)
    os.kill(coordinator(client), signal.SIGKILL)
    until(lambda: lost.state == "failed")
    assert lost.reason == "the coordinator died (killed)"
    send(client, lost, 128)  # it is dropped, and does not fill the ring
    lost.close(256, {}, IDS[:256])
    again = begin(client, tmp_path / "again.zarr")
    send(client, again, 0)
    again.close(128, {}, IDS[:128])
    assert client.flush(PATIENCE) and again.state == "complete" and client.ring.used == 0
    found = {c.store.name: c for c in find_captures(tmp_path)}
    assert found["lost.zarr"].reason == "the coordinator died (killed)", found
    [line] = [line for line in read_index(tmp_path) if line["store"] == "lost.zarr" and line["event"] == "finish"]
    assert isinstance(line.pop("finished"), str)
    told = {"state": "failed", "reason": "the coordinator died (killed)", "key": "k", "request_id": "r"}
    assert line == {"event": "finish", "store": "lost.zarr", **told}


@pytest.mark.parametrize("kind", ["complete", "incomplete", "foreign"])
def test_a_store_that_was_there_when_its_coordinator_died_is_known(
    client: StoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The engine learns of the end of a capture later. A store of another request is not mistaken for it."""
    monkeypatch.setattr("dmi_connector.store.write.client.SHORT_LIFE_S", 0.0)
    losses = [Loss.of(Cause.FELL_BEHIND, [[0, 5]])] if kind == "incomplete" else []
    store = kit.Store()
    key = "other" if kind == "foreign" else "k"
    store.write(tmp_path / "from/a.zarr", [Q], 300, values={"q": VALUES}, request_id="r", key=key, losses=losses)
    assert store.shutdown()
    capture = begin(client, tmp_path / "a.zarr")
    send(client, capture, 0)
    until(lambda: not client.ring.used)
    os.kill(coordinator(client), signal.SIGSTOP)
    capture.close(300, {}, IDS)
    (tmp_path / "from/a.zarr").rename(tmp_path / "a.zarr")
    os.kill(coordinator(client), signal.SIGKILL)
    assert client.flush(PATIENCE) and capture.state == (kind if kind != "foreign" else "failed")
    assert client.stats()["failed"] == (kind == "foreign") and client.shutdown(PATIENCE)
    finish = [line for line in read_index(tmp_path) if line["event"] == "finish"]
    assert [line["state"] for line in finish] == [capture.state]
    if kind == "foreign":
        assert capture.reason == "the coordinator died (killed)"
    else:
        [written] = [line for line in read_index(tmp_path / "from") if line["event"] == "finish"]
        assert finish == [written] and capture.reason == written["reason"]


def test_captures_fail_after_a_coordinator_died_soon_after_its_start(
    client: StoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index has these captures too. Otherwise a bulk run would wait for their stores."""
    monkeypatch.setattr("dmi_connector.store.write.client.SHORT_LIFE_S", 1e9)
    os.kill(coordinator(client), signal.SIGSTOP)
    lost = begin(client, tmp_path / "lost.zarr")
    os.kill(coordinator(client), signal.SIGKILL)
    until(lambda: client._broken is not None)
    capture = begin(client, tmp_path / "a.zarr")
    assert capture.state == "failed" and "nothing is captured until the engine is started again" in str(capture.reason)
    stats = client.stats()
    assert (stats["started"], stats["failed"], stats["open"]) == (2, 2, 0) and len(stats["errors"]) == 3
    send(client, capture, 0)
    assert client.ring.used == 0
    until(lambda: len(find_captures(tmp_path)) == 2)
    found = {info.store.name: info for info in find_captures(tmp_path)}
    assert {info.state for info in found.values()} == {"failed"}
    assert found["lost.zarr"].reason == lost.reason and found["a.zarr"].reason == capture.reason


def test_captures_fail_if_no_other_coordinator_can_be_started(
    client: StoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of their rows is free again, also that of rows which come later."""
    monkeypatch.setattr("dmi_connector.store.write.client.SHORT_LIFE_S", 0.0)
    closing, lost = begin(client, tmp_path / "closing.zarr"), begin(client, tmp_path / "lost.zarr")
    os.kill(coordinator(client), signal.SIGSTOP)
    send(client, closing, 0)
    closing.close(128, {}, IDS[:128])
    descriptors = len(os.listdir("/proc/self/fd"))

    def no_process(*args: Any, **named: Any) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr("dmi_connector.store.write.client.Child", no_process)
    os.kill(coordinator(client), signal.SIGKILL)
    until(lambda: client._broken is not None)
    assert (closing.state, lost.state) == ("failed", "failed")
    assert "cannot be started: no more processes: nothing is captured until" in str(client._broken)
    assert len(os.listdir("/proc/self/fd")) < descriptors
    later = begin(client, tmp_path / "later.zarr")
    send(client, later, 0)
    assert later.state == "failed" and client.ring.used == 0
    until(lambda: {info.state for info in find_captures(tmp_path)} == {"failed"})


def test_the_coordinator_ignores_signals_and_has_its_own_process_group(client: StoreClient, tmp_path: Path) -> None:
    begin(client, tmp_path / "first.zarr").close(0)
    assert client.flush(PATIENCE)  # the coordinator is running now
    capture = begin(client, tmp_path / "a.zarr")
    send(client, capture, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(coordinator(client), number)
    capture.close(128, {}, IDS[:128])
    assert client.flush(PATIENCE) and capture.state == "complete"
    assert os.getpgid(coordinator(client)) != os.getpgid(0)


def test_captures_of_a_killed_engine_keep_every_row_that_came(tmp_path: Path) -> None:
    """Closed captures are complete, open ones are incomplete."""
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[3])!r})
from pathlib import Path
from tests.unit.store import test_coordinator as t
client = t.StoreClient(1 << 20, 2)
whole, part = (t.begin(client, Path({str(tmp_path)!r}) / f"{{n}}.zarr") for n in ("whole", "part"))
for first in (0, 128, 256):
    t.send(client, whole, first)
whole.close(300, {{}}, t.IDS)
for first in (0, 128):
    t.send(client, part, first)
t.until(lambda: client.ring.used == 0)  # the last rows have arrived, and with them what was sent before
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    whole = open_capture(tmp_path / "whole.zarr", timeout=PATIENCE)
    np.testing.assert_array_equal(kit.bits(whole.numpy("q")), VALUES)
    part = open_capture(tmp_path / "part.zarr", timeout=PATIENCE, allow_incomplete=True)
    assert part.reason == "the engine ended before the request did" and list(part.token_ids) == list(IDS[:256])
    np.testing.assert_array_equal(kit.bits(part.numpy("q")), VALUES[:, :256])
    for store in ("whole", "part"):
        assert verify_store(tmp_path / f"{store}.zarr") == []


def test_rows_that_another_rank_gave_up_are_missing(tmp_path: Path) -> None:
    clients = [StoreClient(1 << 20, 1) for _ in range(2)]
    captures = []
    for rank, client in enumerate(clients):
        spec = ArraySpec("q", "float32", (0, 1), 128, 2, rank)
        layout = client.register(PayloadLayout((spec,), segment_tokens=256, codec="none"))
        attrs = {"prompt_len": 250, "start": 0, "model": "tiny"}
        captures.append(client.open_capture(layout, str(tmp_path / "a.zarr"), attrs, "r", None, rank, 2))
        for first in (0, 256) if rank else (0, 128, 256):
            send(client, captures[-1], first)
    captures[1].close(300, {}, IDS, losses=[Loss.of(Cause.FELL_BEHIND, [[128, 256]])])
    captures[0].close(300, {}, IDS)
    assert all([client.flush(PATIENCE) for client in clients])
    assert [c.state for c in captures] == ["incomplete", "incomplete"]
    capture = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    assert capture.missing == [[128, 256]] and capture.reason == "rank 1: writing fell behind (policy drop)"
    assert verify_store(tmp_path / "a.zarr") == []
    assert all([client.shutdown(PATIENCE) for client in clients])


def test_the_coordinator_runs_on_all_cores_of_the_process_that_started_the_worker(tmp_path: Path) -> None:
    """vLLM binds a CPU worker to one core."""
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[3])!r})
from tests.unit.store import test_coordinator as t
every = os.sched_getaffinity(0)
os.sched_setaffinity(0, {{min(every)}})
client = t.StoreClient(1 << 20)
assert os.sched_getaffinity(t.coordinator(client)) == every
assert client.shutdown(t.PATIENCE)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_coordinator_has_the_memory_of_the_ring_and_frees_an_extent_after_its_last_user() -> None:
    ring, freed = Ring(1 << 16), []
    remote = RemoteRing(ring.fd, ring.nbytes, SimpleNamespace(put=freed.append))  # type: ignore[arg-type]
    assert remote.used == 0
    a, b = remote.take(1, 4096, 4096), remote.take(2, 8192, 100)
    assert (a.offset, b.nbytes, remote.used) == (4096, 100, 8192)
    remote.memory[8192] = 7
    assert ring.memory[8192] == 7 and remote.view(b)[0] == 7
    remote.release(b)
    assert freed == [2] and remote.used == 8192, "space after an extent in use must not be free"
    remote.add_users(a)
    remote.release(a)
    assert freed == [2]
    remote.release(a)
    assert freed == [2, 1] and remote.used == 0
    ring.close()


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 16 * 4096)), max_size=80))
def test_the_coordinator_counts_the_ring_as_the_engine_does(steps: list[tuple[bool, int]]) -> None:
    """This includes alignment, and the gap at the end of the ring where an extent did not fit."""
    ring, extents, taken = Ring(1 << 16), {}, []
    remote = RemoteRing(ring.fd, ring.nbytes, SimpleNamespace(put=lambda n: ring.release(extents.pop(n))))  # type: ignore[arg-type]
    for number, (takes, size) in enumerate(steps):
        if not takes and taken:
            remote.release(taken.pop(size % len(taken)))
        elif (extent := ring.alloc(size % 20_000, 0)) is not None:
            extents[number] = extent
            taken.append(remote.take(number, extent.offset, extent.nbytes))
        assert remote.used == ring.used
    ring.close()


def test_a_late_rank_keeps_what_it_may_still_write(tmp_path: Path) -> None:
    """Arrays are not rebuilt from journals that another rank may still be writing."""
    partial = tmp_path / "a.zarr.partial"
    partial.mkdir()
    spec = ArraySpec("q", "float32", (0,), 8, 2)
    arrays = {name: pack_array(np.zeros(0, dtype)) for name, dtype in TOKEN_ARRAYS.items()}
    attrs = {"hooks": hooks_attribute([spec]), "num_tokens": 0, "complete": True, "reason": None, "missing": []}
    message = {"partial": str(partial), "final": str(tmp_path / "a.zarr"), "files": {}, "attrs": attrs}
    message |= {"arrays": arrays, "samples": {}, "ranks": 2, "rank_timeout": 0, "fsync": False, "bytes_raw": 0}
    answer = Commit.start({**message, "losses": []}).run(lambda *_: pytest.fail("rank 1 may still write"))
    reason = "ranks [1] did not finish in 0 s; hooks without data: q"
    assert answer == {"complete": False, "reason": reason, "label": "other"}


def writers(client: StoreClient) -> list[psutil.Process]:
    return [p for p in psutil.Process(coordinator(client)).children(recursive=True) if p.name() == "dmi-writer"]


def test_shutdown_writes_everything(tmp_path: Path) -> None:
    """It comes right after the last message, without any wait before."""
    client = StoreClient(32 << 20, 2)
    for i in range(40):
        capture = begin(client, tmp_path / f"{i}.zarr")
        for first in (0, 128, 256):
            send(client, capture, first)
        capture.close(300, {}, IDS)
    began = time.monotonic()
    assert client.shutdown()
    print(f"40 captures were finished {time.monotonic() - began:.2f} s after the end of the engine")
    assert [info.state for info in find_captures(tmp_path)] == ["complete"] * 40
    assert all(verify_store(path) == [] for path in tmp_path.glob("*.zarr"))


def test_the_shutdown_ends_in_time_when_writers_hang(tmp_path: Path) -> None:
    client = StoreClient(1 << 20, 2, WriteSettings(shutdown_seconds=1))
    capture = begin(client, tmp_path / "a.zarr")
    send(client, capture, 0)
    until(lambda: not client.ring.used and len(writers(client)) == 2)
    stuck = writers(client)
    assert len(stuck) == 2 and not client.ring.used
    for process in stuck:
        process.suspend()
    send(client, capture, 128)
    capture.close(256, {}, IDS[:256])
    began = time.monotonic()
    assert not client.shutdown()
    took = time.monotonic() - began
    assert took < 30, f"{took:.1f} s; without the limit, it would be 60 s"
    assert not [p for p in stuck if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not (tmp_path / "a.zarr").exists()
    [outcome] = repair(tmp_path)
    assert (outcome.state, outcome.num_tokens) == ("salvaged", 128), outcome
    salvaged = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    np.testing.assert_array_equal(kit.bits(salvaged.numpy("q")), VALUES[:, :128])
    assert not salvaged.complete


ENDS = [("stop", True), ("length", True), ("repetition", True), ("abort", False), (None, False)]


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(("finish_reason", "own"), ENDS)
def test_a_store_is_whole_for_the_uploads_if_it_is_complete_and_its_request_ended(
    finish_reason: str | None, own: bool, complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for the coordinator that wrote the store, and for one that replaced a dead coordinator."""
    added: list[Any] = []
    coordinator = object.__new__(Coordinator)
    coordinator.uploads = SimpleNamespace(add=lambda *given: added.append(given))  # type: ignore[assignment]
    coordinator.outbox = SimpleNamespace(put=lambda message: None)  # type: ignore[assignment]
    attrs = {"finish_reason": finish_reason, "complete": complete, "reason": None}
    state = State.COMPLETE if complete else State.INCOMPLETE
    facts = {"final": "a.zarr", "rank": 0, "ranks": 2, "state": state, "end": SimpleNamespace(attrs=attrs)}
    record: Any = SimpleNamespace(**facts, client_number=1, reason=None, label=None, bytes_raw=9, bytes_stored=5)
    coordinator._on_done(record)
    monkeypatch.setattr(coordinator_module, "finished_attrs", lambda *_: attrs)
    monkeypatch.setattr(coordinator_module, "raw_bytes", lambda *_: 9)
    monkeypatch.setattr(coordinator_module, "listed_bytes", lambda *_: 10)
    monkeypatch.setattr(coordinator_module, "append_finish", lambda *_: None)
    coordinator._lost(1, "a.zarr", "r", None, 0, "died")
    assert added == [("a.zarr", 10, own and complete)] * 2
