# SPDX-License-Identifier: Apache-2.0
"""Defines the cache-only draft model that holds the rows of owner "draft"."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models import extract_hidden_states as stock

from dmi_connector.engine import replaced
from dmi_connector.engine.owners.row_cache import CaptureLayer

if TYPE_CHECKING:
    from dmi_connector.engine.owners.base import Context


class DraftModel(stock.ExtractHiddenStatesModel):
    """vLLM's cache-only draft. With our connector, its only layer holds the rows that the taps write.

    capturing: returns the context of an engine with our connector, otherwise None. `models.py` sets it.
    """

    capturing: ClassVar[Callable[[VllmConfig], Context | None]]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        context = type(self).capturing(vllm_config)
        self.dmi_active = context is not None
        if context is None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            return
        nn.Module.__init__(self)
        self.dmi_active = True
        if vllm_config.use_v2_model_runner:
            replaced.skip_draft_forward()
        else:
            replaced.schedule_no_drafts()
        self.cache_only_layers = nn.ModuleDict({str(context.dims.layers): CaptureLayer(context)})

    def forward(self, hidden_states: Any) -> Any:
        return None if self.dmi_active else super().forward(hidden_states)
