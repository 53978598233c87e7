# SPDX-License-Identifier: Apache-2.0
"""Models with a vision tower, whose language model has a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dmi_connector.engine.model.architectures.base import MODELS, Architecture

_WRAPPERS = (
    ("Gemma3ForConditionalGeneration", "gemma3_mm", "Gemma3ForCausalLM"),
    ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "Qwen2ForCausalLM"),
    ("Qwen3VLForConditionalGeneration", "qwen3_vl", "Qwen3ForCausalLM"),
    ("Mistral3ForConditionalGeneration", "mistral3", "MistralForCausalLM"),
    ("Llama4ForConditionalGeneration", "mllama4", "Llama4ForCausalLM"),
    ("Qwen3_5ForConditionalGeneration", "qwen3_5", "Qwen3_5ForCausalLM"),
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_5", "Qwen3_5MoeForCausalLM"),
)
"""(vLLM's class, its module, the row of the language model)."""


def wrappers(text: Mapping[str, Architecture]) -> list[Architecture]:
    """The rows of models with a vision tower. text: the rows of language models, by name."""
    return [_wrapper(name, module, text[inner]) for name, module, inner in _WRAPPERS]


def _wrapper(name: str, module: str, row: Architecture) -> Architecture:
    """The row of a model whose language model has `row`."""
    paths: dict[str, Any] = {
        field: f"language_model.{getattr(row, field)}" for field in ("layers", "embed", "final_norm")
    }
    return replace(row, name=name, base=f"{MODELS}.{module}:{name}", language="language_model", **paths)
