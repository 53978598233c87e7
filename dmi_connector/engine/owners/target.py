# SPDX-License-Identifier: Apache-2.0
"""Owner "target": the served model has the cache layer of the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from dmi_connector.engine.owners.paged import Paged

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

    from dmi_connector.engine.owners.base import Context


class Target(Paged):
    """The served model owns the rows. vLLM needs no speculative config for it."""

    name: ClassVar[str] = "target"

    def fits(self, vllm_config: VllmConfig) -> bool:
        return True

    def check(self, vllm_config: VllmConfig) -> None:
        super().check(vllm_config)
        if (speculative := vllm_config.speculative_config) is not None:
            raise ValueError(
                f"speculative_config: method {speculative.method!r} verifies several tokens a step, which capture "
                "does not support; use the one that capture_args() returns, or none"
            )

    def attach(self, model: nn.Module, context: Context) -> None:
        from dmi_connector.engine.owners.row_cache import CaptureLayer

        model.dmi_rows = CaptureLayer(context)
