# SPDX-License-Identifier: Apache-2.0
"""The start checks the layout of the cache: slot s must be row s, whatever vLLM calls its layout."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, HiddenStateCacheSpec
from vllm.v1.worker.utils import AttentionGroup, KVBlockZeroer

from dmi_connector.engine import replaced
from dmi_connector.engine.owners.row_cache import CaptureBackend, CaptureLayer

BLOCKS, SLOTS, SIZE = 3, 4, 6


def layer(cache: torch.Tensor) -> CaptureLayer:
    """A cache layer to which vLLM has bound `cache`."""
    made = CaptureLayer.__new__(CaptureLayer)
    nn.Module.__init__(made)
    made.head_size, made.kv_cache = SIZE, cache
    return made


def test_slots_of_the_known_layout_are_rows() -> None:
    cache = torch.zeros(BLOCKS, 1, SLOTS, SIZE, dtype=torch.float32)
    made = layer(cache)
    made.check_cache()
    cache[2, 0, 1] = 7.0
    assert made.rows is not None and made.rows.shape == (BLOCKS * SLOTS, SIZE * 4)
    assert made.rows.view(torch.float32)[2 * SLOTS + 1].tolist() == [7.0] * SIZE


@pytest.mark.parametrize(
    ("cache", "shape"),
    [
        # Interleaved blocks of several layers: pages of other layers are between ours.
        (torch.zeros(BLOCKS, 2, 1, SLOTS, SIZE)[:, 0], rf"\[{BLOCKS}, 1, {SLOTS}, {SIZE}\]"),
        # The layout before vLLM 0.29.
        (torch.zeros(BLOCKS, SLOTS, 1, SIZE), rf"\[{BLOCKS}, {SLOTS}, 1, {SIZE}\]"),
        (torch.zeros(BLOCKS, 2, SLOTS, SIZE // 2), rf"\[{BLOCKS}, 2, {SLOTS}, {SIZE // 2}\]"),
        (torch.zeros(BLOCKS * SLOTS, SIZE), rf"\[{BLOCKS * SLOTS}, {SIZE}\]"),
    ],
    ids=["layers between blocks", "slots before heads", "several heads", "no blocks"],
)
def test_another_layout_is_refused_with_the_fix(cache: torch.Tensor, shape: str) -> None:
    with pytest.raises(
        ValueError, match=rf"kv_cache: .*as {shape} with strides .*install vllm>=.*VLLM_KV_CACHE_LAYOUT"
    ):
        layer(cache).check_cache()


def test_new_blocks_are_zeroed_without_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an ended request may still be read when vLLM zeroes its blocks for another request."""
    monkeypatch.setattr(KVBlockZeroer, "__init__", KVBlockZeroer.__init__)  # so that it is restored
    replaced.zero_no_rows(CaptureBackend)
    replaced.zero_no_rows(CaptureBackend)  # by a second engine in this process
    sizes = {"block_size": SLOTS, "num_kv_heads": 1, "head_size": SIZE}
    groups = [
        AttentionGroup(AttentionBackend, ["attention"], FullAttentionSpec(**sizes, dtype=torch.uint8), 0),
        AttentionGroup(CaptureBackend, ["rows"], HiddenStateCacheSpec(**sizes, dtype=torch.float32), 0),
    ]
    layers = {
        "attention": SimpleNamespace(kv_cache=torch.zeros(BLOCKS, 1, SLOTS, 2 * SIZE, dtype=torch.uint8)),
        "rows": layer(torch.zeros(BLOCKS, 1, SLOTS, SIZE)),
    }
    made = KVBlockZeroer(
        torch.device("cpu"),
        attn_groups_iter=iter(groups),
        kernel_block_sizes=[SLOTS],
        static_forward_context=layers,
        num_blocks=BLOCKS,
    )
    assert made._meta is not None
    assert made._meta[0].tolist() == [layers["attention"].kv_cache.data_ptr()]
