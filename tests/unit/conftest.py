# SPDX-License-Identifier: Apache-2.0
"""What tests without an engine share."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from dmi_connector.store.write import child_process
from tests.forks import forked


@pytest.fixture(scope="session", autouse=True)
def forked_processes() -> Iterator[None]:
    """Coordinators, writers and uploaders are forked: see tests/forks.py."""
    with forked():
        yield


@pytest.fixture
def own_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are started as an engine starts them."""
    monkeypatch.setattr(child_process, "subprocess", subprocess)


@pytest.fixture(scope="session", autouse=True)
def no_flushes() -> Iterator[None]:
    """Nothing of this process is flushed to the disk, which takes milliseconds a file: no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # raises for a descriptor that is not open, as fsync does
        yield
