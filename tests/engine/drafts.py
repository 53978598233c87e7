# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding for tests: the configuration of each method, and draft models with random weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.drafts import NGRAM, SYNTHETIC, K, Weights, make_eagle3, read_config
from tests import runner
from tests.engine.harness import engine

if TYPE_CHECKING:
    import torch
    from vllm import LLM

RANDOM = ("eagle", "eagle3", "mtp", "dflash")
"""Methods with random drafts, which the target almost never agrees with."""


@dataclass(frozen=True)
class Pair:
    """A target model and its draft. model: directory. arch: architecture. config: the `speculative_config`."""

    arch: str
    model: Path
    config: dict[str, Any]

    @property
    def synthetic(self) -> bool:
        """Whether vLLM accepts drafts at random, even if the target would not have sampled them."""
        return "rejection_sample_method" in self.config


def make_eagle(target: Path, path: Path) -> Path:
    """Write an EAGLE head for a tiny Llama. Returns its directory."""
    config, weights = read_config(target), Weights()
    hidden = config["hidden_size"]
    weights.layer("layers.0.", config, hidden)
    weights.matrix("fc", hidden, 2 * hidden)
    return weights.save(path, {**config, "num_hidden_layers": 1})


def make_dflash(target: Path, path: Path) -> Path:
    """Write a DFlash draft model for a tiny Qwen3. It drafts all tokens in one forward. Returns its directory."""
    config, weights = read_config(target), Weights()
    hidden, read = config["hidden_size"], [0, 2]
    weights.layer("layers.0.", config, hidden)
    weights.norms(config["head_dim"], "layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm")
    weights.norms(hidden, "layers.0.input_layernorm", "hidden_norm", "norm")
    weights.matrix("fc", hidden, len(read) * hidden)
    own = {"architectures": ["DFlashDraftModel"], "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    return weights.save(path, {**config, **own, "dflash_config": {"mask_token_id": 4, "target_layer_ids": read}})


def make_mtp(target: Path, path: Path) -> Path:
    """Write a tiny GLM-4-MoE with an additional MTP layer. Returns its directory."""
    import torch
    from safetensors.torch import load_file

    config, weights = read_config(target), Weights()
    weights.made = load_file(target / "model.safetensors")
    layer, last = (f"model.layers.{config['num_hidden_layers'] - back}" for back in (0, 1))
    inside = [name for name in weights.made if name.startswith(f"{last}.")]
    weights.made |= {layer + name.removeprefix(last): weights.made[name].clone() for name in inside}
    weights.made |= {f"{layer}.shared_head.{name}.weight": weights.made[of].clone() for name, of in SHARED.items()}
    weights.made[f"{layer}.embed_tokens.weight"] = weights.made["model.embed_tokens.weight"].clone()
    hidden = config["hidden_size"]
    weights.norms(hidden, f"{layer}.enorm", f"{layer}.hnorm")
    weights.made[f"{layer}.eh_proj.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1)
    shutil.copytree(target, path)  # includes the tokenizer
    return weights.save(path, config)


SHARED = {"norm": "model.norm.weight", "head": "lm_head.weight"}
"""Weights that an MTP layer shares with the target."""


def make_pair(method: str, tiny_model: Callable[..., Path], folder: Path) -> Pair:
    """Make a target model and a draft for a method. Draft models have random weights."""
    arch = {"mtp": "glm4_moe", "eagle": "llama", "eagle3": "llama"}.get(method, "qwen3")
    target = tiny_model(arch)
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": K}
    if method in ("ngram", "ngram_gpu"):
        config = {**NGRAM, "method": method}
    elif method == "suffix":  # the number of draft tokens varies, up to K
        pytest.importorskip("arctic_inference", reason="arctic-inference is not installed")
    elif method == "mtp":
        target = make_mtp(target, folder / method)
    elif method == "draft_model":  # the target itself, so all drafts are accepted
        config["model"] = str(target)
    else:
        make = {"eagle": make_eagle, "eagle3": make_eagle3, "dflash": make_dflash}[method]
        config["model"] = str(make(target, folder / method))
    if runner.V2 and method in RANDOM:
        config |= SYNTHETIC
    return Pair(arch, target, config)


@contextmanager
def drafting(pair: Pair, **args: Any) -> Iterator[LLM]:
    """`harness.engine` with a draft. vLLM's n-gram kernel for the V2 runner does not run in Triton's interpreter, so on
    a CPU `_propose` replaces it.
    """
    with pytest.MonkeyPatch.context() as patch:
        if runner.V2 and not runner.GPU:
            from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

            patch.setattr(NgramGPUSpeculator, "propose", _propose)
        with engine(pair.model, speculative_config=pair.config, **args) as llm:
            yield llm


def _propose(self: Any, input_batch: Any, *_args: Any, dummy_run: bool = False, **_more: Any) -> torch.Tensor:
    """Draft the tokens after the latest earlier occurrence of the longest suffix of each request. Missing tokens repeat
    the last one.
    """
    import torch

    for number, index in enumerate(() if dummy_run else input_batch.idx_mapping[: input_batch.num_reqs].tolist()):
        length = int(self.req_states.total_len.gpu[index])
        tokens, found = self.req_states.all_token_ids.gpu[index, :length].tolist(), []
        for size in range(self.max_n, self.min_n - 1, -1):
            ends = (at for at in range(length - 1, size - 1, -1) if tokens[at - size : at] == tokens[length - size :])
            found = found or next((tokens[at : at + self.num_speculative_steps] for at in ends), [])
        missing = self.num_speculative_steps - len(found)
        self.drafts[number] = torch.tensor([*found, *tokens[-1:] * missing])
    return self.drafts[: input_batch.num_reqs]
