# SPDX-License-Identifier: Apache-2.0
"""Layouts that are forgotten: memory does not grow with their number, and captures are not affected."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dmi_connector.captures.capture import open_capture
from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.arrays.shard_writer import FileCache
from dmi_connector.store.write.child_process import Child
from dmi_connector.store.write.client import OpenCapture, StoreClient
from dmi_connector.store.write.coordinator.coordinator import Coordinator, Outbox, RemoteRing
from dmi_connector.store.write.messages import Message, pack_array
from dmi_connector.store.write.ring import Ring
from dmi_connector.store.write.settings import WriteSettings
from dmi_connector.store.write.writer import Writer
from tests import storekit as kit
from tests.storekit import IDS, PATIENCE, VALUES, Q, until

KEPT = 8


@pytest.fixture
def client() -> Iterator[StoreClient]:
    c = StoreClient(4 << 20, 2)
    yield c
    c.shutdown(PATIENCE)


def layout_of(number: int) -> PayloadLayout:
    """Layouts that differ in the layers of one array. Their payloads are those of `kit.Q`."""
    return PayloadLayout((ArraySpec("q", "float32", (number, number + 1), 64),), segment_tokens=256, codec="none")


def begin(client: StoreClient, layout: int, path: Path) -> OpenCapture:
    return client.open_capture(layout, str(path), {"prompt_len": 100, "start": 0})


def finish(client: StoreClient, capture: OpenCapture) -> None:
    kit.send(client, capture, 0)
    capture.close(128, {}, IDS[:128])


def check(path: Path, number: int) -> None:
    """Check the store of `finish` with layout `number`."""
    assert verify_store(path) == []
    with open_capture(path, timeout=0) as found:
        assert found.layers["q"] == [number, number + 1]
        np.testing.assert_array_equal(kit.bits(found.numpy("q")), kit.bits(VALUES[:, :128]))


def coordinator(client: StoreClient) -> int:
    """Wait until the coordinator runs. Returns its process id."""
    assert client._child.ready.wait(PATIENCE)
    return client._child.pid


def writers(client: StoreClient) -> list[psutil.Process]:
    """Wait until all writers run. Returns their processes."""
    parent = psutil.Process(coordinator(client))
    until(lambda: [p.name() for p in parent.children()] == ["dmi-writer"] * client.writers)
    return parent.children()


# ---- the client -----------------------------------------------------------------------------------------------------


def test_captures_of_many_layouts_are_whole_and_few_layouts_are_kept(client: StoreClient, tmp_path: Path) -> None:
    """Each layout is forgotten some captures later, when its captures may still be written."""
    known: list[int] = []
    for number in range(100):
        known.append(client.register(layout_of(number)))
        capture = begin(client, known[-1], tmp_path / f"{number}.zarr")
        if len(known) > KEPT:
            client.forget(known.pop(0))
        finish(client, capture)
    assert list(client._layouts) == known and len(known) == KEPT
    assert client.flush(PATIENCE) and client.stats()["complete"] == 100 and client.stats()["errors"] == []
    for number in range(100):
        check(tmp_path / f"{number}.zarr", number)


def test_a_layout_may_be_forgotten_while_its_last_captures_are_written(client: StoreClient, tmp_path: Path) -> None:
    """The writers have not opened them yet, and one capture is still fed."""
    layout = client.register(layout_of(5))
    suspended = writers(client)
    for process in suspended:
        process.suspend()
    captures = [begin(client, layout, tmp_path / f"{n}.zarr") for n in range(3)]
    finish(client, captures[0])
    client.forget(layout)
    finish(client, captures[1])
    other = client.register(layout_of(9))
    for process in suspended:
        process.resume()
    finish(client, captures[2])
    captures.append(begin(client, other, tmp_path / "3.zarr"))
    finish(client, captures[3])
    assert client.flush(PATIENCE) and [c.state for c in captures] == ["complete"] * 4
    for n, number in enumerate((5, 5, 5, 9)):
        check(tmp_path / f"{n}.zarr", number)


def test_a_new_coordinator_knows_the_layouts_that_were_not_forgotten(
    client: StoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of layouts do not change, whether others were forgotten before or while there was no coordinator."""
    monkeypatch.setattr("dmi_connector.store.write.client.SHORT_LIFE_S", 0.0)
    layouts = {number: client.register(layout_of(number)) for number in range(6)}
    for number in (0, 3):
        client.forget(layouts.pop(number))
    lost = begin(client, layouts[1], tmp_path / "lost.zarr")
    old = client._child
    os.kill(coordinator(client), signal.SIGKILL)
    client.forget(layouts.pop(4))
    until(lambda: lost.state == "failed" and client._child is not old)
    client.forget(layouts.pop(5))
    layouts[7] = client.register(layout_of(7))
    captures = {n: begin(client, layout, tmp_path / f"{n}.zarr") for n, layout in layouts.items()}
    for capture in captures.values():
        finish(client, capture)
    assert client.flush(PATIENCE) and sorted(captures) == [1, 2, 7]
    for number, capture in captures.items():
        assert capture.state == "complete", capture.reason
        check(tmp_path / f"{number}.zarr", number)
    assert len(client._layouts) == 3


def test_a_capture_of_a_forgotten_layout_fails_alone(client: StoreClient, tmp_path: Path) -> None:
    first, second = client.register(layout_of(1)), client.register(layout_of(2))
    client.forget(first)
    with pytest.raises(KeyError):
        client.forget(first)
    bad, good = begin(client, first, tmp_path / "a.zarr"), begin(client, second, tmp_path / "b.zarr")
    for capture in (bad, good):
        finish(client, capture)
    assert client.flush(PATIENCE) and (bad.state, good.state) == ("failed", "complete")
    assert f"layout {first} is not known" in str(bad.reason)


def test_layouts_for_a_coordinator_that_is_not_replaced_take_no_memory(
    client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmi_connector.store.write.client.SHORT_LIFE_S", 1e9)
    os.kill(coordinator(client), signal.SIGKILL)
    until(lambda: client._broken and client._child._deaf)
    waiting = client._child._queue.qsize()
    for number in range(50):
        client.forget(client.register(layout_of(number)))
    assert client._child._queue.qsize() == waiting and client._layouts == {}


# ---- memory of the processes ----------------------------------------------------------------------------------------


def test_coordinator_and_writers_keep_few_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator runs in this process. A second writer gets the messages that are sent to the real one."""
    posted: list[Message] = []
    post = Child.post
    monkeypatch.setattr(Child, "post", lambda child, m: (posted.append(m), post(child, m))[1])
    ring, (life, other) = Ring(4 << 20), os.pipe()
    reader, answers = os.pipe()
    outbox = Outbox(answers)
    coordinator = Coordinator(RemoteRing(ring.fd, ring.nbytes, outbox), outbox, 1, WriteSettings(), life)
    writer = Writer(np.zeros(0, "u1"), lambda _: None, FileCache(4), None)  # type: ignore[arg-type]
    captures, most = coordinator.captures, [0, 0, 0]
    layout: Any
    for number in range(1, 301):
        layout = layout_of(number).to_json()
        coordinator.handle({"type": "layout", "number": number, "layout": layout, "attrs": {"model": "m" * 1000}})
        opened = {"id": number, "final": str(tmp_path / f"{number}.zarr"), "attrs": {"prompt_len": 0}}
        coordinator.handle({"type": "open", "layout": number, **opened})
        if number > KEPT:
            coordinator.handle({"type": "forget", "layout": number - KEPT})
        end = {"length": 0, "samples": {}, "token_ids": pack_array(np.zeros(0, "<i4")), "attrs": {}, "losses": []}
        coordinator.handle({"type": "close", "id": number, **end})
        for message in posted:
            if message["type"] in ("layout", "forget"):
                writer.handle(message)
        posted.clear()
        sizes = len(coordinator._layouts), len(captures.pool._layouts), len(writer._layouts)
        most = [max(pair) for pair in zip(most, sizes, strict=True)]
    assert most == [KEPT, KEPT, KEPT]
    assert captures.flush(PATIENCE) and captures.stats()["complete"] == 300 and captures.stats()["errors"] == []
    assert captures.shutdown(PATIENCE)
    assert b'"done"' in os.read(reader, 1 << 16)
    outbox.close()
    ring.close()
    for fd in (life, other, reader, answers):
        os.close(fd)


def test_a_layout_is_kept_until_its_captures_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other writers then open later segments. One of these writers is new."""
    monkeypatch.setattr("dmi_connector.store.write.coordinator.writer_pool.SEGMENT_BYTES", 1)
    stores = kit.Store(4 << 20, writers=3)
    values = {"q": kit.random_bits(Q, 1400)}
    record = stores.open(tmp_path / "a.zarr", Q)
    aborted = stores.captures.open(record.layout_number, str(tmp_path / "b.zarr"), {"prompt_len": 1})
    stores.captures.forget(record.layout_number)
    busy = [each.assignments[0].process for each in (record, aborted)]
    [idle] = [process for process in stores.pool.processes if process not in busy]
    idle.kill()
    until(lambda: not stores.pool.alive(idle))
    stores.feed(record, values, 1400)
    assert len({a.process for a in record.assignments}) == 3 and stores.stats()["writers_died"] == 1
    assert list(stores.pool._layouts) == [record.layout_number]
    stores.close(record, 1400)
    assert list(stores.pool._layouts) == [record.layout_number]
    stores.abort(aborted)
    assert stores.pool._layouts == {} and stores.captures._unwanted == set()
    assert stores.flush(PATIENCE) and record.state == "complete", record.reason
    assert verify_store(tmp_path / "a.zarr") == []
    with open_capture(tmp_path / "a.zarr", timeout=0) as found:
        np.testing.assert_array_equal(kit.bits(found.numpy("q")), values["q"])
    with pytest.raises(KeyError):
        stores.captures.forget(record.layout_number)
    assert stores.shutdown()
