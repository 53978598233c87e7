# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of architectures: models with a vision tower. They are made from the rows of language models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dmi_connector.engine.model.architectures.base import MODELS, Architecture

_WRAPPERS = (
    ("Gemma3ForConditionalGeneration", "gemma3_mm", "Gemma3ForCausalLM"),
    ("Gemma4ForConditionalGeneration", "gemma4_mm", "Gemma4ForCausalLM"),
    ("Gemma4UnifiedForConditionalGeneration", "gemma4_unified", "Gemma4ForCausalLM"),
    ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "Qwen2ForCausalLM"),
    ("Qwen3VLForConditionalGeneration", "qwen3_vl", "Qwen3ForCausalLM"),
    ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "Qwen3MoeForCausalLM"),
    ("Glm4vForConditionalGeneration", "glm4_1v", "Glm4ForCausalLM"),
    ("Glm4vMoeForConditionalGeneration", "glm4_1v", "Glm4MoeForCausalLM"),
    ("KimiK25ForConditionalGeneration", "kimi_k25", "DeepseekV3ForCausalLM"),
    ("Mistral3ForConditionalGeneration", "mistral3", "MistralForCausalLM"),
    ("Llama4ForConditionalGeneration", "mllama4", "Llama4ForCausalLM"),
    ("Qwen3_5ForConditionalGeneration", "qwen3_5", "Qwen3_5ForCausalLM"),
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_5", "Qwen3_5MoeForCausalLM"),
    ("InternS2PreviewForConditionalGeneration", "interns2_preview", "Qwen3_5MoeForCausalLM"),
    ("MiniCPMV4_6ForConditionalGeneration", "minicpmv4_6", "Qwen3_5ForCausalLM"),
    ("MiMoV2OmniForCausalLM", "mimo_v2_omni", "MiMoV2FlashForCausalLM"),
    ("Step3p7ForConditionalGeneration", "step3p7", "Step3p5ForCausalLM"),
)
"""(architecture, which is also vLLM's class; Python module of the class; architecture of the language model)."""


_ANY_TEXT = (
    ("InternVLForConditionalGeneration", "interns1", "InternS1ForConditionalGeneration"),
    ("InternS1ForConditionalGeneration", "interns1", "InternS1ForConditionalGeneration"),
    ("InternVLChatModel", "internvl", "InternVLChatModel"),
    ("PixtralForConditionalGeneration", "pixtral", "PixtralForConditionalGeneration"),
    ("Lfm2VlForConditionalGeneration", "lfm2_vl", "Lfm2VLForConditionalGeneration"),
    ("NemotronH_Nano_VL_V2", "nano_nemotron_vl", "NemotronH_Nano_VL_V2"),
    ("NemotronH_Nano_Omni_Reasoning_V3", "nano_nemotron_vl", "NemotronH_Nano_VL_V2"),
)
"""(architecture, Python module of vLLM's class, vLLM's class) of models whose config names the language model."""


@dataclass(frozen=True)
class AnyText(Architecture):
    """The row of a model with a vision tower whose config names the language model. text: rows of language models."""

    text: tuple[Architecture, ...] = field(default=(), repr=False)

    def fit(self, config: Any) -> Architecture:
        """The row of a model with this text config. Raises ValueError if the language model has no row."""
        names = getattr(config, "architectures", None) or [_class_of(config.model_type)]
        row = next((row for row in self.text if row.name == names[0]), None)
        if row is None:
            raise ValueError(
                f"model: {self.name} with the language model {names[0]!r}, which has no row in the table of "
                "architectures; use another model"
            )
        module, _, class_name = self.base.rpartition(".")[2].partition(":")
        return _wrapper(self.name, module, row.fit(config), class_name)


def _class_of(model_type: str) -> str:
    """The class of transformers for text models of this type. vLLM uses it if a text config has no architecture."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, model_type))


def wrappers(text: Mapping[str, Architecture]) -> list[Architecture]:
    """The rows of models with a vision tower. text: architecture -> row, for language models."""
    inside = tuple(row for row in text.values() if not row.in_transformers)
    several = (
        AnyText(name, f"{MODELS}.{module}:{class_name}", language="language_model", text=inside)
        for name, module, class_name in _ANY_TEXT
    )
    return [*(_wrapper(name, module, text[inner]) for name, module, inner in _WRAPPERS), *several]


def _wrapper(name: str, module: str, row: Architecture, class_name: str = "") -> Architecture:
    """The row of a model whose language model has the row `row`. class_name: vLLM's class, if it is not `name`."""
    given = {name: getattr(row, name) for name in ("layers", "embed", "final_norm")}
    paths: dict[str, Any] = {name: f"language_model.{path}" for name, path in given.items() if path}
    base = f"{MODELS}.{module}:{class_name or name}"
    return replace(row, name=name, base=base, language="language_model", **paths)
