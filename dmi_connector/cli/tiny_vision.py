# SPDX-License-Identifier: Apache-2.0
"""Configurations of tiny random models with a vision tower. `tiny_models.make_model` writes the models.

Their vocabularies are those of the text models, followed by tokens for images, whose ids begin at VOCAB.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmi_connector.cli.tiny_hybrids import AXES, DELTA, EXPERTS

if TYPE_CHECKING:
    import torch

_QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_GLM_MARKS = ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")
TOKENS = {
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>", "\n", "\n\n", "\n\n\n", "\n\n\n\n"),
    "qwen2_5_vl": _QWEN_TOKENS,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN_TOKENS),
    **dict.fromkeys(("glm4v", "glm4v_moe"), ("<|image|>", "<|video|>", *_GLM_MARKS)),
    "internvl": ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "llama4": (
        "<|patch|>",
        "<|image|>",
        "<|image_start|>",
        "<|image_end|>",
        "<|tile_x_separator|>",
        "<|tile_y_separator|>",
    ),
}
"""Family -> tokens with ids starting at VOCAB. Its first token is the placeholder for an image embedding."""
VOCAB = 512
"""Number of tokens of a text model."""
PATCH = 14
"""Pixels per side of a patch."""

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB + 16,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN_VISION = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 96,
}
_QWEN_IDS = {
    "image_token_id": VOCAB,
    "video_token_id": VOCAB + 1,
    "vision_start_token_id": VOCAB + 2,
    "vision_end_token_id": VOCAB + 3,
}
_QWEN3_VISION = {**_QWEN_VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
_QWEN3_ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
}
_GLM_ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 3, 3],
        "partial_rotary_factor": 0.5,
    }
}
_GLM_VISION = {**_QWEN_VISION, "intermediate_size": 160, "image_size": 8 * PATCH}
_GLM_IDS = {
    "image_token_id": VOCAB,
    "video_token_id": VOCAB + 1,
    "image_start_token_id": VOCAB + 2,
    "image_end_token_id": VOCAB + 3,
    "video_start_token_id": VOCAB + 4,
    "video_end_token_id": VOCAB + 5,
}
_VISION = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 2}
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 24,
            "sliding_window": 32,
            "sliding_window_pattern": 2,
        },
        "vision_config": {**_VISION, "image_size": 4 * PATCH, "patch_size": PATCH, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "image_token_index": VOCAB,
        "boi_token_index": VOCAB + 1,
        "eoi_token_index": VOCAB + 2,
        "tie_word_embeddings": True,
    },
    "qwen2_5_vl": {
        "text_config": {
            **{name: value for name, value in _TEXT.items() if name != "head_dim"},
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        },
        "vision_config": {**_QWEN_VISION, "window_size": 4 * PATCH, "fullatt_block_indexes": [1]},
        **_QWEN_IDS,
        "tie_word_embeddings": False,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, **_QWEN3_ROPE},
        "vision_config": _QWEN3_VISION,
        **_QWEN_IDS,
        "tie_word_embeddings": True,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **_TEXT,
            **_QWEN3_ROPE,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,  # 48, half of hidden_size, would hide swapped axes
            "norm_topk_prob": True,
        },
        "vision_config": _QWEN3_VISION,
        **_QWEN_IDS,
        "tie_word_embeddings": False,
    },
    "glm4v": {
        "text_config": {
            **{name: value for name, value in _TEXT.items() if name != "head_dim"},
            **_GLM_ROPE,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "attention_bias": True,  # for vLLM; transformers always has these biases
        },
        "vision_config": _GLM_VISION,
        **_GLM_IDS,
        "tie_word_embeddings": False,
    },
    "glm4v_moe": {
        "text_config": {
            **_TEXT,
            **_GLM_ROPE,
            "attention_bias": True,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": False,  # for vLLM
        },
        "vision_config": _GLM_VISION,
        **_GLM_IDS,
        "tie_word_embeddings": False,
    },
    "internvl": {
        "text_config": {**_TEXT, "model_type": "qwen3", "num_key_value_heads": 1},
        "vision_config": {
            **_VISION,
            "image_size": [4 * PATCH, 4 * PATCH],
            "patch_size": [PATCH, PATCH],
        },
        "image_token_id": VOCAB,
        "image_seq_length": 4,
        "tie_word_embeddings": False,
    },
    "qwen3_5": {
        "text_config": {**_TEXT, **DELTA, "rope_parameters": AXES},
        "vision_config": {**_QWEN_VISION, "num_position_embeddings": 64},
        **_QWEN_IDS,
        "tie_word_embeddings": False,
    },
    "qwen3_5_moe": {
        "text_config": {**_TEXT, **DELTA, **EXPERTS, "rope_parameters": AXES},
        "vision_config": {**_QWEN_VISION, "num_position_embeddings": 64},
        **_QWEN_IDS,
        "tie_word_embeddings": False,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral", "num_key_value_heads": 3, "sliding_window": None},
        "vision_config": {**_VISION, "image_size": 12 * PATCH, "patch_size": PATCH},
        "image_token_index": VOCAB,
        "vision_feature_layer": -1,
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 4,
            "intermediate_size": 64,
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 128,
            "use_qk_norm": True,
        },
        "vision_config": {
            **_VISION,
            "intermediate_size": 192,  # width after the pixel shuffle: four times the hidden size
            "image_size": 4 * PATCH,
            "patch_size": PATCH,
            "vision_output_dim": 48,
            "projector_input_dim": 48,
            "projector_output_dim": 48,
        },
        "image_token_index": VOCAB,
        "boi_token_index": VOCAB + 2,
        "eoi_token_index": VOCAB + 3,
        "tie_word_embeddings": False,
    },
}
"""Family whose language model is part of a model with a vision tower -> its transformers configuration."""


_SCALE = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_resize": True, "resample": 3}
_NORMAL = {**_SCALE, "image_mean": [0.5] * 3, "image_std": [0.3] * 3}
_SQUARE = {"height": 4 * PATCH, "width": 4 * PATCH}
_QWEN_SIZES = {
    **_NORMAL,
    "size": {"shortest_edge": 4 * PATCH**2, "longest_edge": 256 * PATCH**2},
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 2,
}


def _qwen(generation: str, videos: str) -> dict[str, dict[str, Any]]:
    return {
        "preprocessor_config.json": {
            **_QWEN_SIZES,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": f"Qwen{generation}Processor",
        },
        "video_preprocessor_config.json": {**_QWEN_SIZES, "video_processor_type": f"Qwen{videos}VideoProcessor"},
    }


_GLM = {
    "preprocessor_config.json": {
        **_QWEN_SIZES,
        "image_processor_type": "Glm4vImageProcessor",
        "processor_class": "Glm4vProcessor",
    },
    "video_preprocessor_config.json": {**_QWEN_SIZES, "video_processor_type": "Glm4vVideoProcessor"},
}
PROCESSORS: dict[str, dict[str, dict[str, Any]]] = {
    "gemma3": {
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        "preprocessor_config.json": {**_NORMAL, "image_processor_type": "Gemma3ImageProcessor", "size": _SQUARE},
    },
    "qwen2_5_vl": _qwen("2_5_VL", "2VL"),
    **dict.fromkeys(("glm4v", "glm4v_moe"), _GLM),
    "internvl": {
        "processor_config.json": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        "preprocessor_config.json": {
            **_NORMAL,
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": _SQUARE,
            "crop_to_patches": False,
            "min_patches": 1,
            "max_patches": 1,
        },
        "video_preprocessor_config.json": {
            **_NORMAL,
            "video_processor_type": "InternVLVideoProcessor",
            "size": _SQUARE,
        },
    },
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _qwen("3VL", "3VL")),
    "mistral3": {
        "processor_config.json": {
            "processor_class": "PixtralProcessor",
            "patch_size": PATCH,
            "spatial_merge_size": 2,
        },
        "preprocessor_config.json": {
            **_NORMAL,
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 12 * PATCH},
            "patch_size": {"height": PATCH, "width": PATCH},
        },
    },
    "llama4": {
        "processor_config.json": {"processor_class": "Llama4Processor", "patch_size": PATCH},
        "preprocessor_config.json": {
            **_NORMAL,
            "image_processor_type": "Llama4ImageProcessor",
            "size": _SQUARE,
            "max_patches": 4,
        },
    },
}
"""Family -> {file name: content} of the files that configure its image processor."""


TEXT_ONLY: dict[str, dict[str, Any]] = {
    "step3p7": {
        "text_config": {
            **_TEXT,
            **{"vocab_size": VOCAB, "num_hidden_layers": 4, "sliding_window": 32},
            **{"num_attention_heads": 4, "num_sliding_attention_heads": 6},
            **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "share_expert_dim": 48},
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "rope_theta": [10000.0] * 4,
            "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0],
        },
        "vision_config": {**_VISION, "image_size": 4 * PATCH, "patch_size": PATCH},
        **{"image_token_id": 500, "tie_word_embeddings": False},
    },
}
"""Like WRAPPERS, for families that are not tested with images."""


def wrapper_fields(arch: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The transformers configuration of a family, with `changes`. Nested configurations are changed field by field."""
    fields = copy.deepcopy((WRAPPERS | TEXT_ONLY)[arch])
    for name, value in changes.items():
        fields[name] = {**fields[name], **value} if name.endswith("_config") else value
    return fields


def fill_vision(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Draw the parameters of the vision tower, so that image embeddings have the magnitude of text embeddings."""
    import torch

    for name, weight in sorted(model.named_parameters()):
        if not is_vision(name):
            continue
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith(".bias"):
            weight.copy_(0.05 * noise)
        elif weight.dim() == 1 or "position" in name:
            weight.copy_((0.0 if "soft_emb_norm" in name else 0.3) + 0.1 * noise)
        elif "soft_emb" not in name and "mm_input_projection" not in name:
            weight.copy_(noise / math.sqrt(weight[0].numel()))
        else:
            weight.copy_(0.3 * noise / math.sqrt(weight.shape[0]))


def is_vision(name: str) -> bool:
    """Whether a parameter is outside the language model: in the vision tower or the projector."""
    return "language_model." not in name and "lm_head" not in name


def named_tokens(arch: str) -> dict[str, str]:
    """Attribute of the tokenizer -> token, for the attributes that the family's processor reads."""
    if arch == "internvl":
        names: tuple[str, ...] = ("context_image_token", "start_image_token", "end_image_token", "video_token")
    else:
        names = ("image_token", "boi_token", "eoi_token") if arch == "gemma3" else ()
    return dict(zip(names, TOKENS.get(arch, ()), strict=False))


def save_processor(arch: str, path: Path) -> None:
    """Write the files that configure the family's image processor into the directory `path`."""
    for name, content in PROCESSORS.get(arch, {}).items():
        (path / name).write_text(json.dumps(content, indent=1))


def save_names(arch: str, path: Path) -> None:
    """Rewrite saved weights as published checkpoints have them.

    transformers saves a SigLIP tower (Gemma 3) under shorter names, and the experts of Qwen3-VL with swapped axes.
    """
    if arch not in ("gemma3", "qwen3_vl_moe"):
        return
    from safetensors.torch import load_file, save_file

    tower = "vision_tower."
    weights = load_file(path / "model.safetensors")
    if arch == "gemma3":
        weights = {
            k.replace(tower, f"{tower}vision_model.") if k.startswith(tower) else k: v for k, v in weights.items()
        }
    else:
        weights = {k: v.mT.contiguous() if ".experts." in k else v for k, v in weights.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
