# SPDX-License-Identifier: Apache-2.0
"""Quantised weights and caches: captured values are those the model computed with, and tokens do not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmi_connector import Capture, capture_args, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.cli.tiny_models import make_model
from tests.engine.check import cosines, hooks_of
from tests.engine.harness import ALL_HOOKS, SMALL, Ask, Run, engine, generate, prompt
from tests.quantise import SCHEMES, quantise
from tests.runner import GPU

SIZES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 2}
"""Sizes that are multiples of the tiles of every kernel and of the groups."""
FP8_SIZES = {"num_hidden_layers": 2}
"""The FP8 kernel needs no multiples. The model is small, because PyTorch's FP8 product takes 30 ns per multiplication
on a CPU.
"""
ARCH = {"fp8-static": "llama"}
"""The family of the model, if not Qwen3. In vLLM's CUDA build, Llama's activation function returns FP8 values for a
layer with static scales.
"""
LEAST_COSINE = {"gptq": 0.995, "awq": 0.995, "int8": 0.995, "fp8": 0.985, "fp8-static": 0.97 if GPU else 0.975}
"""Minimum cosine of a row with the float32 row of transformers. bfloat16 rounds, and int8 and fp8 quantise the inputs
of products too. The lowest cosine with 4 bits was 0.9974, on a CPU with AMX. transformers in bfloat16 alone gives
0.9976 (`attn_out` of a tiny Llama). The lowest with a static scale was 0.981, on an H200.
"""
AVX512, VNNI = torch.cpu._is_avx512_supported(), torch.cpu._is_vnni_supported()
if not VNNI:
    # int8 products are less exact on a CPU without VNNI: the lowest was 0.977, with the same tokens as stock vLLM
    LEAST_COSINE["int8"] = 0.97
LACKS = {} if AVX512 else dict.fromkeys(("gptq", "awq"), "no AVX-512")
if not GPU:
    LACKS["fp8-static"] = "vLLM's CPU build lacks static_scaled_fp8_quant"
KERNELS = [pytest.param(name, marks=pytest.mark.skipif(name in LACKS, reason=LACKS.get(name, ""))) for name in SCHEMES]
"""Quantisation schemes. vLLM's build for CPUs without AVX-512 has no kernel for 4-bit weights."""
ASKS = {"short": Ask(prompt(20)), "long": Ask(prompt(200))}


@pytest.mark.parametrize("scheme", KERNELS)
def test_quantised_weights_give_their_values_and_the_same_tokens(
    known_models: None, tmp_path: Path, scheme: str
) -> None:
    arch = ARCH.get(scheme, "qwen3")
    model = make_model(arch, tmp_path / "model", **(FP8_SIZES if scheme.startswith("fp8") else SIZES))
    quantise(model, scheme, tmp_path / "quantised", tmp_path / "plain")
    runs = {name: Run(tmp_path / name) for name in ("captured", "stock")}
    capture: dict[str, Any] = capture_args(ALL_HOOKS, runs["captured"].store_dir, "target", **SMALL)
    for name, run in runs.items():
        args = capture if name == "captured" else {}
        with engine(tmp_path / "quantised", dtype="bfloat16", enforce_eager=True, **args) as llm:
            run.facts["quantised"] = llm.llm_engine.vllm_config.quant_config.get_name()
            generate(llm, run, ASKS)
    run = runs["captured"]
    assert run.facts["quantised"] == runs["stock"].facts["quantised"] != "none"
    oracle = Oracle(tmp_path / "plain")
    for name, ask in ASKS.items():
        tokens = run.tokens(name)
        assert tokens == runs["stock"].tokens(name)
        found = cosines(run.store(name), oracle, tokens, len(ask.prompt), hooks_of(arch))
        assert min(found.values()) >= LEAST_COSINE[scheme], f"{name}: {found}"


def nearest(values: torch.Tensor) -> torch.Tensor:
    """The values in an fp8 cache, rounded to nearest."""
    return values.to(torch.float8_e4m3fn).float()


def towards_zero(values: torch.Tensor) -> torch.Tensor:
    """The values in an fp8 cache, truncated as vLLM's CPU kernel does."""
    rounded = values.to(torch.float8_e4m3fn)
    larger = rounded.float().abs() > values.abs()
    return (rounded.view(torch.uint8) - larger.to(torch.uint8)).view(torch.float8_e4m3fn).float()


def attended(capture: Capture, layer: int, cached: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The attention output of a layer, float32 [tokens, heads * head_dim], from stored queries, keys and values.

    cached: converts keys and values to those in the cache.
    """
    dims = capture.attrs["dims"]
    size, groups = dims["head_dim"], dims["heads"] // dims["kv_heads"]
    q, k, v = (torch.from_numpy(capture.numpy(name, layer=layer)) for name in ("q_rot", "k_rot", "v"))
    k, v = cached(k), cached(v)
    q, k, v = (x.view(len(x), -1, size).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, 0) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(0, 1).flatten(1)


@pytest.mark.skipif(not AVX512, reason="this CPU has no AVX-512, which vLLM's FP8 cache needs")
def test_a_quantised_cache_gives_what_attention_made_of_it(known_models: None, tmp_path: Path) -> None:
    """`k_rot` and `v` are captured before the cache. `z` results from the cached values, in prefill and decode."""
    model = make_model("qwen3", tmp_path / "model")
    runs = {name: Run(tmp_path / name) for name in ("captured", "stock")}
    capture: dict[str, Any] = capture_args(ALL_HOOKS, runs["captured"].store_dir, **SMALL)
    for name, run in runs.items():
        args = capture if name == "captured" else {}
        with engine(model, kv_cache_dtype="fp8", enforce_eager=True, **args) as llm:
            generate(llm, run, ASKS)
    oracle = Oracle(model)
    for name, ask in ASKS.items():
        run = runs["captured"]
        assert run.tokens(name) == runs["stock"].tokens(name)
        found = cosines(run.store(name), oracle, run.tokens(name), len(ask.prompt), hooks_of("qwen3"))
        assert min(found.values()) >= 0.98, f"{name}: {found}"
        if GPU:  # vLLM's kernel for GPUs also quantises queries
            continue
        store = open_capture(run.store(name))
        for layer in range(3):
            z = torch.from_numpy(store.numpy("z", layer=layer))
            off = {how: (z - attended(store, layer, how)).abs().max() for how in (nearest, towards_zero, torch.clone)}
            assert min(off[nearest], off[towards_zero]) <= 1e-5, f"{name}: layer {layer}: {off}"
            assert off[torch.clone] > 1e-3, "the cache was not quantised"
