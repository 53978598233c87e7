# SPDX-License-Identifier: Apache-2.0
"""Under torch.compile in bf16, capture changes no token and no bit of a log-probability.

Inductor keeps the intermediates of fused kernels in float32. A tap that rounded one of them would change all later
values. So the log-probabilities of all generated tokens must be bit-equal to those of vLLM without capture. Two
selections are tested: all hooks, and the residual stream, whose layers share an op. vLLM compiles a model as a whole on
a CPU, and piecewise, split at attention, on a GPU. Both ways are tested.

On a CPU with two threads, vLLM without capture differed in its last bits in 2 of some 130 starts. So the first start
with capture that differs is repeated. If it differs again, vLLM without capture is started again, and the new result is
the reference. A warning names the repeated start.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dmi_connector import Capture, capture_args, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from tests.engine.harness import ALL_HOOKS, Ask, Run, engine, generate, prompt
from tests.engine.test_bf16 import operations, ulps
from tests.probekit import save_probe, scores

STREAM = "resid_pre,resid_mid,q,k"
OWNERS = {ALL_HOOKS: "draft", STREAM: "target"}
SAMPLING = {"max_tokens": 32, "logprobs": 1}
STARTS: Counter[str] = Counter()
"""Number of compiled engines that this process has started: "all", and "odd" ones, whose bits differed."""
ASKS = {f"{n} tokens": Ask(prompt(n), sampling=SAMPLING) for n in (6, 33, 100, 150)} | {
    "seeded": Ask(prompt(9), sampling={**SAMPLING, "temperature": 0.8, "seed": 3})
}


@contextmanager
def in_pieces() -> Iterator[None]:
    """Compile models piecewise, as vLLM does on a GPU, but without CUDA graphs and without a pass that needs a GPU's
    ops.
    """
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.config.compilation import CUDAGraphMode
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config

    def split(vllm_config: Any) -> None:
        update(vllm_config)
        config = vllm_config.compilation_config
        config.mode, config.cudagraph_mode = CompilationMode.VLLM_COMPILE, CUDAGraphMode.NONE
        config.backend = "inductor"
        config.splitting_ops = [*config._attention_ops, "vllm::unified_kv_cache_update"]
        config.ir_enable_torch_wrap, config.compile_sizes = True, []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(split))
        patch.setattr(FixFunctionalizationPass, "__call__", lambda _self, _graph: None)
        yield


class Compiled(NamedTuple):
    """A model, its number of layers, and a context in which vLLM compiles it."""

    model: Path
    layers: int
    how: Callable[[], AbstractContextManager[None]]

    @property
    def together(self) -> int:
        """Number of layers that share an op when STREAM is captured. With three layers it is 2, so that one layer is
        left.
        """
        return 2 if self.layers == 3 else 3


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("qwen3", 4, nullcontext), marks=pytest.mark.soak),
        ("qwen3", 3, in_pieces),
        pytest.param(("llama", 8, nullcontext), marks=pytest.mark.soak),
        *(pytest.param((name, 8, in_pieces), marks=pytest.mark.soak) for name in ("llama", "qwen3_moe", "gpt2")),
    ],
    ids=["qwen3-whole", "qwen3-pieces", "llama-whole", "llama-pieces", "moe-pieces", "gpt2-pieces"],
)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, known_models: None) -> Compiled:
    """Models of different structure: Qwen3 has norms of q and k; in Llama q and k are slices of one tensor; the norms
    of GPT-2 do not add the residual; experts work in place.
    """
    from dmi_connector.cli.tiny_models import make_model

    name, layers, how = request.param
    model = make_model(name, tmp_path_factory.mktemp("compiled"), "bfloat16", num_hidden_layers=layers)
    return Compiled(model, layers, how)


PROBED = {"risk": ("resid_pre", 1), "out": ("mlp_out", 0)}
"""Probes that are captured with all hooks. They read values that hooks read too."""


@pytest.fixture(scope="module")
def probes(compiled: Compiled, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    config, folder = json.loads((compiled.model / "config.json").read_text()), tmp_path_factory.mktemp("probes")
    width = config.get("hidden_size") or config["n_embd"]
    return {n: save_probe(folder / f"{n}.safetensors", hook, (layer,), width, 3) for n, (hook, layer) in PROBED.items()}


def start_plain(compiled: Compiled, directory: Path) -> Run:
    STARTS["all"] += 1
    run = Run(directory)
    with compiled.how(), engine(compiled.model, dtype="bfloat16", enforce_eager=False) as llm:
        generate(llm, run, ASKS)
    return run


def probabilities(run: Run) -> list[float | None]:
    return [run.replies[name].outputs[0].cumulative_logprob for name in ASKS]


@pytest.fixture(scope="module")
def plain(compiled: Compiled, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return start_plain(compiled, tmp_path_factory.mktemp("plain-compiled"))


def start_captured(compiled: Compiled, selection: str, probes: dict[str, Path], directory: Path) -> Run:
    """Run all requests in one engine.

    Facts of the run: "first layers": the first layer of each op that wrote; "pieces": number of graphs that vLLM
    compiled; "how": the `Compilation`; "hashed": the text in the compile hash.
    """
    from vllm.compilation.counter import compilation_counter

    from dmi_connector.engine.taps import batches
    from dmi_connector.engine.taps import op as tap_op
    from dmi_connector.engine.taps.compilation import compilation_of

    STARTS["all"] += 1
    run = Run(directory)
    before, pieces = list(tap_op._PLACES.values()), compilation_counter.num_piecewise_graphs_seen
    if selection == ALL_HOOKS:
        computed = {name: str(path) for name, path in probes.items()}
        args = capture_args(f"{selection},probe.*", run.store_dir, owner=OWNERS[selection], probes=computed)
    else:
        args = capture_args(selection, run.store_dir, owner=OWNERS[selection])
    with pytest.MonkeyPatch.context() as patch, compiled.how():
        patch.setattr(batches, "MAX_VALUES", min(batches.MAX_VALUES, compiled.together * len(STREAM.split(","))))
        with engine(compiled.model, dtype="bfloat16", enforce_eager=False, **args) as llm:
            generate(llm, run, ASKS)
            places = [p for p in tap_op._PLACES.values() if not any(p is b for b in before)]
            run.facts["first layers"] = sorted({p.layer for p in places if p.taps})
            run.facts["pieces"] = compilation_counter.num_piecewise_graphs_seen - pieces
            config = llm.llm_engine.vllm_config
            run.facts |= {"how": compilation_of(config), "hashed": config.additional_config["dmi_connector"]}
    return run


@pytest.fixture(scope="module")
def captured(
    compiled: Compiled, plain: Run, probes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    """{selection: its run}. Only the first start whose bits differ is repeated."""
    runs, doubted = {}, False
    for name in OWNERS:
        run = start_captured(compiled, name, probes, tmp_path_factory.mktemp("captured-compiled"))
        if probabilities(run) != probabilities(plain) and not doubted:
            doubted = True
            STARTS["odd"] += 1
            where = f"start {STARTS['all']}, {STARTS['odd']} odd so far: {name} of {compiled.model.name}"
            bits = f"log-probabilities {probabilities(run)}, plain vLLM {probabilities(plain)}"
            warnings.warn(f"{where} is repeated: {bits}", stacklevel=1)
            facts = run.facts
            run = start_captured(compiled, name, probes, tmp_path_factory.mktemp("captured-compiled"))
            run.facts["pieces"] = facts["pieces"]  # the repeated start loads graphs from a cache
            if probabilities(run) != probabilities(plain):
                plain.replies = start_plain(compiled, tmp_path_factory.mktemp("plain-compiled")).replies
        runs[name] = run
    return runs


def test_vllm_compiles_whole_or_piecewise_as_configured(compiled: Compiled, captured: dict[str, Run]) -> None:
    pieces = [captured[name].facts["pieces"] for name in OWNERS]
    assert pieces == ([2 * compiled.layers + 1] * 2 if compiled.how is in_pieces else [0, 0])
    for run in (captured[name] for name in OWNERS):
        how = run.facts["how"]
        wanted = (False, compiled.how is in_pieces, True, False)
        assert how == wanted, "norms are Inductor's, and the stream lasts in pieces"
        assert str(how) in run.facts["hashed"]


def test_layers_of_the_stream_share_an_op(compiled: Compiled, captured: dict[str, Run]) -> None:
    """Ops write 8 or 12 values at a time, from the first of two or three layers on."""
    assert captured[ALL_HOOKS].facts["first layers"] == list(range(compiled.layers))
    first = list(range(0, compiled.layers, compiled.together))
    assert captured[STREAM].facts["first layers"] == first, "twos or threes, and what is left"


@pytest.mark.parametrize("selection", [ALL_HOOKS, STREAM], ids=["everything", "stream"])
@pytest.mark.parametrize("name", ASKS)
def test_tokens_and_probabilities_equal_those_without_capture(
    plain: Run, captured: dict[str, Run], name: str, selection: str
) -> None:
    run = captured[selection]
    assert run.tokens(name) == plain.tokens(name)
    mine, theirs = (r.replies[name].outputs[0].cumulative_logprob for r in (run, plain))
    assert mine is not None and mine == theirs, f"{name}: cumulative log-probability {mine}, plain vLLM {theirs}"


@pytest.mark.parametrize("name", ASKS)
def test_every_operation_is_within_two_ulp_of_transformers(
    compiled: Compiled, captured: dict[str, Run], name: str
) -> None:
    oracle = Oracle(compiled.model, dtype=torch.bfloat16)
    if oracle.config.model_type != "qwen3":
        pytest.skip("the operations are those of Qwen3")
    with torch.no_grad():
        found = list(operations(stored(captured[ALL_HOOKS], name), oracle))
    errors = {place: ulps(got.float().numpy(), want.float().numpy()) for place, got, want in found}
    assert len(errors) == 13 * compiled.layers + 2
    assert {place: error for place, error in errors.items() if not error <= 2} == {}


@pytest.mark.parametrize("name", ASKS)
def test_scores_of_bfloat16_rows_are_products_in_float32(
    captured: dict[str, Run], probes: dict[str, Path], name: str
) -> None:
    capture = stored(captured[ALL_HOOKS], name)
    for probe, (hook, layer) in PROBED.items():
        want = scores(probes[probe], capture.numpy(hook, layer), layer)
        np.testing.assert_allclose(capture.numpy(f"probe.{probe}"), want, rtol=0, atol=1e-5)


def stored(run: Run, name: str) -> Capture:
    return open_capture(run.replies[name].kv_transfer_params["dmi_store"])


@pytest.mark.parametrize("name", ASKS)
def test_layers_that_share_an_op_have_the_rows_of_layers_that_do_not(
    compiled: Compiled, captured: dict[str, Run], name: str
) -> None:
    apart, together = (stored(captured[run], name) for run in (ALL_HOOKS, STREAM))
    for hook in STREAM.split(","):
        for layer in range(compiled.layers):
            one, other = (capture.numpy(hook, layer=layer) for capture in (apart, together))
            assert one.any(axis=1).all(), f"{hook} of layer {layer} has rows of zeros"
            assert np.array_equal(one, other), f"{hook} of layer {layer}: {np.abs(one - other).max():.3g} apart"
