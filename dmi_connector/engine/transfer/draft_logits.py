# SPDX-License-Identifier: Apache-2.0
"""Logits of steps with draft tokens. They stay where the model computed them until it is known which were accepted.

The ring gives memory back in order, so what lies there must not wait for a later step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Step:
    """Logits of one step, [samples, vocab], and the slots of their tokens, int64 [samples]; -1 for a row of none."""

    number: int
    logits: torch.Tensor
    slots: torch.Tensor


def rows_of(
    wanted: Sequence[int], logits: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy in `dtype` of the logits of tokens that a capture may need, and the slots of its rows.

    wanted: slots of these tokens. logits: [samples, vocab] of the whole batch. slots: of its tokens, int64 [samples].
    The copy has a row for each of `wanted`, so its size is known without waiting for the GPU; a row is of none (slot
    -1) if the batch does not have that token. It is the whole batch where that is smaller.
    """
    if len(wanted) >= len(logits):
        return logits.to(dtype, copy=True), slots
    asked = _numbers(wanted, slots.device)
    same = slots[None, :] == asked[:, None]
    return logits[same.to(torch.uint8).argmax(1)].to(dtype), torch.where(same.any(1), asked, -1)


def _numbers(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [values] on a device. From pinned memory a copy to a GPU does not wait for what is queued there."""
    return torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class DraftLogits:
    """The logits of the last steps. Used by the engine's thread alone; nothing here waits for the GPU."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []

    def add(self, number: int, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep logits of a step: a copy, since vLLM changes its own in place."""
        self._steps.append(_Step(number, logits, slots))

    def drop(self, decided: int) -> None:
        """Steps up to this number have no logits that are still to be accepted."""
        self._steps = [step for step in self._steps if step.number > decided]

    def take(self, slots: Sequence[int], last: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(rows [n, vocab], whether each was found, bool [n]) of accepted tokens. None if no step is there.

        last: for each slot the last step that may have computed it. A token that was rejected is computed again, so the
        newest of these steps that has the slot has its row.
        """
        rows: torch.Tensor | None = None
        found = torch.zeros(0)
        for step in reversed(self._steps):
            wanted, newest = _numbers(slots, step.slots.device), _numbers(last, step.slots.device)
            same = (step.slots[None, :] == wanted[:, None]) & (newest >= step.number)[:, None]
            there, mine = same.any(1), step.logits[same.to(torch.uint8).argmax(1)]
            if rows is None:
                rows, found = mine, there
            else:
                rows, found = torch.where(found[:, None], rows, mine), found | there
        return None if rows is None else (rows, found)
