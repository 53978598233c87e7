# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of repairs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.repairkit import Writing


@pytest.fixture
def writer() -> Iterator[Writing]:
    writing = Writing()
    yield writing
    writing.kill()
