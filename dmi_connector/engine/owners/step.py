# SPDX-License-Identifier: Apache-2.0
"""`StepRows`, the part of a `RowMemory` that keeps the metadata of the running step."""

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
    """Mixin of a `RowMemory`. It keeps the metadata of the running batch, and may fill the batch's rows with UNWRITTEN.

    poisons: whether the rows of a step are filled with UNWRITTEN (model/coverage.py) before its forward. With an
    untested version of vLLM, true until the first captures were checked (`exporter.FIRST_CAPTURES`); otherwise false.
    unpoisoned: vLLM's slots of the step, int64 [tokens], until its rows are filled; None afterwards. The other
    attributes are those of `RowMemory`.
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
        """Set the initial values of the attributes. The constructors of subclasses call it."""
        self.row_dtype = vllm_config.model_config.dtype
        self.step = None
        self.poisons = bool(contract.untested())
        self.unpoisoned = None
        self.scores = None
        self._built_last = not vllm_config.use_v2_model_runner

    def places(self, slots: torch.Tensor) -> torch.Tensor:
        """The indexes in `rows` of tokens, int64 [tokens]. slots: vLLM's slots of the tokens, int64 [tokens]."""
        return slots

    def planned(self, step: CommonAttentionMetadata) -> None:
        """Keep the metadata of a step, and fill its rows if `poisons`.

        vLLM's V1 runner builds the metadata after rows of freed blocks were read, so rows are filled at once. The V2
        runner builds it before they are read, so there the exporter calls `poison_step` later.
        """
        self.step = step
        if self.poisons:
            self.unpoisoned = step.slot_mapping
            if self._built_last:
                self.poison_step()

    def poison_step(self) -> None:
        """Fill the rows of the step with UNWRITTEN, once. Call it before the forward, after freed rows are read."""
        slots, self.unpoisoned = self.unpoisoned, None
        if slots is not None and (rows := self.rows) is not None:
            poison(rows, self.places(slots))
