# SPDX-License-Identifier: Apache-2.0
"""The position of a loop over a `TokenDataset`, and how worker processes number their loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Batch = torch.Tensor | dict[str, Any]
_MOST_WORKERS = 1024
_SEED = (1 << 40) - 1
"""Mask of the lowest 40 bits of a base seed, which are compared."""


@dataclass(frozen=True)
class Position:
    """The position of a loop that has returned `batch` batches of epoch `epoch`.

    end: one past the last epoch of the loop; None: the loop does not end.
    """

    epoch: int
    batch: int
    end: int | None


class WorkerLoops:
    """Numbers the loops over a torch DataLoader. Its workers do this, because torch does not report a new loop.

    The workers of one loop have the same base seed. Each worker writes the seed and the number of its first loop to its
    own int64 in shared memory. The other workers find the seed there, and take the same number. Later loops may have
    the same seed, if torch is seeded before each loop. The write of an int64 is atomic.
    """

    def __init__(self) -> None:
        self._first = torch.full((_MOST_WORKERS,), -1, dtype=torch.int64).share_memory_()
        self._last = torch.full((_MOST_WORKERS,), -1, dtype=torch.int64).share_memory_()
        self._own: tuple[int, int] | None = None  # (seed, number) of the latest loop of this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._first, self._last = self._first.share_memory_(), self._last.share_memory_()

    def start(self, info: Any, first: Position, after: Callable[[Position], Position]) -> Position:
        """The position at which a worker's loop begins.

        info: torch's `WorkerInfo` of the worker. first: the position at which the first loop begins. after: function
        that takes the start of a loop, and returns the start of the next loop.
        """
        for _ in range(self._number(int(info.seed) - int(info.id) & _SEED, int(info.id))):
            first = after(first)
        return first

    def _number(self, seed: int, worker: int) -> int:
        """The number of the loop that this worker begins, counted from 0. seed: the base seed, masked by _SEED."""
        if self._own is not None and self._own[0] == seed:
            number = self._own[1] + 1  # persistent workers keep their seed
        else:
            most = int(self._last.max())  # read before `_first`, and written after it
            noted = self._first.clone()
            same = torch.where((noted >= 0) & (noted & _SEED == seed), noted >> 40, -1)
            # A worker begins each loop once. So if it finds its own number, an earlier loop had the same seed.
            number = int(same.max()) if same.max() > same[worker] else most + 1
            self._first[worker] = number << 40 | seed
        self._last[worker] = number
        self._own = seed, number
        return number
