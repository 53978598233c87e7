# SPDX-License-Identifier: Apache-2.0
"""Scores of probes on their way to the scheduler. Nothing here waits for the GPU."""

from __future__ import annotations

import torch

from dmi_connector.engine.messages import ScoreRows, StepScores
from dmi_connector.layout import RowLayout


class ScoreReader:
    """Reads the scores of one rank from its rows. layout: the layout of the rows. device: the device of the rows."""

    def __init__(self, layout: RowLayout, rank: int, device: torch.device) -> None:
        self._rank = rank
        places = [f.offset // 4 + i for f in layout.scored for i in range(f.stored[1])]
        self._places = torch.tensor(places, dtype=torch.int64, device=device)

    def read(self, rows: torch.Tensor, asked: ScoreRows) -> StepScores:
        """The scores of rows that this step wrote. rows: uint8 [slots, row_bytes].

        On a GPU they are copied to pinned memory on the current stream, after the forward.
        """
        slots = torch.tensor(asked.slots)
        if rows.is_cuda:
            slots = slots.pin_memory().to(rows.device, non_blocking=True)
        found, ready = rows.view(torch.float32)[slots[:, None], self._places], None
        if rows.is_cuda:
            found = torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        return StepScores(self._rank, asked.parts, found, ready)
