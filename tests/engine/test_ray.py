# SPDX-License-Identifier: Apache-2.0
"""`dmi run --ray` on clusters on this machine. Workers and nodes are killed, and every prompt has one store."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from dmi_connector.store.read.run_manifest import read_manifest
from tests.bulkprocess import ROOT, check_whole, command, told, why, write_ids
from tests.engine.faults import gone, group_of, until

PYTHON = ROOT / ".ray/bin/python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="Ray is not installed: make ray")


@dataclass
class Ray:
    """Starts processes with Ray. env: their environment. folder: holds Ray's files. Paths of sockets must be short."""

    env: dict[str, str]
    folder: Path

    @contextlib.contextmanager
    def run(self, model: Path, prompts: Path, out: Path, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """Start `dmi run`. Yields the process and its log file. Kills all its processes at the end."""
        asked = command(model, prompts, out, "--max-num-seqs", "4", "--json", *more)
        log = out.with_name(f"{out.name}.log")
        with open(log, "ab") as file:
            process = subprocess.Popen([str(PYTHON), *asked[1:]], cwd=ROOT, env=self.env, stdout=file, stderr=file)
        try:
            yield process, log
        finally:
            end(process)

    def sessions(self) -> list[psutil.Process]:
        """Processes of Ray that use the folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(self.folder) in text for text in process.cmdline()):
                    found.append(process)
        return found


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process and its descendants."""
    if process.poll() is None:
        for victim in reversed(group_of(psutil.Process(process.pid))):
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        process.wait()


@pytest.fixture
def ray() -> Iterator[Ray]:
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    token = folder / "token"
    token.write_text(secrets.token_hex(32))  # otherwise Ray creates one in the user's home directory
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"RAY_TMPDIR": str(folder), "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
    found = Ray(env, folder)
    yield found
    until(lambda: not found.sessions(), "processes of Ray still run", 60)
    shutil.rmtree(folder)


@pytest.fixture
def cluster(ray: Ray) -> Iterator[str]:
    """The address of a cluster of two nodes with one CPU each."""
    process = subprocess.Popen(
        [str(PYTHON), "-m", "tests.raycluster"],
        cwd=ROOT,
        env=ray.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        address = next(line.split()[1] for line in process.stdout if line.startswith("address "))
        yield address
        process.stdin.close()
        process.wait(120)
    finally:
        end(process)


def engine_of(out: Path, number: int) -> psutil.Process | None:
    """The engine process of a worker; None if it has ended. Its parent is the actor, whose parent is Ray's raylet."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if "dmi_connector.bulk.engine_process" in line and str(out / f"engine-{number}.log") in line:
                return process
    return None


def stores(out: Path) -> int:
    return len(list(out.glob("*.zarr")))


def engine_with(
    process: subprocess.Popen[bytes], out: Path, log: Path, number: int, count: int = 0, but: int = 0
) -> psutil.Process:
    """Wait until a worker has an engine and `count` stores are finished. but: process id of an earlier engine."""
    found: list[psutil.Process] = []

    def there() -> bool:
        found[:] = [e for e in [engine_of(out, number)] if e is not None and e.pid != but]
        return process.poll() is not None or (bool(found) and stores(out) >= count)

    until(there, f"worker {number} does not begin")
    assert process.poll() is None, why(out, log.read_text())
    return found[0]


@contextlib.contextmanager
def held(engine: psutil.Process) -> Iterator[None]:
    """Suspend an engine, so that another one runs the prompts meanwhile."""
    engine.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.resume()


def finished(process: subprocess.Popen[bytes], out: Path, log: Path, prompts: dict[int, list[int]]) -> dict[str, Any]:
    """Wait for the end of a run that finishes all prompts. Returns {event: its last message}."""
    assert process.wait(800) == 0, why(out, log.read_text())
    check_whole(out, prompts)
    assert not list(out.glob(".life.lock.worker-*")), "locks of workers are left"
    assert engine_of(out, 0) is None and engine_of(out, 1) is None
    return {event["event"]: event for event in told(log.read_text())}


def test_a_worker_that_is_killed_halfway_leaves_every_prompt_in_one_store(
    ray: Ray, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """A cluster on this machine with two workers. SIGKILL ends an actor with prompts in flight. The other worker runs
    them, and the command finishes.
    """
    out = tmp_path / "out"
    prompts = write_ids(tmp_path / "p.jsonl", 1000)
    with ray.run(tiny_model("qwen3"), tmp_path / "p.jsonl", out, "--ray", "--workers", "2") as (process, log):
        with held(engine_with(process, out, log, 1)):
            engine = engine_with(process, out, log, 0, 100)
            family = group_of(engine)
            actor = engine.parent()
            assert actor is not None
            actor.kill()
            gone(family[:1], 60)
            left = stores(out)
            assert left < len(prompts), "the worker was not killed halfway"
            again = engine_with(process, out, log, 0, but=engine.pid)
        with held(again):
            engine_with(process, out, log, 1, left + 200)
        told_last = finished(process, out, log, prompts)
    ended, summary = told_last["engine_ended"], told_last["summary"]
    assert (ended["engine"], ended["left"]) == ("worker 0", 0) and ended["again"] > 0
    assert (summary["done"], summary["stored"], summary["lost"], summary["failed"]) == (1000, 1000, 0, 0)
    assert summary["engines"][0] > 0 and summary["engines"][1] > 0, "both workers must have prompts"


def test_the_only_worker_is_started_again(ray: Ray, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """All its processes are killed. Unfinished stores are removed, and their prompts run again."""
    out = tmp_path / "out"
    prompts = write_ids(tmp_path / "p.jsonl", 300)
    with ray.run(tiny_model("qwen3"), tmp_path / "p.jsonl", out, "--ray", "local") as (process, log):
        actor = engine_with(process, out, log, 0, 30).parent()
        assert actor is not None
        for victim in group_of(actor):
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        assert stores(out) < len(prompts), "the worker was not killed halfway"
        told_last = finished(process, out, log, prompts)
    assert told_last["engine_ended"]["again"] > 0
    first, second = told_last["summary"]["engines"]
    assert first > 0 and second > 0


def test_a_node_that_is_lost_and_a_run_that_is_killed_lose_no_prompt(
    ray: Ray, cluster: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The run connects to a cluster by its address. The other node runs the prompts of the lost node. Then the run is
    killed, and a second run finishes its prompts.
    """
    out, model, path = tmp_path / "out", tiny_model("qwen3"), tmp_path / "p.jsonl"
    prompts = write_ids(path, 1000)
    asked = ("--ray", cluster, "--workers", "2")
    with ray.run(model, path, out, *asked) as (process, log):
        with held(engine_with(process, out, log, 0)):
            actor = engine_with(process, out, log, 1, 50).parent()
            assert actor is not None
            raylet = actor.parent()
            assert raylet is not None and "raylet" in raylet.name()
            raylet.kill()
            until(lambda: '"engine_ended"' in log.read_text() or process.poll() is not None, "no loss is reported", 180)
            left = stores(out)
        until(lambda: process.poll() is not None or stores(out) >= left + 100, "the other node does not continue")
        assert process.poll() is None and stores(out) < len(prompts), why(out, log.read_text())
        ended = {event["event"]: event for event in told(log.read_text())}["engine_ended"]
        assert ended["engine"] == "worker 1" and ended["again"] > 0
        process.kill()
        process.wait()
    until(lambda: engine_of(out, 0) is None, "the engine outlives its run", 120)
    with ray.run(model, path, out, *asked) as (process, log):
        told_last = finished(process, out, log, prompts)
    assert told_last["cluster"]["room"] == 1 and told_last["summary"]["lost"] == 0
    assert told_last["recovered"]["done"] >= 50
    assert sum(1 for _ in read_manifest(out / "manifest.jsonl")) == 1000
