# SPDX-License-Identifier: Apache-2.0
"""Refuses engine configurations that capture does not support. docs/COMPATIBILITY.md lists them.

Each error names the fix. Owners refuse configurations that depend on where rows are stored (owners/).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from vllm import envs

from dmi_connector.args import CONNECTOR, CONNECTORS, EXTRACT_HIDDEN_STATES, POOL_CONNECTOR
from dmi_connector.engine import contract
from dmi_connector.engine.features import features_of, may_sleep
from dmi_connector.engine.model.architectures import Mixed
from dmi_connector.engine.owners import owner_of
from dmi_connector.engine.owners.asked import asked
from dmi_connector.settings import POOL
from dmi_connector.store.format.linux import check_linux

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

    from dmi_connector.engine.model.architectures import Architecture
    from dmi_connector.hooks import ModelDims
    from dmi_connector.layout import Reductions
    from dmi_connector.settings import ServerOptions


def check(vllm_config: VllmConfig) -> None:
    """Raises ValueError for configurations in which rows could not be captured. Raises NeedsLinux without Linux."""
    check_linux("kv_connector: capture")
    _check_owner(vllm_config)
    contract.check_version()
    contract.check_names(["always"])  # first, because `features_of` uses these names
    contract.check_names(features_of(vllm_config))
    _check_connector(vllm_config)
    _check_parallel(vllm_config.parallel_config)
    _check_pipeline(vllm_config)
    _check_model(vllm_config)
    _check_offloading(vllm_config)
    _check_compilation(vllm_config)
    owner_of(vllm_config).check(vllm_config)
    _check_sleep(vllm_config)


def _check_owner(vllm_config: VllmConfig) -> None:
    """Checks the option `owner`, which is read before the other options."""
    if (owner := asked(vllm_config)) not in ("", POOL):
        raise ValueError(
            f"owner: {owner!r} is not valid in kv_connector_extra_config; set it to {POOL!r}, or leave it out: whether "
            "the owner is 'draft' or 'target' follows from speculative_config, which capture_args() returns"
        )


def _check_connector(vllm_config: VllmConfig) -> None:
    """Checks the role, and that the connector fits the owner.

    Only POOL_CONNECTOR leaves vLLM's hybrid cache manager on.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    if transfer.kv_connector in CONNECTORS and transfer.kv_role != "kv_producer":
        raise ValueError(
            f"kv_role: {transfer.kv_role!r} would let vLLM load keys and values from this connector, which "
            "loads none; set it to 'kv_producer'"
        )
    pool = asked(vllm_config) == POOL
    if pool and transfer.kv_connector != POOL_CONNECTOR:
        raise ValueError(
            f"kv_connector: {transfer.kv_connector!r} turns off vLLM's hybrid cache manager, which owner='pool' needs; "
            f"set it to {POOL_CONNECTOR!r}, as capture_args() does"
        )
    if not pool and transfer.kv_connector == POOL_CONNECTOR:
        raise ValueError(
            f'kv_connector: {POOL_CONNECTOR!r} is for owner=\'pool\'; add "owner": "pool" to '
            f"kv_connector_extra_config, or set kv_connector to {CONNECTOR!r}"
        )


def _check_parallel(parallel: ParallelConfig) -> None:
    """Refuses parallelism with which ranks lack tokens of a request or name different stores, or vLLM splits a batch,
    and parallelism that was not tested.
    """
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            raise ValueError(
                f"{name}: {size} spreads a request's tokens over ranks, which capture does not support; set it to 1"
            )
    if getattr(parallel, "enable_fault_tolerance", False):  # vLLM 0.33
        raise ValueError(
            "enable_fault_tolerance: True continues after a rank has failed, which was not tested with capture; remove "
            "--enable-fault-tolerance"
        )
    if getattr(parallel, "enable_elastic_ep", False):
        raise ValueError(
            "enable_elastic_ep: True adds and removes data-parallel engines at run time, and captures CUDA graphs "
            "again, which was not tested with capture; remove --enable-elastic-ep"
        )
    if parallel.enable_dbo:
        raise ValueError("enable_dbo: True splits a batch in two, which capture does not support; remove --enable-dbo")
    if parallel.ubatch_size > 1:
        raise ValueError(
            f"ubatch_size: {parallel.ubatch_size} splits a batch into parts, which capture does not support; "
            "remove --ubatch-size"
        )
    if parallel.distributed_executor_backend == "external_launcher" and parallel.tensor_parallel_size > 1:
        raise ValueError(
            "distributed_executor_backend: 'external_launcher' gives each rank its own scheduler, and the schedulers "
            "name different stores; use 'mp', 'ray' or tensor_parallel_size 1"
        )
    if parallel.enable_expert_parallel and parallel.use_sequence_parallel_moe:
        raise ValueError(
            f"enable_expert_parallel: with tensor_parallel_size {parallel.tensor_parallel_size} and data_parallel_size "
            f"{parallel.data_parallel_size} ranks divide the tokens of a step in expert layers, which capture does not "
            "support; set one of the two sizes to 1"
        )


def _check_pipeline(vllm_config: VllmConfig) -> None:
    """Refuses features that were not tested with pipeline stages."""
    parallel, model, drafts = vllm_config.parallel_config, vllm_config.model_config, vllm_config.speculative_config
    if parallel.pipeline_parallel_size == 1:
        return
    drafted = drafts is not None and drafts.method != EXTRACT_HIDDEN_STATES
    backend = parallel.distributed_executor_backend
    tp, dp = parallel.tensor_parallel_size, parallel.data_parallel_size
    refused = (
        (drafted, "speculative_config", "leave it out"),
        (tp > 1, f"tensor_parallel_size {tp}", "set one of the two to 1"),
        (dp > 1, f"data_parallel_size {dp}", "set one of the two to 1"),
        (backend != "mp", f"distributed_executor_backend {backend!r}", "use 'mp'"),
        (model.using_transformers_backend(), "vLLM's Transformers backend", "use a model that vLLM has itself"),
        (model.runner_type == "pooling", "runner 'pooling'", "use tensor_parallel_size instead"),
        (vllm_config.lora_config is not None, "enable_lora", "remove --enable-lora"),
        (model.use_mla, "latent attention", "use tensor_parallel_size instead"),
        (model.is_hybrid, "Mamba or linear-attention layers", "use tensor_parallel_size instead"),
        (may_sleep(model), "sleep", "remove --enable-sleep-mode and --enable-cumem-allocator"),
    )
    for applies, what, fix in refused:
        if applies:
            raise ValueError(
                f"pipeline_parallel_size: {parallel.pipeline_parallel_size} with {what} is not supported; {fix}"
            )


def _check_model(vllm_config: VllmConfig) -> None:
    """Refuses models without a single residual stream, and settings with which rows would be wrong or lack values."""
    model = vllm_config.model_config
    if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
        raise ValueError(
            "attention_config: hisparse_config moves the cache of models with an indexer to the host, which was not "
            "tested with capture; leave it out"
        )
    if model.enable_prompt_embeds:
        raise ValueError(
            "enable_prompt_embeds: True embeds every prompt outside the model's forward, where neither token ids nor "
            "embeddings can be captured; remove --enable-prompt-embeds"
        )
    if getattr(model.multimodal_config, "mm_encoder_only", False):
        raise ValueError(
            "mm_encoder_only: True runs encoders of images and no language model, so there is nothing to capture; "
            "remove --mm-encoder-only, or capture in the engine that runs the language model"
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
    if (streams := getattr(model.hf_text_config, "altup_num_inputs", 1)) > 1:  # Gemma 3n
        raise ValueError(
            f"model: {model.model!r} carries {streams} residual streams at a time (altup_num_inputs in its config), "
            "but a hook captures one stream; use a model with one residual stream"
        )


def _check_offloading(vllm_config: VllmConfig) -> None:
    """Refuses weights in host memory that the GPU cannot read in place (without unified virtual addressing).

    With such weights, vLLM runs a layer inside a call of the same layer (`torch.func.functional_call`), so the taps of
    the layer run twice.
    """
    from vllm.utils.platform_utils import is_uva_available

    offload = vllm_config.offload_config
    backend, size = offload.offload_backend, offload.uva.cpu_offload_gb
    prefetch = backend == "prefetch" or (backend == "auto" and offload.prefetch.offload_group_size > 0)
    if size and not prefetch and (envs.VLLM_WEIGHT_OFFLOADING_DISABLE_UVA or not is_uva_available()):
        raise ValueError(
            f"cpu_offload_gb: {size:g} without unified virtual addressing runs the taps of a layer twice; leave "
            "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA out, set --offload-backend prefetch, or remove --cpu-offload-gb"
        )


def _check_compilation(vllm_config: VllmConfig) -> None:
    """Checks that the compile hash can include the selection of hooks."""
    if not isinstance(vllm_config.additional_config, dict):
        raise ValueError(
            "additional_config: must be a JSON object, since the hook selection is written into it for the compile hash"
        )


def check_logits(vllm_config: VllmConfig) -> None:
    """Raises ValueError for configurations in which `logits` could not be captured."""
    if vllm_config.model_config.runner_type == "pooling":
        raise ValueError("runner: 'pooling' computes no logits; take them out of the hooks, as in 'vllm-full,-logits'")
    if vllm_config.parallel_config.enable_batch_sharded_sampling:
        raise ValueError(
            "enable_batch_sharded_sampling: True does not call compute_logits, where logits are captured; remove "
            "--enable-batch-sharded-sampling, or take logits out of the hooks"
        )


def check_attention(arch: Architecture, model: ModelConfig) -> None:
    """Raises ValueError for attention that `arch` does not describe, and for float16 if vLLM then divides values."""
    if model.use_mla and "latent" not in arch.features:
        raise ValueError(
            f"model: {model.model!r} uses multi-head latent attention, which the row of {arch.name} in the table of "
            "architectures does not describe; register it as a Latent (docs/HOOKS.md)"
        )
    if getattr(model.hf_text_config, "is_heterogeneous", False) and not isinstance(arch, Mixed):
        raise ValueError(
            f"model: {model.model!r} has layers of different sizes (per_layer_config in its config), which the row of "
            f"{arch.name} in the table of architectures does not describe; use a model whose layers are alike, or "
            "register it as a Mixed (docs/HOOKS.md)"
        )
    divisor = getattr(model.hf_text_config, arch.float16_divisor, 1.0) if arch.float16_divisor else 1.0
    if model.dtype is torch.float16 and divisor != 1.0:
        raise ValueError(
            f"dtype: float16 lets vLLM divide the residual stream of {arch.name}, or what shared experts add to it, by "
            f"{arch.float16_divisor} ({divisor}), so its hooks would not be those of the model; set dtype to bfloat16"
        )


def check_ranks(arch: Architecture, hooks: Iterable[str], tp: int) -> None:
    """Raises ValueError for hooks of which each tensor-parallel rank has all, or another part than capture expects."""
    partial = [name for name in hooks if name in arch.one_rank]
    if tp > 1 and partial:
        raise ValueError(
            f"tensor_parallel_size: capture does not support how {tp} ranks of {arch.name} divide {', '.join(partial)} "
            f"among them; set it to 1, or take them out of the hooks, as in 'vllm-full,-{partial[0]}'"
        )


def check_stages(
    arch: Architecture, dims: ModelDims, hooks: Container[str], options: ServerOptions, stages: Sequence[range]
) -> None:
    """Raises ValueError for features that pipeline stages do not support.

    stages: the layers of each stage, the last stage first (`CaptureContext.stages`); () without pipeline parallelism.
    """
    if not stages:
        return
    if not all(stages):
        raise ValueError(
            f"pipeline_parallel_size: a stage has no layers ({', '.join(str(len(s)) for s in reversed(stages))}); "
            "use fewer stages, or another VLLM_PP_LAYER_PARTITION"
        )
    refused = (
        (arch.language or dims.rope_axes, f"{arch.name}, which takes images", "use a text model"),
        (options.probes, "probes", "leave probes out"),
        ("pattern" in hooks, "attention summaries", "take pattern out of the hooks"),
    )
    for applies, what, fix in refused:
        if applies:
            raise ValueError(f"pipeline_parallel_size: {len(stages)} with {what} is not supported; {fix}")


def _check_sleep(vllm_config: VllmConfig) -> None:
    """Refuses sleep if rows would be lost.

    With VLLM_ENABLE_V1_MULTIPROCESSING=0 the scheduler runs in the client's process. It then runs no step between the
    last reply and sleep, so workers in other processes would not learn which requests have ended.
    """
    backend = vllm_config.parallel_config.distributed_executor_backend
    here = envs.VLLM_ENABLE_V1_MULTIPROCESSING or backend in ("uni", "external_launcher")
    if may_sleep(vllm_config.model_config) and not here:
        raise ValueError(
            f"VLLM_ENABLE_V1_MULTIPROCESSING: 0 with distributed_executor_backend {backend!r} lets an engine that may "
            "sleep do so before its workers know which requests have ended, so their last rows would be lost; set it "
            "to 1, or remove --enable-sleep-mode and --enable-cumem-allocator"
        )


def check_reductions(vllm_config: VllmConfig, reductions: Reductions) -> None:
    """Raises ValueError for configurations in which rows could not be reduced."""
    for reduction in reductions.values():
        reduction.check_context(vllm_config.model_config.max_model_len)


def check_precision() -> None:
    """Raises ValueError if torch may compute the matrix products of probes with less precision than float32."""
    precision = getattr(envs, "VLLM_FLOAT32_MATMUL_PRECISION", "highest")
    if precision != "highest":
        raise ValueError(
            f"VLLM_FLOAT32_MATMUL_PRECISION: {precision!r} lets a GPU round the inputs of matrix products, which makes "
            "scores inexact; set it to 'highest', or leave the option probes out"
        )


def replaced_by(name: str) -> ValueError:
    """The error for kv_offloading_size, with which vLLM uses another connector. name: the class of that connector."""
    return ValueError(
        f"kv_offloading_size: it puts {name} in the place of {CONNECTOR}, so nothing would be captured; "
        "remove --kv-offloading-size"
    )


def check_alone(vllm_config: VllmConfig) -> None:
    """Raises ValueError if our connector is one of several, or if vLLM has replaced it by another one.

    If another connector loads the keys and values of tokens, the model does not compute these tokens. So they have no
    rows.
    """
    transfer = vllm_config.kv_transfer_config
    extra = {} if transfer is None else transfer.kv_connector_extra_config or {}
    if vllm_config.cache_config.kv_offloading_size is not None and "store_dir" in extra:
        raise replaced_by(transfer.kv_connector)
    beside = extra.get("connectors") or []
    names = [one.get("kv_connector") for one in beside if isinstance(one, dict)]
    for ours in CONNECTORS:
        if ours in names:
            others = ", ".join(str(name) for name in names if name != ours)
            raise ValueError(
                f"kv_connector: {transfer.kv_connector} runs {ours} beside {others}, which may load keys and values "
                f"of tokens; these are not computed and have no rows; let kv_transfer_config name {ours} alone, as "
                "capture_args() returns it"
            )


def check_one_engine() -> None:
    """Raises ValueError in a process that already has a worker of another engine with a KV connector.

    vLLM keeps one worker connector per process, which would get the rows of both engines.
    """
    from vllm.distributed.kv_transfer.kv_transfer_state import has_kv_transfer_group

    if has_kv_transfer_group():
        raise ValueError(
            "VLLM_ENABLE_V1_MULTIPROCESSING: 0 starts this engine in a process where another one has its KV connector, "
            "and vLLM keeps only one per process; set it to 1, or shut the other engine down first"
        )
