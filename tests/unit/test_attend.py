# SPDX-License-Identifier: Apache-2.0
"""Attention summaries: the torch twin against dense attention, the Triton kernel (interpreted on the CPU, compiled on a
GPU) against the twin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dmi_connector.engine.attend import _packing, check, summaries
from dmi_connector.reduce.attn import AttentionSummary

BLOCK = 16
SCENE = """
def scene(heads, kv_heads, size, spans, dtype, seed=0):
    # Paged queries and keys of requests whose last `count` of `length` tokens are this step's.
    g = torch.Generator().manual_seed(seed)
    tokens, block = sum(count for _, count in spans), 16
    query = torch.randn(tokens, heads, size, generator=g).to(dtype)
    pages = max(-(-length // block) for length, _ in spans) + 1
    keys = torch.randn(pages * len(spans) + 1, kv_heads, block, size, generator=g).to(dtype)
    keys[:, :, 5] = keys[:, :, 3]  # equal scores: the lower position comes first
    order = torch.randperm(pages * len(spans), generator=g) + 1
    table = order.view(len(spans), pages).int()
    starts = torch.tensor([0] + [c for _, c in spans]).cumsum(0).int()
    lengths = torch.tensor([length for length, _ in spans]).int()
    return query, keys, table, starts, lengths
"""
exec(SCENE)

CHILD = (
    """
import json, sys
import torch
from dmi_connector.engine.attend import summaries
from dmi_connector.engine.triton_attention import summarise
"""
    + SCENE
    + """
device = "cuda" if torch.cuda.is_available() else "cpu"
checked = 0
for heads, kv_heads, size, spans, dtype, m in json.loads(sys.argv[1]):
    parts = scene(heads, kv_heads, size, spans, getattr(torch, dtype))
    query, keys, table, starts, lengths = (x.to(device) for x in parts)
    words = heads * (2 * m + 1)
    want = summaries(parts[0], lambda n: parts[1][n.long()], parts[3], parts[4], parts[2], m, size**-0.5)
    tokens = query.shape[0]
    slots = torch.randperm(tokens + 4, device=device)[: tokens].long()
    slots[tokens // 2] = -1
    rows = torch.full((tokens + 4, 64 + words * 4), 7, dtype=torch.uint8, device=device)
    before = rows.clone()
    # Padded as a CUDA graph pads: more queries than tokens, more requests than there are.
    padded = torch.cat([query, query[:3]])
    starts = torch.cat([starts, starts[-1:]])
    lengths = torch.cat([lengths, lengths.new_zeros(1)])
    table = torch.cat([table, table.new_zeros(1, table.shape[1])])
    wide = torch.zeros(*keys.shape[:3], 2 * size, dtype=keys.dtype, device=device)
    wide[..., :size] = keys
    summarise(padded, wide[..., :size], table, starts, lengths, slots, rows, 32, m, size**-0.5)
    got = rows.view(torch.int32)[:, 8 : 8 + words].cpu()
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        mine, other = (x.view(heads, 2 * m + 1) for x in (got[slot], want[token]))
        floats = [x[:, m:].contiguous().view(torch.float32) for x in (mine, other)]
        assert torch.allclose(*floats, atol=2e-5), (heads, m, token, *floats)
        # Two programs may order weights that differ by rounding either way.
        same = mine[:, :m] == other[:, :m]
        close = (floats[0][:, :m] - floats[1][:, :m]).abs() < 2e-6
        assert (same | close).all() and same.float().mean() > 0.95, (mine, other)
        if dtype == "float32" and m == 8 and size == 32:
            assert same.all(), (mine, other)
    rows.view(torch.int32)[:, 8 : 8 + words] = before.view(torch.int32)[:, 8 : 8 + words]
    assert torch.equal(rows, before), "nothing else is written"
    assert (got[[s for s in range(tokens + 4) if s not in slots.tolist()]] == 0x07070707).all()
    checked += 1
print(checked)
"""
)
CASES = [
    (4, 2, 32, [(1, 1), (40, 7), (130, 130), (65, 1)], "float32", 8),
    (7, 1, 80, [(33, 20), (16, 1)], "float32", 3),
    (
        8,
        8,
        64,
        [(17, 17), (90, 2)],
        "bfloat16" if torch.cuda.is_available() else "float16",
        8,
    ),  # no interpreted bf16 dot
    (16, 1, 32, [(70, 5)], "float32", 1),
    (32, 1, 32, [(50, 3)], "float32", 10),
]


def test_the_kernel_is_its_twin() -> None:
    pytest.importorskip("triton")
    env = dict(os.environ)
    if not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(CASES)], capture_output=True, text=True, timeout=900, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) == len(CASES)


@pytest.mark.parametrize("case", CASES[:2])
def test_the_twin_is_dense_attention(case: tuple[int, int, int, list[tuple[int, int]], str, int]) -> None:
    heads, kv_heads, size, spans, _, m = case
    query, keys, table, starts, lengths = scene(heads, kv_heads, size, spans, torch.float32)  # type: ignore[name-defined]  # noqa: F821
    words = summaries(query, lambda n: keys[n.long()], starts, lengths, table, m, size**-0.5)
    summary = AttentionSummary(m)
    raw = words.numpy().view(np.uint8)
    assert raw.shape[1] == summary.stored_width(heads, "float32")
    positions, weights, entropy = summary.split(summary.decode(raw, heads, "float32"))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_keys_are_found_again(dtype: torch.dtype) -> None:
    ops = pytest.importorskip("vllm._custom_ops")
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa, size = _get_attn_isa(dtype, 128, 32), 32
    keys = torch.randn(128, 2, size).to(dtype)
    cache = torch.zeros(3, 2, 256, size, dtype=dtype)
    packed, values = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        keys, keys, packed, values, torch.arange(128, 256), isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    order = _packing(isa, dtype, 128, size)
    assert torch.equal(packed[1].reshape(2, -1)[:, order].view(2, 128, size), keys.transpose(0, 1))


def attention_layer(backend: str = "FLASH_ATTN", values: int = 64, **impl: object) -> SimpleNamespace:
    """What `check` reads of vLLM's Attention."""
    return SimpleNamespace(
        impl=SimpleNamespace(**{"kv_cache_dtype": "auto", "sliding_window": (-1, -1), **impl}),
        attn_backend=SimpleNamespace(get_name=lambda: backend),
        head_size=64,
        head_size_v=values,
    )


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"backend": "FLASHINFER"}, "attention backend FLASHINFER; choose one of CPU_ATTN, FLASH_ATTN, TRITON_ATTN"),
        ({"sliding_window": (4095, 0)}, "pattern of layer 3 cannot be summarised: it has a sliding window"),
        ({"sliding_window": 4096}, "a sliding window"),
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"logits_soft_cap": 30.0}, "a logits soft cap"),
        ({"sinks": [0.0]}, "attention sinks"),
        ({"kv_cache_dtype": "fp8"}, "a quantized KV cache"),
        ({"values": 128}, "values of another width than its keys"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "shared keys"),
    ],
)
def test_attention_that_no_summary_is_true_of_is_refused(layer: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(attention_layer(**layer), 3)  # type: ignore[arg-type]


def test_full_attention_is_taken() -> None:
    for plain in ({}, {"backend": "CPU_ATTN", "sliding_window": -1, "logits_soft_cap": 0}, {"backend": "TRITON_ATTN"}):
        check(attention_layer(**plain), 0)  # type: ignore[arg-type]
