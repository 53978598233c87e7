# SPDX-License-Identifier: Apache-2.0
"""Runs an engine, and keeps its responses. Every fixture stops its engine before the tests of it run.

So only one engine runs at a time, in whatever order tests run.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dmi_connector.hooks import HOOKS, USUAL
from tests import forks, runner
from tests.waits import sleep_while_waiting

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

ALL_HOOKS = "vllm-full,attention,mlp_pre*,indexer*"
"""Every hook that a model has, except `pattern`. Presets and wildcards leave out hooks that the model lacks."""

USUAL_HOOKS = {name for name, hook in HOOKS.items() if hook.only in (None, "dense", *USUAL)}
"""The hooks of a model like Llama."""

CHUNK, SEGMENT, BLOCK = 32, 64, 128
"""Rows per chunk and per shard in these tests, and vLLM's default block size on a CPU."""

SMALL: dict[str, Any] = {
    "chunk_tokens": CHUNK,
    "segment_tokens": SEGMENT,
    "check": "poison",
    "host_buffer_bytes": 32 << 20,
}
"""Options for captures with many chunks and shards. `poison` reveals values that no tap wrote. Writers map the whole
ring, so that of the default size would start more slowly.
"""
if runner.GPU:
    # The defaults suit an engine that has the machine for itself. Here, many test processes share it.
    SMALL |= {"host_buffer_bytes": 256 << 20, "writers": 2}

ENGINE = {"max_model_len": 512, "max_num_batched_tokens": 128, "max_num_seqs": 16, "dtype": "float32"}
"""Engine arguments. A prompt of 300 tokens is prefilled in several steps, which it shares with other requests."""

CACHE_BYTES = 256 << 20
"""Bytes of the KV cache, including the rows of owner draft: room for `max_num_seqs` requests of maximum length. vLLM
fills it with zeros, so a larger one would start more slowly.
"""

END_SECONDS = 120
"""Seconds after which vLLM kills an engine that is shutting down. vLLM's default of 5 seconds is too short to finish
stores on a busy machine.
"""

_FREEZE = gc.freeze


@dataclass(frozen=True)
class Ask:
    """One request: prompt token ids, `kv_transfer_params`, fields of SamplingParams, a LoRARequest of vLLM, and PIL
    images.

    The prompt has one placeholder per image.
    """

    prompt: Sequence[int]
    kv: dict[str, Any] | None = field(default_factory=lambda: {"include_output_tokens": True})
    sampling: dict[str, Any] = field(default_factory=dict)
    lora: Any = None
    images: Sequence[Any] = ()


@dataclass
class Run:
    """The responses of an engine, and what it did.

    steps: {request id: scheduled tokens} of each step. preempted: request ids. Both are only recorded for in-process
    engines.
    """

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
        """Token ids of the prompt and of the generated tokens."""
        reply = self.replies[name]
        return [*reply.prompt_token_ids, *reply.outputs[child].token_ids]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids of the tiny vocabulary without special tokens, different for each length and seed."""
    return np.random.default_rng([length, seed]).integers(5, 512, length).tolist()


_compiled = False
"""Whether an engine in this process has compiled its model."""


@contextmanager
def engine(
    model: Path, in_process: bool = True, fork: bool = False, end_seconds: int = END_SECONDS, **kwargs: Any
) -> Iterator[LLM]:
    """Run a vLLM engine during the `with` block.

    in_process: run the scheduler and the worker in this process. That saves the start of two processes, and tests can
    watch them and run single steps. vLLM's default is False. The coordinator and the writers are then forked from a
    process that has imported their code (tests/forks.py). Otherwise the engine starts them as it does for a user.

    fork: fork the processes of the engine, as vLLM does on a GPU, instead of spawning them, as it does on a CPU. A
    spawned process takes twelve seconds to import vLLM. In a process that has compiled a model, processes are spawned
    anyway, because its threads may hold locks, and forked workers then hang.

    end_seconds: seconds after which vLLM kills workers that are shutting down.
    """
    global _compiled
    from vllm import LLM
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    _find_kernels_once()
    with _classes_as_before(), _garbage_of_the_engine_alone(), forks.forked() if in_process else nullcontext():
        try:
            with pytest.MonkeyPatch.context() as patch:
                if fork and not in_process and not _compiled and not runner.GPU:
                    forked = multiprocessing.get_context("fork")
                    patch.setattr(multiprocessing, "get_context", lambda _method=None: forked)
                    sleep_while_waiting(patch)
                _compiled |= in_process and not kwargs.get("enforce_eager")
                patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if in_process else "1")
                patch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(end_seconds))
                patch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # it is in whole GiB, and overrides the argument
                if in_process:  # objects made at the start live as long as the engine
                    patch.setattr(gc, "collect", lambda *_: 0)
                    gc.disable()
                llm = LLM(str(model), **{**ENGINE, "kv_cache_memory_bytes": CACHE_BYTES, **kwargs, **runner.ENGINE})
        except BaseException:
            if in_process:
                _forget_engine()
            raise
        finally:
            gc.enable()
        try:
            yield llm
            if in_process:
                for _ in range(3):  # an engine in its own process runs these steps by itself
                    llm.llm_engine.step()
        finally:
            llm.llm_engine.engine_core.shutdown(**({} if in_process else {"timeout": end_seconds}))
            unregister_vllm_metrics()  # the next engine with metrics in this process registers them again
            del llm
            gc.collect()


@functools.cache
def _find_kernels_once() -> None:
    """Let vLLM register its CPU replacements of Triton kernels only once per process.

    vLLM does so at each start, and searches all modules for uses of the kernels. Modules that are imported later find
    the replacements.
    """
    from vllm.platforms.cpu import CpuPlatform

    if register := getattr(CpuPlatform, "register_triton_kernel_overrides", None):  # vLLM 0.32 and later
        CpuPlatform.register_triton_kernel_overrides = staticmethod(functools.cache(register))


@contextmanager
def _garbage_of_the_engine_alone() -> Iterator[None]:
    """Collect garbage only among objects that are newer than the engine. About a million older objects are mostly
    modules.

    vLLM collects garbage eight times per engine. It also freezes all objects after its start, and unfreezes them at the
    end to collect the engine. Here, objects older than the engine are frozen and stay frozen, and vLLM freezes none.
    """
    if gc.freeze is not _FREEZE:  # another engine is running
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
    """Restore the classes of transformers at the end. vLLM's Transformers backend changes them to compile models, and
    the oracle needs the original classes.
    """
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
    """Clean up after an engine that failed to start in this process."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def sampling_params(ask: Ask) -> SamplingParams:
    """The sampling parameters of `ask`. Defaults: greedy, 12 tokens."""
    from vllm import SamplingParams

    fields = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "extra_args": {}, **ask.sampling}
    if ask.kv is not None:
        fields["extra_args"] = {**fields["extra_args"], "kv_transfer_params": ask.kv}
    return SamplingParams(**fields)


def generate(llm: LLM, run: Run, asks: dict[str, Ask]) -> None:
    """Run all of `asks` at once, and put their responses into run.replies."""
    prompts: list[dict[str, Any]] = [{"prompt_token_ids": list(ask.prompt)} for ask in asks.values()]
    for given, ask in zip(prompts, asks.values(), strict=True):
        if ask.images:
            given["multi_modal_data"] = {"image": list(ask.images)}
    adapters = [ask.lora for ask in asks.values()]
    wanted = {"lora_request": adapters} if any(adapters) else {}
    replies = llm.generate(prompts, [sampling_params(ask) for ask in asks.values()], use_tqdm=False, **wanted)
    run.replies.update(zip(asks, replies, strict=True))


def submit(llm: LLM, asks: dict[str, Ask]) -> None:
    """Submit `asks` to an in-process engine without running a step."""
    for name, ask in asks.items():
        llm.llm_engine.add_request(name, {"prompt_token_ids": list(ask.prompt)}, sampling_params(ask))


def step(llm: LLM, run: Run) -> None:
    """Run one step of an in-process engine. run.replies then has the latest output of each submitted request."""
    run.replies.update({reply.request_id: reply for reply in llm.llm_engine.step()})


def finish(*engines: tuple[LLM, Run]) -> None:
    """Run steps of each engine in turn until all requests have ended."""
    while busy := [pair for pair in engines if pair[0].llm_engine.has_unfinished_requests()]:
        for llm, run in busy:
            step(llm, run)


def watch_scheduler(llm: LLM, run: Run) -> None:
    """Record the scheduled tokens of every step of an in-process engine."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def recorded(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        run.steps.append(dict(output.num_scheduled_tokens))
        run.preempted += output.preempted_req_ids or ()
        run.drafts += sum(len(tokens) for tokens in output.scheduled_spec_decode_tokens.values())
        return output

    scheduler.schedule = recorded
