# SPDX-License-Identifier: Apache-2.0
"""Reductions that are deferred to the end of a step give the same rows as immediate ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dmi_connector.engine.kernels.reduce import zero_offset
from dmi_connector.engine.kernels.row_writer import RowWriter
from dmi_connector.engine.taps import deferred
from dmi_connector.engine.taps.deferred import DeferredReductions
from dmi_connector.layout import RowField
from dmi_connector.reduce import parse

TOPK, RP, INT8 = parse("topk(3)"), parse("rp(4)"), parse("int8")
FIELDS = [
    RowField("mlp_post", 1, "float32", 10, 64, TOPK),
    RowField("q", 1, "float32", 8, 128, INT8),
    RowField("resid_pre", 1, "bfloat16", 6, 160, RP),
    RowField("mlp_post", 4, "float32", 10, 192, TOPK),
    RowField("resid_pre", 4, "bfloat16", 6, 256, RP),
    RowField("resid_pre", 5, "bfloat16", 6, 320, RP),
    RowField("ln1", 5, "float32", 8, 384, None),
]
LATER = [f for f in FIELDS if f.reduction in (TOPK, RP)]
CPU = torch.device("cpu")


@pytest.mark.parametrize("tokens", [1, 5, deferred.MOST_TOKENS])
def test_deferred_rows_equal_those_of_reducing_at_once(tokens: int) -> None:
    torch.manual_seed(tokens)
    buffered = DeferredReductions(FIELDS, CPU)
    slots = torch.randperm(400)[:tokens] + 1
    mine = torch.full((401, 512), 7, dtype=torch.uint8)
    want = mine.clone()
    for step in range(2):  # values of the second step overwrite those of the first
        for field in LATER:
            places = buffered.places([field.offset])
            values = torch.randn(tokens, field.width).to(getattr(torch, field.dtype)) * (step + 1)
            field.reduction.prepare(field.width, CPU, field.layer, 0)
            one = ([field.width], values.dtype, [field.offset], [field.reduction], field.layer)
            RowWriter(*one, places)(mine, slots, [values], buffered.buffer)
            RowWriter(*one)(want, slots, [values])
        assert step or (mine == 7).all(), "rows must not change before the end"
        buffered.reduce(mine, slots, tokens)
    assert torch.equal(mine, want)
    assert (mine[slots] != 7).any()


def test_large_steps_and_other_reductions_are_not_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    buffered = DeferredReductions(FIELDS, CPU)
    assert (
        not buffered.takes(deferred.MOST_TOKENS + 1) and not buffered.takes(0) and buffered.takes(deferred.MOST_TOKENS)
    )
    assert buffered.places([64, 128, 384, 192]) == [0, None, None, 40]
    rows = torch.full((3, 512), 7, dtype=torch.uint8)
    for tokens in (0, deferred.MOST_TOKENS + 1):
        buffered.reduce(rows, torch.zeros(600, dtype=torch.int64), tokens)
    assert (rows == 7).all()
    assert DeferredReductions([f for f in FIELDS if f.reduction is INT8], CPU).tokens == 0
    row_bytes = 128  # 2 * 10 * 4 + 3 * 6 * 2, padded to a multiple of 64
    monkeypatch.setattr(deferred, "MOST_BYTES", 9 * row_bytes + 1)
    assert DeferredReductions(FIELDS, CPU).tokens == 9


@pytest.mark.parametrize("may_sleep", [False, True])
def test_sleep_frees_the_buffer_alone(monkeypatch: pytest.MonkeyPatch, may_sleep: bool) -> None:
    kept: list[torch.Tensor] = []
    freed: list[torch.Tensor] = []

    def place(tensors: list[torch.Tensor]) -> Any:
        def allocate(call: Callable[[], torch.Tensor], device: torch.device, sleeps: bool) -> torch.Tensor:
            assert (device, sleeps) == (CPU, may_sleep)
            tensors.append(call())
            return tensors[-1]

        return allocate

    monkeypatch.setattr(deferred, "kept_in_sleep", place(kept))
    monkeypatch.setattr(deferred, "freed_in_sleep", place(freed))
    buffered = DeferredReductions(FIELDS, CPU, may_sleep)
    assert len(freed) == 1 and freed[0] is buffered.buffer
    assert [tensor.tolist() for tensor in kept] == [[64, 192], [160, 256, 320], [0]]
    assert kept[-1] is zero_offset(CPU)
    DeferredReductions([], CPU, may_sleep)
    assert len(freed) == 1, "without deferred fields, no buffer is allocated"


def test_projections_of_many_layers_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(deferred, "reduce_layers", lambda *args: calls.append((args[4], args[5], args[2].shape)))
    buffered = DeferredReductions(FIELDS, CPU)
    scratch = RP.scratch(6, "bfloat16")
    monkeypatch.setattr(deferred, "SCRATCH", 2 * 5 * scratch)
    buffered.reduce(torch.zeros(3, 512, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64), 5)
    assert calls == [(TOPK, (1, 4), (5, 2, 10)), (RP, (1, 4), (5, 2, 6)), (RP, (5,), (5, 1, 6))]
