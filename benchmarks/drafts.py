# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding for benchmarks and checks: n-gram, and an EAGLE-3 head of random weights.

A head of random weights guesses nothing, so vLLM accepts its draft tokens by chance (`rejection_sample_method`
"synthetic"). Then generated tokens are not the argmax of the logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

K = 3
"""Draft tokens of a step."""
NGRAM = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
RATES = [0.8, 0.6, 0.4]
"""Share of steps that accept the first, second and third draft token: 2.8 tokens per step."""
METHODS = ("ngram", "eagle3")


def speculative_config(method: str, target: str, folder: Path, weights: bool) -> dict[str, Any]:
    """`speculative_config` of a method of METHODS for the model in the directory `target`.

    The head is written into `folder`. weights: False where engines load dummy weights.
    """
    if method == "ngram":
        return NGRAM
    config = json.loads((Path(target) / "config.json").read_text())
    own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    own |= {"draft_vocab_size": config["vocab_size"], "tie_word_embeddings": False, "layer_types": None}
    layers = config["num_hidden_layers"]
    own["eagle_aux_hidden_state_layer_ids"] = [1, layers // 2, layers - 1]  # vLLM's own choice needs seven layers
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **own}))
    if weights:
        _write_weights(config, folder / "model.safetensors")
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": RATES}
    return {"method": method, "model": str(folder), "num_speculative_tokens": K, **synthetic}


def _write_weights(config: dict[str, Any], path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv_heads = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    matrices = {
        "midlayer.self_attn.q_proj": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "fc": (hidden, 3 * hidden),
        "lm_head": (config["vocab_size"], hidden),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    generator = torch.Generator().manual_seed(1)
    tensors = {f"{name}.weight": torch.randn(*shape, generator=generator) * 0.05 for name, shape in matrices.items()}
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    dtype = getattr(torch, config["dtype"])
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path, {"format": "pt"})
