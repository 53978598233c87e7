# SPDX-License-Identifier: Apache-2.0
"""Attention summaries: the kernel equals its torch twin, and the twin equals dense attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from dmi_connector.engine.kernels.attention import summaries_torch, summarise
from dmi_connector.reduce import ReduceError, from_settings
from dmi_connector.reduce.attn import AttentionSummary
from tests import kernelkit as kit
from tests.shorter import soak

# Rows of padding, which are not stored.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning")
Spans = list[tuple[int, int]]
"""(length, tokens of this step) of each request."""
CASES: list[tuple[int, int, int, Spans, str, int]] = [
    (4, 2, 32, [(1, 1), (40, 7), (130, 130), (65, 1)], "float32", 8),
    (7, 1, 80, [(33, 20), (16, 1)], "float32", 3),
    (8, 8, 64, [(17, 17), (90, 2)], kit.NARROW, 8),
    (16, 1, 32, [(70, 5)], "float32", 1),
    (32, 1, 32, [(50, 3)], "float32", 10),
]
NAMES = ("heads", "kv_heads", "size", "spans", "dtype", "m")
OFFSET = 32
"""Byte of a row where summaries go."""


def scene(heads: int, kv_heads: int, size: int, spans: Spans, dtype: str = "float32") -> tuple[torch.Tensor, ...]:
    """(queries, paged keys, block table, starts of the requests, their lengths), all on the CPU."""
    g = torch.Generator().manual_seed(0)
    kind, tokens, block = getattr(torch, dtype), sum(count for _, count in spans), 16
    query = torch.randn(tokens, heads, size, generator=g).to(kind)
    pages = max(-(-length // block) for length, _ in spans) + 1
    keys = torch.randn(pages * len(spans) + 1, kv_heads, block, size, generator=g).to(kind)
    keys[:, :, 5] = keys[:, :, 3]  # equal scores: the lower position comes first
    table = (torch.randperm(pages * len(spans), generator=g) + 1).view(len(spans), pages).int()
    starts = torch.tensor([0] + [count for _, count in spans]).cumsum(0).int()
    lengths = torch.tensor([length for length, _ in spans]).int()
    return query, keys, table, starts, lengths


@pytest.mark.parametrize(
    ("half", *NAMES),
    [
        *((True, *case) for case in CASES),
        *((False, *CASES[i]) for i in (1, 4)),
        *soak(*((False, *CASES[i]) for i in (0, 2, 3))),
    ],
)
def test_summaries_equal_those_of_the_torch_twin(
    half: bool, heads: int, kv_heads: int, size: int, spans: Spans, dtype: str, m: int
) -> None:
    """Inputs are padded as for a CUDA graph: more queries than tokens, and more entries of requests than requests."""
    torch.manual_seed(0)
    parts = scene(heads, kv_heads, size, spans, dtype)
    reduction = AttentionSummary(m, half)
    words = heads * reduction.stored_words
    want = summaries_torch(parts[0], lambda n: parts[1][n.long()], parts[3], parts[4], parts[2], m, size**-0.5, half)
    query, keys, table, starts, lengths = (part.to(kit.DEVICE) for part in parts)
    tokens = len(query)
    slots = torch.randperm(tokens + 4, device=kit.DEVICE)[:tokens]
    slots[tokens // 2] = -1
    rows = kit.untouched(tokens + 4, 2 * OFFSET + words * 4)
    wide = torch.zeros(*keys.shape[:3], 2 * size, dtype=keys.dtype, device=kit.DEVICE)
    wide[..., :size] = keys
    summarise(
        torch.cat([query, query[:3]]),
        wide[..., :size],
        torch.cat([table, table.new_zeros(1, table.shape[1])]),
        torch.cat([starts, starts[-1:]]),
        torch.cat([lengths, lengths.new_zeros(1)]),
        slots,
        rows,
        OFFSET,
        m,
        size**-0.5,
        half,
    )
    got = rows[:, OFFSET : OFFSET + 4 * words].contiguous().view(torch.int32).cpu()
    numbers = slots.tolist()
    for token, slot in enumerate(numbers):
        if slot < 0:
            continue
        stored = [x.view(1, -1).numpy().view(np.uint8) for x in (got[slot], want[token])]
        mine, other = (torch.from_numpy(reduction.decode(x, heads, dtype)).view(heads, 2 * m + 1) for x in stored)
        floats = [x[:, m:] for x in (mine, other)]
        assert torch.allclose(*floats, atol=2e-5, rtol=2e-3 if half else 1e-5), (token, *floats)
        # Weights that differ only by rounding may have another order in each of the two programs.
        same = mine[:, :m] == other[:, :m]
        close = (floats[0][:, :m] - floats[1][:, :m]).abs() < (1e-3 if half else 2e-6)
        assert (same | close).all() and same.float().mean() > 0.95, (mine, other)
        if dtype == "float32" and m == 8 and size == 32:
            assert same.all(), (mine, other)
    unused = [slot for slot in range(tokens + 4) if slot not in numbers]
    assert (rows[unused] == kit.UNTOUCHED).all()
    rows[:, OFFSET : OFFSET + 4 * words] = kit.UNTOUCHED
    assert (rows == kit.UNTOUCHED).all(), "nothing else is written"


def test_sixteen_bits_hold_positions_below_65535() -> None:
    """The last key of a long context has the largest weight. All others are equal, so the lowest positions follow."""
    summary, length = AttentionSummary(3, half=True), 65_535
    keys = torch.zeros(1, 1, length, 16)
    keys[0, 0, -1, 0] = 20
    query = torch.zeros(1, 1, 16)
    query[0, 0, 0] = 1
    starts, lengths, table = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [length], [[0]]))
    words = summaries_torch(query, lambda n: keys[n.long()], starts, lengths, table, 3, 1.0, half=True)
    positions, weights, entropy = summary.split(summary.decode(words.numpy().view(np.uint8), 1, "float32"))
    assert positions.tolist() == [[[65_534, 0, 1]]]
    np.testing.assert_allclose(weights[0, 0, 0], 1 / (1 + 65_534 * np.exp(-20)), rtol=1e-3)
    assert entropy[0, 0] > 0
    summary.check_context(65_535)
    with pytest.raises(ReduceError, match=r"room for positions below 65535, but max_model_len is 65536; use attn\(3\)"):
        summary.check_context(65_536)
    AttentionSummary(3).check_context(1 << 20)


@pytest.mark.parametrize("half", [False, True])
def test_no_rows_are_decoded_to_no_rows(half: bool) -> None:
    summary = AttentionSummary(3, half)
    stored = np.zeros((1, 0, summary.stored_width(2, "float32")), np.uint8)
    assert summary.decode(stored, 2, "float32").shape == (1, 0, 14)


def test_stores_from_before_16_bit_positions_are_read() -> None:
    """Their attributes have no entry for 16 bits. The attributes of summaries with 32 bits have not changed."""
    assert from_settings({"kind": "attn", "m": 3}) == AttentionSummary(3)
    assert AttentionSummary(3).settings() == {"kind": "attn", "m": 3}
    assert from_settings(AttentionSummary(3, half=True).settings()) == AttentionSummary(3, half=True)


@pytest.mark.parametrize(NAMES, CASES[:2])
def test_the_torch_twin_equals_dense_attention(
    heads: int, kv_heads: int, size: int, spans: Spans, dtype: str, m: int
) -> None:
    query, keys, table, starts, lengths = scene(heads, kv_heads, size, spans, dtype)
    # Blocks that do not exist. No token has these entries of the table, so their keys must not be read.
    beyond = torch.full_like(table, len(keys))
    wide = torch.cat([table, beyond], 1)
    words = summaries_torch(query, lambda n: keys[n.long()], starts, lengths, wide, m, size**-0.5)
    summary = AttentionSummary(m)
    raw = words.numpy().view(np.uint8)
    assert raw.shape[1] == summary.stored_width(heads, dtype)
    positions, weights, entropy = summary.split(summary.decode(raw, heads, dtype))
    for request, (length, count) in enumerate(spans):
        own = keys[table[request].long()].permute(1, 0, 2, 3).reshape(kv_heads, -1, size)[:, :length]
        for i in range(count):
            token, seen = int(starts[request]) + i, length - count + i + 1
            for head in range(heads):
                mine = own[head // (heads // kv_heads), :seen].double()
                full = torch.softmax(mine @ query[token, head].double() * size**-0.5, 0)
                best = sorted(range(seen), key=lambda p, full=full: (-round(float(full[p]), 12), p))[:m]
                kept = positions[token, head]
                assert kept[: len(best)].tolist() == best and (kept[len(best) :] == -1).all()
                np.testing.assert_allclose(weights[token, head, : len(best)], full[best].numpy(), atol=1e-6)
                assert (weights[token, head, len(best) :] == 0).all()
                assert abs(entropy[token, head] + float((full * full.log()).sum())) < 1e-5
