# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin that enables asynchronous scheduling on a CPU, where vLLM disables it (TEST_RUNNER=V2-async)."""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    """Called by vLLM in each of its processes before it makes a config. Does nothing without TEST_RUNNER=V2-async."""
    if os.environ.get("TEST_RUNNER") != "V2-async":
        return
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config

    def keep(vllm_config: Any) -> None:
        update(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    if not getattr(CpuPlatform, "asynchronous", False):
        CpuPlatform.check_and_update_config = staticmethod(keep)
        CpuPlatform.asynchronous = True
