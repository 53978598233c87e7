# SPDX-License-Identifier: Apache-2.0
"""What this package relies on in vLLM, torch and Triton beyond their public interfaces. Checked at start.

docs/CONTRACT.md lists the same items for readers.
"""

from __future__ import annotations

import importlib
from typing import Any

SUPPORTED = ">=0.31,<0.33"
"""Versions with which `make compat` passed. docs/COMPATIBILITY.md says why others are excluded."""
REUSE = ("allow_buffer_reuse", "inplace_buffers", "memory_planning")
"""Options of Inductor that let it put a value where another one was."""

NAMES: dict[str, tuple[str, str]] = {
    # module: attribute path, why
    # ---- the cache-only draft model
    "draft": (
        "vllm.model_executor.models.extract_hidden_states:ExtractHiddenStatesModel",
        "vLLM's cache-only draft model; ours is registered under its name",
    ),
    "proposer": (
        "vllm.v1.spec_decode.extract_hidden_states:ExtractHiddenStatesProposer.propose",
        "V1 runner: replaced by one that proposes no draft token, where our draft is loaded",
    ),
    "sampler": (
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
        "V1 runner: told that a step has no draft tokens, where our draft is loaded",
    ),
    "speculator": (
        "vllm.v1.worker.gpu.spec_decode.extract_hidden_states:ExtractHiddenStatesSpeculator.propose",
        "V2 runner: told to leave out the draft's forward, where our draft is loaded",
    ),
    "backend": (
        "vllm.model_executor.models.extract_hidden_states:CacheOnlyAttentionBackend.get_impl_cls",
        "the cache-only attention backend that ours extends",
    ),
    "builder": (
        "vllm.model_executor.models.extract_hidden_states:CacheOnlyAttentionMetadataBuilder.build",
        "sees the metadata of every batch; ours also allows full CUDA graphs",
    ),
    "spec": (
        "vllm.v1.kv_cache_interface:HiddenStateCacheSpec",
        "the cache spec that gives rows a page size of their own and keeps them for prefix-cache hits",
    ),
    "layer": (
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        "the cache layer is one, so that vLLM gives it pages",
    ),
    "layer_number": (
        "vllm.model_executor.models.utils:extract_layer_index",
        "vLLM sorts cache layers by it; it reads one integer out of the name of ours",
    ),
    "full_graphs": (
        "vllm.v1.attention.backend:AttentionCGSupport.ALWAYS",
        "our metadata builder claims it, so that full CUDA graphs stay on",
    ),
    "graph_support": (
        "vllm.v1.attention.backend:AttentionMetadataBuilder.get_cudagraph_support",
        "says whether a graph of a whole step can hold an attention layer",
    ),
    "graph_mode": (
        "vllm.config:CompilationConfig.__dataclass_fields__.cudagraph_mode",
        "set to FULL after the model is built, where graphs of whole steps are right",
    ),
    "shared_tokens": (
        "vllm.config:ParallelConfig.use_sequence_parallel_moe",
        "says whether ranks share out a step's tokens in expert layers, which is refused",
    ),
    "query_starts": (
        "vllm.v1.attention.backend:CommonAttentionMetadata.__dataclass_fields__.query_start_loc",
        "query starts of a batch, which place rows of logits",
    ),
    "batch_slots": (
        "vllm.v1.attention.backend:CommonAttentionMetadata.__dataclass_fields__.slot_mapping",
        "slots of a batch, which place rows of logits",
    ),
    "static_layers": (
        "vllm.config:CompilationConfig.__dataclass_fields__.static_forward_context",
        "the cache layer is entered there under its name",
    ),
    "no_drafts": (
        "vllm.config:SpeculativeConfig.__dataclass_fields__.num_speculative_tokens_per_batch_size",
        "V2 runner: the schedule of 0 drafts, with which each request decodes one token a step",
    ),
    # ---- latent attention
    "latent": (
        "vllm.model_executor.layers.attention:MLAAttention.forward",
        "gets queries, latent and rotary key, in this order, in models with latent attention",
    ),
    "latent_modules": (
        "vllm.model_executor.layers.mla:MultiHeadLatentAttentionWrapper.forward",
        "calls the projections, the norm and the attention that are tapped in models with latent attention",
    ),
    "latent_used": (
        "vllm.config:ModelConfig.use_mla",
        "says whether attention gets the latent, or keys and values of heads",
    ),
    "scheduled": (
        "vllm.config:SchedulerConfig.__dataclass_fields__.max_num_scheduled_tokens",
        "tells prompts that would wait for ever, where a draft limits a step and prompts are not split over steps",
    ),
    # ---- the forward pass
    "slots": (
        "vllm.forward_context:ForwardContext.__dataclass_fields__.slot_mapping",
        "the slots of a step's tokens, by cache layer",
    ),
    "layers": (
        "vllm.forward_context:ForwardContext.__dataclass_fields__.no_compile_layers",
        "the cache layers by name",
    ),
    "graphs": (
        "vllm.forward_context:ForwardContext.__dataclass_fields__.cudagraph_runtime_mode",
        "tells full CUDA graphs from piecewise ones",
    ),
    "piecewise": (
        "vllm.config:CUDAGraphMode.PIECEWISE",
        "the mode in which a graph ends before the next tap",
    ),
    "forward": (
        "vllm.forward_context:get_forward_context",
        "the running forward, in which an op finds rows and slots",
    ),
    "in_forward": (
        "vllm.forward_context:is_forward_context_available",
        "says whether a forward is running",
    ),
    "connector": (
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.handle_preemptions",
        "called before a forward overwrites freed blocks",
    ),
    "answers": (
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor.collective_rpc",
        "several ranks: asked for one rank's answer in steps in which the others have nothing to say",
    ),
    "metadata": (
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1._get_connector_metadata",
        "the scheduler's message for this step",
    ),
    "group": (
        "vllm.distributed.kv_transfer.kv_transfer_state:get_kv_transfer_group",
        "the connector of this process, which takes the logits of a step",
    ),
    "resets": (
        "vllm.v1.core.kv_cache_manager:KVCacheManager.reset_prefix_cache",
        "wrapped in the scheduler, so that a reset first frees the blocks of ended requests that are kept",
    ),
    "kept": (
        "vllm.v1.core.kv_cache_manager:KVCacheManager.free",
        "frees these blocks; a second call does nothing",
    ),
    "own_ids": (
        "vllm.envs:environment_variables.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
        "says that a client may send the id of a request again, for which no block is kept then",
    ),
    "pauses": (
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.has_pending_push_work",
        "a pause, and sleep after it, waits for rows that still leave the GPU of another process",
    ),
    "before_sleep": (
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.reset_cache",
        "called before vLLM gives up its caches, so that rows leave before",
    ),
    "sleep_mode": (
        "vllm.config:ModelConfig.__dataclass_fields__.enable_sleep_mode",
        "an engine may sleep, so its rows do not wait",
    ),
    "sleep_memory": (
        "vllm.config:ModelConfig.__dataclass_fields__.enable_cumem_allocator",
        "caches lie in memory that sleep() gives up",
    ),
    "in_client": (
        "vllm.envs:environment_variables.VLLM_ENABLE_V1_MULTIPROCESSING",
        "says whether the engine runs in the client's process, where no step comes between the last reply and sleep",
    ),
    "cache_manager": (
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.bind_kv_cache_manager",
        "gives the scheduler half vLLM's cache manager",
    ),
    "has_group": (
        "vllm.distributed.kv_transfer.kv_transfer_state:has_kv_transfer_group",
        "says whether this process has a connector: vLLM keeps one",
    ),
    # ---- bulk capture
    "request": (
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        "refuses the fields of --sampling before a prompt is taken",
    ),
    "encoded": (
        "vllm.v1.serial_utils:MsgpackEncoder.encode",
        "writes a request as the engine's process gets it, which refuses fields of the wrong type",
    ),
    "decoded": (
        "vllm.v1.serial_utils:MsgpackDecoder.decode",
        "reads that message as the engine's process does",
    ),
    # ---- models with a vision tower
    "raw_tokens": (
        "vllm.model_executor.models.interfaces:SupportsMultiModal.requires_raw_input_tokens",
        "set on these models, so that token ids enter the forward beside embeddings",
    ),
    "request_positions": (
        "vllm.v1.attention.backend:CommonAttentionMetadata.__dataclass_fields__.positions",
        "position in the request of each token, which those of M-RoPE do not tell",
    ),
    "axes": (
        "vllm.config:ModelConfig.mrope_num_dims",
        "axes of the positions of M-RoPE",
    ),
    "has_axes": (
        "vllm.config:ModelConfig.uses_mrope",
        "says whether positions have several axes",
    ),
    "takes_embeddings": (
        "vllm.config:ModelConfig.supports_multimodal_inputs",
        "says whether the forward gets embeddings",
    ),
    "makes_embeddings": (
        "vllm.model_executor.models.interfaces:SupportsMultiModal.embed_input_ids",
        "makes the embeddings of our first forward",
    ),
    "pruned": (
        "vllm.config:MultiModalConfig.__dataclass_fields__.video_pruning_rate",
        "drops tokens of videos, which is refused",
    ),
    "media": (
        "vllm.multimodal.inputs:MultiModalFeatureSpec.__dataclass_fields__.mm_position",
        "where an image lies in a prompt",
    ),
    "media_hash": (
        "vllm.multimodal.inputs:MultiModalFeatureSpec.__dataclass_fields__.identifier",
        "tells one image from another",
    ),
    "media_rows": (
        "vllm.multimodal.inputs:PlaceholderRange.__dataclass_fields__.is_embed",
        "which tokens of an image get its embeddings",
    ),
    "image_blocks": (
        "vllm.v1.attention.backend:AttentionBackend.supports_mm_prefix",
        "says whether tokens of an image see each other",
    ),
    # ---- hooks inside opaque ops
    "attention": (
        "vllm.v1.attention.backend:AttentionImpl.forward",
        "wrapped in layers whose attention is summarised",
    ),
    "cpu_keys": (
        "vllm._custom_ops:cpu_attn_reshape_and_cache",
        "tells how the CPU backend orders the keys of a block",
    ),
    "router": (
        "vllm.model_executor.layers.fused_moe.router.fused_moe_router:FusedMoERouter.select_experts",
        "wrapped in layers whose routing is captured",
    ),
    "experts": (
        "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter._apply_eplb_mapping",
        "takes the chosen experts by the model's numbers, before they become places of redundant experts",
    ),
    # ---- models of transformers
    "in_transformers": (
        "vllm.config:ModelConfig.using_transformers_backend",
        "says whether the Transformers backend serves a model, with the modules of transformers",
    ),
    "transformers_class": (
        "vllm.config:ModelConfig._get_transformers_backend_cls",
        "says whether that model is one of text alone",
    ),
    "registered": (
        "vllm.model_executor.models.registry:_LazyRegisteredModel.__dataclass_fields__.class_name",
        "names the class that serves an architecture, so that ours is registered for those of that backend",
    ),
    # ---- how a model is compiled
    "norms": (
        "vllm.config.kernel:IrOpPriorityConfig.__dataclass_fields__.fused_add_rms_norm",
        "says whether Inductor compiles an add-and-norm, which then overwrites no input",
    ),
    "graphs_split": (
        "vllm.config:CompilationConfig.splitting_ops_contain_attention",
        "says whether each graph of a layer writes the residual stream to memory",
    ),
    "mode": (
        "vllm.config:CompilationMode.VLLM_COMPILE",
        "the only mode with piecewise compilation",
    ),
    "partition": (
        "vllm.config:CompilationConfig.__dataclass_fields__.use_inductor_graph_partition",
        "says whether Inductor splits the graph after fusion",
    ),
    "norm_quant": (
        "vllm.config.compilation:PassConfig.__dataclass_fields__.fuse_norm_quant",
        "a pass that fuses an add-and-norm with quantisation, into an op that overwrites the residual stream",
    ),
    "quantised": (
        "vllm.config:VllmConfig.__dataclass_fields__.quant_config",
        "says whether weights are quantised, which that pass needs",
    ),
    "norm_reduce": (
        "vllm.config.compilation:PassConfig.__dataclass_fields__.fuse_allreduce_rms",
        "a pass that fuses an add-and-norm with the all-reduce, into an op that overwrites the residual stream",
    ),
    "passes": (
        "vllm.config:CompilationConfig.__dataclass_fields__.pass_config",
        "has the two passes above",
    ),
    "invariant": (
        "vllm.envs:environment_variables.VLLM_BATCH_INVARIANT",
        "switches Inductor's add-and-norm off; vLLM's own overwrites its inputs",
    ),
    "unquantised": (
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod",
        "says that a matrix product writes a linear layer's output",
    ),
    "compiler": (
        "vllm.config:CompilationConfig.__dataclass_fields__.backend",
        "says whether Inductor compiles the model",
    ),
    "once": (
        "vllm.config:CompilationConfig.__dataclass_fields__.inductor_compile_config",
        "passes the three options of Inductor below",
    ),
    "reuse": (
        "torch._inductor.config:allow_buffer_reuse",
        "Inductor's option to reuse a buffer for another value",
    ),
    "planned": (
        "torch._inductor.config:memory_planning",
        "Inductor's option to place several values in one pool",
    ),
    "in_place": (
        "torch._inductor.config:inplace_buffers",
        "Inductor's option to write a result over its input",
    ),
    "layout": (
        "torch:Tag.flexible_layout",
        "lets Inductor hand values to taps in any layout, without a copy",
    ),
    "hash": (
        "vllm.config:VllmConfig.compute_hash",
        "covers additional_config, where the selection is written: a graph with other taps is never reused",
    ),
    # ---- launches of kernels
    "jit": (
        "triton.runtime.jit:JITFunction.run",
        "returns the compiled kernel of a launch, which later launches call directly",
    ),
    "launch": (
        "triton.compiler.compiler:CompiledKernel.__getitem__",
        "launches a compiled kernel with addresses, without a look at each argument",
    ),
    # ---- copies off the GPU
    "pinning": (
        "torch.cuda:cudart",
        "its cudaHostRegister pins the ring's memory, which other processes share",
    ),
}


def _resolve(path: str) -> Any:
    module, _, attributes = path.partition(":")
    value: Any = importlib.import_module(module)
    for name in attributes.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def check_names() -> None:
    """Raises ValueError for a vLLM outside the supported versions, and for a missing name of NAMES."""
    import vllm
    from packaging.specifiers import SpecifierSet

    if not SpecifierSet(SUPPORTED, prereleases=True).contains(vllm.__version__.split("+")[0]):
        raise ValueError(f"vllm: version {vllm.__version__} is not supported; install vllm{SUPPORTED}")
    for path, why in NAMES.values():
        try:
            _resolve(path)
        except (ImportError, AttributeError, KeyError) as error:
            package = path.partition(".")[0]
            version = importlib.import_module(package).__version__
            raise ValueError(
                f"{package}: {path} is missing in version {version} ({why}); install vllm{SUPPORTED}"
            ) from error
