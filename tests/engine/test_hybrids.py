# SPDX-License-Identifier: Apache-2.0
"""Hybrid models with owner pool: every hook, captured by an engine and compared with transformers.

Some layers of these models have a mixer instead of attention. vLLM caches the states of mixers, and a prefix hit must
end at a cached state. Gated delta nets run in float32 on a stand-in (delta_cpu.py), and in bfloat16 on vLLM's own CPU
kernels, which support no other dtype.

`make test` starts one engine for each kind of mixer. `make models` starts all, and writes the table of docs/MODELS.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmi_connector import capture_args, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle, largest
from dmi_connector.cli.tiny_hybrids import ON_CPU
from dmi_connector.cli.tiny_models import make_model
from tests.engine import delta_cpu, latent_cpu, renamed
from tests.engine.check import cosines, relative_errors
from tests.engine.harness import ALL_HOOKS, SMALL, Ask, Run, engine, generate, prompt, watch_scheduler
from tests.engine.test_models import MOST, RESULT, without_tower
from tests.engine.wrapped import ALL as RENAMED
from tests.runner import GPU

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5-text": ("qwen3_5_text", {}),
    "qwen3_5_moe-text": ("qwen3_5_moe_text", {}),
    "qwen3_5-bf16": ("qwen3_5_text", ON_CPU),
    "nemotron_h": ("nemotron_h", {}),
    "granitemoehybrid": ("granitemoehybrid", {}),
    "granitemoehybrid-dense": ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "nope"}),
    "lfm2": ("lfm2", {}),
    "lfm2_moe": ("lfm2_moe", {}),
    "lfm2_vl": ("lfm2", {}),
    "minicpmv4_6": ("qwen3_5_text", {}),
    "interns2_preview": ("qwen3_5_moe_text", {}),
    "nemotron_vl": ("nemotron_h", {}),
    "nemotron_omni": ("nemotron_h", {}),
}
"""{name: (model type, fields of its config)}."""
DELTA = ("qwen3_next", "qwen3_5-text", "qwen3_5_moe-text", "minicpmv4_6", "interns2_preview")
"""Models with gated delta nets, which run on the stand-in."""
TEXT_ONLY = ("lfm2_vl", "minicpmv4_6", "interns2_preview", "nemotron_vl", "nemotron_omni")
"""Models with a vision tower that run without it."""
_EVERY = (0, 1, 2, 3)
USUAL: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("q", "k_rot", "z"), (1,)),
    **dict.fromkeys(("mix_proj", "mix_core", "mix_z"), (0, 2, 3)),
    **dict.fromkeys(("resid_pre", "ln1", "attn_out", "resid_mid", "ln2", "mlp_out"), _EVERY),
}
"""{hook: its layers} for four layers. The second has attention."""
_PATTERNS = ("nemotron_h", "nemotron_vl", "nemotron_omni")
_NEMOTRON: dict[str, tuple[int, ...]] = {
    "q": (2,),
    "k_rot": (),
    "z": (2,),
    **dict.fromkeys(("mix_proj", "mix_core", "mix_z"), (0, 4)),
    **dict.fromkeys(("resid_pre", "ln1"), (0, 1, 2, 3, 4)),
    **dict.fromkeys(("resid_mid", "ln2"), ()),
    "attn_out": (0, 2, 4),
    "mlp_out": (1, 3),
    "mlp_post": (1, 3),
}
LAYERS: dict[str, dict[str, tuple[int, ...]]] = {
    **dict.fromkeys(_PATTERNS, _NEMOTRON),
    "granitemoehybrid-dense": {"k_rot": (), "mlp_post": _EVERY},
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm2_vl"), dict.fromkeys(("mix_proj", "mix_core", "mix_z"), ())),
}
"""{model: {hook: its layers}} for models that differ from USUAL."""
_ALL = [(name, mode, "pool") for name in MODELS for mode in ("eager", "compiled")]
SHORT = [(name, "eager", "pool") for name in ("qwen3_next", "nemotron_h", "granitemoehybrid", "lfm2")]
CONFIGURATIONS: list[Any] = [
    *SHORT,
    *(pytest.param(one, marks=pytest.mark.soak) for one in _ALL if one not in SHORT),
]
UNCAPTURED: dict[str, Any] = {"include_output_tokens": True, "dmi": {"enabled": False}}
BLOCKS = dict.fromkeys(_PATTERNS, 13)
"""Number of cache blocks, too few for all of CROWD at once, with its blocks and states. Other models have four groups
of layers, and get 17 blocks.
"""
CROWD = {f"crowd{n}": Ask(prompt(n, 1), sampling={"max_tokens": 80}) for n in (90, 100, 110, 200)}
ROUNDING = 3
"""Maximum error of a bfloat16 engine from float32, relative to that of transformers in bfloat16."""
LEAST_COSINE = 0.98
"""Minimum cosine of a row with the float32 row of transformers on a GPU. `benchmarks.checks.check_gpu` found 0.9979 for
a small Qwen3.5 (docs/MODELS.md).
"""


def rounds(name: str) -> bool:
    """Whether the model runs in bfloat16. On a GPU, the kernels of gated delta nets do not support float32."""
    return name.endswith("-bf16") or (GPU and name in DELTA)


def make(name: str, path: Path) -> Path:
    arch, fields = MODELS[name]
    fields = {**fields, **ON_CPU} if GPU and name in DELTA else fields
    make_model(arch, path, "bfloat16" if rounds(name) else "float32", **fields)
    if name in RENAMED:
        RENAMED[name].write(path)
    return path


def requests(llm: Any, run: Run) -> None:
    """Run requests alone, batched with an uncaptured one, with a common prefix, and more than fit in the cache."""
    generate(llm, run, {f"len{n}": Ask(prompt(n)) for n in (5, 33, 300)})
    generate(llm, run, {"beside": Ask(prompt(200, 2)), "uncaptured": Ask(prompt(290, 3), UNCAPTURED)})
    generate(llm, run, {"hit": Ask(prompt(290, 3)[:280] + prompt(9, 4))})
    generate(llm, run, {"uncaptured hit": Ask(prompt(290, 3)[:280] + prompt(9, 5), UNCAPTURED)})
    generate(llm, run, CROWD)


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids="-".join)
def configuration(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    return request.param


@pytest.fixture(scope="module")
def model(configuration: tuple[str, str, str], known_models: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(configuration[0], tmp_path_factory.mktemp(configuration[0]))


@pytest.fixture(scope="module")
def twin(configuration: tuple[str, str, str], model: Path) -> Oracle:
    """The oracle in float32, also of weights in bfloat16."""
    several_axes = configuration[0] in TEXT_ONLY and configuration[0] in DELTA
    return (_InWrapper if several_axes else Oracle)(renamed.twin(model), torch.float32)


@pytest.fixture(scope="module")
def run(configuration: tuple[str, str, str], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    name, mode, owner = configuration
    run = Run(tmp_path_factory.mktemp("-".join(configuration)))
    args: dict[str, Any] = capture_args(ALL_HOOKS, run.store_dir, owner, pool_bytes=48 << 20, **SMALL)
    args |= {"dtype": "bfloat16"} if rounds(name) else {"num_gpu_blocks_override": BLOCKS.get(name, 17)}
    # vLLM 0.32's CPU rotary kernel is wrong for LFM2 too, see latent_cpu.py
    args |= latent_cpu.ROTARY if name.startswith("lfm2") and mode == "eager" else {}
    args |= {"gdn_prefill_backend": "triton"} if GPU and rounds(name) else {}
    args |= {"max_num_seqs": 8} if GPU else {}  # a CUDA graph needs a state for each request
    with pytest.MonkeyPatch.context() as patch:
        if name in DELTA:
            delta_cpu.stand_in(patch)
        args |= without_tower(patch) if name in TEXT_ONLY else {}
        with engine(model, enforce_eager=mode == "eager", **args) as llm:
            watch_scheduler(llm, run)
            scheduler = llm.llm_engine.engine_core.engine_core.scheduler
            run.facts["groups"] = [type(g.kv_cache_spec).__name__ for g in scheduler.kv_cache_config.kv_cache_groups]
            run.facts["group"] = run.facts["groups"][scheduler.connector.tracker.slots.group]
            run.block_size = llm.llm_engine.vllm_config.cache_config.block_size
            requests(llm, run)
    return run


class _InWrapper(Oracle):
    """The oracle of a language model inside a multimodal model, which has positions on several axes. For text, all axes
    are equal.
    """

    def run(
        self, token_ids: Sequence[int], images: Mapping[str, Any] | None = None, image_blocks: bool = False
    ) -> dict[str, np.ndarray]:
        found = super().run(token_ids, images, image_blocks)
        axes = len(self.config.rope_parameters["mrope_section"])
        return {**found, "mrope_positions": np.tile(found["positions"][None, :, None], (1, 1, axes))}


def captured(run: Run) -> list[str]:
    return [name for name in run.replies if "uncaptured" not in name]


def noted(configuration: tuple[str, str, str], twin: Oracle, errors: Mapping[str, float]) -> None:
    """Append the largest errors to the file RESULT."""
    if RESULT:
        name, mode, owner = configuration
        architecture = RENAMED[name].architecture if name in RENAMED else twin.architecture
        facts = {"model": name, "mode": mode, "owner": owner, "architecture": architecture}
        with open(RESULT, "a") as file:
            file.write(json.dumps({**facts, "errors": errors}) + "\n")


def test_every_hook_is_that_of_transformers(
    configuration: tuple[str, str, str], model: Path, run: Run, twin: Oracle
) -> None:
    assert "MambaSpec" in run.facts["groups"] and run.facts["group"] == "FullAttentionSpec"
    lengths = {name: len(run.replies[name].prompt_token_ids) for name in captured(run)}
    if GPU and rounds(configuration[0]) and "topk_ids" in open_capture(run.store("len5")):
        pytest.skip("rounding changes experts: benchmarks.checks.check_gpu allows for that")
    if rounds(configuration[0]):
        check_rounded(run, lengths, twin, Oracle(model, torch.bfloat16))
        return
    assert run.preempted, "no request was preempted"
    worst = largest(
        relative_errors(run.store(name), twin, run.tokens(name), length) for name, length in lengths.items()
    )
    noted(configuration, twin, worst)
    assert {hook: error for hook, error in worst.items() if not error <= MOST} == {}


def check_rounded(run: Run, lengths: Mapping[str, int], exact: Oracle, half: Oracle) -> None:
    """Check that errors from float32 are about as large as those of transformers in bfloat16."""
    for name, length in lengths.items():
        tokens = run.tokens(name)
        want, usual = exact.run(tokens), half.run(tokens)
        hooks = [hook for hook in want if hook not in ("token_ids", "positions")]
        capture = open_capture(run.store(name), timeout=300)
        assert set(capture.attrs["hooks"]) == set(hooks)
        if "mrope_positions" in hooks:
            hooks.remove("mrope_positions")
            positions = want["mrope_positions"][0, : len(tokens) - 1]
            assert np.array_equal(capture.numpy("mrope_positions").reshape(positions.shape), positions), name
        for hook, cosine in cosines(run.store(name), exact, tokens, length, hooks).items():
            norms = np.linalg.norm(usual[hook], axis=-1) * np.linalg.norm(want[hook], axis=-1)
            theirs = float(((usual[hook] * want[hook]).sum(-1) / norms).min())
            least = LEAST_COSINE if GPU else 1 - ROUNDING * (1 - theirs) - 1e-5
            assert cosine >= least, (name, hook, cosine, theirs)


def test_hooks_are_those_of_the_layers_that_have_them(configuration: tuple[str, str, str], run: Run) -> None:
    capture = open_capture(run.store("len33"))
    expected = {**USUAL, **LAYERS.get(configuration[0], {})}
    assert {hook: tuple(capture.layers.get(hook, ())) for hook in expected} == expected


def test_captured_requests_compute_cached_tokens_again_and_others_reuse_them(run: Run) -> None:
    """A prefix hit ends at a cached state, which is at the end of a block."""
    if run.block_size > 280:
        assert run.replies["uncaptured hit"].num_cached_tokens == 0
        return
    assert run.replies["uncaptured hit"].num_cached_tokens == 256, "no prefix-cache hit"
    assert run.replies["hit"].num_cached_tokens == 0
    assert open_capture(run.store("hit")).attrs["recomputed_tokens"] == 256


@pytest.mark.soak
@pytest.mark.parametrize("name", ["nemotron_h", "lfm2", "qwen3_5-text"])
def test_prefix_hits_inside_a_block(name: str, known_models: None, tmp_path: Path) -> None:
    """With `prefix_match_unit`, a hit may end inside a block. The tokens of a hit are computed again for their rows."""
    run, model = Run(tmp_path / "stores"), make(name, tmp_path / "model")
    args: dict[str, Any] = capture_args(ALL_HOOKS, run.store_dir, "pool", pool_bytes=48 << 20, **SMALL)
    args |= latent_cpu.ROTARY if name.startswith("lfm2") else {}
    args |= {"gdn_prefill_backend": "triton", "dtype": "bfloat16"} if GPU and rounds(name) else {}
    ask = Ask(prompt(290, 3)[:280] + prompt(9, 4))
    with pytest.MonkeyPatch.context() as patch:
        if name in DELTA:
            delta_cpu.stand_in(patch)
        with engine(model, enforce_eager=True, prefix_match_unit=32, **args) as llm:
            generate(llm, run, {"first": ask})
            generate(llm, run, {"hit": ask})
    assert open_capture(run.store("hit")).attrs["recomputed_tokens"] == 288
    twin = Oracle(model, torch.float32)
    if rounds(name):
        check_rounded(run, {"hit": len(ask.prompt)}, twin, Oracle(model, torch.bfloat16))
        return
    worst = relative_errors(run.store("hit"), twin, run.tokens("hit"), len(ask.prompt))
    assert {hook: error for hook, error in worst.items() if not error <= MOST} == {}
