# SPDX-License-Identifier: Apache-2.0
"""Worker half of owner "pool": memory of the rows, table from vLLM's slots to pages, slots of the running step."""

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
    """A `RowMemory` of pages, registered among vLLM's layers as `CaptureContext.cache_layer`. It has no KV cache.

    rows: uint8 [(1 + pages) * page size, row_bytes]. Page 0 is the null page. For a token without a row, kernels write
    nothing on a GPU, and to the null page on a CPU. table: int64 [slots of vLLM's cache / page size], the page of each
    page-sized range of vLLM's slots, or -1. It has one entry until vLLM has allocated its cache. slots: int64 [maximum
    tokens of a step], the slots in `rows` of the tokens of the running step. CUDA graphs use the address of `slots`.

    With vLLM 0.32 or later, sleep() frees the memory of `rows` (`freed_in_sleep`). It never frees the memory of `table`
    and `slots`. Stores lose no rows: rows are exported before the sleep, or computed again after it.
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
        """A tensor of -1, int64 [count], that keeps its content during sleep."""
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
        """Use vLLM's slots of `layer`. Called once vLLM has allocated its cache, which has `blocks` blocks."""
        size = page_size(block_size)
        self._layer, self._lookup = layer, Lookup(size)
        with torch.inference_mode(False):
            self.table = self._unknown(blocks * block_size // size, self._memory.device)
            self.places(self.slots[:1])  # compile now, because a graph capture cannot
        watch_steps(layer, self, vllm_config)

    def rows_and_slots(self, forward: ForwardContext, first: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `RowMemory`. The first tap of a forward looks up the pool's slots of all tokens of the forward.

        Raises RuntimeError if the forward has more tokens than `slots`.
        """
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
        """Change entries of the table on the engine's CUDA stream, after all work that was launched before.

        table: int64 [2, n], the indexes of the entries, then their new pages. The driver copies pageable memory of this
        size before the call returns, so the caller may free `table`.
        """
        entries, pages = torch.from_numpy(table).to(self.table.device, non_blocking=True)
        self.table.scatter_(0, entries, pages)


def _slots_of(forward: ForwardContext, layer: str) -> torch.Tensor | None:
    """vLLM's slots of a layer in a forward, int64 [tokens]; None in a profiling run. layer: "" for the first layer."""
    slots: Any = forward.slot_mapping
    if not isinstance(slots, dict):
        return None
    found: torch.Tensor | None = slots.get(layer) if layer else next(iter(slots.values()), None)
    return found


_watching: dict[str, weakref.ref[RowPool]] = {}
"""Name of an attention layer -> the pool that gets the metadata of its batches. A process has one engine at a time."""


def watch_steps(layer: str, pool: RowPool, vllm_config: VllmConfig) -> None:
    """Call `pool.planned` with the metadata of each batch.

    Both model runners of vLLM pass the metadata to `build` of the layer's metadata builder, and while they capture a
    CUDA graph to `build_for_cudagraph_capture`. This function wraps both. By default the second calls the first, but
    not in a backend that chooses between two builders.
    """
    _watching[layer] = weakref.ref(pool)
    attention: Any = vllm_config.compilation_config.static_forward_context[layer]
    builder = attention.get_attn_backend().get_builder_cls()
    for name, at in (("build", 1), ("build_for_cudagraph_capture", 0)):
        if not hasattr(getattr(builder, name), "dmi_tells"):
            setattr(builder, name, _telling(getattr(builder, name), at))


def _telling(build: Any, at: int) -> Any:
    """Wrap `build`, so that it also passes the metadata to pools. at: index of the metadata among its arguments."""

    @wraps(build)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata: CommonAttentionMetadata = args[at] if len(args) > at else kwargs["common_attn_metadata"]
        for layer, known in [*_watching.items()]:
            if layer in self.layer_names and (pool := known()) is not None:
                pool.planned(metadata)
        return build(self, *args, **kwargs)

    told.dmi_tells = True  # type: ignore[attr-defined]
    return told
