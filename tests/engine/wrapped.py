# SPDX-License-Identifier: Apache-2.0
"""Multimodal models that transformers lacks, or that run without their vision tower. Each is the checkpoint of a
language model, with the config and weight names of the surrounding model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from tests.engine.renamed import RENAMED, Renamed, Weights, as_they_are, renamed


def _around(
    model_type: str, vision: Mapping[str, Any], text: str = "text_config", **more: Any
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns a function from the config of a language model to that of a surrounding model of this type.

    text: the field for the language model's config. vision: config of the vision tower.
    """

    def fields(config: dict[str, Any]) -> dict[str, Any]:
        tower = {**vision, "out_hidden_size": config["hidden_size"]}
        return {
            "model_type": model_type,
            "dtype": config["dtype"],
            text: config,
            "vision_config": tower,
            "image_token_id": 500,
            "tie_word_embeddings": config["tie_word_embeddings"],
            **more,
        }

    return fields


def _nested(weights: Weights, _config: dict[str, Any]) -> Weights:
    """Weights of a language model next to a vision tower, both in the module `model`."""
    return renamed(weights, {r"^model\.": "model.language_model."})


def _inside(weights: Weights, _config: dict[str, Any]) -> Weights:
    """Weights of a language model inside another model."""
    return renamed(weights, {"^": "language_model."})


def _kimi_k25(config: dict[str, Any]) -> dict[str, Any]:
    """A vision tower in front of DeepSeek V3."""
    tower = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 80}
    return {
        "model_type": "kimi_k25",
        "dtype": config["dtype"],
        "text_config": config,
        "vision_config": {**tower, "mm_hidden_size": 48, "text_hidden_size": config["hidden_size"]},
        "image_token_id": 500,
        "tie_word_embeddings": False,
    }


_KIMI_IMAGES = {
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "patch_size": 14,
    "merge_kernel_size": 2,
    "temporal_merge_kernel_size": 4,
    "in_patch_limit": 64,
    "in_patch_limit_each_frame": 64,
    "in_patch_limit_video": 64,
    "patch_limit_on_one_side": 16,
    "fixed_output_tokens": None,
}


_TOWER = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 2}
_SIGLIP = {**_TOWER, "num_key_value_heads": 2, "head_dim": 24, "position_embedding_size": 64}


def _unified(config: dict[str, Any]) -> dict[str, Any]:
    """Gemma 4 without an image encoder."""
    text = {**config, "model_type": "gemma4_unified_text"}
    return _around("gemma4_unified", {"mm_embed_dim": 48, "mm_posemb_size": 64})(text)


def _beside_patches(weights: Weights, config: dict[str, Any]) -> Weights:
    """Weights of a language model next to an embedding of image patches (48 * 48 pixels). vLLM loads that embedding
    even if it takes no images.
    """
    norms = {"patch_ln1": 48 * 48 * 3, "patch_ln2": 48, "pos_norm": 48}
    embedder = {f"{name}.{kind}": torch.ones(size) for name, size in norms.items() for kind in ("weight", "bias")}
    embedder["pos_embedding"] = torch.zeros(64, 2, 48)
    return {**_nested(weights, config), **{f"model.vision_embedder.{name}": one for name, one in embedder.items()}}


_TILES = {"image_size": [56, 56], "patch_size": [14, 14]}
_QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 2,
    "patch_size": 14,
    "num_position_embeddings": 64,
}


class _Remote(PreTrainedConfig):
    """A config whose code comes with its checkpoint: a language model in `llm_config` and a vision tower."""

    llm_config: Any = None
    vision_config: Any = None

    def __post_init__(self, **fields: Any) -> None:
        if isinstance(self.llm_config, dict):
            self.llm_config = AutoConfig.for_model(**self.llm_config)
        if isinstance(self.vision_config, dict):
            self.vision_config = PreTrainedConfig(**self.vision_config)
        super().__post_init__(**fields)


class _InternVLChat(_Remote):
    model_type = "internvl_chat"


class _Pixtral(_Remote):
    """Checkpoints in Mistral's own format, which have no model type."""

    model_type = "mistral_with_images"


class _NemotronVL(_Remote):
    model_type = "NemotronH_Nano_VL_V2"


class _Step3p7(_Remote):
    """The config as the code of the checkpoint defines it."""

    model_type = "step3p7_remote"

    def __post_init__(self, **fields: Any) -> None:
        try:
            from vllm.transformers_utils.configs.step3p5 import Step3p5Config
        except ModuleNotFoundError:  # vLLM 0.33 uses transformers' class
            from transformers import Step3p7TextConfig as Step3p5Config

        if isinstance(self.llm_config, dict):
            self.llm_config = Step3p5Config(**self.llm_config)
        super().__post_init__(**fields)


for _config in (_InternVLChat, _NemotronVL, _Pixtral, _Step3p7):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
_VIT = {
    "image_size": 56,
    "patch_size": 14,
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu",
    "qkv_bias": True,
    "qk_normalization": False,
    "initializer_factor": 1.0,
}
_MIMO_TOWER = {
    **_QWEN_TOWER,
    "num_key_value_heads": 2,
    "fullatt_block_indexes": [1],
    "vit_window_attn_types": [-1, -1],
    "use_sink": False,
}
_PIXTRAL = {
    **_TOWER,
    "num_channels": 3,
    "image_size": 56,
    "patch_size": 14,
    "rope_theta": 10000.0,
    "image_token_id": 500,
}


def _pixtral(config: dict[str, Any]) -> dict[str, Any]:
    """Mistral Large 3 and Small 4."""
    text = {**config, "architectures": ["MistralLarge3ForCausalLM"]}
    return _around(_Pixtral.model_type, _PIXTRAL, "llm_config")(text)


_RADIO: dict[str, Any] = {
    "force_image_size": 64,
    "patch_size": 16,
    "downsample_ratio": 0.5,
    "ps_version": "v2",
    "template": "none",
    "image_tag_type": "internvl",
    "vit_hidden_size": 768,
    "projector_hidden_size": 64,
    "norm_mean": [0.5] * 3,
    "norm_std": [0.5] * 3,
}
_RADIO_TOWER = {"args": {"model": "vit_base_patch16_224"}, "patch_size": 16, "preferred_resolution": [64, 64]}


def _step3p5(config: dict[str, Any]) -> dict[str, Any]:
    """Step 3.5, made from the language model of Step 3.7."""
    text = config["text_config"]
    windows = {"num_attention_groups": text["num_key_value_heads"], "head_dim": text["head_dim"]}
    windows |= {"attention_type": "sliding_attention", "num_attention_heads": text["num_sliding_attention_heads"]}
    dense = [i for i, kind in enumerate(text["mlp_layer_types"]) if kind == "dense"]
    return {
        **{name: text[name] for name in _STEP},
        "model_type": "step3p5",
        "num_attention_groups": text["num_key_value_heads"],
        "attention_other_setting": windows,
        "use_head_wise_attn_gate": True,
        "moe_num_experts": text["n_routed_experts"],
        "moe_top_k": text["num_experts_per_tok"],
        "moe_layers_enum": ",".join(str(i) for i in range(text["num_hidden_layers"]) if i not in dense),
        "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": 1.0,
        "norm_expert_weight": True,
        "use_moe_router_bias": True,
        "need_fp32_gate": True,
        "swiglu_limits": None,
        "swiglu_limits_shared": None,
        "rope_theta": [10000.0] * text["num_hidden_layers"],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0],
    }


def _step3p7(config: dict[str, Any]) -> dict[str, Any]:
    text = {**_step3p5(config), "architectures": ["Step3p5ForCausalLM"]}
    return _around(_Step3p7.model_type, _ENCODER, "llm_config", projector_bias=False)(text)


def _text_alone(weights: Weights, _config: dict[str, Any]) -> Weights:
    return {name: weight for name, weight in weights.items() if not name.startswith("vi")}


_ENCODER = {
    **{"width": 48, "layers": 2, "heads": 2, "image_size": 56, "patch_size": 14, "output_dim": 48, "mlp_ratio": 2.0},
    **{"use_abs_posemb": True, "use_cls_token": False, "use_rope2d": True, "use_ln_pre": True, "use_ln_post": False},
    **{"hidden_act": "quick_gelu", "ls_init_value": 0.1, "hidden_size": 48},
}
_STEP = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("moe_intermediate_size", "share_expert_dim", "layer_types", "sliding_window", "rms_norm_eps", "dtype"),
    *("max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings"),
)

WRAPPED = {
    "step3p5": Renamed("Step3p5ForCausalLM", _step3p5, _text_alone),
    "step3p7": Renamed("Step3p7ForConditionalGeneration", _step3p7, _text_alone),
    "kimi_k25": Renamed(
        "KimiK25ForConditionalGeneration",
        _kimi_k25,
        _inside,
        files={"preprocessor_config.json": {"media_proc_cfg": _KIMI_IMAGES}},
    ),
    "gemma4": Renamed("Gemma4ForConditionalGeneration", _around("gemma4", _SIGLIP), _nested),
    "gemma4_unified": Renamed("Gemma4UnifiedForConditionalGeneration", _unified, _beside_patches),
    "interns1": Renamed(
        "InternS1ForConditionalGeneration", _around("internvl", {**_TOWER, **_TILES}, image_seq_length=4), _nested
    ),
    "interns2_preview": Renamed(
        "InternS2PreviewForConditionalGeneration", _around("qwen3_5_moe", _QWEN_TOWER), _nested
    ),
    "internvl_chat": Renamed(
        "InternVLChatModel",
        _around(
            "internvl_chat",
            {**_TOWER, **_VIT},
            "llm_config",
            force_image_size=56,
            downsample_ratio=0.5,
            ps_version="v2",
            select_layer=-1,
        ),
        _inside,
    ),
    "pixtral": Renamed("PixtralForConditionalGeneration", _pixtral, as_they_are),
    "mimo_v2_omni": Renamed("MiMoV2OmniForCausalLM", lambda config: {**config, "vision_config": _MIMO_TOWER}),
    "lfm2_vl": Renamed("Lfm2VlForConditionalGeneration", _around("lfm2_vl", _TOWER), _nested),
    "minicpmv4_6": Renamed(
        "MiniCPMV4_6ForConditionalGeneration", _around("minicpmv4_6", {**_TOWER, "patch_size": 14}), _nested
    ),
    **{
        name: Renamed(architecture, _around("NemotronH_Nano_VL_V2", _RADIO_TOWER, "llm_config", **_RADIO), _inside)
        for name, architecture in (
            ("nemotron_vl", "NemotronH_Nano_VL_V2"),
            ("nemotron_omni", "NemotronH_Nano_Omni_Reasoning_V3"),
        )
    },
}
"""{name in MODELS of test_models.py and test_hybrids.py: checkpoint}."""
ALL = {**RENAMED, **WRAPPED}
