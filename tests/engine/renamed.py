# SPDX-License-Identifier: Apache-2.0
"""Models that transformers does not have, with the weights of one that computes the same: what a checkpoint of theirs
says instead, in its config and by the names of its weights.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Renamed:
    """A checkpoint of `architecture`, made of one that transformers writes.

    fields: of its config, or what gives them from that of transformers; with `text_config` the whole config. weights:
    what gives its weights from those of transformers and the config; None: they keep their names, and transformers
    reads the same checkpoint. scaled: whether `topk_weights` hold the factor by which transformers' class says that
    vLLM multiplies their sum. files: further JSON files of the checkpoint.
    """

    architecture: str
    fields: Mapping[str, Any] | Callable[[dict[str, Any]], dict[str, Any]] = field(default_factory=dict)
    weights: Callable[[Weights, dict[str, Any]], Weights] | None = None
    scaled: bool = False
    files: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Make the checkpoint in `path` one of this architecture. What transformers reads is then at `twin(path)`."""
        config = json.loads((path / "config.json").read_text())
        if self.weights is not None:
            shutil.copytree(path, path / "twin")
            weights = self.weights(load_file(path / "model.safetensors"), config)
            save_file({k: v.contiguous() for k, v in weights.items()}, path / "model.safetensors", {"format": "pt"})
        more = self.fields(config) if callable(self.fields) else self.fields
        changed = {**({} if "text_config" in more else config), **more, "architectures": [self.architecture]}
        for name, content in {"config.json": changed, **self.files}.items():
            (path / name).write_text(json.dumps(content))


def twin(path: Path) -> Path:
    """The checkpoint that transformers reads, of one at `path`."""
    return path / "twin" if (path / "twin").exists() else path


def renamed(weights: Weights, names: Mapping[str, str]) -> Weights:
    """Weights under other names. names: regular expression -> what replaces it, each where it is found."""
    found = {}
    for name, weight in weights.items():
        for old, new in names.items():
            name = re.sub(old, new, name)
        found[name] = weight
    return found


def fused(weights: Weights, prefix: str, parts: tuple[str, ...], whole: str) -> Weights:
    """Weights in which those of `parts` in each module `prefix` lie one below the other, as `whole`."""
    rest = dict(weights)
    for name in weights:
        if match := re.fullmatch(rf"({prefix})\.{parts[0]}\.(weight|bias)", name):
            module, kind = match[1], match[2]
            rest[f"{module}.{whole}.{kind}"] = torch.cat([rest.pop(f"{module}.{part}.{kind}") for part in parts])
    return rest


def _bailing(weights: Weights, _config: dict[str, Any]) -> Weights:
    """Ling and Ring, from GLM-4.5."""
    weights = fused(weights, r"model\.layers\.\d+\.self_attn", ("q_proj", "k_proj", "v_proj"), "query_key_value")
    names = {
        "embed_tokens": "word_embeddings",
        r"self_attn\.o_proj": "attention.dense",
        r"self_attn\.q_norm": "attention.query_layernorm",
        r"self_attn\.k_norm": "attention.key_layernorm",
        "self_attn": "attention",
        r"gate\.e_score_correction_bias": "gate.expert_bias",
    }
    return renamed(weights, names)


def _bailing_fields(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": config["n_routed_experts"],
        "num_shared_experts": config["n_shared_experts"],
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"],
        "partial_rotary_factor": 0.5,
        "use_rmsnorm": True,
        "use_bias": False,
        "use_qkv_bias": False,
        "embedding_dropout": 0.0,
    }


def _as_they_are(weights: Weights, _config: dict[str, Any]) -> Weights:
    """For a config that transformers' class cannot read."""
    return weights


def _inside(weights: Weights, _config: dict[str, Any]) -> Weights:
    """Of a language model inside another model."""
    return renamed(weights, {"^": "language_model."})


def _internlm2(weights: Weights, config: dict[str, Any]) -> Weights:
    """InternLM 2, from Llama: queries of a group beside their key and value."""
    groups, size = config["num_key_value_heads"], config["head_dim"]
    for name in list(weights):
        if name.endswith("q_proj.weight"):
            parts = [weights.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
            by_group = torch.cat([part.unflatten(0, (groups, -1, size)) for part in parts], 1)
            weights[name.replace("q_proj", "wqkv")] = by_group.flatten(0, 2)
    names = {
        r"model\.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        r"self_attn\.o_proj": "attention.wo",
        "self_attn": "attention",
        r"mlp\.gate_proj": "feed_forward.w1",
        r"mlp\.down_proj": "feed_forward.w2",
        r"mlp\.up_proj": "feed_forward.w3",
    }
    return renamed(weights, names)


def _exaone(weights: Weights, _config: dict[str, Any]) -> Weights:
    """EXAONE 3, from Llama."""
    names = {
        r"model\.embed_tokens": "transformer.wte",
        r"model\.norm": "transformer.ln_f",
        r"model\.layers": "transformer.h",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        r"self_attn\.o_proj": "attn.attention.out_proj",
        "self_attn": "attn.attention",
        "gate_proj": "c_fc_0",
        "up_proj": "c_fc_1",
        "down_proj": "c_proj",
    }
    return renamed(weights, names)


_TELEFLM = {"use_mup": True, "mup_scale_factor": 4.0, "output_mult": 2.0, "logits_scaling": 1.0}
_EXAONE = {"activation_function": "silu", "layer_norm_epsilon": 1e-6}


def _minicpm(config: dict[str, Any]) -> dict[str, Any]:
    """From Granite."""
    return {
        "scale_emb": config["embedding_multiplier"],
        "scale_depth": config["residual_multiplier"] * config["num_hidden_layers"] ** 0.5,
        "dim_model_base": config["hidden_size"] / config["logits_scaling"],
        "logits_scaling": 1.0,
    }


def _kimi_k25(config: dict[str, Any]) -> dict[str, Any]:
    """A vision tower before DeepSeek V3."""
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


RENAMED = {
    "internlm3": Renamed("InternLM3ForCausalLM"),
    "llama-first": Renamed("LLaMAForCausalLM"),
    "iquestcoder": Renamed("IQuestCoderForCausalLM"),
    "telechat3": Renamed("TeleChat3ForCausalLM"),
    "pangu": Renamed("PanguEmbeddedForCausalLM"),
    "teleflm": Renamed("TeleFLMForCausalLM", _TELEFLM, _as_they_are),
    "exaone_moe-first": Renamed("ExaoneMoEForCausalLM"),
    "mistral_large3": Renamed("MistralLarge3ForCausalLM"),
    "phimoe": Renamed("PhiMoEForCausalLM"),
    "minicpm": Renamed("MiniCPMForCausalLM", _minicpm, _as_they_are),
    "orion": Renamed("OrionForCausalLM", {"rms_norm_eps": 1e-5}),
    "internlm2": Renamed("InternLM2ForCausalLM", {}, _internlm2),
    "exaone": Renamed("ExaoneForCausalLM", _EXAONE, _exaone),
    "bailing_moe": Renamed("BailingMoeForCausalLM", _bailing_fields, _bailing, scaled=True),
    "bailing_moe_v2": Renamed("BailingMoeV2ForCausalLM", _bailing_fields, _bailing, scaled=True),
    "kimi_k25": Renamed(
        "KimiK25ForConditionalGeneration",
        _kimi_k25,
        _inside,
        files={"preprocessor_config.json": {"media_proc_cfg": _KIMI_IMAGES}},
    ),
    "sarvam_moe": Renamed("SarvamMoEForCausalLM", _bailing_fields, _bailing, scaled=True),
}
"""By their names in MODELS of test_models.py."""
