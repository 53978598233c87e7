# SPDX-License-Identifier: Apache-2.0
"""Lists the names of vLLM, torch and Triton that this package uses although they are not public, by feature.

contract.py checks the names of the features that an engine uses. docs/CONTRACT.md lists the same names for readers.
"""

from __future__ import annotations

from typing import NamedTuple


class Name(NamedTuple):
    """A name outside this package.

    places: `module:attribute path`. A name that has moved has several paths, separated by spaces, and the first one
    that exists is used. why: its use here. without: the behaviour if it is missing; "": the engine does not start.
    """

    places: str
    why: str
    without: str = ""


NAMES: dict[str, dict[str, Name]] = {
    "always": {
        "backend": Name(
            "vllm.model_executor.models.extract_hidden_states:CacheOnlyAttentionBackend.get_impl_cls",
            "the cache-only attention backend that ours extends",
        ),
        "builder": Name(
            "vllm.model_executor.models.extract_hidden_states:CacheOnlyAttentionMetadataBuilder.build",
            "sees the metadata of every batch; ours also allows full CUDA graphs",
        ),
        "spec": Name(
            "vllm.v1.kv_cache_interface:HiddenStateCacheSpec",
            "the cache spec that gives rows a separate page size and keeps them for prefix-cache hits",
        ),
        "layer": Name(
            "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
            "base class of the cache layer, so that vLLM gives it pages",
        ),
        "layer_number": Name(
            "vllm.model_executor.models.utils:extract_layer_index",
            "vLLM sorts cache layers by it, so the name of our layer contains exactly one integer",
        ),
        "full_graphs": Name(
            "vllm.v1.attention.backend:AttentionCGSupport.ALWAYS",
            "returned by our metadata builder, so that full CUDA graphs stay on",
        ),
        "static_layers": Name(
            "vllm.config:CompilationConfig.__dataclass_fields__.static_forward_context",
            "the cache layer is registered there under its name",
        ),
        "query_starts": Name(
            "vllm.v1.attention.backend:CommonAttentionMetadata.__dataclass_fields__.query_start_loc",
            "the index of each request's first token in a batch, which locates the tokens of rows of logits",
        ),
        "batch_slots": Name(
            "vllm.v1.attention.backend:CommonAttentionMetadata.__dataclass_fields__.slot_mapping",
            "the slot of each token of a batch, by which the request of a row of logits is found",
        ),
        "request_positions": Name(
            "vllm.v1.attention.backend:CommonAttentionMetadata.__dataclass_fields__.positions",
            "position of each token in its request, which M-RoPE positions do not give",
        ),
        "slots": Name(
            "vllm.forward_context:ForwardContext.__dataclass_fields__.slot_mapping",
            "the slots of a step's tokens, by cache layer",
        ),
        "layers": Name(
            "vllm.forward_context:ForwardContext.__dataclass_fields__.no_compile_layers",
            "the cache layers by name",
        ),
        "forward": Name(
            "vllm.forward_context:get_forward_context",
            "the running forward, in which an op finds rows and slots",
        ),
        "in_forward": Name(
            "vllm.forward_context:is_forward_context_available",
            "says whether a forward is running",
        ),
        "connector": Name(
            "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.handle_preemptions",
            "called before a forward overwrites freed blocks",
        ),
        "metadata": Name(
            "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1._get_connector_metadata",
            "the scheduler's message for this step",
        ),
        "group": Name(
            "vllm.distributed.kv_transfer.kv_transfer_state:get_kv_transfer_group",
            "the connector of this process, which takes the logits of a step",
        ),
        "has_group": Name(
            "vllm.distributed.kv_transfer.kv_transfer_state:has_kv_transfer_group",
            "says whether this process already has a connector, of which vLLM allows one",
        ),
        "cache_manager": Name(
            "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.bind_kv_cache_manager",
            "gives the scheduler half vLLM's cache manager",
        ),
        "resets": Name(
            "vllm.v1.core.kv_cache_manager:KVCacheManager.reset_prefix_cache",
            "wrapped in the scheduler: before a reset the kept blocks of ended requests are freed, and after it no "
            "earlier rows are borrowed",
        ),
        "kept": Name(
            "vllm.v1.core.kv_cache_manager:KVCacheManager.free",
            "frees the kept blocks; a second call does nothing",
        ),
        "turns": Name(
            "vllm.v1.core.sched.scheduler:Scheduler._update_request_as_session",
            "wrapped in the scheduler: says how many tokens of earlier turns a session keeps",
        ),
        "ends_of_turns": Name(
            "vllm.v1.core.sched.scheduler:Scheduler._handle_stopped_request",
            "wrapped in the scheduler: says which step drafted the last tokens of a turn",
        ),
        "pauses": Name(
            "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.has_pending_push_work",
            "a pause, and the sleep after it, waits until rows are copied off the GPU or out of a pool",
        ),
        "own_ids": Name(
            "vllm.envs:environment_variables.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
            "if set, a client may reuse the id of an ended request, so no blocks are kept for ended requests",
        ),
        "sleep_mode": Name(
            "vllm.config:ModelConfig.__dataclass_fields__.enable_sleep_mode",
            "an engine that may sleep copies its rows off the GPU in each step",
        ),
        "sleep_memory": Name(
            "vllm.config:ModelConfig.__dataclass_fields__.enable_cumem_allocator",
            "caches lie in memory that sleep() frees",
        ),
        "scheduled": Name(
            "vllm.config:SchedulerConfig.__dataclass_fields__.max_num_scheduled_tokens",
            "detects prompts longer than a step that could never be scheduled: with a draft, without chunked prefill",
        ),
        "latent_used": Name(
            "vllm.config:ModelConfig.use_mla",
            "says whether attention gets the latent, or keys and values of heads",
        ),
        "has_axes": Name(
            "vllm.config:ModelConfig.uses_mrope",
            "says whether positions have several axes",
        ),
        "in_transformers": Name(
            "vllm.config:ModelConfig.using_transformers_backend",
            "says whether the Transformers backend serves a model, with the modules of transformers",
        ),
        "norms": Name(
            "vllm.config.kernel:IrOpPriorityConfig.__dataclass_fields__.fused_add_rms_norm",
            "says whether Inductor compiles an add-and-norm, which then overwrites no input",
            "taps read copies, as with a kernel that overwrites its inputs",
        ),
        "invariant": Name(
            "vllm.envs:environment_variables.VLLM_BATCH_INVARIANT",
            "switches Inductor's add-and-norm off; vLLM's own overwrites its inputs",
        ),
        "compiler": Name(
            "vllm.config:CompilationConfig.__dataclass_fields__.backend",
            "says whether Inductor compiles the model",
        ),
        "unquantised": Name(
            "vllm.model_executor.layers.linear:UnquantizedLinearMethod",
            "says that a matrix product writes a linear layer's output",
        ),
        "layout": Name(
            "torch:Tag.flexible_layout",
            "lets Inductor hand values to taps in any layout, without a copy",
        ),
        "hash": Name(
            "vllm.config:VllmConfig.compute_hash",
            "covers additional_config, where the selection is written: a graph with other taps is never reused",
        ),
    },
    "rows in the cache": {
        "zeroes": Name(
            "vllm.v1.worker.utils:KVBlockZeroer",
            "zeroes newly allocated blocks; told to leave out our cache layer, whose rows may still be read",
        ),
    },
    "draft": {
        "draft": Name(
            "vllm.model_executor.models.extract_hidden_states:ExtractHiddenStatesModel",
            "vLLM's cache-only draft model; ours is registered under its name",
        ),
        "no_drafts": Name(
            "vllm.config:SpeculativeConfig.__dataclass_fields__.num_speculative_tokens_per_batch_size",
            "the schedule of 0 draft tokens, with which each request decodes one token per step; set on the V1 runner",
        ),
    },
    "draft on the V1 runner": {
        "proposer": Name(
            "vllm.v1.spec_decode.extract_hidden_states:ExtractHiddenStatesProposer.propose",
            "V1 runner: replaced, if our draft is loaded, by a method that proposes no draft token",
        ),
        "sampler": Name(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
            "V1 runner: told that a step has no draft tokens, if our draft is loaded",
        ),
    },
    "draft on the V2 runner": {
        "speculator": Name(
            "vllm.v1.worker.gpu.spec_decode.extract_hidden_states:ExtractHiddenStatesSpeculator.propose",
            "V2 runner: told to leave out the draft's forward, if our draft is loaded",
        ),
    },
    "pool": {
        "metadata_builders": Name(
            "vllm.v1.attention.backend:AttentionMetadataBuilder.build",
            "wrapped to read the metadata of every batch, because a pool has no cache layer that receives it",
        ),
        "capture_builders": Name(
            "vllm.v1.attention.backend:AttentionMetadataBuilder.build_for_cudagraph_capture",
            "wrapped too: a backend that delegates to one of two others does not call `build` during graph capture",
        ),
        "attention_spec": Name(
            "vllm.v1.kv_cache_interface:FullAttentionSpec",
            "identifies the cache group that keeps a slot for each token of a request",
        ),
        "all_groups": Name(
            "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA.request_finished_all_groups",
            "a connector that has it lets vLLM keep its hybrid cache manager on; called in place of request_finished",
        ),
        "uniform_spec": Name(
            "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs",
            "spec of a cache group whose layers have several sizes; the first layer gives its kind",
        ),
        "step_budget": Name(
            "vllm.config:SchedulerConfig.__dataclass_fields__.max_num_batched_tokens",
            "read by the scheduler at the beginning of each step, and lowered while prompts are captured",
        ),
        "skips_cache": Name(
            "vllm.v1.request:Request.get_skip_reading_prefix_cache",
            "sets the attribute skip_reading_prefix_cache, which makes vLLM compute cached tokens again",
        ),
        "hashes": Name(
            "vllm.v1.request:Request.update_block_hashes",
            "fills the list block_hashes, by which earlier captures are found and prefix hits limited",
        ),
        "hash_size": Name(
            "vllm.v1.core.block_pool:BlockPool",
            "its hash_block_size is the number of tokens per hash",
        ),
    },
    "hybrid models": {
        "aligned_states": Name(
            "vllm.config:CacheConfig.__dataclass_fields__.mamba_cache_mode",
            "says whether the parts of a prompt that steps compute end where blocks end",
        ),
        "partial_hits": Name(
            "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
            "detects prefix hits that end inside a block, because vLLM tells a connector only their whole blocks",
        ),
    },
    "speculative decoding": {
        "draft_config": Name(
            "vllm.config:SpeculativeConfig.__dataclass_fields__.draft_model_config",
            "says whether the model that is built is a draft, which is not captured",
        ),
        "target_config": Name(
            "vllm.config:SpeculativeConfig.__dataclass_fields__.target_model_config",
            "the target model; methods without a draft model set it as their draft model",
        ),
        "shares_modules": Name(
            "vllm.config:SpeculativeConfig.use_eagle",
            "says whether the draft may run modules of the target; taps are off while it does",
        ),
        "scheduled_drafts": Name(
            "vllm.v1.core.sched.output:SchedulerOutput.__dataclass_fields__.scheduled_spec_decode_tokens",
            "how many draft tokens of a request a step verifies",
        ),
    },
    "logits beside drafts on the V1 runner": {
        "logits_of_v1": Name(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._calc_spec_decode_metadata",
            "says which tokens of a step have logits",
        ),
    },
    "logits beside drafts on the V2 runner": {
        "logits_of_v2": Name(
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample",
            "is given the batch before logits are computed",
        ),
        "logits_indices": Name(
            "vllm.v1.worker.gpu.input_batch:InputBatch.__dataclass_fields__.logits_indices",
            "says which tokens of a step have logits",
        ),
    },
    "several ranks": {
        "answers": Name(
            "vllm.v1.executor.multiproc_executor:MultiprocExecutor.collective_rpc",
            "several ranks: told to wait for only one rank in steps in which ranks do not report",
        ),
    },
    "pipeline stages": {
        "stage_layers": Name(
            "vllm.distributed.utils:get_pp_indices",
            "says which layers each pipeline stage has",
        ),
        "stage": Name(
            "vllm.distributed.parallel_state:get_pp_group",
            "says which pipeline stage a process is",
        ),
        "stage_input": Name(
            "vllm.model_executor.models.interfaces:SupportsPP.__annotations__.make_empty_intermediate_tensors",
            "makes the intermediate tensors of a later stage for our first forward",
        ),
        "pages_of_stages": Name(
            "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware",
            "tells the scheduler half the pages of the pool of each stage",
        ),
    },
    "pipeline stages on the V2 runner": {
        "step_of_v2": Name(
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
            "runs a step; replaced in later stages, to note the token ids of their runner",
        ),
        "ids_of_v2": Name(
            "vllm.v1.worker.gpu.input_batch:InputBuffers",
            "holds the token ids of a step, in the same memory for all steps",
        ),
    },
    "expert parallelism": {
        "shared_tokens": Name(
            "vllm.config:ParallelConfig.use_sequence_parallel_moe",
            "says whether expert layers use sequence parallelism, which is refused",
        ),
    },
    "compilation": {
        "mode": Name(
            "vllm.config:CompilationMode.VLLM_COMPILE",
            "the only mode with piecewise compilation",
        ),
        "graphs_split": Name(
            "vllm.config:CompilationConfig.splitting_ops_contain_attention",
            "says whether each graph of a layer writes the residual stream to memory",
        ),
        "partition": Name(
            "vllm.config:CompilationConfig.__dataclass_fields__.use_inductor_graph_partition",
            "says whether Inductor splits the graph after fusion",
        ),
        "passes": Name(
            "vllm.config:CompilationConfig.__dataclass_fields__.pass_config",
            "holds the options fuse_norm_quant and fuse_allreduce_rms",
        ),
        "norm_quant": Name(
            "vllm.config.compilation:PassConfig.__dataclass_fields__.fuse_norm_quant",
            "a pass that fuses an add-and-norm with quantisation, into an op that overwrites the residual stream",
        ),
        "quantised": Name(
            "vllm.config:VllmConfig.__dataclass_fields__.quant_config",
            "says whether weights are quantised, which that pass needs",
        ),
        "norm_reduce": Name(
            "vllm.config.compilation:PassConfig.__dataclass_fields__.fuse_allreduce_rms",
            "a pass that fuses an add-and-norm with the all-reduce, into an op that overwrites the residual stream",
        ),
    },
    "CUDA graphs": {
        "graph_support": Name(
            "vllm.v1.attention.backend:AttentionMetadataBuilder.get_cudagraph_support",
            "says whether a graph of a whole step can hold an attention layer",
        ),
        "graph_mode": Name(
            "vllm.config:CompilationConfig.__dataclass_fields__.cudagraph_mode",
            "set to FULL after the model is built, if graphs of whole steps are correct",
        ),
    },
    "GPU": {
        "jit": Name(
            "triton.runtime.jit:JITFunction.run",
            "returns the compiled kernel of a launch, which later launches call directly",
        ),
        "launch": Name(
            "triton.compiler.compiler:CompiledKernel.__getitem__",
            "launches a compiled kernel with addresses, without checks of each argument",
        ),
        "pinning": Name(
            "torch.cuda:cudart",
            "its cudaHostRegister pins the ring's memory, which other processes share",
        ),
    },
    "latent attention": {
        "latent": Name(
            "vllm.model_executor.layers.attention:MLAAttention.forward",
            "in models with latent attention, its arguments are queries, latent and rotary key, in this order",
        ),
        "latent_modules": Name(
            "vllm.model_executor.layers.mla:MultiHeadLatentAttentionWrapper.forward",
            "calls the projections, the norm and the attention that are tapped in models with latent attention",
        ),
    },
    "indexer": {
        "indexer": Name(
            "vllm.model_executor.models.deepseek_v2:Indexer.forward",
            "returns a buffer that all indexers share; its first rows have the tokens that this indexer chose",
        ),
    },
    "M-RoPE": {
        "axes": Name(
            "vllm.config:ModelConfig.mrope_num_dims",
            "number of axes of M-RoPE positions",
        ),
    },
    "vision tower": {
        "raw_tokens": Name(
            "vllm.model_executor.models.interfaces:SupportsMultiModal.requires_raw_input_tokens",
            "set on these models, so that the forward gets token ids in addition to embeddings",
        ),
        "takes_embeddings": Name(
            "vllm.config:ModelConfig.supports_multimodal_inputs",
            "says whether the forward gets embeddings",
        ),
        "makes_embeddings": Name(
            "vllm.model_executor.models.interfaces:SupportsMultiModal.embed_input_ids",
            "makes the embeddings of our first forward",
        ),
        "encoders_only": Name(
            "vllm.config:MultiModalConfig.__dataclass_fields__.mm_encoder_only",
            "if set, vLLM runs no language model; refused at start",
        ),
        "pruned": Name(
            "vllm.config:MultiModalConfig.__dataclass_fields__.video_pruning_rate",
            "if set, vLLM drops tokens of videos; refused at start",
        ),
        "media": Name(
            "vllm.multimodal.inputs:MultiModalFeatureSpec.__dataclass_fields__.mm_position",
            "where an image lies in a prompt",
        ),
        "media_hash": Name(
            "vllm.multimodal.inputs:MultiModalFeatureSpec.__dataclass_fields__.identifier",
            "identifies the image of a prompt",
        ),
        "media_rows": Name(
            "vllm.multimodal.inputs:PlaceholderRange.__dataclass_fields__.is_embed",
            "which tokens of an image get its embeddings",
        ),
        "image_blocks": Name(
            "vllm.v1.attention.backend:AttentionBackend.supports_mm_prefix",
            "says whether tokens of an image attend to each other",
        ),
    },
    "attention summaries": {
        "attention": Name(
            "vllm.v1.attention.backend:AttentionImpl.forward",
            "wrapped in layers whose attention is summarised",
        ),
    },
    "attention summaries on a CPU": {
        "cpu_keys": Name(
            "vllm._custom_ops:cpu_attn_reshape_and_cache",
            "says how the CPU backend orders the keys of a block",
        ),
    },
    "routing of experts": {
        "router": Name(
            "vllm.model_executor.layers.fused_moe.router.fused_moe_router:FusedMoERouter.select_experts",
            "wrapped in layers whose routing is captured",
        ),
        "experts": Name(
            "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter._apply_eplb_mapping",
            "its input has the model's expert numbers, before they are mapped to redundant experts",
        ),
    },
    "Transformers backend": {
        "transformers_class": Name(
            "vllm.config:ModelConfig._get_transformers_backend_cls",
            "says whether the model is text-only",
        ),
        "registered": Name(
            "vllm.model_executor.models.registry:_LazyRegisteredModel.__dataclass_fields__.class_name",
            "names the class that serves an architecture; if it is of the Transformers backend, ours replaces it",
        ),
    },
    "sleep": {
        "before_sleep": Name(
            "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.reset_cache",
            "called before vLLM frees its caches, so that rows are copied first",
        ),
        "in_client": Name(
            "vllm.envs:environment_variables.VLLM_ENABLE_V1_MULTIPROCESSING",
            "says whether the engine runs in the client's process: then no step runs between the last reply and sleep",
        ),
        "allocator": Name(
            "vllm.device_allocator:get_mem_allocator_instance",
            "gives the allocator of the caches",
        ),
        "memory_of_caches": Name(
            "vllm.device_allocator:MemAllocator.use_memory_pool",
            "rows of a pool, and a buffer of reductions, get the tag of the caches, so sleep frees their memory",
        ),
        "several_pools": Name(
            "vllm.device_allocator:DEFERRABLE_TAGS",
            "says that the allocator may have several memory pools of one tag",
            "this memory stays on the GPU in sleep",
        ),
    },
    "bulk capture": {
        "request": Name(
            "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
            "refuses the fields of --sampling before a prompt is taken",
        ),
        "encoded": Name(
            "vllm.v1.serial_utils:MsgpackEncoder.encode",
            "encodes a request as for the engine's process, which refuses fields of the wrong type",
        ),
        "decoded": Name(
            "vllm.v1.serial_utils:MsgpackDecoder.decode",
            "decodes that message as the engine's process does",
        ),
    },
}
"""feature -> item -> its name. Every engine that captures uses the names of "always"."""
