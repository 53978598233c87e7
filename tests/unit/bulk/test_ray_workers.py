# SPDX-License-Identifier: Apache-2.0
"""Engines on a cluster with a fake Ray: the requested resources, and workers that die."""

from __future__ import annotations

import logging
import os
import queue
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dmi_connector.bulk import ray_workers
from dmi_connector.bulk.engine_worker import EngineWorker
from dmi_connector.bulk.engines import Answer, Death
from dmi_connector.bulk.ray_workers import Needs, RayWorkers, connected
from dmi_connector.store.format.locks import lock_alone
from tests.storekit import PATIENCE

START = {"model": "m"}
ENDED = {"prompt_tokens": 1, "generated_tokens": 1, "finish_reason": "stop", "store": None, "error": None}


class RayError(Exception):
    """Fake of Ray's exception."""


class Actor:
    """A fake `EngineWorker` on a node. `tell` and `end` add results of its `events`."""

    def __init__(self, ray: FakeRay, options: dict[str, Any], made_of: type, arguments: tuple[Any, ...]) -> None:
        self.options, self.made_of, self.arguments = options, made_of, arguments
        self.said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sent: list[Any] = []
        self.groups: set[tuple[str, str]] = set()
        self.post, self.events = (self._method(name) for name in ("post", "events"))
        ray.actors.append(self)

    def _method(self, name: str) -> Any:
        def options(concurrency_group: str) -> Any:
            self.groups.add((name, concurrency_group))
            return SimpleNamespace(remote=self.sent.append if name == "post" else lambda: self.said.get)

        return SimpleNamespace(options=options)

    def tell(self, *messages: dict[str, Any]) -> None:
        self.said.put((list(messages), None))

    def end(self, how: str, status: int | None) -> None:
        self.said.put(([], (how, status)))


class FakeRay:
    """A fake of the module `ray`. there: the resources of the cluster. refuses: the exception that `init` raises."""

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.actors: list[Actor] = []
        self.inits: list[dict[str, Any]] = []
        self.shutdowns = 0
        self.there: dict[str, float] = {"CPU": 8.0}
        self.refuses: Exception | None = None

    def init(self, **options: Any) -> None:
        self.inits.append(options)
        if self.refuses is not None:
            raise self.refuses

    def cluster_resources(self) -> dict[str, float]:
        return self.there

    def shutdown(self) -> None:
        self.shutdowns += 1

    def remote(self, **options: Any) -> Any:
        return lambda made_of: SimpleNamespace(remote=lambda *given: Actor(self, options, made_of, given))

    def get(self, asked: Callable[[], Any]) -> Any:
        found = asked()
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self, actor: Actor) -> None:
        actor.said.put(RayError("The actor died because it was killed by `ray.kill`."))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    return fake


# ---- the cluster ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "cpus", "gpus", "needs", "room"),
    [
        ({"CPU": 8.0}, 3, 1, Needs(3, 0), 2),
        ({"CPU": 8.0, "GPU": 0.0}, 1, 2, Needs(1, 0), 8),
        ({"CPU": 8.0, "GPU": 5.0}, 1, 2, Needs(1, 2), 2),
        ({"CPU": 3.0, "GPU": 8.0}, 1, 2, Needs(1, 2), 3),
        ({"GPU": 8.0}, 1, 1, Needs(1, 1), 0),
        ({"CPU": 8.0, "GPU": 1.0}, 1, 0, Needs(1, 0), 8),
    ],
)
def test_a_cluster_has_room_for_as_many_as_its_resources(
    ray: FakeRay, there: dict[str, float], cpus: int, gpus: int, needs: Needs, room: int
) -> None:
    ray.there = there
    with connected("auto", 99, cpus, gpus) as found:
        assert found == (needs, room) and ray.shutdowns == 0
    assert ray.shutdowns == 1
    assert ray.inits == [{"address": "auto", "log_to_driver": False, "logging_level": logging.WARNING}]


def test_a_local_cluster_is_made_for_the_workers(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's usage statistics are off unless the user turns them on."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    with connected("local", 2, 3, 0) as found:
        assert found == (Needs(3, 0), 2) and os.environ["RAY_USAGE_STATS_ENABLED"] == "1"
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    ray.there = {"CPU": 6.0, "GPU": 3.0}
    few = r"--workers 2: there are 3 GPUs, and each worker takes 2; give fewer workers"
    with pytest.raises(ValueError, match=few), connected("local", 2, 3, 2):
        pass
    assert os.environ.pop("RAY_USAGE_STATS_ENABLED") == "0" and ray.shutdowns == 2
    own = {"num_cpus": 6, "include_dashboard": False, "object_store_memory": 128 << 20}
    common = {"address": "local", "log_to_driver": False, "logging_level": logging.WARNING}
    assert ray.inits == [{**common, **own}] * 2
    ray.there = {"CPU": 6.0, "GPU": 4.0}
    with connected("local", 2, 3, 2) as found:
        assert found == (Needs(3, 2), 2)
    os.environ.pop("RAY_USAGE_STATS_ENABLED")
    ray.there = {"CPU": 6.0, "GPU": 2.0}
    with connected("10.0.0.1:6379", 2, 3, 2) as found:
        assert found == (Needs(3, 2), 1), "clusters may grow later"


def test_a_cluster_that_cannot_be_joined_is_named(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.refuses = ConnectionError("no\n  such host")
    why = r"--ray a:1: the cluster cannot be joined \(no such host\); give HOST:PORT"
    with pytest.raises(ValueError, match=why), connected("a:1", 1, 1, 0):
        pass
    with pytest.raises(ValueError, match="ray://a:1: a run cannot be a Ray client"), connected("ray://a:1", 1, 1, 0):
        pass
    assert len(ray.inits) == 1 and ray.shutdowns == 0
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"ray is not installed in this environment"), connected("auto", 1, 1, 0):
        pass


# ---- workers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def workers(ray: FakeRay, tmp_path: Path) -> Iterator[RayWorkers]:
    pool = RayWorkers(2, Needs(3, 1), START, tmp_path, tmp_path / "life", "-0-of-2")
    yield pool
    for actor in ray.actors:
        actor.end("exit status 0", 0)
    pool.close()


def events(pool: RayWorkers) -> list[Answer | Death]:
    return pool.events(PATIENCE)


def started(ray: FakeRay) -> list[str]:
    """The names of the workers' locks, one per start, without their common prefix."""
    return [Path(actor.arguments[1][1]).name.removeprefix("life.worker-") for actor in ray.actors]


def test_workers_are_actors_with_locks_of_their_own(workers: RayWorkers, ray: FakeRay, tmp_path: Path) -> None:
    (tmp_path / "life.worker-7-1").touch()  # left by a run that was killed
    (tmp_path / "engine-0-of-2-1.log").write_text("earlier")
    workers.start()
    assert not (tmp_path / "life.worker-7-1").exists()
    groups = {"in": 1, "out": 1}
    wanted = {"num_cpus": 3, "num_gpus": 1, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
    for number, actor in enumerate(ray.actors):
        assert actor.made_of is EngineWorker and actor.options == {**wanted, "concurrency_groups": groups}
        log, life = tmp_path / f"engine-0-of-2-{number}.log", tmp_path / f"life.worker-{number}-1"
        assert actor.arguments == (str(log), [str(tmp_path / "life"), str(life)], START)
        assert life.exists() and (tmp_path / "life").exists()
    assert [e.name for e in workers._engines] == ["worker 0", "worker 1"]
    assert [e.logged for e in workers._engines] == [0, len("earlier")]


def test_a_worker_gets_prompts_before_others_are_ready(workers: RayWorkers, ray: FakeRay) -> None:
    """The cluster may have no free resources for the others yet."""
    workers.start()
    assert workers.room() == 0
    ray.actors[0].tell({"ready": 1, "max_num_seqs": 2}, {"refused": 9, "why": "no"})
    assert events(workers) == [Answer(9, refused="no")] and workers.room() == 4
    workers.submit(5, "k", {"text": "t"})
    assert workers.room() == 3 and ray.actors[0].sent == [{"position": 5, "key": "k", "prompt": {"text": "t"}}]
    ray.actors[0].tell({"ended": 5, **ENDED})
    assert events(workers) == [Answer(5, 1, 1, "stop", engine="worker 0")] and workers.room() == 4
    assert ("post", "in") in ray.actors[0].groups and ("events", "out") in ray.actors[0].groups
    assert len(ray.actors[0].groups) == 2


def test_a_worker_that_dies_is_started_again(workers: RayWorkers, ray: FakeRay, tmp_path: Path) -> None:
    """It is started again up to three times without a response in between. Each start has its own lock."""
    workers.start()
    names = []
    for turn in range(5):
        one = next(actor for actor in reversed(ray.actors) if "life.worker-0-" in actor.arguments[1][1])
        one.tell({"ready": 1, "max_num_seqs": 1}, *([{"ended": 0, **ENDED}] if turn == 1 else []))
        if turn == 1:
            assert len(events(workers)) == 1
        one.end("signal 9", -9)
        (death,) = events(workers)
        assert isinstance(death, Death) and death.began
        assert death.life == tmp_path / f"life.worker-0-{turn + 1}" and "it died (signal 9)" in death.how
        names.append(death.name)
    assert names == ["worker 0", *(f"worker 0, start {n}" for n in (2, 3, 4, 5))]
    assert started(ray) == ["0-1", "1-1", "0-2", "0-3", "0-4", "0-5"], (
        "the third start without a response must be the last"
    )
    assert workers.alive()
    ray.actors[1].said.put(RayError("The actor died because\n its node has died. " + "x" * 300))
    (death,) = events(workers)
    assert isinstance(death, Death) and death.name == "worker 1"
    assert death.how.startswith("it died (its node has died. xxx") and len(death.how.partition(";")[0]) == 310


def test_a_worker_that_refuses_its_start_is_not_started_again(workers: RayWorkers, ray: FakeRay) -> None:
    workers.start()
    ray.actors[0].tell({"failed": "OptionError: hooks"})
    ray.actors[0].end("exit status 1", 1)
    (death,) = events(workers)
    assert isinstance(death, Death) and not death.began and death.how.startswith("OptionError: hooks; its log")
    assert started(ray) == ["0-1", "1-1"]
    ray.actors[1].tell({"ready": 1, "max_num_seqs": 1}, {"failed": "RuntimeError: later"})
    ray.actors[1].end("exit status 1", 1)
    (death,) = events(workers)
    assert isinstance(death, Death) and death.began and started(ray) == ["0-1", "1-1", "1-2"]


def test_workers_that_are_told_to_end_are_not_started_again(workers: RayWorkers, ray: FakeRay) -> None:
    workers.start()
    for actor in ray.actors:
        actor.tell({"ready": 1, "max_num_seqs": 1}, {"refused": 9, "why": "no"})
        events(workers)
    workers.finish()
    assert [actor.sent for actor in ray.actors] == [[None], [None]]
    ray.actors[0].end("exit status 0", 0)
    ray.actors[1].end("signal 9", -9)
    found: list[Answer | Death] = []
    while workers.alive():  # they end in any order
        found += workers.events(0.1)
    (death,) = found
    assert isinstance(death, Death) and death.name == "worker 1"
    assert started(ray) == ["0-1", "1-1"]


def test_locks_are_removed_once_no_process_holds_them(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that is still held after a while is left to the next start."""
    pool = RayWorkers(2, Needs(1, 0), START, tmp_path, tmp_path / "life")
    pool.start()
    now, left = [0.0], list[int]()
    monkeypatch.setattr(ray_workers.time, "monotonic", lambda: now[0])
    with ExitStack() as held:
        assert held.enter_context(lock_alone(tmp_path / "life.worker-1-1"))

        def sleep(seconds: float) -> None:
            now[0] += 8
            left.append(len(list(tmp_path.glob("life.worker-*"))))

        monkeypatch.setattr(ray_workers.time, "sleep", sleep)
        for actor in ray.actors:
            actor.end("exit status 0", 0)
        pool.close()
    assert left == [1, 1, 1] and (tmp_path / "life.worker-1-1").exists() and (tmp_path / "life").exists()
    assert pool._remove_locks() and not list(tmp_path.glob("life.worker-*"))
