# SPDX-License-Identifier: Apache-2.0
"""Latent attention with an indexer (DeepSeek V3.2, GLM-5) in float32 on a CPU, in an eager engine of this process.

vLLM's CPU platform refuses sparse attention, and its indexer computes in FP8. `stand_in` replaces the op of the
indexer, its cache, its quantisation, and the attention over the chosen tokens by the functions below. The rest is
vLLM's: the model, the order of its modules, the shared buffer of chosen tokens, the cache and its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from transformers import CONFIG_MAPPING, DeepseekV3Config
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.models import deepseek_v2
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.kv_cache_interface import KVCacheSpec

from tests.engine import latent_cpu


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let eager engines of this process run models with an indexer, with prefix caching and chunked prefill."""
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
    from vllm.platforms.cpu import CpuPlatform

    latent_cpu.stand_in(monkeypatch)
    # vLLM sets it to 1 for these models and does not restore it. It would then compile no other model in this process.
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    # vLLM registers this class for configs of V3.2. Other tests need the classes of transformers.
    monkeypatch.setattr(DeepseekV3Config, "model_type", "deepseek_v3")
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "deepseek_v32", DeepseekV3Config)
    chosen = CpuPlatform.get_attn_backend_cls.__func__  # type: ignore[attr-defined]

    def get_attn_backend_cls(cls: Any, selected: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        if attn_selector_config.use_sparse:
            return f"{__name__}.Backend"
        return chosen(cls, selected, attn_selector_config, num_heads)

    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", classmethod(get_attn_backend_cls))
    monkeypatch.setattr(deepseek_v2, "DeepseekV32IndexerCache", Cache)
    monkeypatch.setattr(deepseek_v2, "per_token_group_quant_fp8", unquantised)
    monkeypatch.setattr(SparseAttnIndexer, "forward_cpu", choose)
    monkeypatch.setattr(MultiHeadLatentAttentionWrapper, "__init__", may_skip)


class Cache(deepseek_v2.DeepseekV32IndexerCache):
    """The indexer's keys in float32, each of [head_dim]. vLLM stores them in FP8 with a scale each."""

    def __init__(self, head_dim: int, dtype: torch.dtype, prefix: str, cache_config: Any) -> None:
        super().__init__(head_dim, torch.float32, prefix, cache_config)

    def get_attn_backend(self) -> type[Any]:
        return Backend


def unquantised(values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scales [rows, 1] of 1), instead of FP8 values and their scales."""
    return values, torch.ones_like(values[:, :1])


@dataclass
class Steps:
    """Metadata of a step. requests: the request of each token, int64 [tokens]. positions: int64 [tokens]."""

    num_actual_tokens: int
    num_decode_tokens: int
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    requests: torch.Tensor
    positions: torch.Tensor
    num_decodes: int = 0
    num_prefills: int = 0
    prefill: Any = None
    decode: Any = None

    def all_fit(self, places: int) -> bool:
        """Whether every token of the step attends to all earlier ones, because these are at most `places`."""
        return int(self.positions[: self.num_actual_tokens].max()) < places

    def slots(self, token: int, block: int) -> torch.Tensor:
        """Cache slots of a request's tokens up to this token, int64 [n]. block: tokens per block."""
        places = torch.arange(int(self.positions[token]) + 1)
        return self.block_table[self.requests[token]].long()[places // block] * block + places % block


class Builder(AttentionMetadataBuilder[Steps]):
    def __init__(self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[arg-type]

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False) -> Steps:
        starts, lengths = common.query_start_loc.long(), common.seq_lens.long()
        counts = starts.diff()
        requests = torch.arange(len(counts)).repeat_interleave(counts)
        positions = torch.arange(len(requests)) - starts[requests] + (lengths[: len(counts)] - counts)[requests]
        tokens = common.num_actual_tokens
        return Steps(tokens, tokens, common.slot_mapping, common.block_table_tensor, requests, positions)


class Backend(CPUMLABackend):
    """Attention over the tokens that the indexer chose. The queries of all heads share the latent."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA_SPARSE_OF_TESTS"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return Builder

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class Impl(CPUMLAImpl):
    is_sparse: ClassVar[bool] = True
    supports_dense_mha_prefill: ClassVar[bool] = False

    def __init__(self, *args: Any, topk_indices_buffer: torch.Tensor, index_group_builder: Any = None, **more: Any):
        super().__init__(*args, **more)
        self.chosen = topk_indices_buffer

    def record_logical_topk_ready(self) -> None:
        """Does nothing. On a GPU, it records an event for another stream."""

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> Any:
        q = torch.cat(q, -1) if isinstance(q, tuple) else q
        block, out = kv_c_and_k_pe_cache.shape[1], q.new_zeros(*q.shape[:2], self.kv_lora_rank)
        entries = kv_c_and_k_pe_cache.reshape(-1, kv_c_and_k_pe_cache.shape[-1])
        every = attn_metadata.all_fit(self.chosen.shape[1])
        for token in range(len(q)):
            chosen, keys = self.chosen[token].long(), entries[attn_metadata.slots(token, block)]
            keys = keys if every else keys[chosen[chosen >= 0]]
            out[token] = torch.softmax(q[token] @ keys.T * self.scale, -1) @ keys[:, : self.kv_lora_rank]
        return out, None


_build = MultiHeadLatentAttentionWrapper.__init__


def may_skip(self: Any, *args: Any, **kwargs: Any) -> None:
    """Build the attention of a layer, and let its indexer skip short prompts, as vLLM does on a GPU."""
    _build(self, *args, **kwargs)
    if self.indexer is not None and not self.skip_topk:
        self.indexer.indexer_op.dense_mha_metadata_layer_name = self.mla_attn.layer_name


def choose(
    self: Any, hidden_states: torch.Tensor, q_quant: torch.Tensor, k: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Store the indexer's keys, and write the positions with each token's largest scores to the shared buffer.

    A score is the sum over heads of weight * relu(query @ key). q_quant: [tokens, heads, size]. k: [tokens, size].
    weights: [tokens, heads]. Unused entries of a row are -1. Returns the buffer, int32 [tokens of a step, index_topk].
    If no token attends to more than index_topk tokens, the buffer may keep the values of an earlier step or layer.
    """
    from vllm.forward_context import get_forward_context

    metadata: Any = get_forward_context().attn_metadata
    chosen: torch.Tensor = self.topk_indices_buffer
    if metadata is None:
        return chosen
    steps: Steps = metadata[self.k_cache.prefix]
    cache, tokens = self.k_cache.kv_cache, steps.num_actual_tokens
    block, entries = cache.shape[1], cache.view(-1, cache.shape[-1])
    entries[steps.slot_mapping[:tokens].long()] = k[:tokens]
    if self.dense_mha_metadata_layer_name and steps.all_fit(self.topk_tokens):
        return chosen
    chosen[: len(hidden_states)] = -1
    for token in range(tokens):
        keys = entries[steps.slots(token, block)]
        scores = weights[token] @ torch.relu(q_quant[token] @ keys.T)
        top = scores.topk(min(self.topk_tokens, len(keys))).indices
        chosen[token, : len(top)] = top.int()
    return chosen
