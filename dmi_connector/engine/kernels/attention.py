# SPDX-License-Identifier: Apache-2.0
"""Computes attention summaries: the largest weights of each head, and the entropy of all weights (`reduce.attn`)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

_ROWS, _KEYS = 16, 64
"""_ROWS: minimum number of rows of a program. Here a row is a pair of a query and a query head of the program's kv
head, or padding. _KEYS: number of keys that a program reads per iteration.
"""
_MASKED = tl.constexpr(-1e30)
"""Score of a masked key. Minus infinity would give NaN if all keys of an iteration are masked."""
_QUERIES = 256
"""Queries that `summaries_torch` computes at a time. Their scores take heads x _QUERIES x context x 4 bytes."""


def summarise(
    query: torch.Tensor,
    keys: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    offset: int,
    m: int,
    scale: float,
    half: bool = False,
) -> None:
    """Write the summary of query t to byte `offset` (a multiple of 4) of row `slots[t]`; a negative slot is skipped.

    query: [tokens, heads, head_dim], last dimension contiguous. keys: [blocks, kv heads, block, head_dim], last
    dimension contiguous, of the queries' dtype. block_table: int32 [requests, blocks]. query_start_loc: int32
    [requests + 1]. seq_lens: int32 [requests]. These three are as in vLLM's attention metadata. slots: int64. rows:
    uint8 [slots, row bytes], contiguous. m: number of weights to keep per head. scale: factor of the scores. half:
    whether positions and weights take 16 bits each (`AttentionSummary.half`).

    The kernel multiplies each query with all keys up to its own position. Per token this takes heads x head_dim x
    context multiply-adds, in addition to those of attention.
    """
    assert query.stride(2) == keys.stride(3) == 1 and rows.is_contiguous() and offset % 4 == 0
    assert query.dtype == keys.dtype and rows.dtype == torch.uint8 and slots.dtype == torch.int64
    assert block_table.dtype == query_start_loc.dtype == seq_lens.dtype == torch.int32
    tokens, heads, size = query.shape
    kv_heads, block = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    tile = max(1, _ROWS // group)
    requests = query_start_loc.shape[0] - 1
    words = rows.view(torch.int16 if half else torch.int32)
    summary_kernel[(tokens // tile + requests, kv_heads)](
        query, keys, block_table, query_start_loc, seq_lens, slots, words,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), block_table.stride(0),
        words.stride(0), offset // words.itemsize, requests, slots.shape[0], scale,
        M=m, HALF=half, TOP=triton.next_power_of_2(m), GROUP=group, TILE=tile,
        ROWS=max(_ROWS, triton.next_power_of_2(tile * group)), SIZE=size, WIDE=max(16, triton.next_power_of_2(size)),
        BLOCK=block, KEYS=_KEYS, EXACT=query.dtype == torch.float32, num_warps=4,
    )  # fmt: skip


def summaries_torch(
    query: torch.Tensor,
    keys_of: Callable[[torch.Tensor], torch.Tensor],
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    m: int,
    scale: float,
    half: bool = False,
) -> torch.Tensor:
    """The torch version of the kernel, for CPUs. Returns the summaries, int32 [tokens, heads * (2 m + 1)], or with
    `half` int32 [tokens, heads * (m + 1)]. reduce/attn.py describes them.

    keys_of: a function from block numbers, int [n], to the keys of these blocks, [n, kv heads, block, head_dim]. The
    other arguments are those of `summarise`.
    """
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    heads, size = query.shape[1:]
    out = torch.zeros(query.shape[0], heads, (m if half else 2 * m) + 1, dtype=torch.int32)
    for request, (start, stop) in enumerate(itertools.pairwise(starts)):
        length = lengths[request] if stop > start else 0
        if not length:
            continue
        block = keys_of(block_table[request, :1]).shape[2]
        blocks = keys_of(block_table[request, : -(-length // block)])  # the table may be far longer
        keys = blocks.permute(1, 0, 2, 3).reshape(blocks.shape[1], -1, size)[:, :length].float()
        group = heads // keys.shape[0]
        for first in range(start, stop, _QUERIES):
            last = min(first + _QUERIES, stop)
            q = query[first:last].float().view(last - first, keys.shape[0], group, size)
            scores = torch.einsum("tkgd,knd->tkgn", q, keys).reshape(last - first, heads, length) * scale
            position = torch.arange(length - (stop - first), length - (stop - last))
            scores.masked_fill_(torch.arange(length) > position[:, None, None], -torch.inf)
            out[first:last] = _words(scores, position, m, half)
    return out.view(query.shape[0], -1)


def _words(scores: torch.Tensor, position: torch.Tensor, m: int, half: bool) -> torch.Tensor:
    """Masked scores [tokens, heads, keys] -> summaries, int32 [tokens, heads, 2 m + 1], or m + 1 words with `half`.

    position: int [tokens], the position of each query.
    """
    log_weights = scores.log_softmax(-1)
    weights = log_weights.exp()
    entropy = -(weights * log_weights.nan_to_num(neginf=0)).sum(-1)
    # A stable sort orders equal scores by position. torch.topk does not guarantee this order.
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :m]
    kept = weights.gather(-1, order)
    order = order.masked_fill(order > position[:, None, None], -1)
    lacking = m - order.shape[-1]
    order = torch.nn.functional.pad(order, (0, lacking), value=-1)
    kept = torch.nn.functional.pad(kept, (0, lacking)).masked_fill(order < 0, 0)
    if half:
        # The lower 16 bits of each position. A conversion to int16 could not hold positions above 32,767.
        places = order.int().view(torch.int16)[..., ::2]
        parts = [places, kept.half().view(torch.int16), entropy[..., None].view(torch.int16)]
        return torch.cat(parts, -1).contiguous().view(torch.int32)
    return torch.cat([order.int(), kept.view(torch.int32), entropy[..., None].view(torch.int32)], -1)


@triton.jit(do_not_specialize=["requests", "slot_count"])
def summary_kernel(
    query, keys, table, starts, lengths, slots, rows,
    q_token, q_head, k_block, k_head, k_token, table_row, row_words, offset, requests, slot_count, scale,
    M: tl.constexpr, TOP: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, kv heads). The first tile of request r is starts[r] // TILE + r, so that no two requests
    share a tile.

    Each of the largest scores is kept in an int64. The upper half has the bits of the score, in an order-preserving
    form. The lower half has LAST - position. So no two int64 are equal, and of two equal scores the one with the lower
    position has the larger int64.
    """
    LEAST: tl.constexpr = -(2**63)
    LAST: tl.constexpr = 0x7FFFFFFF  # the largest int32
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    low, high = 0, requests - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(starts + middle) // TILE + middle <= tile:
            low = middle
        else:
            high = middle - 1
    start = tl.load(starts + low)
    count = tl.load(starts + low + 1) - start
    first = (tile - start // TILE - low) * TILE
    length = tl.load(lengths + low)
    if first < count:
        row = tl.arange(0, ROWS)
        index = first + row // GROUP
        real = (row < TILE * GROUP) & (index < count)
        token = (start + index).to(tl.int64)
        head = kv_head * GROUP + row % GROUP
        position = length - count + index
        column = tl.arange(0, WIDE)
        q = tl.load(
            query + token[:, None] * q_token + head[:, None] * q_head + column[None, :],
            mask=real[:, None] & (column < SIZE)[None, :],
            other=0.0,
        )
        largest = tl.full([ROWS], _MASKED, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        moment = tl.zeros([ROWS], tl.float32)
        top = (tl.zeros([ROWS, TOP], tl.int64) + LEAST) + tl.arange(0, TOP)[None, :]
        stop = tl.minimum(length - count + first + TILE, length)
        for begin in range(0, stop, KEYS):
            at = begin + tl.arange(0, KEYS)
            there = at < stop
            page = tl.load(table + low * table_row + at // BLOCK, mask=there, other=0).to(tl.int64)
            k = tl.load(
                keys + (page * k_block + kv_head * k_head + (at % BLOCK) * k_token)[None, :] + column[:, None],
                mask=there[None, :] & (column < SIZE)[:, None],
                other=0.0,
            )
            if EXACT:
                score = tl.dot(q, k, input_precision="ieee") * scale
            else:
                score = tl.dot(q, k) * scale
            seen = there[None, :] & (at[None, :] <= position[:, None]) & real[:, None]
            score = tl.where(seen, score + 0.0, _MASKED)
            bound = tl.maximum(largest, tl.max(score, 1))
            shrink = tl.exp(largest - bound)
            above = score - bound[:, None]
            weight = tl.where(seen, tl.exp(above), 0.0)
            moment = shrink * (moment + (largest - bound) * total) + tl.sum(tl.where(seen, weight * above, 0.0), 1)
            total = shrink * total + tl.sum(weight, 1)
            largest = bound
            bits = score.to(tl.int32, bitcast=True)
            ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
            found = tl.where(seen, (ordered << 32) | (LAST - at)[None, :].to(tl.int64), LEAST)
            best = tl.max(found, 1)
            worst = tl.min(top, 1)
            while tl.max((best > worst).to(tl.int32), 0) > 0:
                top = tl.where((top == worst[:, None]) & (best > worst)[:, None], best[:, None], top)
                found = tl.where(found == best[:, None], LEAST, found)
                best = tl.max(found, 1)
                worst = tl.min(top, 1)
        slot = tl.load(slots + token, mask=real & (token < slot_count), other=-1)
        keep = real & (slot >= 0)
        out = rows + slot * row_words + offset + head * (2 * M + (2 if HALF else 1))
        entropy = (tl.log(total) - moment / total).to(tl.int32, bitcast=True)
        if HALF:
            tl.store(out + 2 * M, (entropy & 0xFFFF).to(tl.int16), mask=keep)
            tl.store(out + 2 * M + 1, (entropy >> 16).to(tl.int16), mask=keep)
        else:
            tl.store(out + 2 * M, entropy, mask=keep)
        # TOP is M rounded up to a power of two. The smallest TOP - M of the kept scores are not written.
        for i in tl.static_range(M):
            best = tl.max(top, 1)
            top = tl.where(top == best[:, None], LEAST, top)
            held = best > LEAST + TOP
            ordered = (best >> 32).to(tl.int32)
            score = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            weight = tl.where(held, tl.exp(score - largest) / total, 0.0)
            where = tl.where(held, LAST - (best & 0xFFFFFFFF).to(tl.int32), -1)
            if HALF:
                tl.store(out + i, where.to(tl.int16), mask=keep)
                tl.store(out + M + i, weight.to(tl.float16).to(tl.int16, bitcast=True), mask=keep)
            else:
                tl.store(out + i, where, mask=keep)
                tl.store(out + M + i, weight.to(tl.int32, bitcast=True), mask=keep)
