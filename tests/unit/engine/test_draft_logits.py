# SPDX-License-Identifier: Apache-2.0
"""Logits of draft tokens wait in the ring until it is known which were accepted."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
from dmi_connector.engine.messages import Accepted
from dmi_connector.engine.transfer.draft_logits import DraftLogits
from dmi_connector.store.format.completeness import Cause

ROW = 100


class Capture:
    """Stands for a `CaptureExport`."""

    def __init__(self) -> None:
        self.out, self.start = object(), 10
        self.lost: list[tuple[int, int, Cause]] = []

    def lose(self, first: int, rows: int, cause: Cause) -> None:
        self.lost.append((first, rows, cause))


def accepted(*slots: int, step: int, first: int = 0, position: int = 20) -> Accepted:
    return Accepted(1, first, position, np.array(slots), step)


@pytest.fixture
def posted() -> dict[int, list[Any]]:
    return {}


def decide(held: DraftLogits, posted: dict[int, list[Any]], decided: int, *messages: tuple[Any, Accepted]) -> None:
    def post(extent: Any, rows: Sequence[Any]) -> None:
        posted[extent.offset] = list(rows)

    held.decide(messages, decided, post)


def add(held: DraftLogits, step: int, *slots: int) -> None:
    extent: Any = SimpleNamespace(offset=step)
    held.add(step, extent, np.array(slots), ROW)


def test_the_last_step_has_the_row_of_a_token_that_was_rejected_before(posted: dict[int, list[Any]]) -> None:
    held, capture = DraftLogits(), Capture()
    add(held, 1, 40, 41, 42)
    decide(held, posted, 0, (capture, accepted(40, step=1)))
    add(held, 2, 7, 41, 42)
    decide(held, posted, 2, (capture, accepted(41, 42, step=2, first=1, position=21)))
    assert posted[1] == [(capture.out, "logits", 0, 20, 0)]
    assert posted[2] == [(capture.out, "logits", 1, 21, ROW), (capture.out, "logits", 2, 22, 2 * ROW)]
    assert not capture.lost


def test_a_slot_that_another_request_has_by_now_is_not_taken_for_it(posted: dict[int, list[Any]]) -> None:
    """A preempted request lost its blocks in step 2; the result of step 1 came later."""
    held, capture = DraftLogits(), Capture()
    add(held, 1, 40)
    add(held, 2, 8, 40)
    decide(held, posted, 1, (capture, accepted(40, step=1)))
    assert posted == {1: [(capture.out, "logits", 0, 20, 0)]}


def test_rows_that_found_no_room_are_lost_and_others_go_back(posted: dict[int, list[Any]]) -> None:
    held, capture = DraftLogits(), Capture()
    held.lose(1)
    add(held, 2, 41)
    decide(held, posted, 2, (capture, accepted(40, step=1)))
    assert posted == {2: []} and capture.lost == [(10, 1, Cause.FELL_BEHIND)]
    decide(held, posted, 5)
    assert posted == {2: []}
