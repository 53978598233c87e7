# SPDX-License-Identifier: Apache-2.0
"""Shapes of published models, for engines with random weights (`load_format` "dummy"): a config.json of each.

    python -m benchmarks.shapes DIR [--only gemma3,pythia]

Models with experts have fewer layers than the published ones, so that two engines fit one GPU of 80 GB.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks import common

SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        {
            "hidden_size": 2560,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "intermediate_size": 10240,
            "vocab_size": 262208,
            "sliding_window": 1024,
            "query_pre_attn_scalar": 256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        "GptOssForCausalLM",
        {
            "hidden_size": 2880,
            "num_hidden_layers": 12,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "vocab_size": 201088,
            "sliding_window": 128,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
    "pythia": (
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 10240,
            "vocab_size": 50304,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
    ),
    "qwen3-moe": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        },
    ),
    "deepseek-v2": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 14,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "vocab_size": 102400,
            "max_position_embeddings": 16384,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-32b": (
        "qwen3",
        "Qwen3ForCausalLM",
        {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 25600,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        },
    ),
    "llama3-70b": (
        "llama",
        "LlamaForCausalLM",
        {
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 28672,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-235b": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 8,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        },
    ),
}
"""Name -> (model type, architecture, fields of the configuration)."""


def write(name: str, folder: Path) -> Path:
    """Write config.json of a shape into `folder`/`name`, and return that directory."""
    from transformers import AutoConfig

    kind, architecture, fields = SHAPES[name]
    config = AutoConfig.for_model(kind, **fields, dtype="bfloat16")
    config.architectures = [architecture]
    path = folder / name
    config.save_pretrained(path)
    return path


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    p = common.parser("benchmarks.shapes", __doc__)
    p.add_argument("dir", type=Path)
    p.add_argument("--only", default=",".join(SHAPES), help="comma-separated (default: %(default)s)")
    args = p.parse_args(argv)
    for name in args.only.split(","):
        if name not in SHAPES:
            p.error(f"--only: {name!r} is unknown; choose from {', '.join(SHAPES)}")
        print(write(name, args.dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
