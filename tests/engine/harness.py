# SPDX-License-Identifier: Apache-2.0
"""Running a real engine once and keeping what it answered: every fixture ends its engine before tests look.

So at most one engine lives at a time, in whatever order tests run.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

ALL_HOOKS = "vllm-full,attention"
"""Every hook a model has: both presets leave out what it lacks."""

CHUNK, SEGMENT, BLOCK = 32, 64, 128
"""Rows of a chunk and of a shard in these tests, and the block size vLLM chooses on the CPU."""

ENGINE = {"max_model_len": 512, "max_num_batched_tokens": 128, "max_num_seqs": 16, "dtype": "float32"}
"""Small enough that a prompt of 300 tokens is prefilled in several steps, beside others."""


@dataclass(frozen=True)
class Ask:
    """One request: token ids, `kv_transfer_params` and SamplingParams fields."""

    prompt: Sequence[int]
    kv: dict[str, Any] | None = field(default_factory=lambda: {"include_output_tokens": True})
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """What an engine did. steps: for each step {request id: tokens scheduled} (in-process engines only)."""

    store_dir: Path
    replies: dict[str, RequestOutput] = field(default_factory=dict)
    steps: list[dict[str, int]] = field(default_factory=list)
    drafts: int = 0
    block_size: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    def store(self, name: str) -> Path:
        params = self.replies[name].kv_transfer_params
        assert params is not None and params.get("dmi_store"), f"{name}: the response has no dmi_store: {params}"
        return Path(params["dmi_store"])

    def tokens(self, name: str, child: int = 0) -> list[int]:
        """Prompt and generated token ids."""
        reply = self.replies[name]
        return [*reply.prompt_token_ids, *reply.outputs[child].token_ids]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Ordinary (no special) token ids of the tiny vocabulary, different for every length and seed."""
    return np.random.default_rng([length, seed]).integers(5, 512, length).tolist()


@contextmanager
def engine(model: Path, in_process: bool = True, **kwargs: Any) -> Iterator[LLM]:
    """A vLLM engine that is gone when the block ends.

    in_process: run the scheduler in this process (the worker still has its own), which saves the start of one
    process and lets tests watch it; False is vLLM's default.
    """
    from vllm import LLM

    old = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    try:
        llm = LLM(str(model), **{**ENGINE, **kwargs})
    finally:
        if old is None:
            del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
        else:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = old
    try:
        yield llm
        if in_process:
            for _ in range(3):  # an engine in its own process takes these steps by itself
                llm.llm_engine.step()
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def generate(llm: LLM, run: Run, asks: dict[str, Ask]) -> None:
    """Answer all of `asks` at once into run.replies: greedy and 12 tokens unless they say otherwise."""
    from vllm import SamplingParams

    params = []
    for ask in asks.values():
        fields = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **ask.sampling}
        extra = None if ask.kv is None else {"kv_transfer_params": ask.kv}
        params.append(SamplingParams(**fields, extra_args=extra))
    prompts = [{"prompt_token_ids": list(ask.prompt)} for ask in asks.values()]
    replies = llm.generate(prompts, params, use_tqdm=False)
    run.replies.update(zip(asks, replies, strict=True))


def watch_scheduler(llm: LLM, run: Run) -> None:
    """Record what every step of an in-process engine schedules."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def recorded(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        run.steps.append(dict(output.num_scheduled_tokens))
        run.drafts += sum(len(tokens) for tokens in output.scheduled_spec_decode_tokens.values())
        return output

    scheduler.schedule = recorded
