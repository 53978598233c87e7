# SPDX-License-Identifier: Apache-2.0
"""Engines that are measured in slices of time: which of them runs, what their clocks count, and ratios of speeds."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import slices
from benchmarks.common import Child

ROOT = Path(__file__).parents[2]
WORKER = """
import json, socket, subprocess, sys, time
from benchmarks.slices import ActiveClock
name, log, stops, fd = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[5])
beside = subprocess.Popen([sys.executable, "-c", TICK, name + " beside", log], process_group=0)
clock = ActiveClock(stops)
with socket.socket(fileno=fd) as parent, parent.makefile() as requests:
    for line in requests:
        begin, wall = clock(), time.perf_counter()
        with open(log, "a") as file:
            while clock() < begin + json.loads(line)["seconds"]:
                print(name, time.perf_counter(), file=file, flush=True)
                time.sleep(0.002)
        answer = {"active": clock() - begin, "wall": time.perf_counter() - wall}
        parent.sendall((json.dumps(answer) + "\\n").encode())
beside.kill()
"""
TICK = """
import sys, time
with open(sys.argv[2], "a") as file:
    while True:
        print(sys.argv[1], time.perf_counter(), file=file, flush=True)
        time.sleep(0.002)
"""


def start(name: str, log: Path, turn: slices.Slice) -> Child:
    """A child that writes a line to `log` every few milliseconds, as does a process beside it in a group of its own."""
    script = WORKER.replace("TICK", repr(TICK))
    child = Child([sys.executable, "-c", script, name, str(log), turn.path], cwd=ROOT)
    turn.session = child.pid
    return child


def of_session(session: int) -> list[int]:
    """Process ids of a session. The children of these tests have two processes each."""
    mine = []
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, ProcessLookupError):  # no process, or one that has ended
            if os.getsid(int(entry.name)) == session:
                mine.append(int(entry.name))
    assert len(mine) == 2
    return mine


def state(pid: int) -> str:
    """The state of a process, such as "T" (stopped)."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_one_session_runs_at_a_time_and_clocks_leave_out_stops(tmp_path: Path) -> None:
    names = ["stock", "capture", "other"]
    logs = {name: tmp_path / name for name in names}
    turns = {name: slices.Slice() for name in names}
    children = {name: start(name, logs[name], turns[name]) for name in names}
    try:
        while not all(log.exists() and " beside " in log.read_text() for log in logs.values()):
            time.sleep(0.01)
        turns["stock"].stop()
        while {state(pid) for pid in of_session(children["stock"].pid)} != {"T"}:
            time.sleep(0.01)
        turns["stock"].resume()
        answers = slices.take_slices(children, turns, {"seconds": 0.5}, 0.05)
        assert set(answers) == set(names)
        for answer in answers.values():
            assert 0.5 <= answer["active"] < answer["wall"], "the stops were counted"
        total = sum(answer["active"] for answer in answers.values())
        assert max(answer["wall"] for answer in answers.values()) > 0.9 * total, "children ran at the same time"
        lengths = {name: len(log.read_text()) for name, log in logs.items()}
        while any(len(log.read_text()) == lengths[name] for name, log in logs.items()):
            time.sleep(0.01)  # all run again: each log grows
    finally:
        for child in children.values():
            child.close()
        for turn in turns.values():
            turn.close()
    for name in names:
        assert not os.path.exists(turns[name].path)


def test_a_child_that_ends_is_answered_for(tmp_path: Path) -> None:
    with closing(slices.Slice()) as turn:
        child = Child([sys.executable, "-c", "import sys; sys.exit(3)"])
        turn.session = child.pid
        answers = slices.take_slices({"gone": child}, {"gone": turn}, {"seconds": 1.0}, 0.1)
    assert answers == {"gone": {"failed": "exit status 3"}}


def test_a_ratio_is_that_of_all_tokens_with_an_interval() -> None:
    rng = np.random.default_rng(0)
    speed = rng.uniform(0.5, 1.0, 200)  # the machine's speed in each second, for both engines
    stock, mine = 1000 * speed, 950 * speed * rng.uniform(0.98, 1.02, 200)
    found = slices.ratio(list(mine), [*stock, 1.0])
    assert found["seconds"] == 200 and found["ratio"] == pytest.approx(0.95, abs=0.003)
    assert 0.945 < found["low"] < found["ratio"] < found["high"] < 0.955
    halved: dict[str, Any] = json.loads(json.dumps(slices.ratio([5.0] * 10, [10.0] * 10)))
    assert halved == {"ratio": 0.5, "low": 0.5, "high": 0.5, "seconds": 10}
