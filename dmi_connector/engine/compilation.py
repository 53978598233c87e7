# SPDX-License-Identifier: Apache-2.0
"""What taps must know of how vLLM compiles a model: which values last, and which are written out by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm import envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Compilation(NamedTuple):
    """in_place: whether an add-and-norm of a compiled model may overwrite what it is given, with no regard to other
    names of that (vLLM's `UnsafeCloneEliminationPass`): so do kernels of vLLM's own, while Inductor knows who reads
    what. stream_lasts: whether the residual stream before a layer is written out, in the model's dtype, and stays as it
    is until the layer ends.
    """

    in_place: bool = True
    stream_lasts: bool = False


def compilation_of(vllm_config: VllmConfig) -> Compilation:
    """How vLLM compiles the models of a configuration.

    A model that vLLM splits at attention hands the residual stream from one piece to the next. Two of its passes make
    an op of its own of an add-and-norm and what is beside it, which takes the stream over.
    """
    norm = vllm_config.kernel_config.ir_op_priority.fused_add_rms_norm[:1]
    config = vllm_config.compilation_config
    in_place = norm != ["native"] or envs.VLLM_BATCH_INVARIANT
    in_pieces = config.splitting_ops_contain_attention() and not config.use_inductor_graph_partition
    passes, tp = config.pass_config, vllm_config.parallel_config.tensor_parallel_size
    quantised, reduced = vllm_config.quant_config is not None, tp > 1
    fused = (passes.fuse_norm_quant and quantised) or (passes.fuse_allreduce_rms and reduced)
    return Compilation(in_place, stream_lasts=in_pieces and not in_place and not fused)
