# SPDX-License-Identifier: Apache-2.0
"""Owner "target": rows are in a cache layer of vLLM that is added to the served model."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, ClassVar

from dmi_connector.engine.owners.asked import asked
from dmi_connector.engine.owners.paged import Paged

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

    from dmi_connector.engine.owners.base import Context


CHAINS = ("ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "eagle3", "mtp", "dflash")
"""Methods of `speculative_config` that propose one draft token per position, so that no two draft tokens share a slot.
"""


def check_chain(vllm_config: VllmConfig) -> None:
    """Raise ValueError for speculative decoding in which the rows of accepted tokens could not be identified."""
    speculative: Any = vllm_config.speculative_config
    if speculative.method not in CHAINS:
        raise ValueError(
            f"speculative_config: method {speculative.method!r} may propose several tokens for a position; use one of "
            f"{', '.join(CHAINS)}, or none"
        )
    if getattr(speculative, "enable_adaptive_verification", False):  # vLLM 0.32
        raise ValueError(
            "speculative_config: enable_adaptive_verification True lets the GPU skip draft tokens of a step, so "
            "the number of verified draft tokens is unknown; leave it out"
        )
    tree = getattr(speculative, "speculative_token_tree", None)  # vLLM 0.31
    chain = [(0,) * depth for depth in range(1, speculative.num_speculative_tokens + 1)]
    if tree is not None and ast.literal_eval(tree) != chain:
        raise ValueError(
            f"speculative_config: speculative_token_tree {tree} proposes several tokens for a position, whose rows "
            "would share a slot; leave it out"
        )
    if vllm_config.model_config.using_transformers_backend() and speculative.use_eagle():
        raise ValueError(
            f"speculative_config: method {speculative.method!r} runs modules of the model, which vLLM's Transformers "
            "backend compiles as a whole, so values of the draft could not be distinguished from the model's; use "
            "'ngram' or 'draft_model'"
        )


class Target(Paged):
    """The served model owns the rows. This owner supports speculative decoding by the methods of CHAINS."""

    name: ClassVar[str] = "target"

    def fits(self, vllm_config: VllmConfig) -> bool:
        return not asked(vllm_config)

    def features(self, vllm_config: VllmConfig) -> list[str]:
        drafts = ["speculative decoding"] if vllm_config.speculative_config is not None else []
        return [*super().features(vllm_config), *drafts]

    def check(self, vllm_config: VllmConfig) -> None:
        super().check(vllm_config)
        if vllm_config.speculative_config is not None:
            check_chain(vllm_config)

    def attach(self, model: nn.Module, context: Context) -> None:
        from dmi_connector.engine.owners.row_cache import CaptureLayer

        model.dmi_rows = CaptureLayer(context)
