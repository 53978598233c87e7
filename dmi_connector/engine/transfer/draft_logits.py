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
    """The logits of one step, [samples, vocab], and the slots of their tokens, int64 [samples]."""

    number: int
    logits: torch.Tensor
    slots: torch.Tensor


class DraftLogits:
    """The logits of the last steps. Used by the engine's thread alone; nothing here waits for the GPU."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []

    def add(self, number: int, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep the logits of a step: a copy, since vLLM changes its own in place."""
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
            device = step.slots.device
            wanted = torch.tensor(slots, dtype=torch.int64, device=device)
            may = torch.tensor([step.number <= number for number in last], device=device)
            same = (step.slots[None, :] == wanted[:, None]) & may[:, None]
            there, mine = same.any(1), step.logits[same.to(torch.uint8).argmax(1)]
            if rows is None:
                rows, found = mine, there
            else:
                rows, found = torch.where(found[:, None], rows, mine), found | there
        return None if rows is None else (rows, found)
