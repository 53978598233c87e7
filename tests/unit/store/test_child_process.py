# SPDX-License-Identifier: Apache-2.0
"""Ending a child process that detaches from this process, as the coordinator does."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
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
signal.pause()  # also after the end of input
"""


@pytest.fixture(params=["ready", "begun"])
def detached(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Child, queue.Queue[str]]]:
    """A forked child, and how it died. It has sent `ready`, or another message before."""
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
