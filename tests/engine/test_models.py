# SPDX-License-Identifier: Apache-2.0
"""Further model families: every hook, captured by an engine and compared with transformers in float32.

`make test` starts one engine for each of SHORT. `make models` tests all combinations, and writes the table of
docs/MODELS.md.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from dmi_connector import capture_args, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle, largest
from dmi_connector.cli.tiny_models import ARCHS, FAMILIES, make_model
from dmi_connector.engine.model.architectures import ARCHITECTURES
from dmi_connector.hooks import HOOKS
from tests.engine import latent_cpu, renamed, routing_cpu, sparse_cpu
from tests.engine.check import attention_weights, relative_errors
from tests.engine.harness import ALL_HOOKS, SMALL, Ask, Run, engine, generate, prompt
from tests.engine.wrapped import ALL as RENAMED
from tests.runner import GPU

MOST = 2e-3 if GPU else 1e-5
"""Maximum error, relative to the hook's largest value.

On a GPU, the largest was 1.5e-3 for images in an eager GLM-4V, and 9.7e-6 otherwise (docs/MODELS.md).
"""
LENGTHS = (5, 33, 300)
"""Prompt lengths. 300 needs several prefill steps, and exceeds every window and chunk of these models."""
FOUND = ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_final", "logits")
"""Hooks of models that have no entry in ARCHITECTURES. They are found from the structure of the layers."""
RESULT = os.environ.get("MODELS_RESULT", "")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""Families with latent attention. They run on vLLM's CPU kernel. Their models with the suffix "-odd" run on a stand-in
for this kernel. Those with the suffix "-heads" attend over the keys of heads instead of the latent.
"""
INDEXED = ("deepseek_v32", "glm_moe_dsa")
"""Families with latent attention over tokens that an indexer chooses. vLLM has no CPU kernels for them."""
KEYLESS = (*LATENT, *INDEXED)
SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash")
"""Families with attention sinks, which are not stored."""
TEXT_ONLY = ("kimi_k25", "interns1", "internvl_chat", "gemma4", "gemma4_unified", "pixtral", "mimo_v2_omni", "step3p7")
"""Models with a vision tower that run without it."""
BIASED = ("ernie4_5_moe", "laguna", "minimax_m2", "step3p7")
"""Families with routing that vLLM's CPU router does not support."""
PATCHED = (*BIASED, *INDEXED)
_ONE_GROUP: dict[str, Any] = {"n_group": 1, "topk_group": 1, "q_lora_rank": None}
_GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
_SHARED_KEYS: dict[str, Any] = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "attention_k_eq_v": True}
_UNSCALED: dict[str, Any] = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in (*ARCHS, *FAMILIES)},
    "phi-norms": ("phi", {"qk_layernorm": True}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "mistral-windows": ("mistral", {"sliding_window": 64}),  # a window in all layers
    "internlm3": ("llama", {"attention_bias": True}),
    "llama-first": ("llama", {}),
    "iquestcoder": ("llama", {}),
    "telechat3": ("llama", {}),
    "pangu": ("llama", {"attention_bias": True}),
    "teleflm": ("granite", {**_UNSCALED, "attention_multiplier": 32**-0.5}),
    "minicpm": ("granite", {"attention_multiplier": 32**-0.5}),
    "orion": ("stablelm", {"use_qkv_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "internlm2": ("llama", {"num_key_value_heads": 2}),
    "exaone": ("llama", {"num_key_value_heads": 2}),
    "bailing_moe": ("glm4_moe", {}),
    "bailing_moe_v2": ("glm4_moe", _GROUPS),
    "gemma4-shared": ("gemma4_text", _SHARED_KEYS),
    "gemma4-experts": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4": ("gemma4_text", _SHARED_KEYS),
    "gemma4_unified": ("gemma4_text", {"hidden_size_per_layer_input": 0}),
    "kimi_k25": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    "sarvam_moe": ("glm4_moe", _GROUPS),
    "plamo3": (
        "gemma3_text",
        {"tie_word_embeddings": False, "query_pre_attn_scalar": 32, "hidden_activation": "silu"},
    ),
    "mimo_v2": ("mimo_v2_flash", {}),
    "mimo_v2_omni": ("mimo_v2_flash", {}),
    "pixtral": ("deepseek_v3", {}),
    "step3p5": ("step3p7", {}),
    "step3p7": ("step3p7", {}),
    "interns1": ("qwen3_moe", {}),
    "internvl_chat": ("qwen3", {}),
    "exaone_moe-first": ("exaone_moe", {}),
    "cohere-plain": ("cohere", {"use_qk_norm": False}),
    "hyperclovax-plain": ("hyperclovax", {"use_post_norm": False}),
    "laguna-heads": ("laguna", {"num_attention_heads_per_layer": [6, 4, 6, 4]}),
    "mistral_large3": ("deepseek_v3", {}),
    "deepseek_v2-lite": ("deepseek_v2", {**_ONE_GROUP, "topk_method": "greedy"}),
    "moonlight": ("deepseek_v3", _ONE_GROUP),
    **{f"{name}-odd": (name, latent_cpu.ODD) for name in LATENT[:2]},
    **{f"{name}-heads": (name, latent_cpu.HEADS) for name in LATENT[:2]},
}
POOLED = ("gemma4-shared", "gemma4")
"""Models that need owner pool."""
NO_DRAFT = ("mimo_v2_omni",)
"""Models for which vLLM builds the model itself instead of the draft."""
CACHED = {
    name: 272 if name.endswith("-odd") or arch in INDEXED else 0
    for name, (arch, _) in MODELS.items()
    if arch in KEYLESS and not name.endswith("-heads")
}
"""{model: tokens of a prefix-cache hit for a prompt of 280 tokens}, if they are not 256. Blocks of latent attention
have 16 tokens, and vLLM disables prefix caching with its CPU kernel.
"""
EVEN = {
    name: {"num_attention_heads": 4, "num_key_value_heads": 2}
    for name in ("phi3", "ministral3", "mixtral", "granite", "cohere2", "olmo", "olmo2", "olmo3")
} | {
    **{name: {"num_attention_heads": 4, "num_key_value_heads": 4} for name in LATENT},
    "gpt_neox": {"num_attention_heads": 4, "hidden_size": 128},
    "phi": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128},
    "starcoder2": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128},
    "qwen2_moe": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128},
    "olmoe": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128},
    "opt": {"num_attention_heads": 4, "hidden_size": 128, "word_embed_proj_dim": 128},
    "gpt_bigcode": {"n_head": 4, "hidden_size": 128},
    "flex_olmo": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "mimo_v2_flash": {"num_attention_heads": 4, "swa_num_attention_heads": 4},
    "bloom": {"n_head": 4, "hidden_size": 128},
    "gptj": {"num_attention_heads": 4, "hidden_size": 128},
    **{
        name: {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
        for name in (
            "cohere",
            "apertus",
            "phimoe",
            "stablelm",
            "granitemoe",
            "granitemoeshared",
            "granitemoe_swa",
            "minicpm",
        )
    },
    "arcee": {"num_attention_heads": 4, "num_key_value_heads": 2},
}
"""{family or model: numbers of heads that two ranks can share}."""
SHORT = [
    ("gemma2", "eager", "target"),
    ("cohere2", "eager", "draft"),
    ("gpt_oss", "eager", "target"),
    ("opt", "eager", "target"),
    ("bloom", "eager", "draft"),
    ("deepseek_v2-lite", "eager", "target"),
    ("deepseek_v2-heads", "eager", "target"),
    ("deepseek_v3-odd", "eager", "draft"),
    ("gpt_neox", "eager", "draft"),
    ("phi-norms", "eager", "target"),
    ("starcoder2", "eager", "target"),
    ("olmo", "eager", "target"),
    ("exaone4", "eager", "target"),
    ("laguna-heads", "eager", "draft"),
    ("gemma4-shared", "eager", "pool"),
    ("minicpm", "eager", "draft"),
    ("glm_moe_dsa", "eager", "target"),
]
"""With ARCHS and models with a vision tower, these cover each kind of row: tests/unit/engine/test_model_cover.py."""
IN_PROCESSES = [
    name
    for name, (arch, _) in MODELS.items()
    if not name.endswith("-odd") and arch not in PATCHED and name not in TEXT_ONLY
]
"""Models whose engines need no patch. So they can run on two ranks, which are processes of their own."""
OWNERS = ("draft", "target")
"""Owners to test. Owner pool uses the same taps."""


def owners(name: str) -> tuple[str, ...]:
    if name in NO_DRAFT:
        return ("target",)
    return ("pool",) if name in POOLED else (*OWNERS, "pool") if name in INDEXED else OWNERS


def modes(name: str) -> tuple[str, ...]:
    """The modes of a model. vLLM does not compile models with an indexer."""
    return ("eager",) if name in INDEXED else ("eager", "compiled")


_ALL = [(name, mode, owner) for name in MODELS for mode in modes(name) for owner in owners(name)]
CONFIGURATIONS: list[Any] = [
    *SHORT,
    *(pytest.param(one, marks=pytest.mark.soak) for one in _ALL if one not in SHORT),
]


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids="-".join)
def configuration(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    return request.param


@pytest.fixture(scope="module")
def model(configuration: tuple[str, str, str], known_models: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if GPU and configuration[0] in CACHED:
        pytest.skip("vLLM's kernels of latent attention for GPUs do not support float32")
    if "qk_layernorm" in MODELS[configuration[0]][1] and not ARCHITECTURES["PhiForCausalLM"].in_transformers:
        pytest.skip("vLLM 0.31 has a class of its own for Phi, which does not norm q and k")
    return make(configuration[0], tmp_path_factory.mktemp(configuration[0]))


def make(name: str, path: Path, **more: Any) -> Path:
    """Write one of MODELS. more: additional fields of its config."""
    arch, fields = MODELS[name]
    make_model(arch, path, **fields, **more)
    if name in RENAMED:
        RENAMED[name].write(path)
    return path


def lacks(model: Path, ranks: int = 1) -> list[str]:
    """Hooks of transformers that cannot be captured."""
    (name,) = json.loads((model / "config.json").read_text())["architectures"]
    if name not in ARCHITECTURES:
        return [hook for hook in HOOKS if hook not in FOUND]
    config = AutoConfig.from_pretrained(model)
    row = ARCHITECTURES[name].fit(getattr(config, "llm_config", None) or config.get_text_config())
    return [*row.lacks, *(row.one_rank if ranks > 1 else ())]


@pytest.fixture(scope="module")
def twin(configuration: tuple[str, str, str], model: Path) -> Oracle:
    return oracle(configuration[0], model)


def oracle(name: str, model: Path, ranks: int = 1) -> Oracle:
    """The oracle of one of MODELS in the directory `model`."""
    found = Oracle(renamed.twin(model), without=lacks(model, ranks))
    if name in RENAMED and RENAMED[name].scaled:
        found.twin = found.twin.but(weights_scale="")
    return found


@pytest.fixture(scope="module")
def run(configuration: tuple[str, str, str], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    name, mode, owner = configuration
    run = Run(tmp_path_factory.mktemp(f"{name}-{mode}-{owner}"))
    pool = {"pool_bytes": 48 << 20} if owner == "pool" else {}
    args: dict[str, Any] = capture_args(ALL_HOOKS, run.store_dir, owner, **pool, **SMALL)
    with pytest.MonkeyPatch.context() as patch, engine(model, **args, **options(name, mode, patch)) as llm:
        generate(llm, run, {f"len{n}": Ask(prompt(n)) for n in LENGTHS})
        generate(llm, run, {"again": Ask(prompt(300)[:280] + prompt(9, seed=1))})
        if name in INDEXED:  # steps with so few tokens that the indexer need not choose
            generate(llm, run, {"short": Ask(prompt(31))})
    return run


def options(name: str, mode: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The engine options of a model. Also patches what else the engine needs."""
    found: dict[str, Any] = {"enforce_eager": mode != "compiled"}
    if name in TEXT_ONLY:
        found |= without_tower(patch)
    if MODELS[name][0] in BIASED:
        routing_cpu.stand_in(patch)
    if name in INDEXED:
        sparse_cpu.stand_in(patch)
        found |= latent_cpu.KERNEL | latent_cpu.ROTARY
    if MODELS[name][0] in LATENT:
        found |= latent_cpu.ROTARY if mode != "compiled" else {}
        if name.endswith("-heads"):
            patch.setenv("VLLM_MLA_DISABLE", "1")
        elif name.endswith("-odd"):
            latent_cpu.stand_in(patch)
            found |= latent_cpu.KERNEL
        else:
            found |= latent_cpu.KERNEL | latent_cpu.WHOLE
    return found


def without_tower(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of an engine that does not load the vision tower."""
    if not GPU:
        import numba  # noqa: F401  # by vLLM's class

        # vLLM's search for kernels to replace on a CPU fails in this module.
        patch.delitem(sys.modules, "llvmlite.binding.ffi")
    return {"language_model_only": True}


def check(run: Run, twin: Oracle, name: str, mode: str, owner: str) -> None:
    """Compare all stores of a run with transformers. Appends the largest errors to the file RESULT."""
    worst = largest(
        relative_errors(run.store(name), twin, run.tokens(name), len(reply.prompt_token_ids))
        for name, reply in run.replies.items()
    )
    if RESULT:
        architecture = RENAMED[name].architecture if name in RENAMED else twin.config.architectures[0]
        facts = {"model": name, "mode": mode, "owner": owner, "architecture": architecture}
        with open(RESULT, "a") as file:
            file.write(json.dumps({**facts, "errors": worst}) + "\n")
    assert {hook: error for hook, error in worst.items() if not error <= MOST} == {}


def test_every_hook_is_that_of_transformers(configuration: tuple[str, str, str], run: Run, twin: Oracle) -> None:
    name, _, owner = configuration
    hit = 256 if owner == "pool" else CACHED.get(name, 256)
    assert run.replies["again"].num_cached_tokens == hit, "no prefix-cache hit"
    check(run, twin, *configuration)


@pytest.mark.soak
@pytest.mark.parametrize(
    "name",
    [n for n, (arch, _) in MODELS.items() if not n.endswith("-odd") and arch not in PATCHED and n not in POOLED],
)
def test_two_ranks_give_the_hooks_of_the_whole_model(
    name: str, known_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    even = EVEN.get(name, EVEN.get(MODELS[name][0], {"num_attention_heads": 4}))
    model = make(name, tmp_path / "model", **even)
    run, twin = Run(tmp_path / "captures"), oracle(name, model, ranks=2)
    (served,) = json.loads((model / "config.json").read_text())["architectures"]  # transformers may have another class
    row = ARCHITECTURES.get(served)
    hooks = ",".join([ALL_HOOKS, *(f"-{hook}" for hook in (row.one_rank if row else ()))])
    args: dict[str, Any] = capture_args(hooks, run.store_dir, "target", **SMALL)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(model, in_process=False, **ranks, **args, **options(name, "eager", monkeypatch)) as llm:
        generate(llm, run, {f"len{n}": Ask(prompt(n)) for n in LENGTHS})
    check(run, twin, name, "eager, two ranks", "target")


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_reductions_at_the_end_of_a_step_need_no_final_norm(
    mode: str, known_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Step 3.5, the final norm runs after the forward."""
    model, run = make("step3p5", tmp_path / "model"), Run(tmp_path / "captures")
    rules = {"resid_pre": "topk(8,exact)"}
    args: dict[str, Any] = capture_args("resid_pre", run.store_dir, "target", reduce=rules, **SMALL)
    with engine(model, **args, **options("step3p5", mode, monkeypatch)) as llm:
        generate(llm, run, {f"len{n}": Ask(prompt(n)) for n in LENGTHS})
    for n in LENGTHS:
        capture = open_capture(run.store(f"len{n}"), timeout=300)
        want = oracle("step3p5", model).run(run.tokens(f"len{n}")[:-1])["resid_pre"]
        got = capture.numpy("resid_pre")
        assert ((got != 0).sum(-1) == 8).all()
        np.testing.assert_allclose(got, np.where(got == 0, 0, want), rtol=0, atol=2e-3 * np.abs(want).max())


def test_tokens_are_those_of_transformers(run: Run, twin: Oracle) -> None:
    """Greedy tokens must agree unless float32 cannot tell the two best tokens apart."""
    for name, reply in run.replies.items():
        tokens = run.tokens(name)
        scores = twin.run(tokens)["logits"][len(reply.prompt_token_ids) - 1 : -1]
        chosen = np.take_along_axis(scores, np.array(tokens[len(reply.prompt_token_ids) :])[:, None], 1)[:, 0]
        assert (scores.max(1) - chosen).max() < 1e-4, name


def test_computed_attention_is_that_of_the_model(configuration: tuple[str, str, str], run: Run, twin: Oracle) -> None:
    """`attention_pattern` supports the windows, chunks, soft caps, slopes and scales of these models."""
    capture = open_capture(run.store("len300"))
    arch = MODELS[configuration[0]][0]
    lacks = "latent attention, whose keys" if arch in KEYLESS else "attention sinks, which" if arch in SINKS else ""
    if lacks:
        with pytest.raises(ValueError, match=f"{lacks}.* are not stored"):
            capture.attention(0)
        return
    if capture.attrs["rotary"] and "q_rot" not in capture.hooks:
        with pytest.raises(KeyError, match="q_rot"):
            capture.attention(0)
        return
    want = attention_weights(twin, capture.token_ids.tolist())
    with_queries = capture.layers["q_rot" if capture.attrs["rotary"] else "q"]
    for layer in set(range(capture.attrs["num_layers"])).difference(with_queries):
        with pytest.raises(KeyError, match=f"has no layer {layer} in this store"):
            capture.attention(layer)
    for layer in with_queries:
        np.testing.assert_allclose(capture.attention(layer), want[layer], atol=1e-5, err_msg=f"layer {layer}")
