# SPDX-License-Identifier: Apache-2.0
"""Architectures of models whose configs differ, and how taps read values for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ExaoneMoeConfig, GlmMoeDsaConfig, Step3p7TextConfig

pytest.importorskip("vllm")
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.models.openpangu import OpenPanguDecoderLayer

from dmi_connector.engine import refusals
from dmi_connector.engine.model.architectures import ARCHITECTURES
from dmi_connector.engine.taps.install import TAP_POINTS
from dmi_connector.engine.taps.values import norm_outputs
from dmi_connector.hooks import HOOKS, SelectionError, parse_selection


def config(**fields: Any) -> Any:
    """A text config with 4 layers."""
    sizes = {"model_type": "any", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 32}
    return SimpleNamespace(**{**sizes, "intermediate_size": 96, **fields})


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, (1, 3)),
        ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2, "first_k_dense_replace": 1}, (1, 2, 3)),
        ({"num_dense_layers": 2}, (2, 3)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1}, (1, 2)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 2}, (1, 3)),
        ({}, (0, 1, 2, 3)),
    ],
)
def test_layers_with_experts_are_those_that_the_config_names(fields: dict[str, Any], layers: tuple[int, ...]) -> None:
    dims = ARCHITECTURES["MixtralForCausalLM"].dims(config(num_experts=8, num_experts_per_tok=2, **fields))
    assert dims.moe_layers == layers


def test_sizes_of_step_are_the_same_from_the_config_of_transformers_and_from_vllms() -> None:
    """vLLM 0.33 reads the config of transformers, earlier versions read their own."""
    other = {"attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16}
    fields: Any = {
        "num_hidden_layers": 6,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 32,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2,
        "moe_layers_enum": "2,3,5",
        "attention_other_setting": other,
    }
    theirs = Step3p7TextConfig(**fields, num_key_value_heads=2, n_routed_experts=8, num_experts_per_tok=2)
    ours: Any = SimpleNamespace(**fields, num_attention_groups=2, moe_num_experts=8, num_experts_per_tok=2)
    row = ARCHITECTURES["Step3p5ForCausalLM"]
    dims = row.dims(theirs)
    assert dims == row.dims(ours)
    assert (dims.heads, dims.attn_layers, dims.moe_layers) == (6, (1, 2, 4, 5), (2, 3, 5))


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("every", [1, 2, 4])
def test_layers_with_an_indexer_are_those_of_transformers(every: int, offset: int) -> None:
    fields = {"index_topk_freq": every, "index_skip_topk_offset": offset}
    assert indexed(**fields) == with_indexer(GlmMoeDsaConfig(num_hidden_layers=9, **fields))


def test_layers_with_an_indexer_may_be_listed() -> None:
    pattern = {"index_topk_pattern": "FSSFFSFSS"}
    assert indexed(**pattern) == with_indexer(GlmMoeDsaConfig(num_hidden_layers=9, **pattern)) == (0, 3, 4, 6)


def with_indexer(config: GlmMoeDsaConfig) -> tuple[int, ...]:
    return tuple(i for i, kind in enumerate(config.indexer_types) if kind == "full")


def indexed(**fields: Any) -> tuple[int, ...]:
    """The layers of the hook `indexer_topk` in a model with this config."""
    known = config(num_hidden_layers=9, index_topk=48, kv_lora_rank=40, qk_rope_head_dim=8, qk_nope_head_dim=16)
    vars(known).update(fields, v_head_dim=20, q_lora_rank=24)
    dims = ARCHITECTURES["GlmMoeDsaForCausalLM"].fit(known).dims(known)
    assert dims.index_topk == 48
    return dims.layers_of(HOOKS["indexer_topk"])


def test_a_hook_that_no_module_has_is_refused_by_its_name() -> None:
    row = ARCHITECTURES["MiniMaxM2ForCausalLM"]
    dims = row.dims(config(num_experts=8, num_experts_per_tok=2))
    assert {name for name, hook in HOOKS.items() if not dims.layers_of(hook)} >= {"q", "k"}
    assert dims.layers_of(HOOKS["q_rot"]) == (0, 1, 2, 3)
    with pytest.raises(SelectionError, match="'q' does not exist in MiniMaxM2ForCausalLM"):
        parse_selection("q", dims)


def test_norms_that_a_config_turns_off_are_not_tapped() -> None:
    for name, field in (
        ("HYV3ForCausalLM", "qk_norm"),
        ("BailingMoeV2ForCausalLM", "use_qk_norm"),
        ("Qwen2ForCausalLM", "qk_norm"),
    ):
        row = ARCHITECTURES[name]
        assert row.fit(config(**{field: True})).q_norm and not row.fit(config(**{field: False})).q_norm
        assert not row.fit(config()).k_norm, "vLLM applies these norms only if the config enables them"
    row = ARCHITECTURES["HyperCLOVAXForCausalLM"]
    assert row.fit(config(use_post_norm=True)).attn_norm and not row.fit(config(use_post_norm=False)).mlp_norm


class Doubles(nn.Module):
    """A fake norm. With a second argument, it first adds that residual stream."""

    def forward(self, values: torch.Tensor, stream: torch.Tensor | None = None) -> Any:
        return values * 2 if stream is None else ((values + stream) * 2, values + stream)


class Attention(nn.Module):
    def forward(self, positions: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


@pytest.mark.parametrize(
    ("sandwich", "dtype", "middle"),
    [(False, torch.float32, 1 + 2), (True, torch.float32, 1 + 2 * 2), (False, torch.float16, (1 + 2) / 4)],
)
def test_the_stream_of_pangu_is_read_where_vllm_adds_to_it(sandwich: bool, dtype: torch.dtype, middle: float) -> None:
    """The input of vLLM's layer is 1. Attention returns 2, which `sandwich_norm` doubles here. In float16, vLLM divides
    both by the config field in the architecture's `float16_divisor`.
    """
    row = ARCHITECTURES["PanguEmbeddedForCausalLM"].fit(config(sandwich_norm=sandwich))
    assert bool(row.attn_norm) == bool(row.mlp_norm) == sandwich
    layer: Any = nn.Module()
    for name in ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"):
        setattr(layer, name, Doubles())
    layer.self_attn, layer.mlp = Attention(), nn.Identity()
    layer.sandwich_norm, layer.layer_idx = sandwich, 0
    setattr(layer, row.float16_divisor, 4.0)
    seen: list[torch.Tensor] = []
    tap = lambda _module, args, output: seen.append(norm_outputs(row, args, output)[1])  # noqa: E731
    layer.get_submodule(row.ln2).register_forward_hook(tap)
    OpenPanguDecoderLayer.forward(layer, None, torch.ones(2, 4, dtype=dtype), None)
    assert [value.unique().tolist() for value in seen] == [[middle]]


@pytest.mark.parametrize(
    "name",
    [
        "Glm4MoeForCausalLM",
        "Glm4vMoeForConditionalGeneration",
        "Glm4MoeLiteForCausalLM",
        "LagunaForCausalLM",
        "NemotronHForCausalLM",
    ],
)
def test_float16_is_refused_where_vllm_divides_the_output_of_shared_experts(name: str) -> None:
    """The layers of DeepSeek divide the residual stream by the same factor. Those of these models do not."""
    runner: Any = SimpleNamespace(routed_scaling_factor=4.0)
    for dtype, sums in ((torch.bfloat16, 1 + 4.0), (torch.float16, 1 / 4 + 1)):
        outputs = MoERunner._maybe_apply_routed_scale_to_output(runner, *torch.ones(2, 1, dtype=dtype))
        assert sum(outputs) == sums
    latent = {"kv_lora_rank": 8, "qk_rope_head_dim": 4}
    known = config(n_routed_experts=8, hybrid_override_pattern="ME*E", text_config=config(), **latent)
    row = ARCHITECTURES[name].fit(known)
    known.routed_scaling_factor = known.moe_routed_scaling_factor = 4.0
    model: Any = SimpleNamespace(model="any", use_mla="latent" in row.features, hf_text_config=known)
    for model.dtype in (torch.float32, torch.bfloat16):
        refusals.check_attention(row, model)
    model.dtype = torch.float16
    with pytest.raises(ValueError, match=rf"float16 .* of {name}, .*shared experts .* \(4\.0\).*bfloat16"):
        refusals.check_attention(row, model)


def test_float16_is_accepted_for_nemotron_h_without_experts() -> None:
    known = config(hybrid_override_pattern="M-*-", routed_scaling_factor=4.0)
    row = ARCHITECTURES["NemotronHForCausalLM"].fit(known)
    model: Any = SimpleNamespace(dtype=torch.float16, use_mla=False, hf_text_config=known)
    refusals.check_attention(row, model)


def test_layers_with_experts_of_k_exaone_are_those_of_vllm() -> None:
    """vLLM reads the list, even if it contradicts the number of dense layers, which is 1 by default."""
    kinds = ["sparse", "dense", "dense", "sparse"]
    known = ExaoneMoeConfig(num_hidden_layers=4, mlp_layer_types=kinds, layer_types=["full_attention"] * 4)
    for name in ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"):
        assert ARCHITECTURES[name].dims(known).moe_layers == (0, 3)


def test_old_opt_has_no_final_norm() -> None:
    """vLLM builds no final norm for it. The stream is read at the last layer."""
    known = {"do_layer_norm_before": True, "word_embed_proj_dim": 64}
    row = ARCHITECTURES["OPTForCausalLM"]
    assert row.fit(config(**known)).final_norm == "model.decoder.final_layer_norm"
    old = config(**known, _remove_final_layer_norm=True)
    assert row.fit(old).final_norm == "" and not row.fit(old).dims(old).layers_of(HOOKS["final_ln"])
    assert row.fit(old).dims(old).layers_of(HOOKS["resid_final"])


def test_layers_with_different_numbers_of_heads_lack_the_hooks_of_these() -> None:
    row = ARCHITECTURES["LagunaForCausalLM"]
    assert row.fit(config(num_attention_heads_per_layer=[4, 4, 4, 4])).lacks == ()
    assert "q_rot" in row.fit(config(num_attention_heads_per_layer=[4, 2, 4, 2])).lacks


def test_minicpm_scales_its_blocks_and_is_refused_with_experts() -> None:
    row = ARCHITECTURES["MiniCPMForCausalLM"]
    assert row.block_scale(config(scale_depth=1.4)) == pytest.approx(0.7)
    with pytest.raises(ValueError, match=r"MiniCPM with experts \(num_experts\)"):
        row.fit(config(num_experts=4))


def test_a_model_of_any_language_model_has_the_row_of_that_one() -> None:
    row = ARCHITECTURES["InternVLForConditionalGeneration"]
    named = row.fit(config(architectures=["Qwen3MoeForCausalLM"]))
    assert (named.name, named.base) == (row.name, row.base) and named.language == "language_model"
    assert (named.layers, named.q_norm) == ("language_model.model.layers", "self_attn.q_norm")
    assert row.fit(config(model_type="qwen2")).q_norm == "", "transformers' class is used if none is named"
    with pytest.raises(
        ValueError, match=r"InternVL.*'FalconH1ForCausalLM', which has no row in the table of architectures"
    ):
        row.fit(config(architectures=["FalconH1ForCausalLM"]))


def read(hook: str, module: str, args: tuple[Any, ...], output: Any, **row: Any) -> torch.Tensor:
    """The value that the tap of a hook at a module reads, in a layer whose architecture has these fields."""
    arch = SimpleNamespace(qkv_by_head=False, stream_at=0, plain_norms=False)
    layer: Any = SimpleNamespace(arch=arch, scale=row.pop("scale", 1.0), head_size=2, q_size=8, kv_size=4)
    vars(arch).update(row)
    (point,) = (one for one in TAP_POINTS if (one.hook, one.module) == (hook, module))
    return point.read(layer, args, output)


def test_a_stream_may_be_any_argument_of_a_layer() -> None:
    positions, stream = torch.arange(3), torch.ones(3, 4)
    assert read("resid_pre", "layer", (positions, stream, None), None, stream_at=1) is stream
    assert read("resid_pre", "layer", (stream,), None) is stream


@pytest.mark.parametrize(("hook", "module"), [("attn_out", "attn_norm"), ("mlp_out", "mlp_norm")])
def test_the_output_of_a_post_norm_is_scaled_as_it_is_added(hook: str, module: str) -> None:
    assert torch.equal(read(hook, module, (), torch.full((3, 4), 2.0), scale=0.5), torch.ones(3, 4))


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"gated_mlp": True, "gate_proj": ""}, ("up_proj", [0, 1], [2, 3])),
        ({"gated_mlp": True, "gate_proj": "mlp.gate_proj"}, ("gate_proj", [0, 1, 2, 3], [0, 1, 2, 3])),
        ({"gated_mlp": False, "gate_proj": ""}, ("up_proj", [0, 1, 2, 3], None)),
    ],
)
def test_mlp_pre_is_the_gate(row: dict[str, Any], found: tuple[str, list[int], Any]) -> None:
    """It is read from a projection of gate and up, from the first of two projections, or from the only one."""
    module, gate, up = found
    output = (torch.arange(4).expand(3, -1), None)
    assert read("mlp_pre", module, (), output, **row)[0].tolist() == gate
    assert up is None or read("mlp_pre_linear", "up_proj", (), output, **row)[0].tolist() == up


def test_an_mlp_without_a_gate_has_one_tensor_before_its_activation() -> None:
    row = ARCHITECTURES["NemotronForCausalLM"]
    assert row.up_proj == "mlp.up_proj"
    dims = row.dims(config())
    assert list(parse_selection("mlp_pre*", dims).hooks) == ["mlp_pre"]
    with pytest.raises(SelectionError, match=r"'mlp_pre_linear' does not exist in Nemotron.*, whose MLP has no gate"):
        parse_selection("mlp_pre_linear", dims)
    mixture = ARCHITECTURES["MixtralForCausalLM"].dims(config(num_experts=8, num_experts_per_tok=2))
    with pytest.raises(SelectionError, match=r"'mlp_pre' does not exist in Mixtral.*, which are mixtures of experts"):
        parse_selection("mlp_pre", mixture)


def test_queries_of_a_group_lie_beside_their_key_and_value() -> None:
    """Four heads in two groups: q, q, k, v of the first group, then of the second."""
    heads = torch.arange(8).repeat_interleave(2).float().expand(3, -1)
    q, k, v = (read(hook, "qkv", (), heads, qkv_by_head=True)[0].tolist() for hook in "qkv")
    assert (q, k, v) == ([0, 0, 1, 1, 4, 4, 5, 5], [2, 2, 6, 6], [3, 3, 7, 7])
