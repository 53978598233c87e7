# SPDX-License-Identifier: Apache-2.0
"""What this package relies on in vLLM beyond its public interfaces: named, explained and checked at start.

docs/CONTRACT.md lists the same items for readers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUPPORTED = ">=0.29,<0.34"

NAMES: dict[str, tuple[str, str]] = {
    # module: attribute path, why
    "proposer": (
        "vllm.v1.spec_decode.extract_hidden_states:ExtractHiddenStatesProposer.propose",
        "V1 runner: replaced (only where our draft is loaded) so that no draft token is proposed",
    ),
    "speculator": (
        "vllm.v1.worker.gpu.spec_decode.extract_hidden_states:ExtractHiddenStatesSpeculator.propose",
        "V2 runner: replaced (only where our draft is loaded) so that nothing is stacked and copied for no draft",
    ),
    "draft": (
        "vllm.model_executor.models.extract_hidden_states:ExtractHiddenStatesModel",
        "the draft model we stand in for under its registered name",
    ),
    "backend": (
        "vllm.model_executor.models.extract_hidden_states:CacheOnlyAttentionBackend.get_impl_cls",
        "the cache-only attention backend ours extends",
    ),
    "builder": (
        "vllm.model_executor.models.extract_hidden_states:CacheOnlyAttentionMetadataBuilder.build",
        "told of every batch; ours also allows CUDA graphs",
    ),
    "spec": (
        "vllm.v1.kv_cache_interface:HiddenStateCacheSpec",
        "the cache spec that gives rows their own page size and keeps them valid for prefix-cache hits",
    ),
    "slots": (
        "vllm.forward_context:ForwardContext.__dataclass_fields__.slot_mapping",
        "slots of this forward's tokens by cache layer, in a persistent buffer",
    ),
    "layers": (
        "vllm.forward_context:ForwardContext.__dataclass_fields__.no_compile_layers",
        "cache layers by name, read by the tap",
    ),
    "graphs": (
        "vllm.forward_context:ForwardContext.__dataclass_fields__.cudagraph_runtime_mode",
        "tells a captured piece of a model, where taps write in line, from a whole step",
    ),
    "connector": (
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.handle_preemptions",
        "called before a forward overwrites freed blocks: the last moment to read them",
    ),
    "attention": (
        "vllm.v1.attention.backend:AttentionImpl.forward",
        "wrapped, in layers whose pattern is summarised, to read queries and paged keys after attention",
    ),
    "norms": (
        "vllm.config.kernel:IrOpPriorityConfig.__dataclass_fields__.fused_add_rms_norm",
        "says whether Inductor compiles an add-and-norm, which then leaves what it is given as it was",
    ),
    "pieces": (
        "vllm.config:CompilationConfig.splitting_ops_contain_attention",
        "says whether the residual stream is handed from piece to piece of a compiled model, so that it lasts",
    ),
    "mode": (
        "vllm.config:CompilationMode.VLLM_COMPILE",
        "is the only mode in which a model is compiled in pieces",
    ),
    "partition": (
        "vllm.config:CompilationConfig.__dataclass_fields__.use_inductor_graph_partition",
        "says that pieces are made after fusion, so that nothing is handed on that could be read",
    ),
    "norm_quant": (
        "vllm.config.compilation:PassConfig.__dataclass_fields__.fuse_norm_quant",
        "says whether an add-and-norm may be part of an op that quantises, and takes the residual stream over",
    ),
    "quantised": (
        "vllm.config:VllmConfig.__dataclass_fields__.quant_config",
        "says whether weights are quantised, which that fusion needs",
    ),
    "norm_reduce": (
        "vllm.config.compilation:PassConfig.__dataclass_fields__.fuse_allreduce_rms",
        "says whether an add-and-norm may be part of an op that sums up over ranks, and takes the residual stream over",
    ),
    "once": (
        "vllm.config:CompilationConfig.__dataclass_fields__.inductor_compile_config",
        "tells Inductor to overwrite nothing, so that values stay as they are while an op of ours may read them",
    ),
    "compiler": (
        "vllm.config:CompilationConfig.__dataclass_fields__.backend",
        "says whether it is Inductor that compiles",
    ),
    "reuse": (
        "torch._inductor.config:allow_buffer_reuse",
        "Inductor's option to use the memory of one value for another",
    ),
    "planned": (
        "torch._inductor.config:memory_planning",
        "Inductor's option to give several values one piece of memory",
    ),
    "in_place": (
        "torch._inductor.config:inplace_buffers",
        "Inductor's option to write a result over what it was made of",
    ),
    "hash": (
        "vllm.config:VllmConfig.compute_hash",
        "covers additional_config: selection and way of compiling are written there, so that graphs are not mixed up",
    ),
}


def _resolve(path: str) -> Any:
    module, _, attributes = path.partition(":")
    value: Any = importlib.import_module(module)
    for name in attributes.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def check_names() -> None:
    """Refuse a vLLM outside the supported versions, or one that lacks a name we rely on."""
    import vllm
    from packaging.specifiers import SpecifierSet

    if not SpecifierSet(SUPPORTED, prereleases=True).contains(vllm.__version__.split("+")[0]):
        raise ValueError(f"vllm: version {vllm.__version__} is not supported; install vllm{SUPPORTED}")
    for path, why in NAMES.values():
        try:
            _resolve(path)
        except (ImportError, AttributeError, KeyError) as error:
            raise ValueError(
                f"vllm: {path} is missing in version {vllm.__version__} ({why}); install vllm{SUPPORTED}"
            ) from error


def check(vllm_config: VllmConfig) -> None:
    """Refuse configurations in which rows could not be captured, each with its fix."""
    from dmi_connector.engine.compilation import REUSE

    check_names()
    parallel, cache, speculative = (
        vllm_config.parallel_config,
        vllm_config.cache_config,
        vllm_config.speculative_config,
    )
    model = vllm_config.model_config
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size: {parallel.pipeline_parallel_size} is not supported: rows would be spread over "
            "stages; use tensor_parallel_size instead"
        )
    if (
        getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        raise ValueError(
            "context parallelism spreads a request's tokens over ranks, which capture does not support; set it to 1"
        )
    if getattr(parallel, "enable_dbo", False):
        raise ValueError("enable_dbo: True splits a batch in two, which capture does not support; remove --enable-dbo")
    if (parts := getattr(parallel, "ubatch_size", 0)) > 1:
        raise ValueError(
            f"ubatch_size: {parts} splits a batch into so many, which capture does not support; remove --ubatch-size"
        )
    if model.use_mla:
        raise ValueError(
            f"model: {model.model!r} uses multi-head latent attention, whose hooks are not defined yet; "
            "use a model with plain attention"
        )
    if not isinstance(vllm_config.additional_config, dict):
        raise ValueError(
            "additional_config: must be a JSON object, since the hook selection is written into it for the compile hash"
        )
    inductor = vllm_config.compilation_config.inductor_compile_config
    for name in () if model.enforce_eager else REUSE:
        if inductor.get(name):
            raise ValueError(
                f"compilation_config: inductor_compile_config has {name}={inductor[name]!r}, with which values could "
                "be overwritten while they are captured; leave it out"
            )
    if cache.sliding_window is not None or model.is_hybrid:
        raise ValueError(
            f"model: {model.model!r} has sliding-window or hybrid layers, whose caches drop rows before "
            "they are exported; use a model with full attention in every layer"
        )
    if speculative is None:
        return
    if speculative.method != "extract_hidden_states":
        raise ValueError(
            f"speculative_config: method {speculative.method!r} verifies several tokens a step, which capture "
            "does not support; use the one that capture_args() returns, or none"
        )
    schedule = speculative.num_speculative_tokens_per_batch_size
    if vllm_config.use_v2_model_runner and not (schedule and all(entry[-1] == 0 for entry in schedule)):
        raise ValueError(
            f"speculative_config: num_speculative_tokens_per_batch_size is {schedule!r}; set it to [[1, 65536, 0]] so "
            "that each request decodes one token a step (data parallelism turns it off: use owner='target' there)"
        )


def check_logits(vllm_config: VllmConfig) -> None:
    """Refuse configurations in which `logits` could not be captured, each with its fix."""
    if getattr(vllm_config.parallel_config, "enable_batch_sharded_sampling", False):
        raise ValueError(
            "enable_batch_sharded_sampling: True computes logits past compute_logits, where they are captured; remove "
            "--enable-batch-sharded-sampling, or take logits out of the hooks"
        )


def check_reductions(vllm_config: VllmConfig) -> None:
    """Refuse configurations in which rows could not be reduced, each with its fix."""
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise ValueError(
            "enable_sleep_mode: True gives up GPU memory in which reductions keep their matrices and places; remove "
            "--enable-sleep-mode, or the option reduce"
        )


def check_one_engine() -> None:
    """Refuse an engine whose worker lives in a process that serves another: vLLM keeps one connector a process, which
    would take the rows of both for its own.
    """
    from vllm.distributed.kv_transfer.kv_transfer_state import has_kv_transfer_group

    if has_kv_transfer_group():
        raise ValueError(
            "VLLM_ENABLE_V1_MULTIPROCESSING: 0 starts this engine in a process where another one has its KV connector, "
            "and vLLM keeps one for both; set it to 1, or shut the other engine down first"
        )


def schedule_no_drafts() -> None:
    """V1 runner: make the extract_hidden_states proposer propose nothing, so each step decodes one token a request.

    The V2 runner has a setting for this (num_speculative_tokens_per_batch_size with 0 drafts); V1's proposer asserts on
    it. Called where our draft is built, so a process without our draft keeps vLLM's own method.
    """
    from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer

    def propose(self: Any, num_speculative_tokens: int, sampled_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Zero draft tokens for each request: int tensor [batch, 0]."""
        if not getattr(self.model, "dmi_active", False):
            return original(self, num_speculative_tokens, sampled_token_ids, *args, **kwargs)
        return sampled_token_ids[:, :0]

    original = ExtractHiddenStatesProposer.propose
    if not getattr(original, "dmi_silent", False):
        propose.dmi_silent = True  # type: ignore[attr-defined]
        ExtractHiddenStatesProposer.propose = propose


def skip_propose() -> None:
    """V2 runner: no drafts are scheduled, but the speculator still stacks and copies hidden states for its model every
    step. With our draft, which takes none, it stops after its first line.
    """
    from vllm.v1.worker.gpu.spec_decode.extract_hidden_states import ExtractHiddenStatesSpeculator

    def propose(
        self: Any,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Any,
        num_rejected: Any,
        last_sampled: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """What vLLM's own returns: the token sampled last of each request, int tensor [batch, 1]."""
        if not getattr(self.model, "dmi_active", False):
            before = (attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected)
            return original(self, input_batch, *before, last_sampled, *args, **kwargs)
        return last_sampled[input_batch.idx_mapping, :1]

    original = ExtractHiddenStatesSpeculator.propose
    if not getattr(original, "dmi_silent", False):
        propose.dmi_silent = True  # type: ignore[attr-defined]
        ExtractHiddenStatesSpeculator.propose = propose
