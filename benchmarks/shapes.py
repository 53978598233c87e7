# SPDX-License-Identifier: Apache-2.0
"""Writes the config.json of models with published shapes, for engines with random weights (`load_format` "dummy").

    python -m benchmarks.shapes DIR [--only gemma3,pythia]

Models with experts have fewer layers than the published models, so that two engines fit on one GPU of 80 GB.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks import common

# fmt: off
SHAPES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_size": 2560,
        "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "intermediate_size": 10240, "vocab_size": 262208, "sliding_window": 1024, "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
    "gpt-oss": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "num_hidden_layers": 12,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
        "vocab_size": 201088, "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "pythia": {
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "hidden_size": 2560, "num_hidden_layers": 32,
        "num_attention_heads": 32, "intermediate_size": 10240, "vocab_size": 50304, "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "decoder_sparse_step": 1, "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "deepseek-v2": {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048,
        "num_hidden_layers": 14, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "topk_method": "greedy",
        "norm_topk_prob": False, "routed_scaling_factor": 1.0, "vocab_size": 102400, "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
    },
    "deepseek-v32": {
        "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"], "hidden_size": 4096,
        "num_hidden_layers": 10, "num_attention_heads": 64, "num_key_value_heads": 64, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 1, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "vocab_size": 129280,
        "max_position_embeddings": 16384, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
    },
    "qwen3-32b": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 5120, "num_hidden_layers": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600,
        "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
    "llama3-70b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 28672,
        "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "qwen3-235b": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4096,
        "num_hidden_layers": 8, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
        "decoder_sparse_step": 1, "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "qwen3.5-4b": {
        "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 2560,
        "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
        "intermediate_size": 9216, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "full_attention_interval": 4, "vocab_size": 248320, "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "nemotron-h": {
        "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hidden_size": 3072,
        "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-", "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9216, "mamba_num_heads": 64,
        "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "chunk_size": 128, "conv_kernel": 4,
        "vocab_size": 131072, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
}
# fmt: on
"""{name: fields of config.json}."""


def write(name: str, folder: Path) -> Path:
    """Write the config.json of a shape to the directory `folder`/`name`. Returns that directory."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**SHAPES[name], dtype="bfloat16")
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
