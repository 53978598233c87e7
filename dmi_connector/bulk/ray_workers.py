# SPDX-License-Identifier: Apache-2.0
"""Engines on the nodes of a Ray cluster. Ray places the engines, transfers prompts and answers, and reports deaths.

Each engine has a Ray actor (`engine_worker.py`). The prompts do not go through Ray Data, for three reasons:

- The vLLM processor of Ray Data drops `kv_transfer_params` from answers. This field names the store of the prompt, or
  says why there is none.
- It reads its input in blocks, as fast as its buffers allow. A run submits a prompt only when an engine has room and
  the disk budget allows another store.
- It repeats the blocks of a dead worker at once. The writers of that worker may still be finishing their stores, so
  prompts would get two stores.

So `run.py` handles reading, order, manifest, budget and recovery as in a run without Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmi_connector.bulk.engine_worker import EngineWorker
from dmi_connector.bulk.engines import Answer, Death, Engine, EngineChild, EnginePool
from dmi_connector.store.format.locks import lock_alone
from dmi_connector.store.write.messages import Message

LOCAL = "local"
"""Value of --ray that starts a cluster on this machine for one run."""
_OBJECTS_BYTES = 128 << 20
"""Bytes of the object store of a LOCAL cluster, which holds only prompts and answers."""
_STARTS = 3
"""A worker is not started again after this many consecutive starts in which it finished no prompt."""
_LONGEST_WORDS = 300
"""Maximum length of a Ray error in messages, in characters."""
_LOCKS_S, _LOOK_S = 20.0, 0.1
"""Seconds that `RayWorkers.close` waits for the processes of killed workers to exit, and seconds between two checks.
The next start of the run removes lock files that are left.
"""


@dataclass(frozen=True)
class Needs:
    """Number of CPUs and of GPUs that Ray reserves for each worker. gpus: 0 on a cluster without GPUs."""

    cpus: int
    gpus: int


@contextlib.contextmanager
def connected(address: str, workers: int, cpus: int, gpus: int) -> Iterator[tuple[Needs, int]]:
    """Connect to a Ray cluster for the duration of the block.

    Yields (resources of each worker, number of workers for which the whole cluster has resources).

    address: the value of --ray. LOCAL starts a cluster on this machine, and stops it at the end of the block. workers:
    number of workers wanted. cpus, gpus: CPUs and GPUs per worker. `gpus` is ignored if the cluster has no GPU. Raises
    ValueError for the address of a Ray client (ray://), if Ray is not installed, if the cluster cannot be joined, or if
    a local cluster has too few GPUs.
    """
    if address.startswith("ray://"):
        raise ValueError(
            f"--ray {address}: a run cannot be a Ray client; start it on a node of the cluster, with --ray auto, or"
            " with ray job submit"
        )
    try:
        import ray
    except ImportError as error:
        raise ValueError("--ray: ray is not installed in this environment; install dmi_connector[ray]") from error
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options |= {"num_cpus": workers * cpus, "include_dashboard": False, "object_store_memory": _OBJECTS_BYTES}
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        text = _one_line(error)
        raise ValueError(
            f"--ray {address}: the cluster cannot be joined ({text}); give HOST:PORT, auto or local, and use the"
            " same Ray and Python as its nodes"
        ) from error
    try:
        there = ray.cluster_resources()
        needs = Needs(cpus, gpus if there.get("GPU") else 0)
        room = int(there.get("CPU", 0) // needs.cpus)
        if needs.gpus:
            room = min(room, int(there["GPU"] // needs.gpus))
        if address == LOCAL and room < workers:
            count = int(there["GPU"])
            raise ValueError(
                f"--workers {workers}: there are {count} GPUs, and each worker takes {needs.gpus}; give fewer"
                " workers, or --worker-gpus"
            )
        yield needs, room
    finally:
        ray.shutdown()


def _one_line(error: Exception) -> str:
    """The message of a Ray error on one line, without the ids of the actor and cut to _LONGEST_WORDS characters."""
    text = " ".join(str(error).split())
    return re.split(r"The actor (?:is dead|died) because ", text)[-1][:_LONGEST_WORDS]


class _RemoteChild:
    """The `EngineChild` of an engine process on a node of the cluster. actor: handle of the node's `EngineWorker`."""

    def __init__(
        self,
        name: str,
        actor: Any,
        on_message: Callable[[EngineChild, Message], None],
        on_death: Callable[[EngineChild, str], None],
    ) -> None:
        self.status: int | None = None
        self._actor, self._on_message, self._on_death = actor, on_message, on_death
        self._thread = threading.Thread(target=self._receive, name=f"dmi-receive-{name}", daemon=True)
        self._thread.start()

    def post(self, message: Message | None) -> None:
        self._actor.post.options(concurrency_group="in").remote(message)

    def finish(self) -> None:
        self.post(None)

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)

    def join(self, timeout: float) -> bool:
        self._thread.join(timeout)
        ended = not self._thread.is_alive()
        self.kill()
        self._thread.join()
        return ended

    def _receive(self) -> None:
        import ray

        while True:
            try:
                messages, end = ray.get(self._actor.events.options(concurrency_group="out").remote())
            except ray.exceptions.RayError as error:
                self._on_death(self, _one_line(error))
                return
            for message in messages:
                self._on_message(self, message)
            if end is not None:
                how, self.status = end
                self._on_death(self, how)
                return


class RayWorkers(EnginePool):
    """Distributes prompts over engines on the nodes of a cluster. A worker is an `EngineWorker` actor and its engine.

    A worker that dies is started again when the cluster has room, up to _STARTS times without a finished prompt. It is
    not started again if its engine reports an error before it is ready for prompts. Prompts of the dead worker are
    captured again once all its processes have exited. Each process holds a shared lock on a file of the worker until
    then. So `out` must be on a file system that all nodes share.

    count: number of workers. needs: the resources of each worker. start: `RunSettings.engine_message`. out: directory
    of stores and logs. life: path in `out` of the file on which all processes of all engines hold shared locks. suffix:
    `Order.suffix`, for the names of logs.
    """

    def __init__(self, count: int, needs: Needs, start: Message, out: Path, life: Path, suffix: str = "") -> None:
        super().__init__()
        self._count, self._needs, self._message = count, needs, start
        self._out, self._life, self._suffix = out, life, suffix
        self._starts = [0] * count
        self._fruitless = [0] * count
        self._number: dict[EngineChild, int] = {}

    def _begin(self) -> list[Engine]:
        self._remove_locks()  # locks of a killed run
        return [self._start_worker(number) for number in range(self._count)]

    def _start_worker(self, number: int) -> Engine:
        import ray

        self._starts[number] += 1
        again = f", start {self._starts[number]}" if self._starts[number] > 1 else ""
        name, log = f"worker {number}{again}", self._out / f"engine{self._suffix}-{number}.log"
        life = self._life.with_name(f"{self._life.name}.worker-{number}-{self._starts[number]}")
        for path in (self._life, life):
            path.touch()
        logged = log.stat().st_size if log.exists() else 0
        make = ray.remote(
            num_cpus=self._needs.cpus,
            num_gpus=self._needs.gpus,
            max_restarts=0,
            scheduling_strategy="SPREAD",
            concurrency_groups={"in": 1, "out": 1},
        )
        actor = make(EngineWorker).remote(str(log), [str(self._life), str(life)], self._message)
        child = _RemoteChild(name, actor, self._on_message, self._on_death)
        self._number[child] = number
        return Engine(child, name, log, life, logged=logged)

    def room(self) -> int:
        # `EnginePool.room` waits until all engines are ready. A cluster may not have resources for all workers yet.
        return max((e.window - len(e.has) for e in self._engines if e.alive), default=0)

    def _handle(self, child: EngineChild, message: Message | str) -> list[Answer | Death]:
        found = super()._handle(child, message)
        engine = next(e for e in self._engines if e.child is child)
        if any(isinstance(event, Death) for event in found) and not engine.finishing:
            number = self._number[child]
            self._fruitless[number] = 0 if engine.answered else self._fruitless[number] + 1
            refused = engine.failure is not None and not engine.window
            if not refused and self._fruitless[number] < _STARTS:
                self._engines.append(self._start_worker(number))
        return found

    def close(self) -> None:
        super().close()
        deadline = time.monotonic() + _LOCKS_S
        while not self._remove_locks() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _remove_locks(self) -> bool:
        """Remove the lock files of workers whose processes have exited. Returns whether no lock file is left."""
        held = 0
        for path in self._life.parent.glob(f"{self._life.name}.worker-*"):
            with lock_alone(path) as alone:
                if alone:
                    path.unlink()
                held += not alone
        return not held
