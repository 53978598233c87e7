# SPDX-License-Identifier: Apache-2.0
"""Worker half of a pool: memory of the rows, the table from vLLM's slots to pages, and slots of the running step."""

from __future__ import annotations

import weakref
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config

from dmi_connector.engine.gpu_memory import freed_in_sleep, kept_in_sleep
from dmi_connector.engine.kernels.lookup import Lookup
from dmi_connector.engine.owners.pool_limits import PAGE, StepLimits, page_size
from dmi_connector.engine.owners.pool_size import pool_rows
from dmi_connector.engine.owners.step import StepRows

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from dmi_connector.engine.owners.base import Context

_PADDING = 512
"""Tokens by which vLLM may pad a step beyond `max_num_batched_tokens`."""


class RowPool(StepRows, nn.Module):
    """Rows in pages, registered under `CaptureContext.cache_layer` among vLLM's layers. It is no cache layer of vLLM.

    rows: uint8 [(1 + pages) * page size, row_bytes]. Page 0 is the null page: Triton skips tokens without a row, torch
    twins of the kernels write their values there. table: int64 [slots of the cache / page size], the page of each
    page-sized range of vLLM's slots, or -1. It has one entry until vLLM has allocated its cache. slots: int64 [tokens],
    the slots of the running step. CUDA graphs use its address.

    Sleep frees the rows, which are exported before or computed again. It frees neither `table` nor `slots`.
    """

    def __init__(self, context: Context) -> None:
        super().__init__()
        vllm_config = get_current_vllm_config()
        self.begin_steps(vllm_config)
        limits = StepLimits.of(vllm_config)
        count = pool_rows(context.options, context.layout.row_bytes, limits, vllm_config)
        self._may_sleep = context.may_sleep
        device = torch.empty(0).device  # vLLM's default device, on which it builds the model
        shape = PAGE + count, context.layout.row_bytes
        rows = lambda: torch.empty(shape, dtype=torch.uint8, device=device)  # noqa: E731
        with torch.inference_mode(False):
            self._memory = freed_in_sleep(rows, device, self._may_sleep)
            self.table = self._unknown(1, device)
            self.slots = self._unknown(limits.stock + _PADDING, device)
        self._lookup = Lookup(PAGE)
        self._layer = ""
        layers = vllm_config.compilation_config.static_forward_context
        if context.cache_layer in layers:
            raise ValueError(f"Duplicate layer name: {context.cache_layer}")
        layers[context.cache_layer] = self

    def _unknown(self, count: int, device: torch.device) -> torch.Tensor:
        """int64 [count]: -1. Its content stays over sleep."""
        return kept_in_sleep(
            lambda: torch.full((count,), -1, dtype=torch.int64, device=device), device, self._may_sleep
        )

    @property
    def rows(self) -> torch.Tensor:
        return self._memory

    @property
    def pages(self) -> int:
        return len(self._memory) // self._lookup.size - 1

    def follow(self, layer: str, block_size: int, blocks: int, vllm_config: VllmConfig) -> None:
        """vLLM has allocated its cache: use the slots of `layer`. blocks: number of blocks of the cache."""
        size = page_size(block_size)
        self._layer, self._lookup = layer, Lookup(size)
        with torch.inference_mode(False):
            self.table = self._unknown(blocks * block_size // size, self._memory.device)
            self.places(self.slots[:1])  # compile now, because a graph capture cannot
        watch_steps(layer, self, vllm_config)

    def rows_and_slots(self, forward: ForwardContext, first: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `RowMemory`. The first tap of a forward looks up the slots of all its tokens."""
        slots = _slots_of(forward, self._layer)
        if slots is None:
            return None
        if len(slots) > len(self.slots):
            raise RuntimeError(f"a step has {len(slots)} tokens, more than the {len(self.slots)} that the pool expects")
        if first:
            self._lookup(slots, self.table, self.slots)
        return self._memory, self.slots[: len(slots)]

    @property
    def cache_slots(self) -> int:
        return len(self.table) * self._lookup.size

    @property
    def step_tokens(self) -> int:
        return len(self.slots)

    def slots_in_cache(self, forward: ForwardContext) -> torch.Tensor:
        slots = _slots_of(forward, self._layer)
        assert slots is not None, "a forward without slots writes no row"
        return slots

    def places(self, slots: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(slots)
        self._lookup(slots, self.table, found)
        return found

    def place(self, table: np.ndarray) -> None:
        """Change entries of the table on the engine's stream, after all work that was launched before.

        The driver copies such a small array before the call returns, so it may be freed then.
        """
        entries, pages = torch.from_numpy(table).to(self.table.device, non_blocking=True)
        self.table.scatter_(0, entries, pages)


def _slots_of(forward: ForwardContext, layer: str) -> torch.Tensor | None:
    """vLLM's slots of a layer in a forward. None in a profiling run. layer: "" for any layer, before a cache exists."""
    slots: Any = forward.slot_mapping
    if not isinstance(slots, dict):
        return None
    found: torch.Tensor | None = slots.get(layer) if layer else next(iter(slots.values()), None)
    return found


_watching: dict[str, weakref.ref[RowPool]] = {}
"""Name of an attention layer -> the pool that gets its metadata. A process has one engine at a time."""


def watch_steps(layer: str, pool: RowPool, vllm_config: VllmConfig) -> None:
    """Give a pool the metadata of each batch. Both runners pass it to the metadata builder of an attention layer."""
    _watching[layer] = weakref.ref(pool)
    attention: Any = vllm_config.compilation_config.static_forward_context[layer]
    builder = attention.get_attn_backend().get_builder_cls()
    if not hasattr(builder.build, "dmi_tells"):
        builder.build = _telling(builder.build)


def _telling(build: Any) -> Any:
    @wraps(build)
    def told(
        self: Any, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *args: Any, **kwargs: Any
    ) -> Any:
        for layer, known in [*_watching.items()]:
            if layer in self.layer_names and (pool := known()) is not None:
                pool.planned(common_attn_metadata)
        return build(self, common_prefix_len, common_attn_metadata, *args, **kwargs)

    told.dmi_tells = True  # type: ignore[attr-defined]
    return told
