# SPDX-License-Identifier: Apache-2.0
"""Scores of probes on their way to the scheduler. Nothing here waits for the GPU."""

from __future__ import annotations

import numpy as np
import torch

from dmi_connector.engine.kernels.scores import ReadScores
from dmi_connector.engine.messages import ScoreRows, StepScores
from dmi_connector.layout import RowLayout

_WORDS = 1 << 18
"""Words of 4 bytes of a piece of pinned memory at least. It has the scores of many steps."""


class ScoreReader:
    """Reads the scores of one rank from its rows. layout: of the rows. rows: uint8 [slots, row_bytes]."""

    def __init__(self, layout: RowLayout, rank: int, rows: torch.Tensor) -> None:
        self._rank, self._rows = rank, rows
        places = [f.offset // 4 + i for f in layout.scored for i in range(f.stored[1])]
        self._values = len(places)
        self._places = torch.tensor(places, dtype=torch.int64, device=rows.device)
        self._pinned: Pinned | None = None
        if rows.is_cuda and places:
            self._kernel, self._pinned = ReadScores(self._places), Pinned()
            self.read(ScoreRows(*(np.zeros(1, np.int64) for _ in range(3))))  # compiles it, on the null block

    def read(self, asked: ScoreRows) -> StepScores:
        """The scores of rows that this step wrote. On a GPU a kernel copies them after the forward, on its stream."""
        if self._pinned is None:
            words = self._rows.view(torch.float32).numpy()
            return StepScores(self._rank, asked, read_scores(words, asked.slots, self._places.numpy()))
        count = len(asked.slots)
        memory, words, at = self._pinned.take(2 * count + count * self._values)
        end = at + 2 * count
        words[at:end].view(np.int64)[:] = asked.slots
        self._kernel(self._rows, memory, at, end, count)
        late = words[end : end + count * self._values].view(np.float32).reshape(count, self._values)
        ready = torch.cuda.Event()
        ready.record()
        self._pinned.used(ready)
        return StepScores(self._rank, asked, late, ready)


def read_scores(words: np.ndarray, slots: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The kernel's twin in numpy. words: float32 [slots, row words]. Returns [len(slots), len(places)]."""
    first, count = min(places, default=0), len(places)
    if (places == np.arange(first, first + count)).all():  # of each row one piece
        return words[:, first : first + count][slots]
    return words[slots[:, None], places]


class Pinned:
    """Pinned memory, in pieces that are used once, from start to end. Arrays that lie in a piece keep it alive. So does
    this, until the GPU has done what was to be done with it: torch does not know of that, as no operation of its own
    does it.
    """

    def __init__(self, pin: bool = True) -> None:
        self._pin, self._at = pin, 0
        self._memory = torch.empty(0, dtype=torch.int32)
        self._words = self._memory.numpy()
        self._done: torch.cuda.Event | None = None  # after the last use of the piece
        self._before: list[tuple[torch.cuda.Event, torch.Tensor]] = []  # pieces before, until that event

    def take(self, count: int) -> tuple[torch.Tensor, np.ndarray, int]:
        """(memory, the same as an array, where `count` words of it begin), int32. They begin at a multiple of 16
        bytes.
        """
        at = self._at
        if at + count > len(self._words):
            self._before = [(done, piece) for done, piece in self._before if not done.query()]
            if self._done is not None:
                self._before.append((self._done, self._memory))
            self._memory = torch.empty(max(_WORDS, count), dtype=torch.int32, pin_memory=self._pin)
            self._words, at = self._memory.numpy(), 0
        self._at = at + -(-count // 4) * 4
        return self._memory, self._words, at

    def used(self, done: torch.cuda.Event) -> None:
        """The GPU works with what was taken last until `done`."""
        self._done = done
