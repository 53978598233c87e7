# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding for benchmarks, checks and tests: n-gram, and draft models with random weights.

A target model almost never accepts the draft tokens of random weights. So vLLM accepts draft tokens at random
(`rejection_sample_method` "synthetic"). The generated tokens are then not the argmax of the logits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

K = 3
"""Number of draft tokens per step."""
NGRAM = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
RATES = [0.8, 0.6, 0.4]
"""Share of steps that accept the first, second and third draft token: 2.8 tokens per step."""
SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": RATES}
"""Makes vLLM accept draft tokens at random, whatever the target model says. vLLM's V1 runner on a CPU lacks this."""
METHODS = ("ngram", "eagle3")


class Weights:
    """Random weights of one draft model. made: {name: tensor}."""

    def __init__(self) -> None:
        import torch

        self._generator = torch.Generator().manual_seed(1)
        self.made: dict[str, torch.Tensor] = {}

    def matrix(self, name: str, *shape: int) -> None:
        """Add a matrix [out, in] whose products with a vector have about the magnitude of the vector."""
        import torch

        self.made[f"{name}.weight"] = torch.randn(*shape, generator=self._generator) / math.sqrt(shape[-1])

    def norms(self, size: int, *names: str) -> None:
        """Add the gains of norms, all 1."""
        import torch

        self.made |= {f"{name}.weight": torch.ones(size) for name in names}

    def layer(self, prefix: str, config: dict[str, Any], inputs: int) -> None:
        """Add attention and MLP of a layer. inputs: width of the rows that its attention reads."""
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        width = config.get("head_dim") or hidden // heads
        self.matrix(f"{prefix}self_attn.q_proj", heads * width, inputs)
        self.matrix(f"{prefix}self_attn.k_proj", kv_heads * width, inputs)
        self.matrix(f"{prefix}self_attn.v_proj", kv_heads * width, inputs)
        self.matrix(f"{prefix}self_attn.o_proj", hidden, heads * width)
        self.matrix(f"{prefix}mlp.gate_proj", inner, hidden)
        self.matrix(f"{prefix}mlp.up_proj", inner, hidden)
        self.matrix(f"{prefix}mlp.down_proj", hidden, inner)
        self.norms(hidden, f"{prefix}post_attention_layernorm")

    def save(self, folder: Path, config: dict[str, Any]) -> Path:
        """Write the model to `folder` in the dtype of its config. Returns `folder`."""
        import torch
        from safetensors.torch import save_file

        dtype = getattr(torch, config["dtype"])
        folder.mkdir(parents=True, exist_ok=True)
        made = {name: tensor.to(dtype) for name, tensor in self.made.items()}
        save_file(made, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        return folder


def read_config(model: str | Path) -> dict[str, Any]:
    """The config of the model in a directory."""
    config: dict[str, Any] = json.loads((Path(model) / "config.json").read_text())
    return config


def make_eagle3(target: str | Path, folder: Path, layers: Sequence[int] | None = None, weights: bool = True) -> Path:
    """Write an EAGLE-3 head for the model in the directory `target` to `folder`. Returns `folder`.

    layers: layers of the target model whose inputs the head reads; None: vLLM's own choice. weights: whether to write
    weights, or only the config.
    """
    config = read_config(target)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    own |= {"draft_vocab_size": vocab, "tie_word_embeddings": False, "layer_types": None}
    own |= {} if layers is None else {"eagle_aux_hidden_state_layer_ids": [*layers]}
    if not weights:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**config, **own}))
        return folder
    made = Weights()
    made.layer("midlayer.", config, 2 * hidden)
    made.norms(hidden, "midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
    made.matrix("fc", hidden, 3 * hidden)
    made.matrix("lm_head", vocab, hidden)
    return made.save(folder, {**config, **own})


def speculative_config(method: str, target: str, folder: Path, weights: bool) -> dict[str, Any]:
    """vLLM's `speculative_config` for a method of METHODS and the model in the directory `target`.

    A head is written to `folder`. weights: whether it gets weights; engines that load dummy weights need none.
    """
    if method == "ngram":
        return NGRAM
    layers = read_config(target)["num_hidden_layers"]
    head = make_eagle3(target, folder, [1, layers // 2, layers - 1], weights)  # vLLM's own choice needs seven layers
    return {"method": method, "model": str(head), "num_speculative_tokens": K, **SYNTHETIC}
