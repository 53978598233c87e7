# SPDX-License-Identifier: Apache-2.0
"""Running a real engine once and keeping what it answered: every fixture ends its engine before tests look.

So at most one engine lives at a time, in whatever order tests run.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dmi_connector.hooks import HOOKS, USUAL
from tests import runner
from tests.waits import sleep_while_waiting

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

ALL_HOOKS = "vllm-full,attention,mlp_pre*,indexer*"
"""Every hook a model has: presets and wildcards leave out what it lacks."""

USUAL_HOOKS = {name for name, hook in HOOKS.items() if hook.only in (None, "dense", *USUAL)}
"""The hooks of a model like Llama."""

CHUNK, SEGMENT, BLOCK = 32, 64, 128
"""Rows of a chunk and of a shard in these tests, and the block size vLLM chooses on the CPU."""

SMALL: dict[str, Any] = {"chunk_tokens": CHUNK, "segment_tokens": SEGMENT, "check": "poison"}
"""Options of captures: many chunks and shards, and values that no tap wrote are found."""

ENGINE = {"max_model_len": 512, "max_num_batched_tokens": 128, "max_num_seqs": 16, "dtype": "float32"}
"""Small enough that a prompt of 300 tokens is prefilled in several steps, beside others."""

CACHE_BYTES = 256 << 20
"""Of the KV cache, with the draft's rows in it: room for `max_num_seqs` whole requests. vLLM fills it with zeros."""

END_SECONDS = 120
"""vLLM kills an engine that takes longer to end. By itself it waits 5 seconds: too few for stores on a busy machine."""

_FREEZE = gc.freeze


@dataclass(frozen=True)
class Ask:
    """One request: token ids, `kv_transfer_params`, SamplingParams fields, vLLM's LoRARequest, and PIL images.

    A prompt with images has one placeholder for each.
    """

    prompt: Sequence[int]
    kv: dict[str, Any] | None = field(default_factory=lambda: {"include_output_tokens": True})
    sampling: dict[str, Any] = field(default_factory=dict)
    lora: Any = None
    images: Sequence[Any] = ()


@dataclass
class Run:
    """What an engine did. steps: for each step {request id: tokens scheduled}; preempted: ids (in-process only)."""

    store_dir: Path
    replies: dict[str, RequestOutput] = field(default_factory=dict)
    steps: list[dict[str, int]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
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


_compiled = False
"""Whether an engine in this process has compiled its model."""


@contextmanager
def engine(
    model: Path, in_process: bool = True, fork: bool = False, end_seconds: int = END_SECONDS, **kwargs: Any
) -> Iterator[LLM]:
    """A vLLM engine that is gone when the block ends.

    in_process: run scheduler and worker in this process, which saves the start of two and lets tests watch them and
    take single steps; False is vLLM's default. fork: processes of the engine are forked, as vLLM does on a GPU, not
    spawned, as on a CPU: each that is spawned imports vLLM for twelve seconds. Not in a process that has compiled a
    model: its threads hold locks, for which a forked worker has waited for ever. end_seconds: after them vLLM kills
    workers that have not ended.
    """
    global _compiled
    from vllm import LLM
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    _find_kernels_once()
    with _classes_as_before(), _garbage_of_the_engine_alone():
        try:
            with pytest.MonkeyPatch.context() as patch:
                if fork and not in_process and not _compiled and not runner.GPU:
                    forked = multiprocessing.get_context("fork")
                    patch.setattr(multiprocessing, "get_context", lambda _method=None: forked)
                    sleep_while_waiting(patch)
                _compiled |= in_process and not kwargs.get("enforce_eager")
                patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if in_process else "1")
                patch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(end_seconds))
                patch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # in whole GiB, and it wins over the argument
                llm = LLM(str(model), **{**ENGINE, "kv_cache_memory_bytes": CACHE_BYTES, **kwargs, **runner.ENGINE})
        except BaseException:
            if in_process:
                _forget_engine()
            raise
        try:
            yield llm
            if in_process:
                for _ in range(3):  # an engine in its own process takes these steps by itself
                    llm.llm_engine.step()
        finally:
            llm.llm_engine.engine_core.shutdown(**({} if in_process else {"timeout": end_seconds}))
            unregister_vllm_metrics()  # which the next engine with metrics in this process registers again
            del llm
            gc.collect()


@functools.cache
def _find_kernels_once() -> None:
    """On a CPU vLLM looks through all modules for Triton's kernels at each start, and puts its own in their place.

    Once in a process is enough: modules that are imported later find those.
    """
    from vllm.platforms.cpu import CpuPlatform

    if register := getattr(CpuPlatform, "register_triton_kernel_overrides", None):  # of vLLM 0.32
        CpuPlatform.register_triton_kernel_overrides = staticmethod(functools.cache(register))


@contextmanager
def _garbage_of_the_engine_alone() -> Iterator[None]:
    """Garbage is looked for among the objects of the engine, not among a million older ones, most of them of modules.

    vLLM collects garbage eight times for each engine. It also freezes what there is when it has started, and unfreezes
    that at the end, to collect the engine. Here only what is older than the engine is frozen, and stays so.
    """
    if gc.freeze is not _FREEZE:  # there is another engine
        yield
        return
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        yield


@contextmanager
def _classes_as_before() -> Iterator[None]:
    """vLLM's Transformers backend changes classes of transformers to compile them. The oracle needs them plain."""
    from vllm.model_executor.models.transformers.base import Base

    names = ("__init__", "__call__", "save_aot_compiled_function")
    before: dict[type, tuple[tuple[type, ...], dict[str, Any]]] = {}
    decorate = Base._decorate_cls_for_torch_compile

    def recorded(self: Any, cls: type, *args: Any, **kwargs: Any) -> None:
        before.setdefault(cls, (cls.__bases__, {name: vars(cls)[name] for name in names if name in vars(cls)}))
        decorate(self, cls, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Base, "_decorate_cls_for_torch_compile", recorded)
        try:
            yield
        finally:
            for cls, (bases, own) in before.items():
                cls.__bases__ = bases
                for name in names:
                    if name in own:
                        setattr(cls, name, own[name])
                    elif name in vars(cls):
                        delattr(cls, name)


def _forget_engine() -> None:
    """Remove what an engine that did not start leaves in this process."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def sampling_params(ask: Ask) -> SamplingParams:
    """Greedy and 12 tokens unless `ask` says otherwise."""
    from vllm import SamplingParams

    fields = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "extra_args": {}, **ask.sampling}
    if ask.kv is not None:
        fields["extra_args"] = {**fields["extra_args"], "kv_transfer_params": ask.kv}
    return SamplingParams(**fields)


def generate(llm: LLM, run: Run, asks: dict[str, Ask]) -> None:
    """Answer all of `asks` at once into run.replies."""
    prompts: list[dict[str, Any]] = [{"prompt_token_ids": list(ask.prompt)} for ask in asks.values()]
    for given, ask in zip(prompts, asks.values(), strict=True):
        if ask.images:
            given["multi_modal_data"] = {"image": list(ask.images)}
    adapters = [ask.lora for ask in asks.values()]
    wanted = {"lora_request": adapters} if any(adapters) else {}
    replies = llm.generate(prompts, [sampling_params(ask) for ask in asks.values()], use_tqdm=False, **wanted)
    run.replies.update(zip(asks, replies, strict=True))


def submit(llm: LLM, asks: dict[str, Ask]) -> None:
    """Hand `asks` to an in-process engine without taking a step."""
    for name, ask in asks.items():
        llm.llm_engine.add_request(name, {"prompt_token_ids": list(ask.prompt)}, sampling_params(ask))


def step(llm: LLM, run: Run) -> None:
    """One step of an in-process engine. run.replies holds what each submitted request has got so far."""
    run.replies.update({reply.request_id: reply for reply in llm.llm_engine.step()})


def finish(*engines: tuple[LLM, Run]) -> None:
    """Steps of each engine in turn until none has a request left."""
    while busy := [pair for pair in engines if pair[0].llm_engine.has_unfinished_requests()]:
        for llm, run in busy:
            step(llm, run)


def watch_scheduler(llm: LLM, run: Run) -> None:
    """Record what every step of an in-process engine schedules."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def recorded(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        run.steps.append(dict(output.num_scheduled_tokens))
        run.preempted += output.preempted_req_ids or ()
        run.drafts += sum(len(tokens) for tokens in output.scheduled_spec_decode_tokens.values())
        return output

    scheduler.schedule = recorded
