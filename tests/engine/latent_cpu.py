# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA) on a CPU, in an engine of this process, with any kv_lora_rank and qk_rope_head_dim.

vLLM's CPU decode kernel supports only 512 and 64, and its CPU platform disables prefix caching and chunked prefill.
`stand_in` replaces the decode kernel and `merge_attn_states`. It keeps both features enabled, so rows, taps and stores
are tested with every kind of step. Everything else is vLLM's own code: the model, the order of its modules, the cache,
the rest of the decode path, and prefill.

`docs/HOOKS.md` says which of the options KERNEL, WHOLE and ROTARY a user needs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runner import GPU

KERNEL: dict[str, Any] = {} if GPU else {"attention_config": {"backend": "CPU_MLA"}}
"""Options of an engine that uses vLLM's float32 kernel on any CPU. With AMX, vLLM would use a bfloat16 kernel."""
WHOLE: dict[str, Any] = {"max_num_batched_tokens": 512}
"""For owner draft with that kernel. vLLM does not split prompts then, so a step must hold max_model_len tokens."""
ROTARY: dict[str, Any] = {} if GPU else {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
"""Options of an eager engine. vLLM 0.32's CPU kernel rotates heads incorrectly if they are next to other values."""
ODD = {"kv_lora_rank": 280, "qk_rope_head_dim": 40, "qk_nope_head_dim": 20, "v_head_dim": 28}
"""Sizes without a kernel on a CPU. kv_lora_rank + qk_rope_head_dim must be 320, 512 or 576 for vLLM."""
HEADS = {"kv_lora_rank": 40, "qk_rope_head_dim": 24, "qk_nope_head_dim": 40, "v_head_dim": 28}
"""Sizes with head size 64, which vLLM's multi-head attention on a CPU supports (VLLM_MLA_DISABLE=1)."""


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines of this process run latent attention of other shapes, with prefix caching and chunked prefill."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.platforms.cpu import CpuPlatform

    monkeypatch.setattr(_custom_ops, "mla_decode_kvcache_cpu", decode)
    monkeypatch.setattr(mla_attention, "merge_attn_states", merge)
    checked = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        steps = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching
        checked(vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching = steps

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_update_config))


def decode(
    out: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Decode one query per request over its paged latents.

    out: [requests, heads, latent]. query: [requests, heads, latent + rotary]. kv_cache: [blocks, block, latent +
    rotary].
    """
    for i, length in enumerate(seq_lens.tolist()):
        blocks = block_tables[i, : -(-length // kv_cache.shape[1])].long()
        keys = kv_cache[blocks].flatten(0, 1)[:length]
        out[i] = torch.softmax(query[i] @ keys.T * scale, -1) @ keys[:, : out.shape[-1]]


def merge(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
) -> None:
    """Merge attention over two parts of the keys. Outputs: [tokens, heads, size]. Log-sum-exps: [heads, tokens]."""
    weights = torch.softmax(torch.stack([prefix_lse, suffix_lse]), 0).mT[..., None]
    output.copy_(weights[0] * prefix_output + weights[1] * suffix_output)
