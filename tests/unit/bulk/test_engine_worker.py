# SPDX-License-Identifier: Apache-2.0
"""The actor of an engine process on a Ray cluster: its start, its messages and its end. The process is fake."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dmi_connector.bulk import engine_worker
from dmi_connector.bulk.engine_worker import EngineWorker
from dmi_connector.bulk.engines import PROCESS
from dmi_connector.store.format.locks import LIFE_LOCK

DEAD = ("exit status 3", 3)


class FakeChild:
    """A fake child process that records calls. on_message, on_death: the callbacks that it was given."""

    made: ClassVar[list[FakeChild]] = []

    def __init__(self, *given: Any, env: dict[str, str]) -> None:
        self.given, self.on_message, self.on_death, self.env = given[:4], given[4], given[5], env
        self.asked: list[Any] = []
        self.status: int | None = None
        self.made.append(self)

    def post(self, message: Any) -> None:
        self.asked.append(message)

    def finish(self) -> None:
        self.asked.append("finish")

    def kill(self) -> None:
        self.asked.append("kill")

    def die(self, how: str, status: int | None) -> None:
        self.status = status
        self.on_death(self, how)


class Clock:
    """A fake clock that only advances in `sleep`. wakes: called at the end of each sleep."""

    def __init__(self) -> None:
        self.now, self.sleeps = 100.0, list[float]()
        self.wakes: Any = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds
        self.wakes()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(engine_worker, "time", made)
    return made


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[dict[str, Any]]:
    """The arguments of the worker's threads. None of them runs."""
    found: list[dict[str, Any]] = []

    class Thread:
        def __init__(self, **given: Any) -> None:
            self.given = given

        def start(self) -> None:
            found.append(self.given)

    monkeypatch.setattr(engine_worker.threading, "Thread", Thread)
    monkeypatch.setattr(engine_worker, "Child", FakeChild)
    monkeypatch.setattr(FakeChild, "made", [])
    return found


def make(folder: Path, **more: Any) -> tuple[EngineWorker, FakeChild]:
    for name in ("life", "life.worker"):
        (folder / name).touch()
    lives = [str(folder / "life"), str(folder / "life.worker")]
    worker = EngineWorker("the.log", lives, {"model": "m"}, **more)
    [child] = FakeChild.made
    return worker, child


def test_a_worker_starts_its_engine_with_locks_and_its_first_message(
    threads: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_RUN", "yes")
    worker, child = make(tmp_path)
    assert child.given == ("engine", PROCESS, ["--parent", str(os.getpid()), "--log", "the.log"], [])
    assert child.env == {**os.environ, LIFE_LOCK: f"{tmp_path}/life\n{tmp_path}/life.worker"}
    assert child.asked == [{"start": {"model": "m"}}]
    assert [(thread["target"], thread["daemon"]) for thread in threads] == [(worker._watch, True)]


def test_messages_go_to_the_engine_in_order_and_none_ends_it(threads: Any, tmp_path: Path) -> None:
    worker, child = make(tmp_path)
    worker.post({"position": 1})
    worker.post({})
    worker.post(None)
    assert child.asked[1:] == [{"position": 1}, {}, "finish"]


def test_events_are_the_messages_since_the_last_call(
    threads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages come before the end, which is returned once."""
    monkeypatch.setattr(engine_worker, "ASK_S", 0.0)
    worker, child = make(tmp_path)
    assert worker.events() == ([], None)
    for number in range(3):
        child.on_message(child, {"ended": number})
    assert worker.events() == ([{"ended": 0}, {"ended": 1}, {"ended": 2}], None)
    child.on_message(child, {"ended": 3})
    child.die(*DEAD)
    assert worker.events() == ([{"ended": 3}], DEAD)
    assert worker.events() == ([], None)
    child.die("signal 9", None)
    assert worker.events() == ([], ("signal 9", None))


def test_only_the_first_message_is_waited_for(threads: Any, tmp_path: Path) -> None:
    worker, _ = make(tmp_path)
    waits = list[float]()

    class Outbox:
        items: ClassVar[list[Any]] = [{"a": 1}, {"b": 2}]

        def get(self, timeout: float) -> Any:
            waits.append(timeout)
            if not self.items:
                raise engine_worker.queue.Empty
            return self.items.pop(0)

    worker._outbox = Outbox()  # type: ignore[assignment]
    assert worker.events() == ([{"a": 1}, {"b": 2}], None) and waits == [5.0, 0.0, 0.0]
    assert worker.events() == ([], None) and waits == [5.0, 0.0, 0.0, 5.0]


def test_an_engine_without_calls_is_killed(
    threads: Any, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is a minute after the start or the last call of `events`."""
    monkeypatch.setattr(engine_worker, "ASK_S", 0.0)
    worker, child = make(tmp_path)
    asks = [lambda: worker.events(), lambda: child.asked.append("not yet")]
    clock.wakes = lambda: asks.pop(0)() if asks else None
    clock.now += 20
    worker._watch()
    assert clock.sleeps == [40.0, 60.0] and child.asked[1:] == ["not yet", "kill"]


def test_a_node_with_another_directory_starts_no_engine(threads: Any, tmp_path: Path) -> None:
    (tmp_path / "life").touch()
    lives = [str(tmp_path / "life"), str(tmp_path / "gone/life"), str(tmp_path / "lost/life")]
    worker = EngineWorker("the.log", lives, {})
    why = f"--out {tmp_path}/gone: node {socket.gethostname()} has another directory there; give a shared one"
    assert worker.events() == ([{"failed": why}], ("no engine was started", 1))
    worker.post({"position": 1})
    worker.post(None)
    assert FakeChild.made == [] and threads == []
