# SPDX-License-Identifier: Apache-2.0
"""Runs the first forward for coverage.py, in engines in which vLLM runs no forward before it serves requests."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context

_FEW_TOKENS = 2
_SAMPLED = 1
"""Number of rows of logits: one for each prompt of the batch."""


def first_forward(model: Any, vllm_config: VllmConfig) -> None:
    """Run a forward of _FEW_TOKENS tokens, and compute logits. model: the tapped model.

    The connector calls this function if no forward has run: on a CPU without compilation. As in vLLM's profiling run,
    there is no KV cache, and attention computes nothing.
    """
    device = next(model.parameters()).device
    ids = torch.zeros(_FEW_TOKENS, dtype=torch.int32, device=device)
    positions = torch.arange(_FEW_TOKENS, dtype=torch.int64, device=device)
    config = vllm_config.model_config
    if config.uses_mrope:
        positions = positions.repeat(config.mrope_num_dims, 1)
    if vllm_config.lora_config is not None:
        _use_no_adapter(model, vllm_config)
    embeddings = None
    if model.dmi_context.arch.language and config.supports_multimodal_inputs:
        with torch.inference_mode():
            embeddings = model.embed_input_ids(ids)
    context, before = model.dmi_context, None
    if not context.first_stage:
        before = model.make_empty_intermediate_tensors(batch_size=_FEW_TOKENS, dtype=config.dtype, device=device)
    with torch.inference_mode(), set_forward_context(None, vllm_config, num_tokens=_FEW_TOKENS):
        output = model(input_ids=ids, positions=positions, intermediate_tensors=before, inputs_embeds=embeddings)
        hidden = output[0] if isinstance(output, tuple) else output
        if config.runner_type != "pooling" and context.last_stage:
            model.compute_logits(hidden[:_SAMPLED])


def _use_no_adapter(model: Any, vllm_config: VllmConfig) -> None:
    """Let LoRA layers use no adapter in the first forward. All LoRA layers share one mapping.

    The mapping assigns an adapter to each token, and to each row of logits: vLLM wraps the unembedding of most models
    in a LoRA layer too.
    """
    from vllm.lora.layers import LoRAMapping

    wrapper = next(m.punica_wrapper for m in model.modules() if hasattr(m, "punica_wrapper"))
    slots = vllm_config.lora_config.max_loras
    mapping = LoRAMapping((0,) * _FEW_TOKENS, (0,) * _SAMPLED, is_prefill=True)
    wrapper.update_metadata(mapping, [None] * slots, slots, vllm_config.model_config.get_vocab_size())
