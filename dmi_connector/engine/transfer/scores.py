# SPDX-License-Identifier: Apache-2.0
"""Scores of probes on their way to the scheduler. Nothing here waits for the GPU."""

from __future__ import annotations

import numpy as np
import torch

from dmi_connector.engine.messages import ScoreRows, StepScores
from dmi_connector.layout import RowLayout


class ScoreReader:
    """Reads the scores of one rank from its rows. layout: the layout of the rows. device: the device of the rows."""

    def __init__(self, layout: RowLayout, rank: int, device: torch.device) -> None:
        self._rank = rank
        places = [f.offset // 4 + i for f in layout.scored for i in range(f.stored[1])]
        self._first, self._count = min(places, default=0), len(places)
        self._places = None  # side by side
        if places != list(range(self._first, self._first + self._count)):
            self._places = torch.tensor(places, dtype=torch.int64, device=device)

    def read(self, rows: torch.Tensor, asked: ScoreRows) -> StepScores:
        """The scores of rows that this step wrote. rows: uint8 [slots, row_bytes].

        On a GPU they are copied to pinned memory on the current stream, after the forward.
        """
        slots, ready = torch.from_numpy(np.array(asked.slots, np.int64)), None
        if rows.is_cuda:
            slots = slots.pin_memory().to(rows.device, non_blocking=True)
        values = rows.view(torch.float32)
        if self._places is None:  # one kernel, which reads these values alone
            found = values.narrow(1, self._first, self._count).index_select(0, slots)
        else:
            found = values[slots[:, None], self._places]
        if rows.is_cuda:
            found = torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        return StepScores(self._rank, asked, found, ready)
