# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of tiny models, and models whose weights include a merged adapter."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK, ALPHA = 8, 16
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "input_linear", "output_linear")
_MIXER = ("in_proj", "out_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
TARGETS = (*_ATTENTION, *_MLP, *_MIXER)
"""Names of the linear layers that get an adapter, over all models."""


def make_adapter(model: Path, folder: Path, merged: Path, seed: int) -> None:
    """Write a random adapter for all linear layers of `model` in PEFT's format, and write the merged model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    generator, tensors = torch.Generator().manual_seed(seed), {}
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name, module in whole.named_modules():
            if name.rsplit(".", 1)[-1] in TARGETS:
                out, into = module.weight.shape
                a = torch.randn(RANK, into, generator=generator) / into**0.5
                b = 0.2 * torch.randn(out, RANK, generator=generator) / RANK**0.5
                module.weight += ALPHA / RANK * b @ a
                tensors |= {f"base_model.model.{name}.lora_{x}.weight": v for x, v in (("A", a), ("B", b))}
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": list(TARGETS)}))
    save_file(tensors, folder / "adapter_model.safetensors")
    whole.save_pretrained(merged)
    AutoTokenizer.from_pretrained(model).save_pretrained(merged)
