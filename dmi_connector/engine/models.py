# SPDX-License-Identifier: Apache-2.0
"""Tapped model classes: `models.NAME` is vLLM's own class NAME with taps installed when our connector is configured.

vLLM's registry imports them by name. Without our connector they add nothing: same modules, same compiled graph.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import nn

from dmi_connector.engine.architectures import ARCHITECTURES
from dmi_connector.engine.context import CaptureContext, capture_context, is_active


class Tapped:
    """Mixin in front of a vLLM model class."""

    dmi_context: CaptureContext | None = None

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        if is_active(vllm_config):
            self._init_tapped(vllm_config, prefix)
        else:
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]

    def _init_tapped(self, vllm_config: Any, prefix: str) -> None:
        from dmi_connector.engine import rows, taps
        from dmi_connector.engine.compilation import compilation_of, write_once

        context, compilation = capture_context(vllm_config), compilation_of(vllm_config)
        vllm_config.additional_config["dmi_connector"] = f"{context.fingerprint};{compilation}"
        write_once(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.dmi_context = context
        assert isinstance(self, nn.Module)
        taps.install(self, context, compilation)
        if context.owner == "target":
            self.dmi_rows = rows.CaptureLayer(context)
        elif not getattr(self, "supports_eagle3", False):
            # The speculative path asks the target for this interface; taps need nothing of the model for it.
            for name, value in {
                "supports_eagle3": True,
                "has_own_lm_head": False,
                "has_own_embed_tokens": False,
            }.items():
                setattr(self, name, value)

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """The draft reads nothing from the target, so no layer is asked for its hidden states."""
        if self.dmi_context is None:
            super().set_aux_hidden_state_layers(layers)  # type: ignore[misc]

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        if self.dmi_context is None:
            return super().get_eagle3_default_aux_hidden_state_layers()  # type: ignore[misc]
        return (0,)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = super().compute_logits(hidden_states)  # type: ignore[misc]
        if self.dmi_context is not None and logits is not None and "logits" in self.dmi_context.selection.hooks:
            from dmi_connector.engine.connector import offer_logits

            offer_logits(logits)
        return logits


def _tapped_class(name: str) -> type:
    row = ARCHITECTURES[name]
    module, _, class_name = row.base.partition(":")
    base = getattr(importlib.import_module(module), class_name)

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = base.forward(self, *args, **kwargs)
        if self.dmi_context is not None and self.dmi_context.owner == "draft" and isinstance(output, torch.Tensor):
            return output, [output]  # the proposer expects one auxiliary tensor; the rows are written already
        return output

    attributes: dict[str, Any] = {"forward": forward, "__module__": __name__, "__doc__": base.__doc__}
    if not hasattr(base, "set_aux_hidden_state_layers"):
        attributes["supports_eagle3"] = False
    return type(name, (Tapped, base), attributes)


def __getattr__(name: str) -> type:
    if name not in ARCHITECTURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    cls = _tapped_class(name)
    globals()[name] = cls
    return cls
