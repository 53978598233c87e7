# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of attention summaries; `attend.summaries` is its twin. Imported only where a GPU (or Triton's
interpreter) runs it.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS, _KEYS = 16, 64
"""Least rows (queries x heads that share keys) of a program, and keys it looks at in one step."""


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
) -> None:
    """Write the summary of each query at byte `offset` of its row. query: [tokens, heads, head_dim]. keys: [blocks, kv
    heads, block, head_dim], any strides. rows: uint8 [slots, row bytes]; negative slots are padding.

    Every query looks at all keys up to its own: heads x head_dim x context multiply-adds, once more than attention.
    """
    tokens, heads, size = query.shape
    kv_heads, block = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    tile = max(1, _ROWS // group)
    requests = query_start_loc.shape[0] - 1
    words = rows.view(torch.int32)
    summary_kernel[(tokens // tile + requests, kv_heads)](
        query, keys, block_table, query_start_loc, seq_lens, slots, words,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), block_table.stride(0),
        words.stride(0), offset // 4, requests, slots.shape[0], scale,
        M=m, TOP=triton.next_power_of_2(m), GROUP=group, TILE=tile,
        ROWS=max(_ROWS, triton.next_power_of_2(tile * group)), SIZE=size, WIDE=max(16, triton.next_power_of_2(size)),
        BLOCK=block, KEYS=_KEYS, EXACT=query.dtype == torch.float32, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["requests", "slot_count"])
def summary_kernel(
    query, keys, table, starts, lengths, slots, rows,
    q_token, q_head, k_block, k_head, k_token, table_row, row_words, offset, requests, slot_count, scale,
    M: tl.constexpr, TOP: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, kv heads). Request r has the tiles from starts[r] // TILE + r on, so that none is shared.

    The largest scores are kept as one int64 each, the score's bits above and the position below, so that no two are
    equal and the lower position wins a tie.
    """
    LEAST: tl.constexpr = -(2**63)
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
        largest = tl.full([ROWS], -1e30, tl.float32)
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
            score = tl.where(seen, score + 0.0, -1e30)
            bound = tl.maximum(largest, tl.max(score, 1))
            shrink = tl.exp(largest - bound)
            above = score - bound[:, None]
            weight = tl.where(seen, tl.exp(above), 0.0)
            moment = shrink * (moment + (largest - bound) * total) + tl.sum(tl.where(seen, weight * above, 0.0), 1)
            total = shrink * total + tl.sum(weight, 1)
            largest = bound
            bits = score.to(tl.int32, bitcast=True)
            ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
            found = tl.where(seen, (ordered << 32) | (0x7FFFFFFF - at)[None, :].to(tl.int64), LEAST)
            best = tl.max(found, 1)
            worst = tl.min(top, 1)
            while tl.max((best > worst).to(tl.int32), 0) > 0:
                top = tl.where((top == worst[:, None]) & (best > worst)[:, None], best[:, None], top)
                found = tl.where(found == best[:, None], LEAST, found)
                best = tl.max(found, 1)
                worst = tl.min(top, 1)
        slot = tl.load(slots + token, mask=real & (token < slot_count), other=-1)
        keep = real & (slot >= 0)
        out = rows + slot * row_words + offset + head * (2 * M + 1)
        entropy = tl.log(total) - moment / total
        tl.store(out + 2 * M, entropy.to(tl.int32, bitcast=True), mask=keep)
        # TOP - M of the kept are not wanted: they are the smallest.
        for i in tl.static_range(M):
            best = tl.max(top, 1)
            top = tl.where(top == best[:, None], LEAST, top)
            held = best > LEAST + TOP
            ordered = (best >> 32).to(tl.int32)
            score = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            weight = tl.where(held, tl.exp(score - largest) / total, 0.0)
            where = tl.where(held, 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32), -1)
            tl.store(out + i, where, mask=keep)
            tl.store(out + M + i, weight.to(tl.int32, bitcast=True), mask=keep)
