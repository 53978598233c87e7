# SPDX-License-Identifier: Apache-2.0
"""Owner "pool": rows are in pages outside of vLLM's cache. Only tokens that are captured have a row.

The scheduler assigns each row a slot by its request and position, independent of the batch:

    scheduler   position -> page of the request, which is kept until its rows are gathered     (pool_pages.py)
                vLLM's blocks of the request -> entries of the table: slot // PAGE -> page
                changed entries travel in the step's message (`StepMetadata.table`)
    worker      before the forward: gather rows of reused pages, change the table       (exporter.py, pool_memory.py)
                first tap of the forward: vLLM's slots -> slots of the pool, for all tokens    (kernels/lookup.py)
                every tap: rows[slots[token]] = values; slot -1 (a token without a row) is skipped
                later: chunks of rows -> staging memory -> ring, as for the other owners

Taps, gathers and changes of the table run on the engine's CUDA stream, so a page is overwritten only after its rows
were gathered. If a step reuses pages with pending rows, its message says how many rows must be gathered before the
forward (`StepMetadata.need`).

When a request is admitted, pages are reserved for the maximum number of rows that it holds at a time
(`PoolSlots.most`), or with `keep_if` for all of its rows (`StepLimits.room_of_all`). Only the prompt tokens of a step
have no reserved pages, and a step may have more of them than the pool has rows. So, while prompts are captured, the
scheduler half lowers vLLM's token budget of a step to the rows in unreserved pages. A page is then free whenever one is
needed, and no admitted request waits for another.

The pool does not keep rows of tokens in the prefix cache. A captured request borrows these rows from an earlier capture
(pool_borrowing.py), or computes the tokens again.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from dmi_connector.args import EXTRACT_HIDDEN_STATES
from dmi_connector.engine.owners.asked import asked
from dmi_connector.engine.owners.base import Owner, RowMemory, RowSlots
from dmi_connector.engine.owners.target import check_chain
from dmi_connector.settings import POOL

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from dmi_connector.engine.owners.base import Context
    from dmi_connector.settings import ServerOptions

LARGE_ROW = 500_000
"""Bytes of a row above which chunks have fewer rows by default. A request holds up to a chunk of rows in the pool."""
_CHUNK, _SHORT_CHUNK = 64, 32
"""Default `chunk_tokens` for rows of up to LARGE_ROW bytes, and for larger rows."""


class Pool(Owner):
    """Rows are in pages outside of vLLM's cache."""

    name: ClassVar[str] = POOL

    def fits(self, vllm_config: VllmConfig) -> bool:
        return asked(vllm_config) == POOL

    def features(self, vllm_config: VllmConfig) -> list[str]:
        hybrid = ["hybrid models"] if vllm_config.model_config.is_hybrid else []
        return ["pool", *hybrid, *(["speculative decoding"] if vllm_config.speculative_config is not None else [])]

    def check(self, vllm_config: VllmConfig) -> None:
        speculative = vllm_config.speculative_config
        if speculative is not None and speculative.method == EXTRACT_HIDDEN_STATES:
            raise ValueError(
                f"speculative_config: only owner='draft' needs method {EXTRACT_HIDDEN_STATES!r}; leave "
                "speculative_config out with owner='pool'"
            )
        if speculative is not None:
            check_chain(vllm_config)

    def options(self, options: ServerOptions, given: Container[str], row_bytes: int) -> ServerOptions:
        """See `Owner.options`. The default `chunk_tokens` is small, so that requests hold few rows in the pool."""
        if "chunk_tokens" in given:
            return options
        return replace(options, chunk_tokens=_CHUNK if row_bytes <= LARGE_ROW else _SHORT_CHUNK)

    def attach(self, model: nn.Module, context: Context) -> None:
        """Allocate the pool, before vLLM measures the memory left for its cache."""
        from dmi_connector.engine.owners.pool_memory import RowPool

        model.dmi_rows = RowPool(context)

    def row_slots(self, context: Context, config: KVCacheConfig, vllm_config: VllmConfig) -> RowSlots:
        from dmi_connector.engine.owners.pool_limits import StepLimits
        from dmi_connector.engine.owners.pool_pages import PoolSlots

        group, _, block_size = key_group(config)
        cache = sum(tensor.size for tensor in config.kv_cache_tensors)
        return PoolSlots(context, group, block_size, config.num_blocks, StepLimits.of(vllm_config), cache)

    def row_memory(self, context: Context, config: KVCacheConfig, vllm_config: VllmConfig) -> RowMemory:
        from dmi_connector.engine.owners.pool_memory import RowPool

        _, layer, block_size = key_group(config)
        if not layer:
            raise ValueError(
                f"pipeline_parallel_size: no layer of this stage ({context.here.start} to {context.here.stop - 1}) has "
                "full attention, and owner='pool' finds rows by the slots of such a layer; use fewer stages, or "
                "owner='target'"
            )
        pool = vllm_config.compilation_config.static_forward_context[context.cache_layer]
        assert isinstance(pool, RowPool)
        pool.follow(layer, block_size, config.num_blocks, vllm_config)
        return pool


def key_group(config: KVCacheConfig) -> tuple[int, str, int]:
    """(index, first layer, slots per block) of the first cache group with full attention.

    The layer is "" in a pipeline stage without layers of this group.

    Such a group keeps a slot for each token until the request ends. Sliding-window groups give slots of older tokens to
    other requests, and groups with a state (Mamba) have no slots for most tokens. Raises ValueError if there is no
    group with full attention.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    for index, group in enumerate(config.kv_cache_groups):
        spec: Any = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = next(iter(spec.kv_cache_specs.values()))
        if isinstance(spec, FullAttentionSpec) and not hasattr(spec, "rswa_window"):
            return index, next(iter(group.layer_names), ""), group.kv_cache_spec.block_size
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups})
    raise ValueError(
        f"model: none of its layers has full attention (they have {', '.join(kinds) or 'no cache'}), and owner='pool' "
        "finds rows by the slots of such layers; use owner='target', or a model with full attention in some layers"
    )
