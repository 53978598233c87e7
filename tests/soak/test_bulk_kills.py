# SPDX-License-Identifier: Apache-2.0
"""`dmi run` is killed with SIGKILL, alone or with all its processes, and started again. No prompt is lost or captured
twice.

In `make test`, tests/unit/bulk/test_kills.py stops a run at its steps inside the test process.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dmi_connector.store.read.run_manifest import read_manifest
from tests.bulkprocess import check_whole, run, start, told, why, write_ids
from tests.engine.faults import gone, group_of, until
from tests.programs import Program

pytestmark = pytest.mark.soak
MANY = 20_000
"""Number of prompts, far more than are captured before a test kills the run."""

IN_FLIGHT = 64
"""Number of prompts that an engine has at a time: twice --max-num-seqs."""


def begun(out: Path) -> int:
    """The number of stores, finished or not."""
    return len(list(out.glob("*.zarr"))) + len(list(out.glob("*.partial")))


def wait_for_stores(process: Program, out: Path, count: int, finished: bool = False) -> bool:
    """Wait for `count` stores. Returns whether the run is still alive. finished: count only finished stores."""

    def stores() -> int:
        return len(list(out.glob("*.zarr"))) if finished else begun(out)

    until(lambda: process.poll() is not None or stores() >= count, f"there are not {count} stores in {out}")
    return process.poll() is None


def behind_the_last(out: Path) -> int:
    """The row after the last one that has a store, finished or not."""
    return max([-1, *(int(path.name.split("-")[1]) for path in out.glob("*.zarr*"))]) + 1


def rows(out: Path) -> set[int]:
    """The rows in the manifest."""
    return {entry["row"] for entry in read_manifest(out / "manifest.jsonl")}


def kill_run(process: Program, everything: bool) -> None:
    """Kill a run. everything: kill all its processes too. Other processes of the run exit by themselves."""
    family = group_of(psutil.Process(process.pid))
    for victim in family if everything else family[:1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    process.wait()
    engines = [p for p in family if "dmi-" not in _name(p)]
    gone(engines, 120)  # writers may finish their stores; the next start waits for them


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/comm").read_text()
    return ""


def finish(model: Path, path: Path, out: Path, ids: dict[int, list[int]]) -> None:
    """Finish a run with a limit some rows after the last store, and check all stores."""
    limit = behind_the_last(out) + 4 * IN_FLIGHT
    last = run(model, path, out, "--limit", str(limit), timeout=1800)
    assert last.returncode == 0, why(out, last.stdout, last.stderr)
    assert rows(out) >= set(range(limit))
    check_whole(out, {row: ids[row] for row in rows(out)})


def ended_in_order(out: Path, ids: dict[int, list[int]]) -> None:
    """Check a run after SIGINT: prompts in flight were finished, and the others are left to the next start."""
    assert 0 < len(rows(out)) < MANY
    check_whole(out, {row: ids[row] for row in rows(out)})
    assert json.loads((out / "run.json").read_text())["settings"]["max_tokens"] == 6


def kill_often(model: Path, folder: Path, kills: int, rng: random.Random) -> list[str]:
    """Start a run and kill it, `kills` times. Then finish the run. Returns a description of each kill."""
    path, out, log = folder / "p.jsonl", folder / "out", folder / "log"
    ids, done = write_ids(path, MANY), []
    for number in range(kills):
        process = start(model, path, out, log)
        stored = sum(1 for _ in read_manifest(out / "manifest.jsonl"))
        if rng.random() < 0.15:
            time.sleep(rng.uniform(0, 15))  # during the start
            lives, when = process.poll() is None, "while it started"
        else:
            more, finished = rng.randint(1, 150), rng.random() < 0.6
            lives = wait_for_stores(process, out, stored + more, finished)
            when = f"after {more} more stores were {'finished' if finished else 'begun'}"
        assert lives, why(out, log.read_text())
        everything = rng.random() < 0.4
        kill_run(process, everything)
        done.append(f"kill {number + 1}: {'all' if everything else 'the run'} {when}; {stored} lines before")
        print(done[-1], flush=True)
    finish(model, path, out, ids)
    return done


def kill_one_of_two(model: Path, path: Path, out: Path, log: Path) -> Program:
    """Kill one of two engines. The other one continues, and the run reports the number of unfinished prompts."""
    process = start(model, path, out, log, "--data-parallel", "2", "--json", "--max-num-seqs", "4")
    assert wait_for_stores(process, out, 12), why(out, log.read_text())
    children = [p for p in psutil.Process(process.pid).children() if "engine_process" in " ".join(p.cmdline())]
    assert len(children) == 2
    first = next(p for p in children if str(out / "engine-0.log") in " ".join(p.cmdline()))
    first.kill()
    until(lambda: "engine_ended" in log.read_text(), "the run does not tell of the engine's death")
    many = begun(out)
    assert wait_for_stores(process, out, many + 10), "the other engine must continue"
    (ended,) = [event for event in told(log.read_text()) if event["event"] == "engine_ended"]
    assert ended["engine"] == "engine 0" and "signal 9" in ended["why"] and ended["left"] > 0
    return process


@pytest.mark.parametrize("engines", [1, 2])
def test_killed_engines_and_runs_lose_no_prompt(tiny_model: Callable[..., Path], tmp_path: Path, engines: int) -> None:
    """All processes are killed. The next start captures the lost prompts, and a signal ends it."""
    model, path, out, log = tiny_model("qwen3"), tmp_path / "p.jsonl", tmp_path / "out", tmp_path / "log"
    ids = write_ids(path, MANY)
    if engines == 2:
        process = kill_one_of_two(model, path, out, log)
    else:
        process = start(model, path, out, log)
        assert wait_for_stores(process, out, 12), why(out, log.read_text())
    kill_run(process, True)
    lost = set(range(behind_the_last(out)))
    process = start(model, path, out, log)
    until(lambda: process.poll() is not None or lost <= rows(out), "prompts of killed runs are not done")
    assert lost <= rows(out) and process.poll() is None, why(out, log.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(600) == 1, why(out, log.read_text())
    ended_in_order(out, ids)


@pytest.mark.timeout(5400)
def test_a_run_that_is_killed_20_times_loses_no_prompt(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """SOAK_SEED chooses the times of the kills."""
    seed = int(os.environ.get("SOAK_SEED", random.randrange(10**6)))
    print(f"SOAK_SEED={seed}", flush=True)
    assert len(kill_often(tiny_model("qwen3"), tmp_path, 20, random.Random(seed))) == 20
