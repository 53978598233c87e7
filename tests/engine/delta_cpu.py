# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets in float32 on a CPU, with heads of any size, in an eager engine of this process.

vLLM's own CPU kernels only support bfloat16 and heads of 128. `stand_in` replaces the op that runs them by the
functions below, so tests compare rows, taps and stores in float32. The rest is vLLM's: the model, the order of its
modules, the states and their metadata.

`order_of_gpu` lets vLLM's own CPU kernels run in the forward that vLLM has for GPUs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

from tests.runner import GPU

NAME = "gdn_attention_core_of_tests"


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let eager engines of this process run gated delta nets in float32. On a GPU, vLLM's kernels run.

    Worker processes call it too if they have the extension in `delta_worker`.
    """
    if GPU:
        return
    from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import register_cpu_gdn_attention_ops
    from vllm.utils.torch_utils import direct_register_custom_op

    register_cpu_gdn_attention_ops()
    if not hasattr(torch.ops.vllm, NAME):
        direct_register_custom_op(op_name=NAME, op_func=core, mutates_args=["out"])
    monkeypatch.setattr(torch.ops.vllm, "cpu_gdn_attention_core", getattr(torch.ops.vllm, NAME))


def order_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines of this process run the forward of gated delta nets for GPUs, with vLLM's CPU kernels.

    With drafts, this forward calls one op for core and norm. In steps without prompts, vLLM's op runs a fused kernel.
    In other steps it runs the core, then the norm. The stand-in always runs the core, then the norm. On a GPU, nothing
    changes.
    """
    if GPU:
        return
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention as Mixer
    from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import cpu_gdn_attention_core

    build = Mixer.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.enable_fused_gdn_spec_decode = self.speculative_config is not None

    def core_alone(
        self: Any, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        cpu_gdn_attention_core(mixed_qkv, b, a, core_attn_out, self.prefix)

    def norm(self: Any, x: torch.Tensor, output_gate: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self.norm.forward_native(x, output_gate))

    monkeypatch.setattr(Mixer, "__init__", built)
    monkeypatch.setattr(Mixer, "forward_cpu", Mixer.forward_cuda)
    monkeypatch.setattr(Mixer, "_forward_core", core_alone)
    monkeypatch.setattr(Mixer, "_rms_norm_gated_cuda", norm)
    monkeypatch.setattr(Mixer, "_warmup_prefill_kernels", lambda *_: None)


def core(qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor, layer_name: LayerNameType) -> None:
    """Compute convolution and recurrence over the tokens of each request.

    They start from the request's states, and update them. qkv: [tokens, width]. a, b: [tokens, heads]. out: the result,
    [tokens, heads, size], written in place.
    """
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    metadata: Any = context.attn_metadata[layer.prefix]  # type: ignore[call-overload, index]
    starts = metadata.non_spec_query_start_loc.tolist()
    conv, states = layer.kv_cache[0].transpose(-1, -2), layer.kv_cache[1]
    slots = metadata.non_spec_state_indices_tensor.tolist()
    for i, (first, last) in enumerate(pairwise(starts)):
        begins = i >= metadata.num_decodes and not bool(metadata.has_initial_state[i])
        if begins:
            conv[slots[i]], states[slots[i]] = 0, 0
        given = torch.cat([conv[slots[i]], qkv[first:last].T], -1)
        conv[slots[i]] = given[:, -conv.shape[-1] :]
        mixed = F.silu(F.conv1d(given[None], layer.conv1d.weight, groups=len(given))[0].T)
        keys, heads = (n // layer.tp_size for n in (layer.num_k_heads, layer.num_v_heads))  # of this rank
        widths = (layer.head_k_dim * keys, layer.head_k_dim * keys, layer.head_v_dim * heads)
        q, k, v = mixed.split(widths, -1)
        q, k = (x.unflatten(-1, (keys, -1)).repeat_interleave(heads // keys, 1) for x in (q, k))
        decay = torch.exp(-layer.A_log.exp() * F.softplus(a[first:last] + layer.dt_bias))
        inputs = (q, k, v.unflatten(-1, (heads, -1)), decay, b[first:last].sigmoid())
        state = states[slots[i]].view(heads, layer.head_k_dim, layer.head_v_dim)
        out[first:last] = delta_rule(state, *inputs)


def delta_rule(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The gated delta rule (Yang et al., 2024), token by token. Returns [tokens, heads, value size].

    state: [heads, key size, value size], changed in place. q, k, v: [tokens, heads, size]. decay, beta: [tokens,
    heads].
    """
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    out = []
    for t in range(len(q)):
        state *= decay[t, :, None, None]
        change = (v[t] - (state * k[t, :, :, None]).sum(1)) * beta[t, :, None]
        state += k[t, :, :, None] * change[:, None]
        out.append((state * q[t, :, :, None]).sum(1) * q.shape[-1] ** -0.5)
    return torch.stack(out)
