# SPDX-License-Identifier: Apache-2.0
"""Keeps the metadata of the running step for a memory of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dmi_connector.engine import contract
from dmi_connector.engine.model.coverage import poison

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from dmi_connector.engine.host_scores import HostScores


class StepRows:
    """Mixin of a `RowMemory`: holds the metadata of the running batch, and fills its rows with a pattern.

    step: metadata of the running batch (query starts and vLLM's slots). poisons: whether the rows of a step are filled
    with UNWRITTEN before its forward, as for the first captures of an untested vLLM. unpoisoned: vLLM's slots of the
    step whose rows are still to be filled. scores: see `RowMemory`.
    """

    row_dtype: torch.dtype
    step: CommonAttentionMetadata | None
    poisons: bool
    unpoisoned: torch.Tensor | None
    scores: HostScores | None
    _built_last: bool

    @property
    def rows(self) -> torch.Tensor | None:
        """uint8 [slots, row_bytes]. None until there is memory."""
        raise NotImplementedError

    def begin_steps(self, vllm_config: VllmConfig) -> None:
        """Set the attributes. Constructors call it."""
        self.row_dtype = vllm_config.model_config.dtype
        self.step = None
        self.poisons = bool(contract.untested())
        self.unpoisoned = None
        self.scores = None
        self._built_last = not vllm_config.use_v2_model_runner

    def places(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots of the rows of tokens, int64 [tokens]. slots: vLLM's slots of the tokens, int64 [tokens]."""
        return slots

    def planned(self, step: CommonAttentionMetadata) -> None:
        """Take the metadata of a step. The V2 runner builds it before rows of freed blocks are read, V1 after that."""
        self.step = step
        if self.poisons:
            self.unpoisoned = step.slot_mapping
            if self._built_last:
                self.poison_step()

    def poison_step(self) -> None:
        """Fill the rows of the step with UNWRITTEN, once. Call it before the forward, and after freed rows are read."""
        slots, self.unpoisoned = self.unpoisoned, None
        if slots is not None and (rows := self.rows) is not None:
            poison(rows, self.places(slots))
