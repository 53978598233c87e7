# SPDX-License-Identifier: Apache-2.0
"""The start checks the layout of the cache: slot s must be row s, whatever vLLM calls its layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dmi_connector.engine.owners.row_cache import CaptureLayer

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
