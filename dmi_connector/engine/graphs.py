# SPDX-License-Identifier: Apache-2.0
"""Chooses the mode of CUDA graphs (option `cuda_graphs`).

vLLM's default, FULL_AND_PIECEWISE, runs mixed prefill-decode batches with piecewise graphs, in which capture costs
more. FULL runs each such batch as one graph, if the attention backend supports that.

FlashAttention 3 supports it. FlashAttention 4 claims support in vLLM 0.33, but its values were not compared.
FlashAttention 3 gives wrong attention for head sizes of up to 64, or of more than 128. In a step with one token per
request, its scheduler metadata is for another kernel than the one in the graph (vLLM 0.32, H200: 9 of 30 sequences
correct with head size 64, 30 of 30 with 128). So FULL is chosen only if tests found it to be correct.

The scheduler metadata and the graph must also agree on the number of splits of keys and values. The two numbers agree
if `flash_attn_max_num_splits_for_cuda_graph` is above 1. For attention that is not causal, as in encoders, vLLM's graph
records the max_query_len of a dummy batch, which is too small for later steps. So such models keep piecewise graphs.

Qwen3-VL adds visual features to the output of its first layers, from a buffer. Python code at the end of the model's
forward clears the buffer, but no Python runs while a graph of a whole step is replayed. So with FULL the features of an
image would also be added to the tokens of later steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import CUDAGraphMode
from vllm.logger import init_logger

from dmi_connector.engine import contract

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.dmi_connector")

_BACKEND, _VERSION = "FLASH_ATTN", 3
"""The attention backend and the version of its kernels whose values in full graphs were compared."""
_WRONG_UP_TO, _RIGHT_UP_TO = 64, 128
"""FULL is correct for head sizes above the first number and up to the second."""
_DECODER = "decoder"
"""The type of causal attention, in `AttentionType` of vLLM."""
_LARGEST = 512
"""Number of tokens that few steps of a busy engine exceed. vLLM's default max_cudagraph_capture_size is not larger,
except on Blackwell GPUs.
"""


def choose_graphs(vllm_config: VllmConfig, option: str, visual_layers: int) -> None:
    """Replace the mode FULL_AND_PIECEWISE by FULL if tests found FULL to be correct, and log in which steps capture
    costs more.

    Logs a warning if the user chose FULL, and FULL gives wrong values because of the head size or visual features.

    Call this function after the attention layers are built, and before the KV cache is allocated. option:
    `ServerOptions.cuda_graphs`. visual_layers: `CaptureContext.visual_layers`.
    """
    config = vllm_config.compilation_config
    given = config.cudagraph_mode
    if given in (None, CUDAGraphMode.NONE) or vllm_config.device_config.device_type == "cpu":
        return
    visual = visual_layers > 0 and vllm_config.model_config.supports_multimodal_inputs
    why_not = _VISUAL if visual else _why_not_full(vllm_config)
    if given == CUDAGraphMode.FULL and why_not == _WRONG_HEADS:
        logger.warning("dmi_connector: cudagraph_mode: FULL gives wrong attention here: %s; leave it out", why_not)
    if given == CUDAGraphMode.FULL and why_not == _VISUAL:
        logger.warning("dmi_connector: cudagraph_mode: FULL gives wrong values here: %s; leave it out", why_not)
    if given == CUDAGraphMode.FULL_AND_PIECEWISE and option == "auto" and not why_not:
        config.cudagraph_mode = CUDAGraphMode.FULL
    if config.cudagraph_mode != CUDAGraphMode.FULL:
        reason = why_not or f"cuda_graphs is {option!r} and cudagraph_mode {given.name}"
        mixed = "without" if given.mixed_mode() == CUDAGraphMode.NONE else "with piecewise"
        logger.info(
            "dmi_connector: mixed prefill-decode batches run %s CUDA graphs: capture costs more there (%s)",
            mixed,
            reason,
        )
        return
    largest, steps = config.max_cudagraph_capture_size, vllm_config.scheduler_config.max_num_batched_tokens
    if largest < min(_LARGEST, steps):
        logger.info(
            "dmi_connector: the largest CUDA graph has %d tokens: larger steps run without one, and capture costs more "
            "there. A max_cudagraph_capture_size of %d in the compilation config covers most steps",
            largest,
            _LARGEST,
        )


_WRONG_HEADS = f"{_BACKEND} has heads of up to {_WRONG_UP_TO} values, or of more than {_RIGHT_UP_TO}"
_VISUAL = "the first layers add visual features, which vLLM does not clear when it replays a graph of a whole step"


def _why_not_full(vllm_config: VllmConfig) -> str:
    """Why FULL is not known to be correct; "" if it is."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backend import AttentionCGSupport

    if version := contract.untested():
        return f"vLLM {version} was not tested"
    if not vllm_config.use_v2_model_runner:
        return "vLLM's V1 model runner"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline stages"
    layers: list[Any] = [
        layer
        for layer in vllm_config.compilation_config.static_forward_context.values()
        if isinstance(layer, AttentionLayerBase)
    ]
    if (splits := vllm_config.attention_config.flash_attn_max_num_splits_for_cuda_graph) < 2:
        return f"flash_attn_max_num_splits_for_cuda_graph is {splits}"
    for layer in layers:
        backend = layer.get_attn_backend()
        if backend.get_name() != _BACKEND:
            return f"attention backend {backend.get_name()}"
        kernels = getattr(layer.impl, "vllm_flash_attn_version", None)
        if kernels != _VERSION:
            return f"{_BACKEND} runs FlashAttention {kernels}"
        if layer.impl.attn_type != _DECODER:
            return "attention that is not causal"
        spec = layer.get_kv_cache_spec(vllm_config)
        support = backend.get_builder_cls().get_cudagraph_support(vllm_config, spec)
        if support != AttentionCGSupport.ALWAYS:
            return f"{_BACKEND} supports only graphs of {support.name} on this GPU"
        if not _WRONG_UP_TO < layer.head_size <= _RIGHT_UP_TO:
            return _WRONG_HEADS
        if getattr(spec, "sliding_window", None) is not None:
            return "sliding windows"
    return ""
