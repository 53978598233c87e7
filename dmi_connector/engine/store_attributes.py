# SPDX-License-Identifier: Apache-2.0
"""The root attributes that all stores of an engine share (docs/FORMAT.md, section 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dmi_connector.engine.context import CaptureContext

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def store_attributes(context: CaptureContext, vllm_config: VllmConfig) -> dict[str, Any]:
    """The shared attributes, JSON-ready. `engine/tracker.py` adds those of one request."""
    import vllm

    import dmi_connector

    dims = context.dims
    return {
        "model": vllm_config.model_config.model,
        "architecture": context.arch.name,
        "dtype": context.dtype,
        "num_layers": dims.layers,
        "identities": True,
        **({"parallel": True} if context.arch.parallel else {}),
        "tp": context.tp,
        "owner": context.owner,
        "versions": {
            "dmi_connector": dmi_connector.__version__,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
        },
        "dims": {
            "hidden": dims.hidden,
            "heads": dims.heads,
            "kv_heads": dims.kv_heads,
            "head_dim": dims.head_dim,
            "vocab": dims.vocab,
        },
    }
