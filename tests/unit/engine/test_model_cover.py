# SPDX-License-Identifier: Apache-2.0
"""`make test` starts an engine for each kind of model, and `make models` one for each model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

pytest.importorskip("vllm")
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from vllm.transformers_utils.configs.step3p5 import Step3p5Config

from dmi_connector.cli.tiny_hybrids import HYBRIDS
from dmi_connector.cli.tiny_models import _COMMON, ARCHS, FAMILIES
from dmi_connector.cli.tiny_vision import TEXT_ONLY, WRAPPERS, wrapper_fields
from dmi_connector.engine.model.architectures import ARCHITECTURES, Architecture, Latent, Mixed
from dmi_connector.engine.model.architectures.hybrids import GatedDelta
from dmi_connector.engine.model.transformers_backend import generic
from tests.engine import test_hooks_vs_transformers, test_hybrids, test_models, test_multimodal
from tests.engine.wrapped import ALL as RENAMED

FILES: tuple[Any, ...] = (test_hooks_vs_transformers, test_models, test_multimodal, test_hybrids)
MODELS = {**test_models.MODELS, **test_hybrids.MODELS}
_SIZES = {
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "n_head", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "intermediate_size_mlp", "n_inner", "ffn_dim", "word_embed_proj_dim", "rotary_dim"),
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "expert_hidden_dim", "moe_k", "moe_topk"),
    *("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim", "layernorm_epsilon"),
    *("num_sliding_attention_heads", "share_expert_dim"),
    *(
        "top_k_experts",
        "moe_num_experts",
        "shared_intermediate_size",
        "prefix_dense_intermediate_size",
        "num_global_key_value_heads",
    ),
}
_IN_THE_ROW = {
    *("use_parallel_residual", "qk_layernorm", "tie_word_embeddings", "model_type", "qk_norm", "use_post_norm"),
    *("use_routing_bias", "mup_enabled", "position_embedding_type", "enable_moe_block", "hidden_activation"),
}
"""Config fields that only give sizes, and fields that only select the entry in ARCHITECTURES."""
_SAME = {
    **dict.fromkeys(("num_shared_experts", "moe_num_shared_experts"), "n_shared_experts"),
    **dict.fromkeys(("num_dense_layers", "moe_layer_start_index", "moe_layer_end_index"), "first_k_dense_replace"),
    "mlp_layer_types": "first_k_dense_replace",
    **dict.fromkeys(("route_scale", "router_scaling_factor", "moe_routed_scaling_factor"), "routed_scaling_factor"),
    **dict.fromkeys(("global_attn_every_n_layers", "layer_types"), "sliding_window_pattern"),
    "layer_rope_theta": "no_rope_layer_interval",
    "moe_layer_freq": "first_k_dense_replace",
    **dict.fromkeys(("hybrid_layer_pattern", "sliding_window_size"), "sliding_window_pattern"),
    "add_swa_attention_sink_bias": "sliding_window_pattern",  # attention sinks, as those of gpt-oss
    **dict.fromkeys(("swa_rope_theta", "rope_theta", "partial_rotary_factors"), "partial_rotary_factor"),
    "route_norm": "norm_topk_prob",
    "score_func": "scoring_func",
    "use_qkv_bias": "attention_bias",
}
"""{field of some families: field with the same meaning in other families}."""
Kind = tuple[object, ...]


def model(name: str) -> tuple[Architecture, Any, dict[str, Any]]:
    """The architecture of a tiny model, fitted to its config, the config, and the fields that were set."""
    if name in WRAPPERS:
        given = wrapper_fields(name, {})
        config = AutoConfig.for_model(name, **given)
        architecture = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name]
        return ARCHITECTURES[architecture].fit(config.get_text_config()), config, given["text_config"]
    arch, more = MODELS[name]
    if arch in TEXT_ONLY:
        whole = AutoConfig.for_model(arch, **wrapper_fields(arch, {})).to_dict()
        row = ARCHITECTURES[RENAMED[name].architecture]
        found = RENAMED[name].fields({**whole, "dtype": "float32"})
        config = Step3p5Config(**found.get("llm_config", found))
        return row.fit(config), config, TEXT_ONLY[arch]["text_config"]
    given = {**{**ARCHS, **FAMILIES, **HYBRIDS}[arch], **more}
    config = AutoConfig.for_model(arch, **{**_COMMON, **given})
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # after vLLM is imported, some configs have classes of vLLM
    renamed = RENAMED[name].architecture if name in RENAMED else None
    architecture = renamed or names.get(config.model_type) or names[arch]
    if architecture not in ARCHITECTURES:
        return generic(architecture, config), config, given
    row = ARCHITECTURES[architecture].fit(config)
    return row.over_heads() if isinstance(row, Latent) and name.endswith("-heads") else row, config, given


def kinds(name: str) -> set[Kind]:
    """The features of a model: fields of its architecture, their combination in a block, options of its config."""
    row, config, given = model(name)
    text = config.get_text_config()
    dims = row.dims(text)
    return {
        ("latent attention", _latent(name) if isinstance(row, Latent) else ""),
        ("class of rows", Mixed.__name__ if isinstance(row, Mixed) else type(row).__name__),
        ("Transformers backend", row.in_transformers),
        ("block", bool(row.only), row.parallel, *map(bool, (row.ln1, row.ln2, row.attn_norm, row.mlp_norm))),
        ("experts", "in some layers" if 0 < len(dims.moe_layers) < dims.layers else bool(dims.moe_layers)),
        ("key and value heads", "one" if dims.kv_heads == 1 else dims.kv_heads < dims.heads),
        ("windows", bool(given.get("sliding_window")) and len({*(getattr(text, "layer_types", None) or ())}) < 2),
        ("vision tower", name in WRAPPERS, bool(row.visual_layers(config))),
        ("vision tower of a hybrid", name in WRAPPERS and isinstance(row, GatedDelta)),
        *of_columns(row),
        *of_config(given),
    }


def _latent(name: str) -> str:
    """The implementation of latent attention, of vLLM or of the tests."""
    arch, suffix = MODELS[name][0], name.rpartition("-")[2]
    return "indexer" if arch in test_models.INDEXED else suffix if suffix in ("odd", "heads") else "kernel"


def of_columns(row: Architecture) -> Iterator[Kind]:
    for column in fields(Architecture):
        value = getattr(row, column.name)
        if column.name in ("layers", "embed", "final_norm") and row.language:
            value = value.removeprefix(f"{row.language}.")
        if column.name not in ("name", "base"):
            usual = value == column.default
            yield column.name, "default" if usual else bool(value) if isinstance(value, str | tuple) else value


def of_config(given: dict[str, Any]) -> Iterator[Kind]:
    for field, value in given.items():
        if field == "rope_parameters":
            # one for each type of layers
            for rope in [one for one in value.values() if isinstance(one, dict)] or [value]:
                yield from (("rope", key, rope[key] if key == "rope_type" else "") for key in rope)
        elif field not in _SIZES | _IN_THE_ROW and (value is not None or field == "q_lora_rank"):
            yield "config", _SAME.get(field, field), value if isinstance(value, str | None) else ""


def in_make_test() -> set[str]:
    """Models for which `make test` starts an engine with all hooks."""
    found = [c for file in FILES for c in file.CONFIGURATIONS if not getattr(c, "marks", ())]
    return {name for name, _mode, _owner in found}


EVERY = {*MODELS, *WRAPPERS}


def test_each_kind_of_model_has_one_that_make_test_starts() -> None:
    wanted, found = ({kind for name in names for kind in kinds(name)} for names in (EVERY, in_make_test()))
    assert wanted - found == set(), "add a model to SHORT of tests/engine/test_models.py"


def test_each_row_has_a_model_that_make_models_starts() -> None:
    assert {model(name)[0].name for name in EVERY} >= ARCHITECTURES.keys()
    started = [tuple(getattr(c, "values", [c])[0]) for file in FILES[1:] for c in file.CONFIGURATIONS]
    assert sorted(started) == sorted(
        (name, mode, owner) for name in EVERY for mode in test_models.modes(name) for owner in owners(name)
    )


def owners(name: str) -> tuple[str, ...]:
    if name in test_models.INDEXED:
        return ("draft", "target", "pool")
    if name in test_models.NO_DRAFT:
        return ("target",)
    return (
        ("pool",)
        if name in (*test_hybrids.MODELS, *test_multimodal.HYBRID, *test_models.POOLED)
        else ("draft", "target")
    )


@pytest.mark.parametrize("name", sorted(in_make_test() - ARCHS.keys()))
def test_no_model_of_make_test_could_be_left_out(name: str) -> None:
    rest = {kind for other in in_make_test() - {name} for kind in kinds(other)}
    assert kinds(name) - rest, f"{name} tests nothing that no other model tests: leave it to make models"
