# SPDX-License-Identifier: Apache-2.0
"""Unsupported options and models stop the engine at start. The message names the option, its value and the fix."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import DeepseekV3Config

from dmi_connector import capture_args, open_capture
from dmi_connector.args import OWNERS
from dmi_connector.engine import context, contract, refusals
from dmi_connector.engine.context import capture_context, is_active
from dmi_connector.engine.contract_names import NAMES, Name
from dmi_connector.engine.features import features_of, features_of_hooks
from dmi_connector.engine.model.architectures import ARCHITECTURES, Architecture
from dmi_connector.engine.replaced import decomposed_experts
from dmi_connector.engine.taps.batches import TapBatch
from tests.engine import sparse_cpu
from tests.engine.drafts import NGRAM
from tests.engine.harness import Ask, Run, engine, generate, prompt
from tests.engine.latent_cpu import KERNEL
from tests.probekit import save_probe


def vllm_config(model: Path, store_dir: Path, extra: dict[str, Any] | None = None, **args: Any) -> Any:
    """The config of an engine that captures into `store_dir`. No engine is started."""
    from vllm import EngineArgs

    capture = capture_args("hidden-states", store_dir, args.pop("owner", "target"))
    capture["kv_transfer_config"]["kv_connector_extra_config"].update(extra or {})
    fields = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, **capture, **args}
    return EngineArgs(model=str(model), **fields).create_engine_config()


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3")


def test_a_good_configuration_is_accepted(model: Path, tmp_path: Path) -> None:
    context = capture_context(vllm_config(model, tmp_path / "new", owner="draft"))
    assert context.owner.name == "draft" and context.dims.layers == 3
    assert dict(context.selection.hooks) == {"resid_pre": (0, 1, 2), "resid_final": (0,)}
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ({"hooks": "mlp_pots"}, ["hooks", "'mlp_pots'", "did you mean 'mlp_post'"]),
        ({"hooks": "q@7"}, ["hooks", "layer 7", "layers 0 to 2"]),
        ({"hooks": "topk_ids"}, ["hooks", "'topk_ids'", "no experts"]),
        ({"hooks": []}, ["hooks", "[]", "comma-separated string"]),
        ({"codec": "gzip"}, ["codec", "'gzip'", "choose one of none, lz4, zstd"]),
        ({"chunk_tokens": 0}, ["chunk_tokens", "0", "integer from 1"]),
        ({"segment_tokens": 100}, ["segment_tokens", "100", "multiple of chunk_tokens (128)"]),
        ({"polcy": "drop"}, ["'polcy'", "did you mean 'policy'"]),
        ({"shared_storage_path": "/x"}, ["'shared_storage_path'", "did you mean 'store_dir'?", "docs/FROM_VLLM.md"]),
        ({"num_writer_threads": 8}, ["'num_writer_threads'", "did you mean 'writers'?", "docs/FROM_VLLM.md"]),
        ({"use_synchronization_lock": True}, ["'use_synchronization_lock'", "leave it out", "docs/FROM_VLLM.md"]),
        ({"owner": "target"}, ["owner: 'target'", "set it to 'pool', or leave it out", "capture_args()"]),
        ({"store_dir": ""}, ["store_dir", "''", "directory where stores are written"]),
        ({"store_dir": "/dev/null/x"}, ["store_dir", "'/dev/null/x'", "choose another"]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_bad_server_option_is_refused(model: Path, tmp_path: Path, extra: dict[str, Any], parts: list[str]) -> None:
    config = vllm_config(model, tmp_path, extra)
    with pytest.raises(ValueError) as caught:
        capture_context(config)
    assert [part for part in parts if part not in str(caught.value)] == [], caught.value


def test_a_bad_server_option_keeps_the_engine_from_starting(model: Path, tmp_path: Path) -> None:
    args = capture_args("hidden-states", tmp_path)
    args["kv_transfer_config"]["kv_connector_extra_config"]["hooks"] = "resid_per"
    with (
        pytest.raises(Exception, match=r"'resid_per' is unknown: did you mean 'resid_pre'"),
        engine(model, enforce_eager=True, **args),
    ):
        pytest.fail("the engine started")


def config_of(directory: Path, model_type: str, architecture: str, **fields: Any) -> Path:
    """The directory of a model that has only a config."""
    from transformers import AutoConfig

    sizes = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = AutoConfig.for_model(model_type, vocab_size=512, pad_token_id=0, **{**sizes, **fields})
    config.architectures = [architecture]
    config.save_pretrained(directory)
    return directory


NO_TOKENIZER = {"skip_tokenizer_init": True}
STRUCTURE = {"skip_tokenizer_init": True, "model_impl": "transformers"}


def test_an_unknown_architecture_is_refused_with_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ARCHITECTURES, "StableLmForCausalLM")
    model = config_of(tmp_path / "model", "stablelm", "StableLmForCausalLM")
    with pytest.raises(
        ValueError, match=r"'StableLmForCausalLM' has no row.*model_impl='transformers'.*docs/HOOKS\.md"
    ):
        capture_context(vllm_config(model, tmp_path / "captures", **NO_TOKENIZER))
    found = capture_context(vllm_config(model, tmp_path / "captures", **STRUCTURE))
    assert found.arch.only == ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_final", "logits")
    with pytest.raises(ValueError, match=r"'q' does not exist in StableLmForCausalLM, of which these hooks are known"):
        capture_context(vllm_config(model, tmp_path / "captures", {"hooks": "q"}, **STRUCTURE))


_FALCON = ("falcon_h1", "FalconH1ForCausalLM", {"mamba_d_ssm": 96, "mamba_n_heads": 3, "mamba_d_head": 32})
_NEMOTRON = ("nemotron_h", "NemotronHForCausalLM", {"mamba_num_heads": 3, "mamba_head_dim": 32, "n_groups": 1})
HYBRIDS = [("qwen3_next", "Qwen3NextForCausalLM", {"num_experts": 4}), _FALCON, _NEMOTRON]


@pytest.mark.parametrize("owner", [owner for owner in OWNERS if owner != "pool"])
@pytest.mark.parametrize(("model_type", "architecture", "fields"), HYBRIDS, ids=[name for name, _, _ in HYBRIDS])
def test_hybrid_models_need_a_pool(
    tmp_path: Path, owner: str, model_type: str, architecture: str, fields: dict[str, Any]
) -> None:
    model = config_of(tmp_path / "model", model_type, architecture, **fields)
    words = rf"Mamba or linear-attention layers.*owner='{owner}' .*use owner='pool'"
    with pytest.raises(ValueError, match=words):
        capture_context(vllm_config(model, tmp_path / "captures", owner=owner, **NO_TOKENIZER))


def test_a_hybrid_model_whose_blocks_are_scaled_is_refused(tmp_path: Path) -> None:
    fields = {"num_experts": 4, "layer_scale": True}
    model = config_of(tmp_path / "model", "qwen3_next", "Qwen3NextForCausalLM", **fields)
    with pytest.raises(ValueError, match=r"model: Qwen3NextForCausalLM with layer_scale=True .*; use another model"):
        capture_context(vllm_config(model, tmp_path / "captures", owner="pool", **NO_TOKENIZER))


def test_a_hybrid_model_with_layers_of_several_sizes_is_refused(tmp_path: Path) -> None:
    _, name, fields = _NEMOTRON
    config = SimpleNamespace(**fields, intermediate_size=[96, 128], hybrid_override_pattern="M-*-")
    with pytest.raises(ValueError, match=rf"model: {name} with layers of different sizes .*have equal sizes"):
        ARCHITECTURES[name].fit(config)
    config.intermediate_size = [96, 96]
    assert ARCHITECTURES[name].fit(config).only == ()
    config.hybrid_override_pattern = "M-*E"
    known = ARCHITECTURES[name].fit(config).only
    assert "mlp_out" in known and not {"router_logits", "topk_ids", "topk_weights"} & {*known}


def test_mix_proj_is_refused_with_tensor_parallelism(tmp_path: Path) -> None:
    model = config_of(tmp_path / "model", "qwen3_next", "Qwen3NextForCausalLM", num_experts=4)
    config = vllm_config(model, tmp_path / "captures", {"hooks": "mix_*"}, owner="pool", **NO_TOKENIZER)
    config.parallel_config.tensor_parallel_size = 2
    with pytest.raises(
        ValueError,
        match="tensor_parallel_size: capture does not support how 2 ranks of Qwen3NextForCausalLM divide mix_proj",
    ):
        capture_context(config)


@pytest.mark.parametrize(("model_type", "architecture", "fields"), HYBRIDS, ids=[name for name, _, _ in HYBRIDS])
def test_hybrid_models_get_no_row_from_their_structure(
    tmp_path: Path, model_type: str, architecture: str, fields: dict[str, Any]
) -> None:
    model = config_of(tmp_path / "model", model_type, architecture, **fields)
    why = "mamba in a layer keeps a recurrent state" if model_type == "falcon_h1" else "1 of 4 layers have attention"
    with pytest.raises(
        ValueError, match=rf"'{architecture}' has no row in the table of architectures.*{why}.*as in hybrid models"
    ):
        capture_context(vllm_config(model, tmp_path / "captures", **STRUCTURE))


_FIVE_LAYERS = {"num_hidden_layers": 5, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 512}


@pytest.mark.parametrize("how", [NO_TOKENIZER, STRUCTURE], ids=["own class", "transformers"])
def test_several_residual_streams_are_refused(tmp_path: Path, how: dict[str, Any]) -> None:
    model = config_of(tmp_path / "model", "gemma3n_text", "Gemma3nForCausalLM", **_FIVE_LAYERS)
    with pytest.raises(ValueError, match=r"carries 4 residual streams at a time \(altup_num_inputs"):
        capture_context(vllm_config(model, tmp_path / "captures", **how))


@pytest.mark.parametrize(
    ("model_type", "architecture", "fields", "how"),
    [
        ("gemma4_text", "Gemma4ForCausalLM", {"vocab_size_per_layer_input": 512}, STRUCTURE),
        ("llama", "LlamaForCausalLM", {"per_layer_config": {"1": {"intermediate_size": 64}}}, NO_TOKENIZER),
    ],
)
def test_sizes_by_layer_that_a_row_does_not_describe_are_refused(
    tmp_path: Path, model_type: str, architecture: str, fields: dict[str, Any], how: dict[str, Any]
) -> None:
    model = config_of(tmp_path / "model", model_type, architecture, **fields)
    with pytest.raises(ValueError, match=rf"different sizes \(per_layer_config.*, which the row of {architecture} in"):
        capture_context(vllm_config(model, tmp_path / "captures", **how))


@pytest.mark.parametrize("owner", ["draft", "target"])
def test_layers_that_read_the_keys_of_others_need_a_pool(tmp_path: Path, owner: str) -> None:
    fields = {**_FIVE_LAYERS, "num_kv_shared_layers": 2}
    model = config_of(tmp_path / "model", "gemma4_text", "Gemma4ForCausalLM", **fields)
    with pytest.raises(ValueError, match=rf"num_kv_shared_layers\).*owner='{owner}' does not.*use owner='pool'"):
        capture_context(vllm_config(model, tmp_path / "captures", owner=owner, **NO_TOKENIZER))


@pytest.mark.parametrize(
    ("arch", "hooks"), [("olmoe", "q"), ("olmoe", "k,z"), ("cohere2", "vllm-full"), ("glm", "mlp_post")]
)
def test_hooks_that_no_rank_has_are_refused(tmp_path: Path, arch: str, hooks: str) -> None:
    from dmi_connector.cli.tiny_models import make_model

    even = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = make_model(arch, tmp_path / "model", **even)
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    extra = {"hooks": hooks}
    capture_context(vllm_config(model, tmp_path / "captures", extra))
    with pytest.raises(
        ValueError,
        match=r"tensor_parallel_size: capture does not support how 2 ranks of .*; set it to 1, or take them out",
    ):
        capture_context(vllm_config(model, tmp_path / "captures", extra, **two))
    capture_context(vllm_config(model, tmp_path / "captures", {"hooks": "hidden-states,z"}, **two))


@pytest.mark.parametrize(
    ("arch", "fields", "reason"),
    [
        ("opt", {"do_layer_norm_before": False}, "OPT with do_layer_norm_before=False"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "Bloom with apply_residual_connection"),
    ],
)
def test_models_without_a_residual_stream_are_refused(
    tmp_path: Path, arch: str, fields: dict[str, Any], reason: str
) -> None:
    from dmi_connector.cli.tiny_models import make_model

    model = make_model(arch, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(ValueError, match=reason):
        capture_context(vllm_config(model, tmp_path / "captures"))


@pytest.mark.parametrize("addressed", [True, False])
@pytest.mark.parametrize("disabled", [True, False])
def test_weights_on_the_host_that_a_gpu_cannot_read_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, addressed: bool, disabled: bool
) -> None:
    """vLLM then calls a layer inside a call of this layer. With `prefetch` it does not."""
    monkeypatch.setenv("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", str(int(disabled)))
    monkeypatch.setattr("vllm.utils.platform_utils.is_uva_available", lambda: addressed)
    args: dict[str, Any] = {"cpu_offload_gb": 1.5}
    refused = pytest.raises(ValueError, match=r"cpu_offload_gb: 1\.5 without .* the taps of a layer twice; .*prefetch")
    with refused if disabled or not addressed else nullcontext():
        capture_context(vllm_config(model, tmp_path / "captures", **args))
    for more in ({"offload_group_size": 2}, {"offload_backend": "prefetch", "offload_group_size": 2}):
        capture_context(vllm_config(model, tmp_path / "captures", **args, **more))


def test_pruned_videos_are_refused(known_models: None, tmp_path: Path) -> None:
    from dmi_connector.cli.tiny_models import make_model

    model = make_model("qwen2_5_vl", tmp_path / "model")
    assert capture_context(vllm_config(model, tmp_path / "captures")).dims.rope_axes == 3
    with pytest.raises(ValueError, match=r"video_pruning_rate: 0\.5 drops tokens .*; remove --video-pruning-rate"):
        capture_context(vllm_config(model, tmp_path / "captures", video_pruning_rate=0.5))


def test_an_engine_without_a_language_model_is_refused(known_models: None, tmp_path: Path) -> None:
    from dmi_connector.cli.tiny_models import make_model

    model = make_model("qwen2_5_vl", tmp_path / "model")
    with pytest.raises(ValueError, match=r"mm_encoder_only: .* no language model.*; remove --mm-encoder-only"):
        capture_context(vllm_config(model, tmp_path / "captures", mm_encoder_only=True))


def latent_model(folder: Path, arch: str = "deepseek_v3", **fields: Any) -> Path:
    """A tiny model whose config.json is replaced by these fields."""
    from dmi_connector.cli.tiny_models import make_model

    model = make_model(arch, folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **fields}))
    return model


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2"])
def test_latent_attention_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, owner: str
) -> None:
    """A config of Kimi K2 changes the type of transformers' V3 class. Other tests need the original type."""
    monkeypatch.setattr(DeepseekV3Config, "model_type", "deepseek_v3")
    model = latent_model(tmp_path, model_type=model_type)
    args = {"owner": owner, "max_num_batched_tokens": 512}
    context = capture_context(vllm_config(model, tmp_path / "captures", {"hooks": "attention"}, **args))
    assert list(context.selection.hooks) == ["kv_c", "k_pe", "q_rot", "z"]
    assert context.arch.attn == "self_attn.mla_attn.mla_attn"


@pytest.mark.parametrize(
    ("arch", "fields", "args", "reason"),
    [
        ("deepseek_v2", {"qk_rope_head_dim": 0}, {}, "DeepseekV2ForCausalLM without kv_lora_rank or qk_rope_head_dim"),
        ("deepseek_v2", {}, {"dtype": "float16"}, r"float16 .* by routed_scaling_factor \(1.5\).*bfloat16"),
        (
            "deepseek_v2",
            {},
            {"owner": "draft", "max_num_batched_tokens": 256, **KERNEL},
            r"a step takes 256 tokens, .*set it to 512 \(max_model_len\) or more",
        ),
    ],
    ids=["plain", "float16", "whole-prompts"],
)
def test_latent_attention_that_would_be_wrong_is_refused(
    tmp_path: Path, arch: str, fields: dict[str, Any], args: dict[str, Any], reason: str
) -> None:
    model = latent_model(tmp_path, arch, **fields)
    with pytest.raises(ValueError, match=reason):
        capture_context(vllm_config(model, tmp_path / "captures", **{"dtype": "float32", **args}))


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("arch", ["deepseek_v32", "glm_moe_dsa"])
def test_attention_with_an_indexer_is_accepted_with_its_cache_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, owner: str
) -> None:
    sparse_cpu.stand_in(monkeypatch)
    args = {"owner": owner, "max_num_batched_tokens": 512}
    config = vllm_config(latent_model(tmp_path, arch), tmp_path / "captures", {"hooks": "attention"}, **args)
    context = capture_context(config)
    assert list(context.selection.hooks) == ["kv_c", "k_pe", "q_rot", "z"]
    assert context.dims.indexer_layers == ((0, 1, 3) if arch == "glm_moe_dsa" else (0, 1, 2))
    monkeypatch.setattr(config.attention_config, "hisparse_config", object(), raising=False)
    with pytest.raises(ValueError, match=r"hisparse_config moves the cache .* to the host.*; leave it out"):
        refusals.check(config)


def test_the_choice_of_an_indexer_needs_what_vllms_indexer_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse_cpu.stand_in(monkeypatch)
    hide(monkeypatch, "indexer")
    model = latent_model(tmp_path, "glm_moe_dsa")
    capture_context(vllm_config(model, tmp_path / "captures", {"hooks": "attention"}))
    with pytest.raises(ValueError, match=r"no_such_name is missing in version .*"):
        capture_context(vllm_config(model, tmp_path / "captures", {"hooks": "indexer_topk"}))


def test_float16_is_accepted_where_vllm_divides_nothing(tmp_path: Path) -> None:
    model = latent_model(tmp_path, "deepseek_v2", routed_scaling_factor=1.0)
    assert capture_context(vllm_config(model, tmp_path / "captures", dtype="float16")).dtype == "float16"


def test_a_row_of_plain_attention_for_a_latent_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Architecture("DeepseekV3ForCausalLM", ARCHITECTURES["DeepseekV3ForCausalLM"].base)
    monkeypatch.setitem(ARCHITECTURES, row.name, row)
    with pytest.raises(ValueError, match=r"latent attention, which the row of Deepseek.*register it as a Latent"):
        capture_context(vllm_config(latent_model(tmp_path), tmp_path / "captures"))


STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}


def staged(model: Path, store_dir: Path, extra: dict[str, Any] | None = None, **args: Any) -> Any:
    """The config of an engine with two pipeline stages."""
    return vllm_config(model, store_dir, extra, **{**STAGES, **args})


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize("owner", ["target", "pool"])
def test_pipeline_stages_are_accepted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str, v2: bool
) -> None:
    config = staged(model, tmp_path, owner=owner)
    monkeypatch.setattr(type(config), "use_v2_model_runner", v2)
    context = capture_context(config)
    assert (context.ranks, context.stages) == (2, (range(2, 3), range(2))), "the last stage must be rank 0"
    assert (context.first_stage, context.last_stage) == (False, True)


def test_the_draft_with_pipeline_stages_is_refused(model: Path, tmp_path: Path) -> None:
    config = vllm_config(model, tmp_path, owner="draft")  # vLLM would refuse it as an argument for the draft model
    config.parallel_config.pipeline_parallel_size = 2
    config.parallel_config.distributed_executor_backend = "mp"
    with pytest.raises(ValueError, match=r"pipeline_parallel_size: 2 with owner='draft'.*use owner='target'"):
        capture_context(config)


def test_a_draft_that_vllm_would_build_as_the_model_is_refused(model: Path, tmp_path: Path) -> None:
    config = vllm_config(model, tmp_path, owner="draft")
    config.speculative_config.draft_model_config.hf_config.architectures = ["MiMoV2OmniForCausalLM"]
    with pytest.raises(ValueError, match=r"model: vLLM would build MiMoV2OmniForCausalLM as the draft.*owner='target'"):
        capture_context(config)


@pytest.mark.parametrize(
    ("where", "option", "value", "reason"),
    [
        ("parallel_config", "tensor_parallel_size", 2, r"tensor_parallel_size 2 .*set one of the two to 1"),
        ("parallel_config", "data_parallel_size", 2, r"data_parallel_size 2 .*set one of the two to 1"),
        ("parallel_config", "distributed_executor_backend", "ray", r"distributed_executor_backend 'ray' .*use 'mp'"),
        ("", "lora_config", object(), r"enable_lora .*remove --enable-lora"),
        ("model_config", "use_mla", True, r"latent attention .*use tensor_parallel_size"),
        ("model_config", "is_hybrid", True, r"Mamba or linear-attention layers .*use tensor_parallel_size"),
        ("model_config", "runner_type", "pooling", r"runner 'pooling' .*use tensor_parallel_size"),
        ("model_config", "enable_sleep_mode", True, r"sleep .*remove --enable-sleep-mode"),
    ],
)
def test_untested_features_with_pipeline_stages_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, option: str, value: object, reason: str
) -> None:
    config = staged(model, tmp_path)
    part = getattr(config, where) if where else config
    monkeypatch.setattr(type(part) if option in ("is_hybrid", "use_mla") else part, option, value)
    with pytest.raises(ValueError, match=rf"pipeline_parallel_size: 2 with {reason}"):
        capture_context(config)


def test_drafts_beside_pipeline_stages_are_refused(model: Path, tmp_path: Path) -> None:
    config = staged(model, tmp_path, speculative_config=NGRAM)
    with pytest.raises(ValueError, match=r"with speculative_config is not supported; leave it out"):
        capture_context(config)


def test_the_transformers_backend_in_pipeline_stages_is_refused(model: Path, tmp_path: Path) -> None:
    config = staged(model, tmp_path, model_impl="transformers")
    with pytest.raises(ValueError, match=r"with vLLM's Transformers backend .*use a model that vLLM has itself"):
        capture_context(config)


def test_probes_and_attention_summaries_in_pipeline_stages_are_refused(model: Path, tmp_path: Path) -> None:
    probe = save_probe(tmp_path / "p.safetensors", "resid_pre", (1,), 64, 1)
    with pytest.raises(ValueError, match=r"with probes is not supported; leave probes out"):
        capture_context(staged(model, tmp_path, {"hooks": "resid_pre,probe.p", "probes": {"p": str(probe)}}))
    summary = {"hooks": "pattern", "reduce": {"pattern": "attn(4)"}}
    with pytest.raises(ValueError, match=r"with attention summaries .*take pattern out of the hooks"):
        capture_context(staged(model, tmp_path, summary))


def test_images_in_pipeline_stages_are_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"which takes images .*use a text model"):
        capture_context(staged(tiny_model("qwen3_vl"), tmp_path))


def test_a_stage_without_layers_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,0")
    with pytest.raises(ValueError, match=r"a stage has no layers \(3, 0\); use fewer stages, or another VLLM_PP"):
        capture_context(staged(model, tmp_path))


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("enable_dbo", True, r"enable_dbo: True .*remove --enable-dbo"),
        ("ubatch_size", 3, r"ubatch_size: 3 .*remove --ubatch-size"),
        ("decode_context_parallel_size", 2, r"decode_context_parallel_size: 2 spreads .*set it to 1"),
        ("prefill_context_parallel_size", 2, r"prefill_context_parallel_size: 2 spreads .*set it to 1"),
    ],
)
def test_an_option_that_splits_a_batch_is_refused(
    model: Path, tmp_path: Path, owner: str, option: str, value: object, reason: str
) -> None:
    config = vllm_config(model, tmp_path, owner=owner)  # as arguments, they need several GPUs
    assert getattr(config.parallel_config, option) != value
    setattr(config.parallel_config, option, value)
    with pytest.raises(ValueError, match=reason):
        capture_context(config)


def test_fault_tolerance_is_refused(model: Path, tmp_path: Path) -> None:
    config = vllm_config(model, tmp_path)
    config.parallel_config.enable_fault_tolerance = True  # vLLM 0.33 and later
    with pytest.raises(ValueError, match=r"enable_fault_tolerance: True .*remove --enable-fault-tolerance"):
        capture_context(config)


@pytest.mark.parametrize("owner", OWNERS)
def test_elastic_expert_parallelism_is_refused(model: Path, tmp_path: Path, owner: str) -> None:
    config = vllm_config(model, tmp_path, owner=owner)  # as an argument, it needs several GPUs
    refusals.check(config)
    config.parallel_config.enable_elastic_ep = True
    with pytest.raises(ValueError, match=r"enable_elastic_ep: True .*remove --enable-elastic-ep"):
        refusals.check(config)


@pytest.mark.parametrize("owner", ["target", "pool"])
def test_adaptive_verification_of_draft_tokens_is_refused(model: Path, tmp_path: Path, owner: str) -> None:
    config = vllm_config(model, tmp_path, owner=owner, speculative_config=NGRAM)
    refusals.check(config)
    config.speculative_config.enable_adaptive_verification = True  # as an argument, it needs CUDA graphs
    with pytest.raises(ValueError, match=r"speculative_config: enable_adaptive_verification True .*leave it out"):
        refusals.check(config)


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_with_schedulers_of_their_own_are_refused(model: Path, tmp_path: Path, tp: int) -> None:
    config = vllm_config(model, tmp_path)
    config.parallel_config.distributed_executor_backend = "external_launcher"
    config.parallel_config.tensor_parallel_size = tp
    if tp == 1:
        refusals.check(config)
        return
    with pytest.raises(ValueError, match=r"distributed_executor_backend: 'external_launcher' .*use 'mp', 'ray'"):
        refusals.check(config)


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2), (2, 2)])
def test_experts_over_both_kinds_of_ranks_are_refused(
    model: Path, tmp_path: Path, owner: str, tp: int, dp: int
) -> None:
    config = vllm_config(model, tmp_path, owner=owner)
    sizes = {"tensor_parallel_size": tp, "data_parallel_size": dp, "enable_expert_parallel": True}
    for name, value in sizes.items():
        setattr(config.parallel_config, name, value)
    if tp == dp == 2:
        with pytest.raises(ValueError, match=r"enable_expert_parallel: with tensor_parallel_size 2 .* sizes to 1"):
            capture_context(config)
    else:
        assert capture_context(config).tp == tp


@pytest.mark.parametrize("owner", OWNERS)
def test_another_connector_is_refused_without_our_module_too(model: Path, tmp_path: Path, owner: str) -> None:
    """Each model checks whether capture is on. test_compatibility.py tests the case with `kv_connector_module_path`."""
    capture = capture_args("hidden-states", tmp_path, owner)
    del capture["kv_transfer_config"]["kv_connector_module_path"]
    assert is_active(vllm_config(model, tmp_path, **capture))
    with pytest.raises(ValueError, match=r"kv_offloading_size: it puts OffloadingConnector .*; remove --kv-offloading"):
        is_active(vllm_config(model, tmp_path, **capture, kv_offloading_size=0.1))
    offloading = {"kv_transfer_config": None, "speculative_config": None, "kv_offloading_size": 0.1}
    assert not is_active(vllm_config(model, tmp_path, **offloading)), "without our options, the connector is left alone"


@pytest.mark.parametrize("owner", OWNERS)
def test_the_connector_of_another_owner_is_refused(model: Path, tmp_path: Path, owner: str) -> None:
    config = vllm_config(model, tmp_path, owner=owner)
    mine = config.kv_transfer_config.kv_connector
    other = "DMIConnector" if owner == "pool" else "DMIPoolConnector"
    config.kv_transfer_config.kv_connector = other
    assert is_active(config), "a subclass of our connector is accepted"
    with pytest.raises(ValueError, match=rf"kv_connector: '{other}' .*set (it|kv_connector) to '{mine}'"):
        capture_context(config)


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
@pytest.mark.parametrize("owner", OWNERS)
def test_a_role_that_loads_keys_is_refused(model: Path, tmp_path: Path, owner: str, role: str) -> None:
    config = vllm_config(model, tmp_path, owner=owner)
    config.kv_transfer_config.kv_role = role
    with pytest.raises(ValueError, match=rf"kv_role: '{role}' would .*; set it to 'kv_producer'"):
        capture_context(config)


def test_a_list_as_additional_config_is_refused(model: Path, tmp_path: Path) -> None:
    config = vllm_config(model, tmp_path)
    config.additional_config = ["hooks"]
    with pytest.raises(ValueError, match=r"additional_config: must be a JSON object"):
        capture_context(config)


@pytest.mark.parametrize("schedule", [None, [[1, 65536, 1]]])
def test_draft_tokens_under_the_v2_runner_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: list[list[int]] | None
) -> None:
    config, good = (vllm_config(model, tmp_path, owner="draft") for _ in range(2))
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    assert capture_context(good).owner.name == "draft"
    config.speculative_config.num_speculative_tokens_per_batch_size = schedule
    with pytest.raises(ValueError, match=r"per_batch_size is .*set it to \[\[1, 65536, 0\]\].*owner='target'"):
        capture_context(config)


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("option", ["enable_sleep_mode", "enable_cumem_allocator"])
@pytest.mark.parametrize("extra", [{"reduce": {"*": "int8"}}, {}])
def test_an_engine_that_may_sleep_starts_with_each_owner(
    model: Path, tmp_path: Path, owner: str, option: str, extra: dict[str, Any]
) -> None:
    """vLLM can also sleep with its allocator alone."""
    configs = [vllm_config(model, tmp_path, extra, owner=owner) for _ in range(2)]
    setattr(configs[0].model_config, option, True)  # as an argument, it needs a GPU
    assert [capture_context(config).may_sleep for config in configs] == [True, False]
    assert capture_context(configs[0]).owner.name == owner


@pytest.mark.parametrize("owner", OWNERS)
def test_sleep_needs_the_allocator_of_vllm(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    from vllm import device_allocator

    monkeypatch.delattr(device_allocator, "get_mem_allocator_instance")
    assert not capture_context(vllm_config(model, tmp_path, owner=owner)).may_sleep
    config = vllm_config(model, tmp_path, owner=owner)
    config.model_config.enable_sleep_mode = True
    with pytest.raises(ValueError, match=r"vllm: vllm\.device_allocator:get_mem_allocator_instance is missing in ver"):
        capture_context(config)


def test_probes_of_another_model_are_refused(model: Path, tmp_path: Path) -> None:
    good = save_probe(tmp_path / "good.safetensors", "resid_pre", (1,), 64, 2)
    wide = save_probe(tmp_path / "wide.safetensors", "resid_pre", (1,), 65, 2)
    config = vllm_config(model, tmp_path, {"hooks": "probe.p", "probes": {"p": str(wide)}})
    with pytest.raises(ValueError, match=r"^probes: 'p' \(.*wide\.safetensors\) is of resid_pre with 65 values, but"):
        capture_context(config)
    context = capture_context(vllm_config(model, tmp_path, {"hooks": "probe.p", "probes": {"p": str(good)}}))
    assert context.selection.hooks == {"probe.p": (1,)}
    (tmp_path / "again").mkdir()
    again = save_probe(tmp_path / "again/good.safetensors", "resid_pre", (1,), 64, 2, seed=7)
    same = capture_context(vllm_config(model, tmp_path, {"hooks": "probe.p", "probes": {"p": str(again)}}))
    assert context.fingerprint == same.fingerprint, "the weights are not part of the graph"
    assert same.layout.fields[0].reduction != context.layout.fields[0].reduction
    other = capture_context(vllm_config(model, tmp_path, {"hooks": "resid_pre"}))
    assert "probe.p" in context.dims.hooks and "probe.p" not in other.dims.hooks, "probes are part of the graph"


def test_each_selection_has_its_own_text_in_the_compile_hash(model: Path, tmp_path: Path) -> None:
    """Also selections whose rows have the same size."""
    selections = ["resid_pre", "resid_mid", "resid_pre@0", "resid_pre@1", "q"]
    found = {hooks: capture_context(vllm_config(model, tmp_path, {"hooks": hooks})) for hooks in selections}
    assert len({context.fingerprint for context in found.values()}) == len(selections)
    again = capture_context(vllm_config(model, tmp_path, {"hooks": "resid_pre"}))
    assert again.fingerprint == found["resid_pre"].fingerprint


def test_probes_with_float32_products_in_fewer_bits_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_probe(tmp_path / "p.safetensors", "resid_pre", (1,), 64, 2)
    monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "high")
    config = vllm_config(model, tmp_path, {"hooks": "probe.p", "probes": {"p": str(path)}})
    with pytest.raises(ValueError, match=r"^VLLM_FLOAT32_MATMUL_PRECISION: 'high' .*set it to 'highest', or leave the"):
        capture_context(config)
    assert capture_context(vllm_config(model, tmp_path, {"hooks": "resid_pre"}))


@pytest.mark.parametrize("backend", ["uni", "external_launcher", "mp"])
def test_sleep_is_refused_where_no_step_reaches_the_workers_before(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    config = vllm_config(model, tmp_path)
    config.parallel_config.distributed_executor_backend = backend
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    refusals.check(config)
    config.model_config.enable_sleep_mode = True
    if backend == "mp":
        with pytest.raises(ValueError, match=r"VLLM_ENABLE_V1_MULTIPROCESSING: 0 with .* 'mp' .*; set it to 1, or rem"):
            refusals.check(config)
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    refusals.check(config)


@pytest.mark.parametrize("owner", OWNERS)
def test_a_second_engine_in_one_process_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    from vllm.distributed.kv_transfer import kv_transfer_state

    from dmi_connector.engine import models

    config = vllm_config(model, tmp_path, owner=owner)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", object())
    with pytest.raises(ValueError, match=r"VLLM_ENABLE_V1_MULTIPROCESSING: 0 .*set it to 1"):
        models.Qwen3ForCausalLM(vllm_config=config)


@pytest.mark.parametrize("owner", OWNERS)
def test_batch_sharded_sampling_is_refused_with_logits(model: Path, tmp_path: Path, owner: str) -> None:
    configs = [vllm_config(model, tmp_path, {"hooks": hooks}, owner=owner) for hooks in ("vllm-full", "hidden-states")]
    for config in configs:  # as an argument, it needs two GPUs: only the V2 runner supports it, with tensor parallelism
        assert config.parallel_config.enable_batch_sharded_sampling is False
        config.parallel_config.enable_batch_sharded_sampling = True
    with pytest.raises(ValueError, match=r"enable_batch_sharded_sampling: True .*take logits out of the hooks"):
        capture_context(configs[0])
    assert "logits" not in capture_context(configs[1]).selection.hooks


@pytest.mark.parametrize("owner", OWNERS)
def test_data_parallelism_is_accepted(model: Path, tmp_path: Path, owner: str) -> None:
    config = vllm_config(model, tmp_path, owner=owner, data_parallel_size=2)
    assert config.parallel_config.data_parallel_size == 2
    assert capture_context(config).owner.name == owner


@pytest.mark.parametrize("owner", OWNERS)
def test_async_scheduling_is_accepted_where_vllm_has_it(model: Path, tmp_path: Path, owner: str) -> None:
    """Where vLLM supports it, benchmarks/checks/check_gpu.py compares all hooks under it."""
    config = vllm_config(model, tmp_path, owner=owner, async_scheduling=True)
    if not config.scheduler_config.async_scheduling:
        pytest.skip("vLLM took async_scheduling=True and switched it off: it has none on this platform")
    assert capture_context(config).owner.name == owner


def hide(monkeypatch: pytest.MonkeyPatch, item: str) -> None:
    """Remove a name of the contract from its module, as a version of vLLM without it would."""
    names = next(names for names in NAMES.values() if item in names)
    module = names[item].places.partition(":")[0]
    monkeypatch.setitem(names, item, names[item]._replace(places=f"{module}:no_such_name"))


ITEMS = [(feature, item) for feature, names in NAMES.items() for item in names]
USED = ("always", "rows in the cache", "routing of experts")
"""Features of an eager engine on a CPU with owner target and expert routing among its hooks."""


@pytest.fixture(scope="module")
def routed_config(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The configuration of an engine with these features."""
    return vllm_config(tiny_model("qwen3_moe"), tmp_path_factory.mktemp("routed"), {"hooks": "resid_pre,topk_ids"})


@pytest.mark.parametrize(("feature", "item"), ITEMS, ids=[item for _, item in ITEMS])
def test_a_missing_name_is_refused_where_it_is_used_alone(
    routed_config: Any, monkeypatch: pytest.MonkeyPatch, feature: str, item: str
) -> None:
    """An engine that does not use a feature of vLLM starts without the names of the feature."""
    name = NAMES[feature][item]
    hide(monkeypatch, item)
    monkeypatch.setattr(context, "_built", None)
    if feature in USED and not name.without:
        with pytest.raises(ValueError, match=r"no_such_name is missing in version .*; install vllm>=0\.31") as caught:
            capture_context(routed_config)
        assert name.why in str(caught.value)
    else:
        assert dict(capture_context(routed_config).selection.hooks)["topk_ids"]


@pytest.mark.parametrize(
    ("args", "features"),
    [
        ({"owner": "draft"}, {"rows in the cache", "draft", "draft on the V1 runner"}),
        ({"owner": "target", "enforce_eager": False}, {"rows in the cache", "compilation"}),
        ({"owner": "target", "tensor_parallel_size": 2}, {"rows in the cache", "several ranks"}),
        ({"owner": "target", "speculative_config": NGRAM}, {"rows in the cache", "speculative decoding"}),
        ({"owner": "pool", "speculative_config": NGRAM}, {"pool", "speculative decoding"}),
        ({"owner": "target", "model_impl": "transformers"}, {"rows in the cache", "Transformers backend"}),
        ({"owner": "target", **STAGES}, {"rows in the cache", "several ranks", "pipeline stages"}),
    ],
    ids=lambda value: "" if isinstance(value, set) else "-".join(map(str, value.values())),
)
def test_names_of_the_features_in_use_are_looked_up(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], features: set[str]
) -> None:
    config, looked_up = vllm_config(model, tmp_path, **args), set()
    monkeypatch.setattr(contract, "check_names", looked_up.update)
    refusals.check(config)
    assert looked_up == {"always", *features}


def test_stages_on_the_v2_runner_use_more_names(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = staged(model, tmp_path, owner="target")
    before = set(features_of(config))
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    assert set(features_of(config)) == before | {"pipeline stages on the V2 runner"}


def test_names_of_the_hooks_in_use_are_looked_up(model: Path, tmp_path: Path) -> None:
    from dmi_connector.engine.model.architectures import ARCHITECTURES

    config = vllm_config(model, tmp_path)
    text, vision = ARCHITECTURES["Qwen3ForCausalLM"], ARCHITECTURES["Gemma3ForConditionalGeneration"]
    assert features_of_hooks(config, text, ["q"]) == []
    assert features_of_hooks(config, vision, ["q"]) == ["vision tower"]
    found = features_of_hooks(config, text, ["pattern", "topk_weights"])
    assert found == ["attention summaries", "attention summaries on a CPU", "routing of experts"]
    config.device_config.device_type = "cuda"
    assert features_of_hooks(config, text, ["pattern"]) == ["attention summaries"]
    drafting = vllm_config(model, tmp_path, speculative_config=NGRAM)
    assert features_of_hooks(drafting, text, ["q", "logits"]) == ["logits beside drafts on the V1 runner"]
    assert features_of_hooks(drafting, text, ["q"]) == features_of_hooks(config, text, ["logits"]) == []


def test_speculative_decoding_is_taken_as_far_as_it_was_tested(model: Path, tmp_path: Path) -> None:
    config = vllm_config(model, tmp_path, speculative_config=NGRAM)
    refusals.check(config)
    drafting = capture_context(config).drafting
    assert drafting is not None and (drafting.method, drafting.most) == ("ngram", NGRAM["num_speculative_tokens"])
    config.speculative_config.speculative_token_tree = "[(0,), (0, 0), (0, 0, 0)]"  # in vLLM 0.31, a chain
    refusals.check(config)
    config.speculative_config.speculative_token_tree = "[(0,), (1,), (0, 0)]"
    with pytest.raises(ValueError, match=r"speculative_token_tree .* several tokens for a position.*leave it out"):
        refusals.check(config)
    config.speculative_config.method = "medusa"
    with pytest.raises(
        ValueError,
        match=r"speculative_config: method 'medusa' may propose several tokens for a position; use one of ngram",
    ):
        refusals.check(config)
    config.speculative_config.method, config.speculative_config.speculative_token_tree = "eagle3", None
    config.model_config.model_impl = "transformers"
    if config.model_config.using_transformers_backend():
        with pytest.raises(ValueError, match=r"speculative_config: method 'eagle3' runs modules of the model"):
            refusals.check(config)


def test_routers_are_asked_for_kernels_that_do_not_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 queries each router while it builds an expert layer. vLLM 0.32 does not."""
    from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter

    class Router(FusedMoERouter):
        """A router that never routes."""

    Router.__abstractmethods__ = frozenset()
    if "supports_monolithic_kernels" not in vars(FusedMoERouter):
        with decomposed_experts():
            assert not hasattr(FusedMoERouter, "supports_monolithic_kernels")
        yes = property(lambda _router: True)
        monkeypatch.setattr(FusedMoERouter, "supports_monolithic_kernels", yes, raising=False)
    router = Router.__new__(Router)
    with decomposed_experts():
        assert router.supports_monolithic_kernels is False
    assert router.supports_monolithic_kernels is True


def test_a_name_is_found_in_its_second_place(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = Name("vllm.gone.module:Thing vllm.config:ModelConfig.use_mla", "a name that has moved to another module")
    monkeypatch.setitem(NAMES["always"], "moved", moved)
    contract.check_names(["always"])
    from vllm.config import ModelConfig

    assert contract.find(moved) is ModelConfig.use_mla


@pytest.fixture
def of_version(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """of_version(version): make vLLM report this version."""
    import vllm

    def set_version(version: str) -> None:
        monkeypatch.setattr(vllm, "__version__", version)
        contract.untested.cache_clear()

    yield set_version
    monkeypatch.undo()
    contract.untested.cache_clear()


@pytest.mark.parametrize(
    ("version", "answer"),
    [
        ("0.30.0", "refused"),
        ("0.31.0", "tested"),
        ("0.32.1+cpu", "tested"),
        ("0.33.0", "tested"),
        ("0.33.1rc1.dev2+g1234", "tested"),
        ("0.34.0", "newer"),
        ("0.34.0rc1", "newer"),
        ("1.0", "newer"),
        ("dev", "refused"),
    ],
)
def test_a_newer_vllm_is_accepted_with_a_warning_unless_it_is_to_be_refused(
    of_version: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, version: str, answer: str
) -> None:
    of_version(version)
    lines: list[str] = []
    monkeypatch.setattr(contract.logger, "warning", lambda text, *values: lines.append(text % values))
    refused = pytest.raises(ValueError, match=rf"version {re.escape(version)} is not supported; install vllm>=0\.31")
    with refused if answer == "refused" else nullcontext():
        contract.check_version()
    assert contract.untested() == (version if answer == "newer" else "")
    assert ["is newer than the tested versions" in line for line in lines] == [True] * (answer == "newer")
    monkeypatch.setenv(contract.UNTESTED, "refuse")
    with nullcontext() if answer == "tested" else refused:
        contract.check_version()
    monkeypatch.setenv(contract.UNTESTED, "strict")
    with pytest.raises(ValueError, match="DMI_UNTESTED_VLLM: 'strict' is unknown; choose one of check, refuse"):
        contract.check_version()


def test_the_first_captures_of_a_newer_vllm_are_checked(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_version: Callable[[str], None],
) -> None:
    """If a hook does not fire after the start, the engine ends. No such row is stored, even if its memory has values of
    an earlier request.
    """
    of_version("0.34.0")
    writes, broken = TapBatch.add, False

    def add(self: Any, row_field: Any, value: Any) -> None:
        if not (broken and row_field is not None and (row_field.hook, row_field.layer) == ("z", 1)):
            writes(self, row_field, value)

    monkeypatch.setattr(TapBatch, "add", add)
    run = Run(tmp_path)
    args = capture_args("hidden-states,z,mlp_out", run.store_dir, "target", chunk_tokens=32, segment_tokens=64)
    ends = pytest.raises(RuntimeError, match=r"no tap wrote z of layer 1 in version 0\.34\.0.*install vllm>=0\.31")
    with ends, engine(tiny_model("qwen3"), enforce_eager=True, **args) as llm:
        generate(llm, run, {"first": Ask(prompt(50))})
        broken = True
        generate(llm, run, {"second": Ask(prompt(300))})
    assert open_capture(run.store("first"), timeout=60).attrs["untested_vllm"] is True
    lost = next(path for path in run.store_dir.glob("*.zarr") if path != Path(run.store("first")))
    capture = open_capture(lost, timeout=60, allow_incomplete=True)
    assert not capture.complete and not len(capture.token_ids)


def test_every_name_of_the_contract_exists_and_has_a_reason() -> None:
    for feature, names in NAMES.items():
        for item, name in names.items():
            assert contract.find(name) is not None, (feature, item)
            assert len(name.why) > 20, f"{item}: say why"
