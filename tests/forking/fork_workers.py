# SPDX-License-Identifier: Apache-2.0
"""A plugin of vLLM that forks the processes of engines, for programs that tests start as a user does.

vLLM spawns them on a CPU. A spawned process imports vLLM, which takes twelve CPU seconds. On a GPU the plugin is not
loaded (runner.py).
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent
CORES = "TEST_FORKS_CORES"


def environment(cores: bool = True) -> Mapping[str, str]:
    """Environment variables with which a program loads this plugin. cores: fork engine cores too, not only workers."""
    from tests.runner import GPU

    paths = (str(FOLDER), str(FOLDER.parents[1]), os.environ.get("PYTHONPATH"))
    return {} if GPU else {"PYTHONPATH": os.pathsep.join(filter(None, paths)), CORES: "1" if cores else ""}


def register() -> None:
    """Entry point of the plugin. vLLM calls it in each process, before the process starts others."""
    if multiprocessing.parent_process() is None and not os.environ[CORES]:
        return  # this process starts the engine core, which starts the workers
    import pytest

    from tests.waits import sleep_while_waiting

    forked = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _method=None: forked  # type: ignore[assignment]
    sleep_while_waiting(pytest.MonkeyPatch())
