# SPDX-License-Identifier: Apache-2.0
"""Keeps logits of draft tokens on the model's device until the scheduler knows which tokens were accepted.

The ring frees memory in order, so logits in the ring must not wait for a later step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Step:
    """Logits of one step, [samples, vocab], and the slots of their tokens, int64 [samples]; -1 for unused rows."""

    number: int
    logits: torch.Tensor
    slots: torch.Tensor


def rows_of(
    wanted: Sequence[int], logits: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy in `dtype` of the logits of tokens that captures may need, and the slots of its rows.

    wanted: slots of these tokens. logits: [samples, vocab] of the whole batch. slots: slots of the batch's tokens,
    int64 [samples]. The copy has one row per entry of `wanted`, so its size is known without waiting for the GPU. The
    row of a token that the batch does not have is unused (slot -1). A batch with no more rows than `wanted` is copied
    whole.
    """
    if len(wanted) >= len(logits):
        return logits.to(dtype, copy=True), slots
    asked = _numbers(wanted, slots.device)
    same = slots[None, :] == asked[:, None]
    return logits[same.to(torch.uint8).argmax(1)].to(dtype), torch.where(same.any(1), asked, -1)


def _numbers(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [values] on a device. A copy from pinned memory to a GPU does not wait for work that is queued there."""
    return torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class DraftLogits:
    """The logits of the last steps. Only the engine's thread uses it, and nothing here waits for the GPU."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []

    def add(self, number: int, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep logits of a step. They must be a copy, because vLLM changes its logits in place."""
        self._steps.append(_Step(number, logits, slots))

    def drop(self, decided: int) -> None:
        """Drop the logits of steps up to number `decided`. No more tokens of these steps will be accepted."""
        self._steps = [step for step in self._steps if step.number > decided]

    def take(self, slots: Sequence[int], last: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(rows [n, vocab], whether each was found, bool [n]) of accepted tokens. None if no step is kept.

        slots: slot of each token. last: for each token, the last step that may have computed it. The position of a
        rejected token is computed again. So the row is in the newest of these steps that has the slot.
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
