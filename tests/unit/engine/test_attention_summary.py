# SPDX-License-Identifier: Apache-2.0
"""Attention layers that can be summarised, and the key layout of vLLM's CPU backend."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from dmi_connector.engine.model.coverage import Coverage
from dmi_connector.engine.taps import attention_summary
from dmi_connector.engine.taps.attention_summary import _packing, check, install
from dmi_connector.layout import RowField
from dmi_connector.reduce.attn import AttentionSummary


class Context:
    """A fake of vLLM's forward context."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_keys_are_unpacked_in_order(dtype: torch.dtype) -> None:
    from vllm import _custom_ops as ops
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


def attention_layer(
    backend: str = "FLASH_ATTN",
    values: int = 64,
    images: bool = False,
    blocks: bool = True,
    chunk: int | None = None,
    **impl: object,
) -> SimpleNamespace:
    """A fake of vLLM's Attention with the attributes that `check` reads.

    images: whether image tokens may attend to each other. blocks: whether the backend supports that. chunk: tokens per
    chunk of chunked attention, as in layers of Llama 4; tokens do not attend beyond their chunk.
    """
    chunked = {} if chunk is None else {"attention_chunk_size": chunk}
    plain = {
        "kv_cache_dtype": "auto",
        "sliding_window": (-1, -1),
        "alibi_slopes": None,
        "logits_soft_cap": None,
        "sinks": None,
        "kv_sharing_target_layer_name": None,
        "attn_type": "decoder",
    }
    return SimpleNamespace(
        impl=SimpleNamespace(**{**plain, **impl}),
        attn_backend=SimpleNamespace(get_name=lambda: backend, supports_mm_prefix=lambda: blocks),
        use_mm_prefix=images,
        head_size=64,
        head_size_v=values,
        **chunked,
    )


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"backend": "FLASHINFER"}, "attention backend FLASHINFER; choose one of CPU_ATTN, FLASH_ATTN, TRITON_ATTN"),
        ({"sliding_window": (4095, 0)}, "pattern of layer 3 cannot be summarised: its attention has a sliding window"),
        ({"sliding_window": 4096}, "a sliding window"),
        ({"chunk": 8192}, "its attention has chunks"),
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"logits_soft_cap": 30.0}, "a logits soft cap"),
        ({"sinks": [0.0]}, "attention sinks"),
        ({"kv_cache_dtype": "fp8"}, "a quantised KV cache"),
        ({"values": 128}, "keys and values of different widths"),
        ({"attn_type": "encoder_only"}, "tokens that attend to later tokens"),
        ({"images": True}, "image tokens that attend to later tokens"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "keys of another layer"),
    ],
)
def test_attention_whose_summary_would_be_wrong_is_refused(layer: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(attention_layer(**layer), 3)  # type: ignore[arg-type]


def test_full_attention_is_accepted() -> None:
    on_cpu = {"backend": "CPU_ATTN", "sliding_window": -1, "logits_soft_cap": 0, "images": True, "blocks": False}
    for plain in ({}, on_cpu, {"backend": "TRITON_ATTN"}):
        check(attention_layer(**plain), 0)  # type: ignore[arg-type]


def test_a_batch_behind_a_replayed_graph_is_summarised_and_a_split_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed forwards write the header without Python, so the recorded number of tokens is that of another one."""
    field = RowField("pattern", 0, "int32", 8, 64, AttentionSummary(4))
    coverage, context = Coverage([field]), Context()
    coverage.checked = True
    coverage.wrote(0, [0, 4], 1, context)
    attn = attention_layer(forward=lambda *_: "attended")
    install(attn, field, "rows", coverage)  # type: ignore[arg-type]
    now: list[object] = [Context()]
    known = SimpleNamespace(is_forward_context_available=lambda: True, get_forward_context=lambda: now[0])
    monkeypatch.setattr(attention_summary, "forward_context", known)
    query = torch.zeros(320, 2, 64)
    assert attn.impl.forward(attn, query, None, None, None, None) == "attended"
    now[0] = context
    with pytest.raises(RuntimeError, match="pattern of layer 0 got values of 320 tokens in a forward of 1"):
        attn.impl.forward(attn, query, None, None, None, None)
