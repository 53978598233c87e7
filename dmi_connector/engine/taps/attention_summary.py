# SPDX-License-Identifier: Apache-2.0
"""Taps of attention summaries (hook `pattern`, reduction attn(m)). They read queries and paged keys after attention.

`install` wraps the forward of an attention layer's `impl`. vLLM's opaque attention op calls this forward with the
metadata of the step, with and without CUDA graphs. When it returns, the keys of the step are in the KV cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm import forward_context

from dmi_connector.engine.kernels.attention import summaries_torch, summarise
from dmi_connector.engine.kernels.copy import copy_rows_torch
from dmi_connector.engine.model.coverage import Coverage
from dmi_connector.engine.taps.op import rows_and_slots
from dmi_connector.layout import RowField
from dmi_connector.reduce.attn import AttentionSummary

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""Attention backends whose KV cache can be read: [blocks, kv heads, block, 2 * head_dim], keys before values."""


def check(attn: nn.Module, layer: int) -> None:
    """Raise ValueError if the backend's KV cache cannot be read, or if a summary of this attention would be wrong."""
    impl: Any = attn.impl
    backend = attn.attn_backend.get_name()  # type: ignore[operator, union-attr]
    if backend not in BACKENDS:
        raise ValueError(
            f"hooks: pattern does not work with the attention backend {backend}; choose one of "
            f"{', '.join(BACKENDS)} (--attention-backend) or leave pattern out"
        )
    special = {
        "a sliding window": impl.sliding_window not in (None, -1, (-1, -1), [-1, -1]),
        "chunks": getattr(attn, "attention_chunk_size", None) is not None,  # positions then count from its start
        "ALiBi": impl.alibi_slopes is not None,
        "a logits soft cap": bool(impl.logits_soft_cap),
        "attention sinks": impl.sinks is not None,
        "a quantised KV cache": impl.kv_cache_dtype not in ("auto", "bfloat16", "float16", "float32"),
        "keys and values of different widths": attn.head_size_v != attn.head_size,
        "tokens that attend to later tokens": impl.attn_type != "decoder",
        "image tokens that attend to later tokens": getattr(attn, "use_mm_prefix", False)
        and attn.attn_backend.supports_mm_prefix(),  # type: ignore[operator, union-attr]
        "keys of another layer": impl.kv_sharing_target_layer_name is not None,
    }
    for what, there in special.items():
        if there:
            raise ValueError(
                f"hooks: pattern of layer {layer} cannot be summarised: its attention has {what}; leave pattern out, "
                "or name only other layers, as in pattern@0-3"
            )


def install(attn: nn.Module, field: RowField, cache_layer: str, coverage: Coverage) -> None:
    """Make an attention layer write its summary to the rows of each step. Raises ValueError, see `check`."""
    check(attn, field.layer)
    impl: Any = attn.impl
    reduction = field.reduction
    assert isinstance(reduction, AttentionSummary), "this tap computes what this one reduction stores"
    inner: Callable[..., Any] = impl.forward

    @functools.wraps(inner)
    def forward(
        layer: Any, query: torch.Tensor, key: Any, value: Any, kv_cache: Any, metadata: Any, *a: Any, **k: Any
    ) -> Any:
        result = inner(layer, query, key, value, kv_cache, metadata, *a, **k)
        if forward_context.is_forward_context_available():
            coverage.wrote(0, (field.offset,), query.shape[0], forward_context.get_forward_context())
        found = rows_and_slots(cache_layer)
        if metadata is not None and found is not None:
            _write(layer, query, kv_cache, metadata, *found, field.offset, reduction)
        return result

    impl.forward = forward


def _write(
    attn: Any,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Any,
    rows: torch.Tensor,
    slots: torch.Tensor,
    offset: int,
    reduction: AttentionSummary,
) -> None:
    """Write the summary of each token of this step to byte `offset` of its row."""
    scale, where = float(attn.impl.scale), (metadata.query_start_loc, metadata.seq_lens)
    if rows.is_cuda:
        keys = kv_cache[..., : query.shape[-1]]
        summarise(query, keys, metadata.block_table, *where, slots, rows, offset, reduction.m, scale, reduction.half)
    else:
        keys_of, table = _cpu_keys(attn, kv_cache), metadata.block_table
        words = summaries_torch(query, keys_of, *where, table, reduction.m, scale, reduction.half)
        copy_rows_torch(rows, slots[: len(words)], [words], [offset])


def _cpu_keys(attn: Any, kv_cache: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from block numbers, int [n], to the keys of these blocks, [n, kv heads, block, head_dim].

    vLLM's CPU backend reorders the keys of each block for the instruction set of the processor.
    """
    blocks, kv_heads, block, content = kv_cache.shape
    keys = kv_cache.view(blocks, kv_heads, block * 2, content // 2).chunk(2, dim=2)[0]
    order = _packing(attn.isa, kv_cache.dtype, block, content // 2)

    def keys_of(numbers: torch.Tensor) -> torch.Tensor:
        packed = keys[numbers.long()].reshape(len(numbers), kv_heads, -1)
        return packed[..., order].view(len(numbers), kv_heads, block, -1)

    return keys_of


@functools.cache
def _packing(isa: str, dtype: torch.dtype, block: int, size: int) -> torch.Tensor:
    """The index in a packed block of each element of a block of keys [block, size]: int64 [block * size].

    To find the indexes, vLLM's own op packs blocks that hold the token index and the column index of each element.
    Each index is packed as two digits in base 128, which are exact in any dtype. Raises RuntimeError if the op packs
    keys with loss.
    """
    from vllm import _custom_ops as ops

    found = []
    column, token = torch.arange(size).expand(block, size), torch.arange(block)[:, None].expand(block, size)
    for numbers in (token % 128, token // 128, column % 128, column // 128):
        cache = torch.zeros(1, 1, block * 2, size, dtype=dtype)
        keys, values = cache.chunk(2, dim=2)
        one = numbers.to(dtype).reshape(block, 1, size).contiguous()
        ops.cpu_attn_reshape_and_cache(
            one, one, keys, values, torch.arange(block), isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )
        found.append(keys.reshape(-1).long())
    place = (found[0] + 128 * found[1]) * size + found[2] + 128 * found[3]
    order = torch.empty_like(place)
    order[place] = torch.arange(len(place))
    if not torch.equal(place[order], torch.arange(len(place))):
        raise RuntimeError(
            f"vLLM's CPU attention ({isa}) stores keys with loss of precision, so pattern cannot be summarised; leave "
            "pattern out"
        )
    return order
