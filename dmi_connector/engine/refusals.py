# SPDX-License-Identifier: Apache-2.0
"""Configurations of an engine that capture refuses at start, each with its fix. docs/COMPATIBILITY.md lists them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from vllm import envs

from dmi_connector.args import CONNECTOR, EXTRACT_HIDDEN_STATES
from dmi_connector.engine import contract
from dmi_connector.engine.features import features_of, may_sleep
from dmi_connector.store.format.linux import check_linux

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

    from dmi_connector.engine.model.architectures import Architecture


def check(vllm_config: VllmConfig) -> None:
    """Raises ValueError for configurations in which rows could not be captured, each with its fix, and NeedsLinux."""
    check_linux("kv_connector: capture")
    contract.check_version()
    contract.check_names(["always"])  # by which the others are told
    contract.check_names(features_of(vllm_config))
    _check_parallel(vllm_config.parallel_config)
    _check_model(vllm_config)
    _check_compilation(vllm_config)
    _check_speculative(vllm_config)
    _check_whole_prompts(vllm_config)
    _check_sleep(vllm_config)


def _check_parallel(parallel: ParallelConfig) -> None:
    """Rows of a request's tokens lie on every tensor-parallel rank, and a batch is one forward."""
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size: {parallel.pipeline_parallel_size} is not supported: rows would be spread over "
            "stages; use tensor_parallel_size instead"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ValueError(
            "context parallelism spreads a request's tokens over ranks, which capture does not support; set it to 1"
        )
    if getattr(parallel, "enable_fault_tolerance", False):  # vLLM 0.33
        raise ValueError(
            "enable_fault_tolerance: True goes on after a rank has failed, which was not tried with capture; remove "
            "--enable-fault-tolerance"
        )
    if parallel.enable_dbo:
        raise ValueError("enable_dbo: True splits a batch in two, which capture does not support; remove --enable-dbo")
    if parallel.ubatch_size > 1:
        raise ValueError(
            f"ubatch_size: {parallel.ubatch_size} splits a batch into so many, which capture does not support; "
            "remove --ubatch-size"
        )
    if parallel.distributed_executor_backend == "external_launcher" and parallel.tensor_parallel_size > 1:
        raise ValueError(
            "distributed_executor_backend: 'external_launcher' gives each rank a scheduler of its own, which names "
            "different stores; use 'mp', 'ray' or tensor_parallel_size 1"
        )
    if parallel.enable_expert_parallel and parallel.use_sequence_parallel_moe:
        raise ValueError(
            f"enable_expert_parallel: with tensor_parallel_size {parallel.tensor_parallel_size} and data_parallel_size "
            f"{parallel.data_parallel_size} ranks share out a step's tokens in expert layers, which capture does not "
            "support; set one of the two sizes to 1"
        )


def _check_model(vllm_config: VllmConfig) -> None:
    """The model has the hooks, and its caches keep rows until they are exported."""
    model = vllm_config.model_config
    if hasattr(model.hf_text_config, "index_topk"):
        raise ValueError(
            f"model: {model.model!r} chooses the tokens that it attends to with an indexer (index_topk in its config), "
            "whose hooks are not defined; use a model without one, such as DeepSeek V3"
        )
    if model.enable_prompt_embeds:
        raise ValueError(
            "enable_prompt_embeds: True embeds every prompt outside the model's forward, where neither token ids nor "
            "embeddings can be captured; remove --enable-prompt-embeds"
        )
    if pruned := getattr(model.multimodal_config, "video_pruning_rate", None):
        raise ValueError(
            f"video_pruning_rate: {pruned} drops tokens of videos and moves others, so positions of rows "
            "could not be checked; remove --video-pruning-rate"
        )
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        raise ValueError(
            "kv_sharing_fast_prefill: True skips most tokens of a prompt in layers that share a cache, so their rows "
            "would lack values; remove --kv-sharing-fast-prefill"
        )
    if model.is_hybrid:
        raise ValueError(
            f"model: {model.model!r} has Mamba or linear-attention layers, which need vLLM's hybrid cache manager; "
            "DMIConnector does not support that; use a model with attention in every layer"
        )
    if (streams := getattr(model.hf_text_config, "altup_num_inputs", 1)) > 1:  # Gemma 3n
        raise ValueError(
            f"model: {model.model!r} carries {streams} residual streams at a time (altup_num_inputs in its config), "
            "and a hook is a tensor of one; use a model with one residual stream"
        )
    if getattr(model.hf_text_config, "is_heterogeneous", False):  # Gemma 4
        raise ValueError(
            f"model: {model.model!r} has layers of different sizes (per_layer_config in its config), and a hook has "
            "one size in all layers; use a model whose layers are alike"
        )


def _check_compilation(vllm_config: VllmConfig) -> None:
    """The compiled graph is that of the selection, and overwrites nothing that taps read."""
    if not isinstance(vllm_config.additional_config, dict):
        raise ValueError(
            "additional_config: must be a JSON object, since the hook selection is written into it for the compile hash"
        )
    inductor = vllm_config.compilation_config.inductor_compile_config
    for name in () if vllm_config.model_config.enforce_eager else contract.REUSE:
        if inductor.get(name):
            raise ValueError(
                f"compilation_config: inductor_compile_config has {name}={inductor[name]!r}, with which values could "
                "be overwritten while they are captured; leave it out"
            )


CHAINS = ("ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "eagle3", "mtp", "dflash")
"""Methods of `speculative_config` that propose one token after the other. Rows of the accepted ones are captured."""


def _check_speculative(vllm_config: VllmConfig) -> None:
    """Draft tokens of a request are a chain, so the rows of the accepted ones follow each other in its slots."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    if speculative.method in CHAINS:
        _check_chain(vllm_config)
        return
    if vllm_config.model_config.runner_type == "pooling":
        raise ValueError(
            "runner: 'pooling' skips the step in which vLLM lets a draft's rows be exported; use owner='target'"
        )
    if speculative.method != EXTRACT_HIDDEN_STATES:
        raise ValueError(
            f"speculative_config: method {speculative.method!r} was not tried with capture; use one of "
            f"{', '.join(CHAINS)} with owner='target', or none"
        )
    schedule = speculative.num_speculative_tokens_per_batch_size
    if vllm_config.use_v2_model_runner and not (schedule and all(entry[-1] == 0 for entry in schedule)):
        raise ValueError(
            f"speculative_config: num_speculative_tokens_per_batch_size is {schedule!r}; set it to [[1, 65536, 0]] so "
            "that each request decodes one token a step (docs/FROM_VLLM.md; data parallelism turns it off: use "
            "owner='target' there)"
        )


def _check_chain(vllm_config: VllmConfig) -> None:
    """Draft tokens form a chain, and a draft's forward can be told from the target's."""
    speculative = vllm_config.speculative_config
    tree = getattr(speculative, "speculative_token_tree", None)  # vLLM 0.31
    chain = [(0,) * depth for depth in range(1, speculative.num_speculative_tokens + 1)]
    if tree is not None and ast.literal_eval(tree) != chain:
        raise ValueError(
            f"speculative_config: speculative_token_tree {tree} proposes several tokens for a position, whose rows "
            "would share a slot; leave it out"
        )
    if vllm_config.model_config.using_transformers_backend() and speculative.use_eagle():
        raise ValueError(
            f"speculative_config: method {speculative.method!r} runs modules of the model, which vLLM's Transformers "
            "backend compiles as a whole, so the draft's values could not be told from the model's; use 'ngram' or "
            "'draft_model'"
        )


def _check_whole_prompts(vllm_config: VllmConfig) -> None:
    """Where prompts are not split over steps, the longest fits into a step.

    vLLM raises max_num_batched_tokens for latent attention on a CPU, but a draft has set the scheduler's limit by then.
    """
    scheduler, longest = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
    limit = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    if not scheduler.enable_chunked_prefill and limit < longest:
        raise ValueError(
            f"max_num_batched_tokens: a step takes {limit} tokens, and here vLLM does not split prompts over steps, so "
            f"longer ones would wait for ever; set it to {longest} (max_model_len) or more, lower max_model_len, or "
            "use owner='target'"
        )


def check_logits(vllm_config: VllmConfig) -> None:
    """Raises ValueError for configurations in which `logits` could not be captured."""
    if vllm_config.model_config.runner_type == "pooling":
        raise ValueError("runner: 'pooling' computes no logits; take them out of the hooks, as in 'vllm-full,-logits'")
    if vllm_config.parallel_config.enable_batch_sharded_sampling:
        raise ValueError(
            "enable_batch_sharded_sampling: True computes logits past compute_logits, where they are captured; remove "
            "--enable-batch-sharded-sampling, or take logits out of the hooks"
        )


def check_attention(arch: Architecture, model: ModelConfig) -> None:
    """Raises ValueError for attention of which the row of hooks does not know, and for a dtype that scales hooks."""
    if model.use_mla and "latent" not in arch.features:
        raise ValueError(
            f"model: {model.model!r} uses multi-head latent attention, which the row of {arch.name} does not describe; "
            "register it as a Latent (docs/HOOKS.md)"
        )
    divisor = getattr(model.hf_text_config, arch.float16_divisor, 1.0) if arch.float16_divisor else 1.0
    if model.dtype is torch.float16 and divisor != 1.0:
        raise ValueError(
            f"dtype: float16 lets vLLM divide the residual stream of {arch.name} by {arch.float16_divisor} "
            f"({divisor}), so its hooks would not be those of the model; set dtype to bfloat16"
        )


def check_ranks(arch: Architecture, hooks: Iterable[str], tp: int) -> None:
    """Raises ValueError for hooks of which a tensor-parallel rank has neither the whole nor its slice."""
    partial = [name for name in hooks if name in arch.one_rank]
    if tp > 1 and partial:
        raise ValueError(
            f"tensor_parallel_size: {tp} splits {', '.join(partial)} of {arch.name} in a way that capture does not "
            f"support; set it to 1, or take them out of the hooks, as in 'vllm-full,-{partial[0]}'"
        )


def _check_sleep(vllm_config: VllmConfig) -> None:
    """Rows leave before vLLM sleeps. In the client's process it then takes no step that would tell other processes."""
    backend = vllm_config.parallel_config.distributed_executor_backend
    here = envs.VLLM_ENABLE_V1_MULTIPROCESSING or backend in ("uni", "external_launcher")
    if may_sleep(vllm_config.model_config) and not here:
        raise ValueError(
            f"VLLM_ENABLE_V1_MULTIPROCESSING: 0 with distributed_executor_backend {backend!r} lets an engine that may "
            "sleep do so before its workers know which requests have ended, so their last rows would be lost; set it "
            "to 1, or remove --enable-sleep-mode and --enable-cumem-allocator"
        )


def check_reductions(vllm_config: VllmConfig) -> None:
    """Raises ValueError for configurations in which rows could not be reduced."""
    if vllm_config.model_config.enable_sleep_mode:
        raise ValueError(
            "enable_sleep_mode: True gives up GPU memory in which reductions keep their matrices and places; remove "
            "--enable-sleep-mode, or the option reduce"
        )
    if may_sleep(vllm_config.model_config):
        raise ValueError(
            "enable_cumem_allocator: True lets sleep() give up GPU memory in which reductions keep their matrices and "
            "places; remove --enable-cumem-allocator, or the option reduce"
        )


def replaced_by(name: str) -> ValueError:
    """The error where vLLM puts another connector in the place of ours, which it does with kv_offloading_size."""
    return ValueError(
        f"kv_offloading_size: it puts {name} in the place of {CONNECTOR}, so nothing would be captured; "
        "remove --kv-offloading-size"
    )


def check_alone(vllm_config: VllmConfig) -> None:
    """Raises ValueError where our connector is one of several, and where vLLM has put another in its place.

    Rows of tokens whose keys and values another connector loads were never computed here.
    """
    transfer = vllm_config.kv_transfer_config
    extra = {} if transfer is None else transfer.kv_connector_extra_config or {}
    if vllm_config.cache_config.kv_offloading_size is not None and "store_dir" in extra:
        raise replaced_by(transfer.kv_connector)
    beside = extra.get("connectors") or []
    names = [one.get("kv_connector") for one in beside if isinstance(one, dict)]
    if CONNECTOR in names:
        others = ", ".join(str(name) for name in names if name != CONNECTOR)
        raise ValueError(
            f"kv_connector: {transfer.kv_connector} runs {CONNECTOR} beside {others}, which may load keys and values "
            f"of tokens that have no rows; let kv_transfer_config name {CONNECTOR} alone, as capture_args() returns it"
        )


def check_one_engine() -> None:
    """Raises ValueError in a process where another engine has its worker.

    vLLM keeps one connector in a process, which would mix the rows of both engines.
    """
    from vllm.distributed.kv_transfer.kv_transfer_state import has_kv_transfer_group

    if has_kv_transfer_group():
        raise ValueError(
            "VLLM_ENABLE_V1_MULTIPROCESSING: 0 starts this engine in a process where another one has its KV connector, "
            "and vLLM keeps one for both; set it to 1, or shut the other engine down first"
        )
