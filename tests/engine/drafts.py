# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding for tests: the configuration of each method, and draft models of random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

K = 3
"""Draft tokens of a step."""
NGRAM = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def make_eagle3(target: Path, path: Path) -> Path:
    """An EAGLE3 head of random weights for a tiny Llama. Returns its directory."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((target / "config.json").read_text())
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    generator = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.05

    layer = "midlayer."
    weights = {
        f"{layer}self_attn.q_proj.weight": weight(heads * width, 2 * hidden),
        f"{layer}self_attn.k_proj.weight": weight(kv_heads * width, 2 * hidden),
        f"{layer}self_attn.v_proj.weight": weight(kv_heads * width, 2 * hidden),
        f"{layer}self_attn.o_proj.weight": weight(hidden, heads * width),
        f"{layer}mlp.gate_proj.weight": weight(inner, hidden),
        f"{layer}mlp.up_proj.weight": weight(inner, hidden),
        f"{layer}mlp.down_proj.weight": weight(hidden, inner),
        **{f"{layer}{norm}.weight": torch.ones(hidden) for norm in ("input_layernorm", "hidden_norm")},
        f"{layer}post_attention_layernorm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "fc.weight": weight(hidden, 3 * hidden),
        "lm_head.weight": weight(vocab, hidden),
    }
    path.mkdir(exist_ok=True)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    own = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": vocab}
    (path / "config.json").write_text(json.dumps({**config, **own, "tie_word_embeddings": False}))
    return path


def speculative_config(method: str, tiny_model: Callable[..., Path], folder: Path) -> tuple[str, dict[str, Any]]:
    """(architecture of the target, `speculative_config`) of a method."""
    if method == "ngram":
        return "qwen3", NGRAM
    if method == "draft_model":  # the target itself: all drafts are accepted
        return "qwen3", {"method": method, "model": str(tiny_model("qwen3")), "num_speculative_tokens": K}
    head = make_eagle3(tiny_model("llama"), folder / "eagle3")
    return "llama", {"method": "eagle3", "model": str(head), "num_speculative_tokens": K}
