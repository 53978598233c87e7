# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests without an engine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from dmi_connector.store.write import child_process
from tests.forks import forked


@pytest.fixture(scope="session", autouse=True)
def forked_processes() -> Iterator[None]:
    """Fork coordinators, writers and uploaders, see tests/forks.py."""
    with forked():
        yield


@pytest.fixture
def own_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start these processes as an engine does."""
    monkeypatch.setattr(child_process, "subprocess", subprocess)


@pytest.fixture(scope="session", autouse=True)
def no_flushes() -> Iterator[None]:
    """Replace fsync in this process, because it takes milliseconds per file. No test simulates a power failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # raises for a closed descriptor, as fsync does
        yield
