# SPDX-License-Identifier: Apache-2.0
"""Parameters that only `make soak` tests."""

from __future__ import annotations

from typing import Any

import pytest


def soak(*values: Any) -> list[Any]:
    """Parameters of tests for `make soak`. A tuple holds several arguments of a test."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.soak) for v in values]


def seeds(count: int) -> list[Any]:
    """Seeds of random histories: 0 to count - 1. Of more than eight, `make test` takes the first two thirds, and every
    third of the others.
    """
    short = [seed for seed in range(count) if count <= 8 or seed < 2 * count // 3 or seed % 3 == 0]
    return [one for seed in range(count) for one in ([seed] if seed in short else soak(seed))]
