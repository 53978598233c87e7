# SPDX-License-Identifier: Apache-2.0
"""Ending a child process that detaches from this process, as the coordinator does."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dmi_connector.store.write.child_process import Child
from tests.storekit import PATIENCE

DETACHED = """
import os, signal, sys
from dmi_connector.store.write.messages import pack, write_all
if os.fork():
    os._exit(0)
write_all(1, pack({sys.argv[1]: os.getpid()}))
signal.pause()  # it does not exit at the end of input
"""


@pytest.fixture(params=["ready", "begun"])
def detached(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Child, queue.Queue[str]]]:
    """A child that has detached, and how it died. Its one message was `ready`, or one of another name."""
    (tmp_path / "detached.py").write_text(DETACHED)
    answers: queue.Queue[dict[str, Any]] = queue.Queue()
    deaths: queue.Queue[str] = queue.Queue()
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    child = Child(
        "detached",
        "detached",
        [request.param],
        [],
        lambda _child, message: answers.put(message),
        lambda _child, how: deaths.put(how),
        apart=True,
        env=env,
    )
    pid = answers.get(timeout=PATIENCE)[request.param]
    assert pid != child.process.pid
    yield child, deaths
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_kill_ends_the_process_that_detached(detached: tuple[Child, queue.Queue[str]]) -> None:
    child, deaths = detached
    child.kill()
    assert deaths.get(timeout=PATIENCE) == "killed"
    assert child.join(PATIENCE)
    child.kill()  # no process is left


def test_join_kills_the_process_that_detached(detached: tuple[Child, queue.Queue[str]]) -> None:
    child, deaths = detached
    assert not child.join(0.1)
    assert deaths.get(timeout=PATIENCE) == "killed"


def test_a_process_may_open_as_many_files_as_its_hard_limit_allows() -> None:
    program = """
import resource
from dmi_connector.store.write.child_process import allow_open_files
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, min(hard, 512)))
print(allow_open_files(100), allow_open_files(4096), allow_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["100", "512", "512", "512"]
