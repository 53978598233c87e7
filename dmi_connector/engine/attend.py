# SPDX-License-Identifier: Apache-2.0
"""Attention summaries (`pattern`, reduced by attn(m)): a second look at queries and paged keys, after attention itself.

The forward of an attention layer's implementation is wrapped: it runs inside vLLM's opaque attention op, so in every
kind of graph with this step's own metadata, and the keys of this step are in the cache when it returns.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dmi_connector.engine.kernels import copy_rows
from dmi_connector.layout import Segment
from dmi_connector.reduce.attn import AttentionSummary

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""Those whose paged keys are read here: [blocks, kv heads, block, head_dim ...], keys before values."""
_QUERIES = 256
"""Queries of a request computed at a time by the twin: scores take heads x this x context x 4 bytes."""


def check(attn: nn.Module, layer: int) -> None:
    """Raises ValueError for attention that the summary would not be true of."""
    impl: Any = attn.impl
    backend = attn.attn_backend.get_name()  # type: ignore[operator, union-attr]
    if backend not in BACKENDS:
        raise ValueError(
            f"hooks: pattern does not work with the attention backend {backend}; choose one of "
            f"{', '.join(BACKENDS)} (--attention-backend) or leave pattern out"
        )
    special = {
        "a sliding window": getattr(impl, "sliding_window", None) not in (None, -1, (-1, -1), [-1, -1]),
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "a logits soft cap": bool(getattr(impl, "logits_soft_cap", None)),
        "attention sinks": getattr(impl, "sinks", None) is not None,
        "a quantized KV cache": impl.kv_cache_dtype not in ("auto", "bfloat16", "float16", "float32"),
        "values of another width than its keys": attn.head_size_v != attn.head_size,
        "shared keys": getattr(impl, "kv_sharing_target_layer_name", None) is not None,
    }
    for what, there in special.items():
        if there:
            raise ValueError(f"hooks: pattern of layer {layer} cannot be summarised: it has {what}; leave it out")


def install(attn: nn.Module, segment: Segment, layer_name: str) -> None:
    """Let an attention layer write its summary into this step's rows."""
    check(attn, segment.layer)
    impl: Any = attn.impl
    reduction = segment.reduction
    assert isinstance(reduction, AttentionSummary)
    inner: Callable[..., Any] = impl.forward

    @functools.wraps(inner)
    def forward(
        layer: Any, query: torch.Tensor, key: Any, value: Any, kv_cache: Any, metadata: Any, *a: Any, **k: Any
    ) -> Any:
        result = inner(layer, query, key, value, kv_cache, metadata, *a, **k)
        if metadata is not None:
            _summarise(layer, query, kv_cache, metadata, segment.offset, reduction.m, layer_name)
        return result

    impl.forward = forward


def _summarise(
    attn: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, offset: int, m: int, layer_name: str
) -> None:
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    owner = context.no_compile_layers.get(layer_name)
    slots = context.slot_mapping.get(layer_name) if isinstance(context.slot_mapping, dict) else None
    if owner is None or slots is None or owner.rows is None:
        return  # a profiling run: the cache does not exist yet
    scale = float(attn.impl.scale)
    if owner.rows.is_cuda:
        from dmi_connector.engine.triton_attention import summarise

        keys = kv_cache[..., : query.shape[-1]]
        summarise(
            query, keys, metadata.block_table, metadata.query_start_loc, metadata.seq_lens, slots, owner.rows, offset,
            m, scale,
        )  # fmt: skip
        return
    keys_of = _cpu_keys(attn, kv_cache)
    words = summaries(query, keys_of, metadata.query_start_loc, metadata.seq_lens, metadata.block_table, m, scale)
    copy_rows(owner.rows, slots[: len(words)], [words], [offset])


def summaries(
    query: torch.Tensor,
    keys_of: Callable[[torch.Tensor], torch.Tensor],
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    m: int,
    scale: float,
) -> torch.Tensor:
    """The kernel's twin in plain torch. query: [tokens, heads, head_dim]. keys_of: block numbers -> keys [blocks, kv
    heads, block, head_dim]. query_start_loc, seq_lens, block_table: as vLLM's attention metadata has them. Gives int32
    [tokens, heads * (2 m + 1)], the words of reduce/attn.py.
    """
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    heads, size = query.shape[1:]
    out = torch.zeros(query.shape[0], heads, 2 * m + 1, dtype=torch.int32)
    for request, (start, stop) in enumerate(itertools.pairwise(starts)):
        length = lengths[request] if stop > start else 0
        if not length:
            continue
        blocks = keys_of(block_table[request])
        block = blocks.shape[2]
        keys = blocks[: -(-length // block)].permute(1, 0, 2, 3).reshape(blocks.shape[1], -1, size)[:, :length].float()
        group = heads // keys.shape[0]
        for first in range(start, stop, _QUERIES):
            last = min(first + _QUERIES, stop)
            q = query[first:last].float().view(last - first, keys.shape[0], group, size)
            scores = torch.einsum("tkgd,knd->tkgn", q, keys).reshape(last - first, heads, length) * scale
            position = torch.arange(length - (stop - first), length - (stop - last))
            scores.masked_fill_(torch.arange(length) > position[:, None, None], -torch.inf)
            out[first:last] = _words(scores, position, m)
    return out.view(query.shape[0], heads * (2 * m + 1))


def _words(scores: torch.Tensor, position: torch.Tensor, m: int) -> torch.Tensor:
    """Masked scores [tokens, heads, keys] -> int32 [tokens, heads, 2 m + 1]."""
    log_weights = scores.log_softmax(-1)
    weights = log_weights.exp()
    entropy = -(weights * log_weights.nan_to_num(neginf=0)).sum(-1)
    # A stable sort puts equal scores by position, which topk does not promise.
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :m]
    kept = weights.gather(-1, order)
    order = order.masked_fill(order > position[:, None, None], -1)
    lacking = m - order.shape[-1]
    order = torch.nn.functional.pad(order, (0, lacking), value=-1)
    kept = torch.nn.functional.pad(kept, (0, lacking)).masked_fill(order < 0, 0)
    return torch.cat([order.int(), kept.view(torch.int32), entropy[..., None].view(torch.int32)], -1)


def _cpu_keys(attn: Any, kv_cache: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The paged keys of vLLM's CPU backend, which packs each block of keys as its instruction set likes them."""
    blocks, kv_heads, block, content = kv_cache.shape
    keys = kv_cache.view(blocks, kv_heads, block * 2, content // 2).chunk(2, dim=2)[0]
    order = _packing(attn.isa, kv_cache.dtype, block, content // 2)

    def keys_of(numbers: torch.Tensor) -> torch.Tensor:
        packed = keys[numbers.long()].reshape(len(numbers), kv_heads, -1)
        return packed[..., order].view(len(numbers), kv_heads, block, -1)

    return keys_of


@functools.cache
def _packing(isa: str, dtype: torch.dtype, block: int, size: int) -> torch.Tensor:
    """Where each value of a block of keys [block, size] lies in the packed block: int64 [block * size].

    Asked of vLLM's own op: it packs a block of token numbers, then one of column numbers, both exact in any dtype.
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
        raise RuntimeError(f"vLLM's CPU attention ({isa}) does not keep keys as they are: pattern cannot be summarised")
    return order
