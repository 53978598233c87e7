# SPDX-License-Identifier: Apache-2.0
"""Owner "draft": vLLM's cache-only draft model (method extract_hidden_states) contains the cache layer of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dmi_connector.args import EXTRACT_HIDDEN_STATES, NO_DRAFTS, PLACEHOLDER_LAYERS
from dmi_connector.engine.owners.asked import asked
from dmi_connector.engine.owners.paged import Paged
from dmi_connector.wording import show

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

    from dmi_connector.engine.owners.base import Context

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


class Draft(Paged):
    """vLLM's draft model owns the rows. It proposes no tokens: each request decodes one token per step."""

    name: ClassVar[str] = "draft"
    models: ClassVar[Mapping[str, str]] = {
        "ExtractHiddenStatesModel": "dmi_connector.engine.owners.draft_model:DraftModel"
    }

    def fits(self, vllm_config: VllmConfig) -> bool:
        speculative = vllm_config.speculative_config
        drafts = speculative is not None and speculative.method == EXTRACT_HIDDEN_STATES
        return drafts and not asked(vllm_config)

    def features(self, vllm_config: VllmConfig) -> list[str]:
        runner = 2 if vllm_config.use_v2_model_runner else 1
        return [*super().features(vllm_config), "draft", f"draft on the V{runner} runner"]

    def check(self, vllm_config: VllmConfig) -> None:
        super().check(vllm_config)
        if (stages := vllm_config.parallel_config.pipeline_parallel_size) > 1:
            raise ValueError(
                f"pipeline_parallel_size: {stages} with owner='draft' is not supported: vLLM places the draft "
                "model on the last stage only; use owner='target' or owner='pool'"
            )
        if vllm_config.model_config.runner_type == "pooling":
            raise ValueError(
                "runner: with 'pooling', vLLM skips the step after which the rows of a draft are exported; use "
                "owner='target'"
            )
        assert vllm_config.speculative_config is not None
        schedule = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
        if vllm_config.use_v2_model_runner and not (schedule and all(entry[-1] == 0 for entry in schedule)):
            raise ValueError(
                f"speculative_config: num_speculative_tokens_per_batch_size is {schedule!r}; set it to [[1, 65536, 0]] "
                "so that each request decodes one token per step (docs/FROM_VLLM.md); data parallelism turns "
                "this setting off, so use owner='target' there"
            )
        built = vllm_config.speculative_config.draft_model_config.hf_config.architectures
        if not set(built) <= set(self.models):  # MiMo V2 Omni: vLLM derives the class from its vision tower
            raise ValueError(
                f"model: vLLM would build {', '.join(built)} as the draft that holds the rows, because it renames the "
                "classes of this model's config; use owner='target' or owner='pool'"
            )
        self._check_whole_prompts(vllm_config)

    def before_scheduler(self, vllm_config: VllmConfig) -> None:
        """V1 runner: let vLLM's scheduler plan no draft tokens, because the proposer proposes none (replaced.py).

        vLLM 0.33 turns num_speculative_tokens_per_batch_size off for this runner, and a configuration may lack it. A
        request with one token left to compute, such as the last one after a prefix-cache hit, would then be scheduled
        with a draft token. It would have two rows of logits, and `LogitsExport` expects one per request.
        """
        if not vllm_config.use_v2_model_runner:
            assert vllm_config.speculative_config is not None
            vllm_config.speculative_config.num_speculative_tokens_per_batch_size = deepcopy(NO_DRAFTS)

    def _check_whole_prompts(self, vllm_config: VllmConfig) -> None:
        """Raise ValueError if chunked prefill is off and the longest prompt does not fit into a step.

        For latent attention on a CPU, vLLM turns chunked prefill off and raises max_num_batched_tokens. But with a
        draft model, vLLM has already set the scheduler's limit (max_num_scheduled_tokens) to the lower value.
        """
        scheduler, longest = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
        limit = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
        if not scheduler.enable_chunked_prefill and limit < longest:
            raise ValueError(
                f"max_num_batched_tokens: a step takes {limit} tokens, and chunked prefill is off here, so longer "
                f"prompts would wait forever; set it to {longest} (max_model_len) or more, lower max_model_len, or use "
                "owner='target'"
            )

    def ignored(self, vllm_config: VllmConfig, context: Context) -> str:
        """A warning if the layer ids of the speculative config are not the captured layers; else "".

        Id i means the input of layer i. The id that equals the number of layers means the output of the last layer.
        vLLM requires ids, so `capture_args` gives placeholders, for which there is no warning.
        """
        speculative: Any = vllm_config.speculative_config
        ids = getattr(speculative.draft_model_config.hf_config, _LAYER_IDS, None)
        hooks, last = context.selection.hooks, context.dims.layers
        captured = {*hooks.get("resid_pre", ()), *([last] if "resid_final" in hooks else ())}
        if not ids or list(ids) == PLACEHOLDER_LAYERS or set(ids) == captured:
            return ""
        layers = "+".join(str(layer) for layer in sorted(set(ids) - {last}))
        wanted = [*([f"resid_pre@{layers}"] if layers else []), *(["resid_final"] if last in ids else [])]
        return (
            f"{_LAYER_IDS}: {show(list(ids))} have no effect, since hooks choose the layers; to capture only these "
            f"layers, set hooks to {','.join(wanted)!r} and the ids to {PLACEHOLDER_LAYERS} (docs/FROM_VLLM.md)"
        )

    def remedy(self, error: str) -> str:
        """The fix for a sampling parameter that vLLM refuses because there is a draft model; "" for other errors."""
        return "give --owner target" if "speculative decoding" in error else ""

    def attach(self, model: nn.Module, context: Context) -> None:
        """Give the model EAGLE-3's attributes. vLLM requires these attributes with this draft, and taps ignore them."""
        if not getattr(model, "supports_eagle3", False):
            for name, value in {
                "supports_eagle3": True,
                "has_own_lm_head": False,
                "has_own_embed_tokens": False,
            }.items():
                setattr(model, name, value)

    def output(self, output: Any) -> Any:
        """Add the auxiliary tensor that vLLM's proposer expects to the output of the model."""
        return (output, [output]) if isinstance(output, torch.Tensor) else output
