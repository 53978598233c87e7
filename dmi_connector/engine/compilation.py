# SPDX-License-Identifier: Apache-2.0
"""What taps must know of how vLLM compiles a model: which values last, and which are written out by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm import envs
from vllm.config import CompilationMode

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Compilation(NamedTuple):
    """in_place: whether an add-and-norm of a compiled model may overwrite what it is given, with no regard to other
    names of that (vLLM's `UnsafeCloneEliminationPass`): so do kernels of vLLM's own, while Inductor knows who reads
    what. stream_lasts: whether the residual stream before a layer is written out, in the model's dtype, and stays as it
    is until the forward ends.
    """

    in_place: bool
    stream_lasts: bool


def compilation_of(vllm_config: VllmConfig) -> Compilation:
    """How vLLM compiles the models of a configuration.

    Where it splits them at attention, one piece hands the residual stream to the next. Two passes fuse an add-and-norm
    with the sum over ranks before it, or with what quantises after it, into one op, which overwrites the stream.
    """
    norm = vllm_config.kernel_config.ir_op_priority.fused_add_rms_norm[:1]
    config = vllm_config.compilation_config
    in_place = norm != ["native"] or envs.VLLM_BATCH_INVARIANT
    split = config.mode == CompilationMode.VLLM_COMPILE and config.splitting_ops_contain_attention()
    in_pieces = split and not config.use_inductor_graph_partition
    passes, ranks = config.pass_config, vllm_config.parallel_config.tensor_parallel_size
    quantised = vllm_config.quant_config is not None
    fused = (passes.fuse_allreduce_rms and ranks > 1) or (passes.fuse_norm_quant and quantised)
    return Compilation(in_place, stream_lasts=in_pieces and not in_place and not fused)
