# SPDX-License-Identifier: Apache-2.0
"""Logits of draft tokens are kept until the accepted tokens are known."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")
from dmi_connector.engine.transfer.draft_logits import DraftLogits, rows_of


def add(held: DraftLogits, step: int, *slots: int) -> None:
    """Add rows whose values are their step and slot."""
    rows = torch.tensor([[step, slot] for slot in slots], dtype=torch.float32)
    held.add(step, rows, torch.tensor(slots))


def take(held: DraftLogits, slots: list[int], last: list[int]) -> list[list[int] | None]:
    taken = held.take(slots, last)
    if taken is None:
        return [None] * len(slots)
    rows, found = taken
    return [row if there else None for row, there in zip(rows.int().tolist(), found.tolist(), strict=True)]


def test_the_last_step_has_the_row_of_a_token_that_was_rejected_before() -> None:
    held = DraftLogits()
    add(held, 1, 40, 41, 42)
    add(held, 2, 7, 41, 42)
    assert take(held, [40, 41, 42], [2, 2, 2]) == [[1, 40], [2, 41], [2, 42]]


def test_a_slot_that_another_request_has_by_now_is_not_taken_for_it() -> None:
    """A preempted request lost its blocks in step 2, before the result of step 1 arrived."""
    held = DraftLogits()
    add(held, 1, 40)
    add(held, 2, 8, 40)
    assert take(held, [40, 8], [1, 2]) == [[1, 40], [2, 8]]


def test_steps_are_kept_until_they_are_decided() -> None:
    held = DraftLogits()
    assert take(held, [40], [1]) == [None]
    add(held, 1, 40)
    add(held, 2, 41)
    assert take(held, [39, 40, 41], [2, 2, 1]) == [None, [1, 40], None]
    held.drop(1)
    assert take(held, [40, 41], [2, 2]) == [None, [2, 41]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [[41], [43, 99, 41], [40, 41, 42, 43, 99]])
def test_only_logits_that_a_capture_may_need_are_kept(wanted: list[int], dtype: torch.dtype) -> None:
    """Slot 99 belongs to a token of another step."""
    slots = torch.tensor([40, 41, 42, 43])
    logits = torch.stack([slots.float(), slots.float() + 0.5], 1)
    rows, kept = rows_of(wanted, logits, slots, dtype)
    assert len(rows) == len(kept) == min(len(wanted), 4) and rows.dtype == dtype
    held = DraftLogits()
    held.add(1, rows, kept)
    logits.zero_()  # vLLM changes its logits in place
    taken = held.take(wanted, [1] * len(wanted))
    assert taken is not None and taken[1].tolist() == [slot != 99 for slot in wanted]
    assert [row for row, there in zip(taken[0].tolist(), taken[1], strict=True) if there] == [
        [slot, slot + 0.5] for slot in wanted if slot != 99
    ]


def test_a_wanted_token_of_another_step_has_no_slot() -> None:
    _, kept = rows_of([41, 99], torch.ones(4, 2), torch.tensor([40, 41, 42, 43]), torch.float16)
    assert kept.tolist() == [41, -1]


def test_slots_stay_integers_if_no_token_is_wanted() -> None:
    rows, kept = rows_of([], torch.ones(2, 3), torch.tensor([40, 41]), torch.float16)
    assert rows.shape == (0, 3) and kept.shape == (0,) and kept.dtype == torch.int64
