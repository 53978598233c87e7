# SPDX-License-Identifier: Apache-2.0
"""Under torch.compile in bf16, capture changes no token and no bit of a probability.

Inductor keeps fused intermediates in float32. A tap that made it round one of them would change what follows. So the
log-probabilities of all generated tokens must equal plain vLLM's exactly: when every hook is captured, and when the
residual stream alone is, whose layers share an op. On a CPU vLLM compiles a model whole; on a GPU piecewise, between
attention layers. Both are tested.

On a GPU an op may read its values until the next op waits for its branch (taps/overlap.py). Each engine answers
twice, and writes as late the second time.

Plain vLLM itself had other last bits in 2 of some 130 starts on a CPU, with two threads. So the first capturing start
of a model that differs is repeated. If it differs again, plain vLLM is started once more, and counts instead. A warning
says which start was repeated, of how many.
"""

from __future__ import annotations

import ctypes
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch

from dmi_connector import Capture, capture_args, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.engine.contract import REUSE
from tests.engine.harness import ALL_HOOKS, Ask, Run, engine, generate, prompt
from tests.engine.test_bf16 import operations, ulps
from tests.probekit import save_probe, scores

STREAM = "resid_pre,resid_mid,q,k"
OWNERS = {ALL_HOOKS: "draft", STREAM: "target"}
SAMPLING = {"max_tokens": 32, "logprobs": 1}
STARTS: Counter[str] = Counter()
"""Compiled engines that this process has started: "all", and "odd" ones, whose bits differed from plain vLLM's."""
ASKS = {f"{n} tokens": Ask(prompt(n), sampling=SAMPLING) for n in (6, 33, 100, 150)} | {
    "seeded": Ask(prompt(9), sampling={**SAMPLING, "temperature": 0.8, "seed": 3})
}


class LateStream:
    """Stands for CUDA's streams: what is written on a branch is written when another stream waits for that."""

    chosen: ClassVar[list[LateStream]] = []  # by torch.cuda.stream
    written: ClassVar[Counter[str]] = Counter()  # how many by which op's waiting

    def __init__(self, *_args: Any) -> None:
        self.launched: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self.chosen.append(self)

    def __exit__(self, *_error: object) -> None:
        self.chosen.pop()

    def wait_stream(self, _other: LateStream) -> None:
        assert not self.launched, "the op before was not waited for"

    def record_event(self) -> list[Callable[[], None]]:
        return self.launched

    def wait_event(self, launched: list[Callable[[], None]]) -> None:
        op = sys._getframe(2).f_code.co_name
        while launched:
            launched.pop()()
            self.written[op] += 1


class LateWriter:
    """A RowWriter that holds no reference to its values on a branch, only where they were."""

    def __init__(self, *args: Any) -> None:
        from dmi_connector.engine.kernels.row_writer import RowWriter

        self._write = RowWriter(*args)

    def __call__(
        self, rows: torch.Tensor, slots: torch.Tensor, values: list[torch.Tensor], buffer: torch.Tensor | None = None
    ) -> None:
        if not LateStream.chosen:
            self._write(rows, slots, values, buffer)
            return
        where = [(v.data_ptr(), v.shape, v.stride(), v.dtype) for v in values]
        LateStream.chosen[-1].launched.append(lambda: self._write(rows, slots, [in_memory(*w) for w in where], buffer))


def in_memory(address: int, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What is in memory there now, as a tensor."""
    size = ((shape[0] - 1) * stride[0] + shape[1]) * dtype.itemsize
    content = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    return torch.from_numpy(content).view(dtype).as_strided(shape, stride)


def write_late(patch: pytest.MonkeyPatch) -> None:
    """Let taps with a LateWriter write as late as a GPU may."""
    from dmi_connector.engine.taps import op as tap_op
    from dmi_connector.engine.taps.overlap import Branch

    enter = torch.cuda.stream
    patch.setattr(torch.cuda, "Stream", LateStream)
    patch.setattr(torch.cuda, "current_stream", LateStream)
    patch.setattr(torch.cuda, "stream", lambda stream: stream if isinstance(stream, LateStream) else enter(stream))
    branch = Branch(torch.device("cpu"))
    patch.setattr(tap_op, "captured_branch", lambda _device: branch)


@contextmanager
def in_pieces() -> Iterator[None]:
    """vLLM compiles models as on a GPU, but for CUDA graphs and one pass, which knows only ops that a GPU has."""
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
    """A model of so many layers and how to compile it."""

    model: Path
    layers: int
    how: Callable[[], AbstractContextManager[None]]

    @property
    def together(self) -> int:
        """How many layers share an op when STREAM is captured: of a model of three layers two, so that one is left."""
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
    """Qwen3 norms q and k, Llama's are slices of one tensor; GPT-2's norms add nothing; experts work in place."""
    from dmi_connector.cli.tiny_models import make_model

    name, layers, how = request.param
    model = make_model(name, tmp_path_factory.mktemp("compiled"), "bfloat16", num_hidden_layers=layers)
    return Compiled(model, layers, how)


PROBED = {"risk": ("resid_pre", 1), "out": ("mlp_out", 0)}
"""Probes beside the selection of all hooks, which are computed from values that others read too."""


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


def start_captured(compiled: Compiled, selection: str, probes: dict[str, Path], directory: Path) -> tuple[Run, Run]:
    """What an engine answers, and what it answers again while it writes late. Facts: the layers from whose place in the
    rows on something was written, how often it was written late, how many graphs vLLM compiled, how, and what of this
    went into its compile hash.
    """
    from vllm.compilation.counter import compilation_counter

    from dmi_connector.engine.taps import batches
    from dmi_connector.engine.taps import op as tap_op
    from dmi_connector.engine.taps.compilation import compilation_of

    STARTS["all"] += 1
    run, late = Run(directory), Run(directory)
    before, pieces = list(tap_op._PLACES.values()), compilation_counter.num_piecewise_graphs_seen
    if selection == ALL_HOOKS:
        computed = {name: str(path) for name, path in probes.items()}
        args = capture_args(f"{selection},probe.*", run.store_dir, owner=OWNERS[selection], probes=computed)
    else:
        args = capture_args(selection, run.store_dir, owner=OWNERS[selection])
    with pytest.MonkeyPatch.context() as patch, compiled.how():
        LateStream.written.clear()
        patch.setattr(tap_op, "RowWriter", LateWriter)
        patch.setattr(batches, "MAX_VALUES", min(batches.MAX_VALUES, compiled.together * len(STREAM.split(","))))
        with engine(compiled.model, dtype="bfloat16", enforce_eager=False, **args) as llm:
            generate(llm, run, ASKS)
            places = [p for p in tap_op._PLACES.values() if not any(p is b for b in before)]
            run.facts |= {"first layers": sorted({p.layer for p in places if p.taps}), "late": dict(LateStream.written)}
            run.facts["pieces"] = compilation_counter.num_piecewise_graphs_seen - pieces
            config = llm.llm_engine.vllm_config
            run.facts |= {"how": compilation_of(config), "hashed": config.additional_config["dmi_connector"]}
            run.facts["options"] = config.compilation_config.inductor_compile_config
            llm.reset_prefix_cache()
            write_late(patch)
            generate(llm, late, ASKS)
            late.facts["late"] = dict(LateStream.written)
    return run, late


@pytest.fixture(scope="module")
def captured(
    compiled: Compiled, plain: Run, probes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    """Each selection, and with "late " before it each written late.

    Only the first start with other bits than plain vLLM's is doubted.
    """
    runs, doubted = {}, False
    for name in OWNERS:
        run, late = start_captured(compiled, name, probes, tmp_path_factory.mktemp("captured-compiled"))
        if probabilities(run) != probabilities(plain) and not doubted:
            doubted = True
            STARTS["odd"] += 1
            where = f"start {STARTS['all']}, {STARTS['odd']} odd so far: {name} of {compiled.model.name}"
            bits = f"log-probabilities {probabilities(run)}, plain vLLM {probabilities(plain)}"
            warnings.warn(f"{where} is repeated: {bits}", stacklevel=1)
            facts = run.facts
            run, late = start_captured(compiled, name, probes, tmp_path_factory.mktemp("captured-compiled"))
            run.facts["pieces"] = facts["pieces"]  # graphs now come from a cache
            if probabilities(run) != probabilities(plain):
                plain.replies = start_plain(compiled, tmp_path_factory.mktemp("plain-compiled")).replies
        runs |= {name: run, f"late {name}": late}
    return runs


def test_vllm_compiles_whole_or_piecewise_as_configured(compiled: Compiled, captured: dict[str, Run]) -> None:
    pieces = [captured[name].facts["pieces"] for name in OWNERS]
    assert pieces == ([2 * compiled.layers + 1] * 2 if compiled.how is in_pieces else [0, 0])
    for run in (captured[name] for name in OWNERS):
        how = run.facts["how"]
        wanted = (False, compiled.how is in_pieces, True, False)
        assert how == wanted, "norms are Inductor's, and the stream lasts in pieces"
        assert str(how) in run.facts["hashed"]
        assert [run.facts["options"][name] for name in REUSE] == [False] * 3


def test_layers_of_the_stream_share_an_op(compiled: Compiled, captured: dict[str, Run]) -> None:
    """8 or 12 values at a time: what is written counts from the first of two or three layers on."""
    assert captured[ALL_HOOKS].facts["first layers"] == list(range(compiled.layers))
    first = list(range(0, compiled.layers, compiled.together))
    assert captured[STREAM].facts["first layers"] == first, "twos or threes, and what is left"


@pytest.mark.parametrize("selection", [ALL_HOOKS, STREAM], ids=["everything", "stream"])
@pytest.mark.parametrize("name", ASKS)
def test_tokens_and_probabilities_equal_those_of_plain_vllm(
    plain: Run, captured: dict[str, Run], name: str, selection: str
) -> None:
    run = captured[selection]
    assert run.tokens(name) == plain.tokens(name)
    mine, theirs = (r.replies[name].outputs[0].cumulative_logprob for r in (run, plain))
    assert mine is not None and mine == theirs, f"{name}: cumulative log-probability {mine}, plain vLLM {theirs}"


@pytest.mark.parametrize("selection", [ALL_HOOKS, STREAM], ids=["everything", "stream"])
@pytest.mark.parametrize("name", ASKS)
def test_values_last_until_their_branch_is_joined(captured: dict[str, Run], name: str, selection: str) -> None:
    late, layers = captured[f"late {selection}"].facts["late"], len(captured[selection].facts["first layers"])
    before = 2 if selection == ALL_HOOKS else 1  # ops of the inputs; the last of a forward is waited for by its end
    after = 1 if selection == ALL_HOOKS else 0  # of the final norm
    assert captured[selection].facts["late"] == {} and late["_tap_end"] > 30
    joins = len(PROBED) if selection == ALL_HOOKS else 0  # before the attention behind a layer that reduces
    assert late["_tap"] == (before + layers + after - 1 - joins) * late["_tap_end"]
    assert late.get("_tap_join", 0) == joins * late["_tap_end"]
    one, other = (stored(captured[run], name) for run in (selection, f"late {selection}"))
    for hook in one.hooks:
        np.testing.assert_array_equal(other.numpy(hook), one.numpy(hook), err_msg=hook)


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
    for run in (ALL_HOOKS, f"late {ALL_HOOKS}"):
        capture = stored(captured[run], name)
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
