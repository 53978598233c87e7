# SPDX-License-Identifier: Apache-2.0
"""The tap op: what it prepares, and how many tokens it writes at a time."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from dmi_connector.engine.kernels.launch import DECODE_TOKENS
from dmi_connector.engine.taps import op
from dmi_connector.engine.taps.deferred import DeferredReductions
from dmi_connector.layout import RowField
from dmi_connector.reduce import parse
from tests import tapkit as kit


@pytest.mark.parametrize(("spec", "taps"), [("none", 1), ("int8", 1), ("topk(16)", 2), ("rp(8)", 2)])
@pytest.mark.parametrize("tokens", [3, 600])
def test_kernels_of_other_steps_are_compiled_on_padding(
    spec: str, taps: int, tokens: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps have one token, many tokens, and more tokens than are deferred.

    Only the null block changes, where the torch twins write padding. A failure is logged, and the step that needs the
    kernel compiles it.
    """
    width, reduction = 64, parse(spec)
    if reduction is not None:
        reduction.prepare(width, torch.device("cpu"), 0, 0)
    deferred = DeferredReductions([RowField("mlp_out", 0, "bfloat16", width, 0, reduction)], torch.device("cpu"))
    place = op.Place(0, 0, {} if reduction is None else {0: reduction}, deferred)
    rows = torch.full((700, 256), 7, dtype=torch.uint8)
    seen: list[int] = []
    write = op.Tap.write

    def noted(self: op.Tap, rows: torch.Tensor, slots: torch.Tensor, values: Any) -> None:
        seen.append(len(values[0]))
        write(self, rows, slots, values)

    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(op.Tap, "write", noted)
    values = [torch.randn(tokens, width).bfloat16()]
    place.tap(values, [0])
    op.compile_others(place, rows, values, [0])
    undeferred = [deferred.tokens + 1] if reduction is not None else []
    assert sorted(seen) == sorted({1, *undeferred, DECODE_TOKENS + 1})
    assert len(place.taps) == taps and bool((rows[1:] == 7).all())
    monkeypatch.setattr(op.Tap, "write", fails)
    op.compile_others(place, rows, values, [0])
    assert "could not be compiled ahead of time (RuntimeError: no memory)" in caplog.text


def test_two_models_have_places_of_their_own_and_a_freed_one_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op raises an error for a tensor without a place, and writes no row."""
    rows, slots = torch.zeros(4, 256, dtype=torch.uint8), torch.tensor([1, 2])
    kit.in_forward(monkeypatch, kit.ForwardContext(no_compile_layers={"rows": kit.RowMemory(rows, slots)}))
    batches, token = [kit.batch(), kit.batch()], torch.zeros(1, dtype=torch.int32)

    def write(tensor: torch.Tensor, value: float) -> None:
        torch.ops.dmi.tap([torch.full((2, 4), value)], token, tensor, [0], "rows")

    starts, tensors = (64, 128), [batch.tensor for batch in batches]
    for batch, start in zip(batches, starts, strict=True):
        batch.place.start = start
    write(tensors[0], 1.0)
    write(tensors[1], 2.0)
    words = rows.view(torch.float32)
    assert words[1:3, 16:20].eq(1).all() and words[1:3, 32:36].eq(2).all() and words.count_nonzero() == 16
    batches.pop(0)
    gc.collect()
    before = rows.clone()
    for tensor in (tensors[0], tensors[1].clone()):
        with pytest.raises(KeyError):
            write(tensor, 3.0)
    assert rows.equal(before)
    write(tensors[1], 4.0)
    assert words[1:3, 32:36].eq(4).all()


@pytest.mark.parametrize(
    ("device", "specs", "dtype", "tokens"),
    [
        ("cuda", ["int8", "topk(64)", "none"], torch.bfloat16, sys.maxsize),
        ("cuda", ["rp(512)", "int8"], torch.bfloat16, (64 << 20) // (4 * 512)),
        ("cuda", ["rp(512)", "rp(512)"], torch.float32, (64 << 20) // (2 * 4 * (512 + 2 * 2560))),
        ("cuda", ["rp(512)"] * 40, torch.float32, 1024),
        ("cpu", ["int8"], torch.bfloat16, 1024),
        ("cpu", ["none"], torch.bfloat16, sys.maxsize),
    ],
)
def test_only_projections_split_a_step(device: str, specs: list[str], dtype: torch.dtype, tokens: int) -> None:
    """A fake GPU tensor has only the attributes that are read."""
    value: Any = SimpleNamespace(is_cuda=device == "cuda", shape=(20_000, 2560), dtype=dtype)
    assert op.tokens_at_once([value] * len(specs), [parse(spec) for spec in specs]) == tokens


def test_scores_are_copied_when_all_rows_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied after the deferred reductions."""
    done: list[Any] = []
    deferred: Any = SimpleNamespace(reduce=lambda *_: done.append("reduce"))
    scores: Any = SimpleNamespace(copy=lambda *given: done.append(given))
    rows, slots, cached = torch.zeros(4, 64, dtype=torch.uint8), torch.arange(1, 4), torch.arange(7, 10)
    memory = kit.RowMemory(rows, slots, scores=(scores, cached))
    kit.in_forward(monkeypatch, kit.ForwardContext(no_compile_layers={"rows": memory}))
    token, tensor = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    place = op.Place(0, 0, {}, deferred)
    op.stand_for(tensor, place)
    torch.ops.dmi.tap_end(token.expand(2), token, tensor, "rows")
    assert done[0] == "reduce"
    copied, row_slots, slots_of_tokens = done[1]
    assert copied is rows and row_slots is slots and slots_of_tokens.tolist() == [7, 8], (
        "only the slots of the tokens in the forward are passed"
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("spec", ["none", "int8", "topk(16)"])
def test_a_captured_step_writes_the_rows_of_an_uncaptured_one(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are overwritten, and their memory is reused, as soon as an op was called."""
    width, tokens, device = 4096, 64, torch.device("cuda")
    row_bytes, reduction = 2 * width, parse(spec)
    if reduction is not None:
        for layer in range(6):
            reduction.prepare(width, device, layer, 0)
    fields = [RowField("mlp_out", i, "bfloat16", width, row_bytes * i, reduction) for i in range(6)]
    rows = torch.zeros(tokens, 6 * row_bytes, dtype=torch.uint8, device=device)
    slots = torch.randperm(tokens, device=device)
    kit.in_forward(monkeypatch, kit.ForwardContext(no_compile_layers={"rows": kit.RowMemory(rows, slots)}))
    deferred, tensors, places = DeferredReductions(fields, device), [], []
    for field in fields:
        tensors.append(torch.zeros(1, dtype=torch.int32, device=device))
        reductions = {} if reduction is None else {field.offset: reduction}
        places.append(op.Place(field.offset, field.layer, reductions, deferred))
        op.stand_for(tensors[-1], places[-1])
    token, inputs = torch.zeros(1, dtype=torch.int32, device=device), torch.randn(6, tokens, width, device=device)

    def step() -> None:
        for i, tensor in enumerate(tensors):
            value = inputs[i].bfloat16()
            torch.ops.dmi.tap([value], token, tensor, [0], "rows")
            if i % 2:
                value.fill_(-1)
            del value
            torch.full((tokens, width), -2, dtype=torch.bfloat16, device=device)
        torch.ops.dmi.tap_end(slots, token, tensors[0], "rows")

    step()
    torch.cuda.synchronize()
    want = rows.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        rows.zero_()
        graph.replay()
        assert torch.equal(rows, want)
    assert int(want.count_nonzero()) > 1000
