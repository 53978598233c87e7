# SPDX-License-Identifier: Apache-2.0
"""What the programs here share: options, a child process for each engine, result files that name no machine's paths."""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

CLOSE_S = 60
"""Seconds that a child has to end by itself."""


def parser(module: str, doc: str | None, out: str, store_dir: str) -> argparse.ArgumentParser:
    """The options of every program, with its own defaults for `out` and `store_dir`."""
    p = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").splitlines()[0])
    p.add_argument("--out", default=out, help="result file (JSON), rewritten after every measurement")
    p.add_argument("--store-dir", default=store_dir)
    p.add_argument("--engine-args", type=json.loads, default={}, help="JSON: engine arguments for every engine")
    p.add_argument("--child", default="", help=argparse.SUPPRESS)
    return p


def child_command(module: str, argv: list[str], name: str) -> list[str]:
    """The command of the part `name` of a program."""
    return [sys.executable, "-m", module, *argv, "--child", name]


def child_env(**env: str) -> dict[str, str]:
    """`env`, beneath it the environment, and beneath that the defaults for offline runs and small machines."""
    from dmi_connector.tiny import ENV

    return {**ENV, **os.environ, **env}


def run_child(module: str, argv: list[str], name: str, **env: str) -> int:
    """Run the part `name` of a program in a process of its own; returns its exit status."""
    return subprocess.run(child_command(module, argv, name), check=False, env=child_env(**env)).returncode


def three_digits(number: float) -> float:
    """Rounded to three significant digits: also a very slow disk has a rate above 0."""
    return float(f"{number:.3g}")


class Child:
    """A process that answers lines of JSON with lines of JSON, over a socket that it is told of with `--fd`."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None) -> None:
        self._socket, end = socket.socketpair()
        with end:
            fd = end.fileno()
            self._process = subprocess.Popen(
                [*command, "--fd", str(fd)], env=env, pass_fds=[fd], start_new_session=True
            )
        self._lines = self._socket.makefile()
        # Processes that the child forked hold the socket open, so end of file alone does not tell its death.
        self._pidfd = os.pidfd_open(self._process.pid)

    def answer(self, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """The next answer, after sending `request` if there is one; {"failed": why} if the process ended instead."""
        with suppress(ConnectionError):  # it ended
            if request is not None:
                self._socket.sendall((json.dumps(request) + "\n").encode())
            fd = self._socket.fileno()
            readable, _, _ = select.select([fd, self._pidfd], [], [])
            if fd in readable and (line := self._lines.readline()):
                answer: dict[str, Any] = json.loads(line)
                return answer
        return {"failed": f"exit status {self.close()}"}

    def end(self) -> None:
        """Tell it to end, which is an end of file to it."""
        self._lines.close()
        self._socket.close()

    def close(self) -> int:
        """Let it end, and kill what is left of it. Returns its exit status."""
        if self._process.returncode is None:
            self.end()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
            with suppress(ProcessLookupError):  # nothing is left
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._pidfd)
        return self._process.returncode


def python_us() -> float:
    """How quick the core of this thread is just now: microseconds of 1,500 calls of a function, best of five.

    What is next to a virtual machine may double it from one second to the next, and with it each step of an engine.
    """

    def call(a: int, b: int = 2) -> int:
        return a + b

    samples = []
    for _ in range(5):
        total, begin = 0, time.perf_counter()
        for _ in range(1500):
            total = call(total)
        samples.append(time.perf_counter() - begin)
    return round(min(samples) * 1e6, 1)


def quickest_cores(count: int) -> list[int]:
    """The cores on which `python_us` is least just now. This thread visits all that it may use."""
    cores = os.sched_getaffinity(0)
    found = {}
    try:
        for core in cores:
            os.sched_setaffinity(0, {core})
            found[core] = python_us()
    finally:
        os.sched_setaffinity(0, cores)
    return sorted(found, key=lambda core: found[core])[:count]


def without_directories(text: str) -> str:
    """`text` with every path cut to its last part."""
    return re.sub(r"[^\s'\"=,:{}\[\]()]*/", "", text)


def command_line(module: str, argv: list[str]) -> str:
    """The command to record in a result."""
    return f"python -m {module} " + shlex.join(without_directories(arg) for arg in argv)


def save(path: str, results: dict[str, Any]) -> None:
    """Write a result file, whole or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(target)


def store_problems(path: str | Path) -> list[str]:
    """What `dmi verify` finds wrong with a store."""
    from dmi_connector.store.verify import verify_store

    return [f"{Path(path).name}: {problem.where}: {problem.what}" for problem in verify_store(path)]
