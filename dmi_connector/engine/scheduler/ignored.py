# SPDX-License-Identifier: Apache-2.0
"""Settings of vLLM's ExampleHiddenStatesConnector that choose nothing here. Responses and the log say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dmi_connector.args import PLACEHOLDER_LAYERS
from dmi_connector.wording import show

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from dmi_connector.engine.context import CaptureContext

_LAYER_IDS, _PATH = "eagle_aux_hidden_state_layer_ids", "hidden_states_path"


def ignored_layers(vllm_config: VllmConfig, context: CaptureContext) -> str:
    """A sentence on layer ids of the speculative config that are not those of the captured hidden states, or "".

    Id i is the input of layer i, and the number of layers is the output of the last one. The ids that `capture_args`
    gives stand for none: vLLM wants some.
    """
    if context.owner != "draft":
        return ""
    speculative: Any = vllm_config.speculative_config
    ids = getattr(speculative.draft_model_config.hf_config, _LAYER_IDS, None)
    hooks, last = context.selection.hooks, context.dims.layers
    captured = {*hooks.get("resid_pre", ()), *([last] if "resid_final" in hooks else ())}
    if not ids or list(ids) == PLACEHOLDER_LAYERS or set(ids) == captured:
        return ""
    layers = "+".join(str(layer) for layer in sorted(set(ids) - {last}))
    wanted = [*([f"resid_pre@{layers}"] if layers else []), *(["resid_final"] if last in ids else [])]
    return (
        f"{_LAYER_IDS}: {show(list(ids))} choose nothing here, hooks do; for these layers alone set hooks to "
        f"{','.join(wanted)!r} and the ids to {PLACEHOLDER_LAYERS} (docs/FROM_VLLM.md)"
    )


def ignored_path(params: object) -> str:
    """A sentence on a path in a request's `kv_transfer_params` to which vLLM's connector would write, or ""."""
    path = params.get(_PATH) if isinstance(params, Mapping) else None
    if path is None:
        return ""
    return (
        f"{_PATH}: {show(path)} is ignored, dmi_store names the store; for another directory set dmi.save_path "
        "(docs/FROM_VLLM.md)"
    )
