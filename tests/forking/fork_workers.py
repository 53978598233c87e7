# SPDX-License-Identifier: Apache-2.0
"""A plugin of vLLM for programs that tests start as a user does: workers of their engines are forked, not spawned.

Each that is spawned imports vLLM for twelve seconds of a core. On a GPU all are spawned: see runner.py.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent


def environment() -> Mapping[str, str]:
    """Variables of a program that loads this plugin."""
    from tests.runner import GPU

    paths = (str(FOLDER), str(FOLDER.parents[1]), os.environ.get("PYTHONPATH"))
    return {} if GPU else {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def register() -> None:
    """vLLM calls this in each process, before that starts others."""
    if multiprocessing.parent_process() is None:
        return  # this process starts the engine, which starts the workers
    import pytest

    from tests.waits import sleep_while_waiting

    forked = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _method=None: forked  # type: ignore[assignment]
    sleep_while_waiting(pytest.MonkeyPatch())
