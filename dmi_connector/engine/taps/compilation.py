# SPDX-License-Identifier: Apache-2.0
"""The properties of vLLM's compilation that taps depend on."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, NamedTuple

from vllm import envs

from dmi_connector.engine import contract

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_BACKENDS = ("", "inductor", "eager")
"""Values of vLLM's option `backend` whose compilers overwrite no value before its tap. "" is the platform's default."""


class Compilation(NamedTuple):
    """How a model is compiled.

    in_place: whether the model may overwrite a value before a tap writes it to rows. vLLM's own add-and-norm kernel
    overwrites its inputs (`UnsafeCloneEliminationPass`), and compilers other than Inductor may overwrite values.
    stream_lasts: whether the residual stream before a layer is written to memory in the model's dtype, and not
    overwritten in this forward. products_last: whether the matrix product is the last operation of a linear layer; with
    LoRA it is not. copies: whether each tap reads a copy, as in an untested version of vLLM.
    """

    in_place: bool
    stream_lasts: bool
    products_last: bool = True
    copies: bool = False


def compilation_of(vllm_config: VllmConfig) -> Compilation:
    """How vLLM compiles the models of a configuration.

    With piecewise compilation, the residual stream is the output of one graph and the input of the next, so it is in
    memory. `stream_lasts` is nevertheless False if vLLM fuses an add-and-norm with the all-reduce before it, or with
    the quantisation after it, because the fused op overwrites the stream.
    """
    if contract.untested():
        return Compilation(True, False, False, copies=True)
    config, plain = vllm_config.compilation_config, vllm_config.lora_config is None
    in_place = not _norms_compiled(vllm_config) or envs.VLLM_BATCH_INVARIANT or config.backend not in _BACKENDS
    if vllm_config.model_config.enforce_eager:
        return Compilation(in_place, False, plain)
    passes, ranks = config.pass_config, vllm_config.parallel_config.tensor_parallel_size
    quantised = vllm_config.quant_config is not None
    fused = (passes.fuse_allreduce_rms and ranks > 1) or (passes.fuse_norm_quant and quantised)
    return Compilation(in_place, is_piecewise(vllm_config) and not in_place and not fused, plain)


def is_piecewise(vllm_config: VllmConfig) -> bool:
    """Whether vLLM splits a model into graphs at attention and mixers before it compiles it."""
    from vllm.config import CompilationMode

    config = vllm_config.compilation_config
    split = config.mode == CompilationMode.VLLM_COMPILE and config.splitting_ops_contain_attention()
    return split and not config.use_inductor_graph_partition


def check_mixers(vllm_config: VllmConfig, hooks: Container[str]) -> None:
    """Raise ValueError for `mix_proj` if a mixer (such as Mamba) on a GPU may overwrite it before it is captured.

    In decode, a mixer overwrites its input projection with the result of its convolution. vLLM does not declare this
    mutation. So if the graph is not split at mixers, Inductor may copy the projection after it was overwritten.
    """
    from vllm.config import CompilationMode

    mode = vllm_config.compilation_config.mode
    compiled = not vllm_config.model_config.enforce_eager and mode != CompilationMode.NONE
    gpu = vllm_config.device_config.device_type != "cpu"
    if "mix_proj" in hooks and gpu and compiled and not is_piecewise(vllm_config):
        raise ValueError(
            "compilation_config: the compiled graph is not split at mixers (mode, splitting_ops, "
            "use_inductor_graph_partition or fuse_attn_quant), so mix_proj could be overwritten while it is captured; "
            "leave these options out, or take mix_proj out of the hooks, as in 'vllm-full,-mix_proj'"
        )


def _norms_compiled(vllm_config: VllmConfig) -> bool:
    """Whether Inductor compiles add-and-norms. False if vLLM's config lacks this setting, as in 0.34 and later."""
    priority = getattr(vllm_config.kernel_config, "ir_op_priority", None)
    return getattr(priority, "fused_add_rms_norm", ["unknown"])[:1] == ["native"]
