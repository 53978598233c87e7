# SPDX-License-Identifier: Apache-2.0
"""Models that transformers lacks, made from a model that computes the same, with another config and other names."""

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
    """A checkpoint of `architecture`, made from a checkpoint of transformers.

    fields: changed fields of the config, or a function from the config of transformers to these fields. If they include
    `model_type`, they are the whole config. weights: a function from (weights, config) of transformers to the weights;
    None keeps their names, and transformers reads the same checkpoint. scaled: whether `topk_weights` include the
    factor (routed_scaling_factor) by which vLLM multiplies the sum of the experts. files: additional JSON files of the
    checkpoint.
    """

    architecture: str
    fields: Mapping[str, Any] | Callable[[dict[str, Any]], dict[str, Any]] = field(default_factory=dict)
    weights: Callable[[Weights, dict[str, Any]], Weights] | None = None
    scaled: bool = False
    files: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Convert the checkpoint in `path` to this architecture. Its original is then at `twin(path)`."""
        config = json.loads((path / "config.json").read_text())
        if self.weights is not None:
            shutil.copytree(path, path / "twin")
            weights = self.weights(load_file(path / "model.safetensors"), config)
            save_file({k: v.contiguous() for k, v in weights.items()}, path / "model.safetensors", {"format": "pt"})
        more = self.fields(config) if callable(self.fields) else self.fields
        changed = {**({} if "model_type" in more else config), **more, "architectures": [self.architecture]}
        for name, content in {"config.json": changed, **self.files}.items():
            (path / name).write_text(json.dumps(content))


def twin(path: Path) -> Path:
    """The checkpoint for transformers that belongs to the checkpoint at `path`."""
    return path / "twin" if (path / "twin").exists() else path


def renamed(weights: Weights, names: Mapping[str, str]) -> Weights:
    """Weights with changed names. names: {regular expression: replacement}, applied in order to each name."""
    found = {}
    for name, weight in weights.items():
        for old, new in names.items():
            name = re.sub(old, new, name)
        found[name] = weight
    return found


def fused(weights: Weights, prefix: str, parts: tuple[str, ...], whole: str) -> Weights:
    """Weights with the `parts` of each module `prefix` concatenated along dimension 0 as `whole`."""
    rest = dict(weights)
    for name in weights:
        if match := re.fullmatch(rf"({prefix})\.{parts[0]}\.(weight|bias)", name):
            module, kind = match[1], match[2]
            rest[f"{module}.{whole}.{kind}"] = torch.cat([rest.pop(f"{module}.{part}.{kind}") for part in parts])
    return rest


def _bailing(weights: Weights, _config: dict[str, Any]) -> Weights:
    """Ling and Ring, made from GLM-4.5."""
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


def as_they_are(weights: Weights, _config: dict[str, Any]) -> Weights:
    """Unchanged weights, for a config that transformers' class cannot read."""
    return weights


def _internlm2(weights: Weights, config: dict[str, Any]) -> Weights:
    """InternLM 2, made from Llama. The queries of a group are stored next to their key and value."""
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
    """EXAONE 3, made from Llama."""
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


def _plamo3(weights: Weights, config: dict[str, Any]) -> Weights:
    """PLaMo 3, made from Gemma 3. It adds other constants to weights of norms, and does not scale embeddings."""
    weights = fused(weights, r"model\.layers\.\d+\.self_attn", ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    weights = fused(weights, r"model\.layers\.\d+\.mlp", ("gate_proj", "up_proj"), "gate_up_proj")
    added = {"post_attention_layernorm": 0.2, "post_feedforward_layernorm": 5**-1.5}
    for name in weights:
        if (leaf := name.split(".")[-2]) in added:
            weights[name] = weights[name] + 1 - added[leaf]
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * config["hidden_size"] ** 0.5
    names = {
        r"model\.layers": "model.layers.layers",
        "self_attn": "mixer",
        "input_layernorm": "pre_mixer_norm",
        "post_attention_layernorm": "post_mixer_norm",
        "pre_feedforward_layernorm": "pre_mlp_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
    }
    return renamed(weights, names)


def _plamo3_windows(config: dict[str, Any]) -> dict[str, Any]:
    kinds = config["layer_types"]
    windows = [config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
    return {"interleaved_sliding_window": windows}


_TELEFLM = {"use_mup": True, "mup_scale_factor": 4.0, "output_mult": 2.0, "logits_scaling": 1.0}
_EXAONE = {"activation_function": "silu", "layer_norm_epsilon": 1e-6}


def _minicpm(config: dict[str, Any]) -> dict[str, Any]:
    """MiniCPM, made from Granite."""
    return {
        "scale_emb": config["embedding_multiplier"],
        "scale_depth": config["residual_multiplier"] * config["num_hidden_layers"] ** 0.5,
        "dim_model_base": config["hidden_size"] / config["logits_scaling"],
        "logits_scaling": 1.0,
    }


RENAMED = {
    "internlm3": Renamed("InternLM3ForCausalLM"),
    "llama-first": Renamed("LLaMAForCausalLM"),
    "iquestcoder": Renamed("IQuestCoderForCausalLM"),
    "telechat3": Renamed("TeleChat3ForCausalLM"),
    "pangu": Renamed("PanguEmbeddedForCausalLM"),
    "teleflm": Renamed("TeleFLMForCausalLM", _TELEFLM, as_they_are),
    "exaone_moe-first": Renamed("ExaoneMoEForCausalLM"),
    "mistral_large3": Renamed("MistralLarge3ForCausalLM"),
    "phimoe": Renamed("PhiMoEForCausalLM"),
    "minicpm": Renamed("MiniCPMForCausalLM", _minicpm, as_they_are),
    "orion": Renamed("OrionForCausalLM", {"rms_norm_eps": 1e-5}),
    "internlm2": Renamed("InternLM2ForCausalLM", {}, _internlm2),
    "exaone": Renamed("ExaoneForCausalLM", _EXAONE, _exaone),
    "bailing_moe": Renamed("BailingMoeForCausalLM", _bailing_fields, _bailing, scaled=True),
    "bailing_moe_v2": Renamed("BailingMoeV2ForCausalLM", _bailing_fields, _bailing, scaled=True),
    "plamo3": Renamed("Plamo3ForCausalLM", _plamo3_windows, _plamo3),
    "mimo_v2": Renamed("MiMoV2ForCausalLM"),
    "sarvam_moe": Renamed("SarvamMoEForCausalLM", _bailing_fields, _bailing, scaled=True),
}
"""{name in MODELS of test_models.py: checkpoint}. wrapped.py adds models with a language model inside."""
