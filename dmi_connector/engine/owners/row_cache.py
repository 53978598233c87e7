# SPDX-License-Identifier: Apache-2.0
"""Defines the cache layer whose pages hold the rows, and its attention backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models import extract_hidden_states as stock
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, KVCacheSpec

from dmi_connector.engine import contract, replaced
from dmi_connector.engine.owners.step import StepRows

if TYPE_CHECKING:
    import numpy as np
    from vllm.forward_context import ForwardContext

    from dmi_connector.engine.owners.base import Context


class CaptureMetadataBuilder(stock.CacheOnlyAttentionMetadataBuilder):
    """Builds only the slot mapping, so that full CUDA graphs stay on."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> stock.CacheOnlyAttentionMetadata:
        layers = self.vllm_config.compilation_config.static_forward_context
        for name in self.layer_names:
            layers[name].planned(common_attn_metadata)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class CaptureBackend(stock.CacheOnlyAttentionBackend):
    """Attention backend of the cache layer. It computes nothing."""

    @staticmethod
    def get_name() -> str:
        return "DMI_ROWS"

    @staticmethod
    def get_builder_cls() -> type[CaptureMetadataBuilder]:
        return CaptureMetadataBuilder


class CaptureLayer(StepRows, nn.Module, AttentionLayerBase):
    """A paged cache layer with one "head". The vector of this head is a whole row.

    rows: uint8 [slots, row_bytes], a view of the cache; None until vLLM binds it.
    """

    pages: ClassVar[int] = 0
    step_tokens: ClassVar[int] = 0

    def __init__(self, context: Context) -> None:
        super().__init__()
        vllm_config = get_current_vllm_config()
        self.layer_name = context.cache_layer
        self.context = context
        self.begin_steps(vllm_config)
        self.head_size = context.layout.row_bytes // self.row_dtype.itemsize
        self.num_heads = 1
        self.kv_cache = torch.tensor([])
        self.impl = CaptureBackend.get_impl_cls()(1, self.head_size, "auto", self.row_dtype)
        layers = vllm_config.compilation_config.static_forward_context
        if self.layer_name in layers:
            raise ValueError(f"Duplicate layer name: {self.layer_name}")
        layers[self.layer_name] = self
        replaced.zero_no_rows(CaptureBackend)

    @property
    def rows(self) -> torch.Tensor | None:
        cache = self.kv_cache
        if not isinstance(cache, torch.Tensor) or cache.numel() == 0:
            return None
        # Not stored: vLLM replaces the cache after profiling, and a stored view would keep the old one alive.
        return cache.view(-1, self.head_size).view(torch.uint8)

    def rows_and_slots(self, forward: ForwardContext, first: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `RowMemory`. The slots are those that vLLM assigns for this layer. A profiling run has none."""
        slots = forward.slot_mapping.get(self.layer_name) if isinstance(forward.slot_mapping, dict) else None
        rows = self.rows
        return None if rows is None or slots is None else (rows, slots)

    @property
    def cache_slots(self) -> int:
        rows = self.rows
        return 0 if rows is None else len(rows)

    def slots_in_cache(self, forward: ForwardContext) -> torch.Tensor:
        slots: torch.Tensor = forward.slot_mapping[self.layer_name]
        return slots

    def place(self, table: np.ndarray) -> None:
        """Raises RuntimeError: rows are in vLLM's blocks, which have no table."""
        raise RuntimeError(f"the scheduler sent a page table of {table.shape[1]} entries, but this engine has no pool")

    def check_cache(self) -> None:
        """Raises ValueError unless the cache is a contiguous [blocks, 1, slots, head_size], where row s has slot s."""
        cache = self.kv_cache
        shaped = cache.ndim == 4 and cache.shape[1] == 1 and cache.shape[3] == self.head_size
        if not (shaped and cache.is_contiguous()):
            raise ValueError(
                f"kv_cache: this vllm allocates the cache of rows as {list(cache.shape)} with strides "
                f"{list(cache.stride())}, not as a contiguous [blocks, 1, slots, {self.head_size}]; install "
                f"vllm{contract.SUPPORTED}, and leave VLLM_KV_CACHE_LAYOUT unset"
            )

    def get_attn_backend(self) -> type[AttentionBackend]:
        return CaptureBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return HiddenStateCacheSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.head_size,
            dtype=self.row_dtype,
        )
