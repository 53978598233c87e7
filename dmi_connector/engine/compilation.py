# SPDX-License-Identifier: Apache-2.0
"""How vLLM compiles a model, as far as taps must know it: which values last, and which are written out by themselves.
And what they ask for: that nothing is written over (`write_once`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm import envs
from vllm.config import CompilationMode

if TYPE_CHECKING:
    from vllm.config import VllmConfig

REUSE = ("allow_buffer_reuse", "inplace_buffers", "memory_planning")
"""Options of Inductor that let it put a value where another one was."""
_BACKENDS = ("", "inductor", "eager")
""""": vLLM's choice for the platform."""


class Compilation(NamedTuple):
    """in_place: whether a compiled model may overwrite what it is given before the next op, with no regard to who else
    refers to that: an add-and-norm that is a kernel of vLLM's own does (`UnsafeCloneEliminationPass`), and compilers
    other than Inductor may. stream_lasts: whether the residual stream before a layer is written out, in the model's
    dtype, and stays as it is until the forward ends.
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
    in_place = norm != ["native"] or envs.VLLM_BATCH_INVARIANT or config.backend not in _BACKENDS
    split = config.mode == CompilationMode.VLLM_COMPILE and config.splitting_ops_contain_attention()
    in_pieces = split and not config.use_inductor_graph_partition
    passes, ranks = config.pass_config, vllm_config.parallel_config.tensor_parallel_size
    quantised = vllm_config.quant_config is not None
    fused = (passes.fuse_allreduce_rms and ranks > 1) or (passes.fuse_norm_quant and quantised)
    return Compilation(in_place, stream_lasts=in_pieces and not in_place and not fused)


def write_once(vllm_config: VllmConfig) -> None:
    """Let Inductor write each buffer of a model once, before vLLM compiles it: the memory of what an op reads is then
    its own as long as anything refers to it. Memory that is done with goes back to torch's allocator all the same.
    """
    vllm_config.compilation_config.inductor_compile_config |= dict.fromkeys(REUSE, False)
