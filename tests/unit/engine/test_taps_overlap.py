# SPDX-License-Identifier: Apache-2.0
"""Taps on a branch of a CUDA graph, which run in parallel with the model's kernels."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.config import CUDAGraphMode

from dmi_connector.engine.taps import op, overlap
from dmi_connector.engine.taps.deferred import DeferredReductions
from dmi_connector.layout import RowField
from dmi_connector.reduce import parse
from tests.tapkit import ForwardContext, RowMemory, in_forward


class Streams:
    """Fake CUDA streams that record the calls of a branch."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def wait_stream(self, _stream: Any) -> None:
        self.done.append("fork")

    def record_event(self) -> str:
        return "event"

    def wait_event(self, _event: Any) -> None:
        self.done.append("wait")


def test_an_op_waits_for_the_branch_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the forward waits too, but an op without a branch does not. Values stay referenced until then. The
    values of a forward whose capture failed are dropped.
    """
    streams = Streams()
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: streams)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    branch, write = overlap.Branch(torch.device("cpu")), op.Tap.write
    monkeypatch.setattr(op, "captured_branch", lambda _device: branch)
    monkeypatch.setattr(op.Tap, "write", lambda *args: streams.done.append("write") or write(*args))
    rows, slots = torch.zeros(4, 64, dtype=torch.uint8), torch.arange(1, 3)
    deferred, tensor = DeferredReductions([], torch.device("cpu")), torch.zeros(1, dtype=torch.int32)
    place = op.Place(0, 0, {}, deferred)
    op.stand_for(tensor, place)
    token = torch.zeros(1, dtype=torch.int32)

    def forward(*besides: bool, end: bool = True, join: bool = False) -> list[list[bool]]:
        """Run a forward. Returns which values still exist after each op. join: let something wait after each op."""
        context = ForwardContext(no_compile_layers={"rows": RowMemory(rows, slots)})
        in_forward(monkeypatch, context)
        values: list[weakref.ref[torch.Tensor]] = []
        there = []
        streams.done.clear()
        for beside in besides:
            value = torch.ones(2, 4)
            values.append(weakref.ref(value))
            torch.ops.dmi.tap([value], token, tensor, [0], beside, "rows")
            del value
            if join:
                torch.ops.dmi.tap_join(token)
            there.append([v() is not None for v in values])
        if end:
            torch.ops.dmi.tap_end(token.expand(2), token, tensor, "rows")
            assert not any(v() is not None for v in values)
        return there

    alive = [[True], [False, True], [False, True, False], [False, False, False, True]]
    assert forward(True, True, False, True) == alive
    assert " ".join(streams.done) == "fork write wait fork write write wait fork write wait"
    assert rows.view(torch.float32)[1:3, :4].eq(1).all()
    assert forward(True, True, False, join=True) == [[False], [False, False], [False, False, False]]
    assert " ".join(streams.done) == "fork write wait fork write wait write"
    assert forward(True, end=False) == [[True]], "the value of a failed forward stays until the next one"
    assert forward(True) == [[True]]
    assert " ".join(streams.done) == "fork write wait", "the next forward must only wait for its own op"


def test_scores_are_copied_when_all_rows_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied after the branch and after the deferred reductions."""
    done: list[Any] = []
    branch: Any = SimpleNamespace(join=lambda _forward: done.append("join"))
    monkeypatch.setattr(op, "captured_branch", lambda _device: branch)
    deferred: Any = SimpleNamespace(reduce=lambda *_: done.append("reduce"))
    scores: Any = SimpleNamespace(copy=lambda *given: done.append(given))
    rows, slots, cached = torch.zeros(4, 64, dtype=torch.uint8), torch.arange(1, 4), torch.arange(7, 10)
    memory = RowMemory(rows, slots, scores=(scores, cached))
    in_forward(monkeypatch, ForwardContext(no_compile_layers={"rows": memory}))
    token, tensor = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    place = op.Place(0, 0, {}, deferred)
    op.stand_for(tensor, place)
    torch.ops.dmi.tap_end(token.expand(2), token, tensor, "rows")
    assert done[:2] == ["join", "reduce"]
    copied, row_slots, slots_of_tokens = done[2]
    assert copied is rows and row_slots is slots and slots_of_tokens.tolist() == [7, 8], (
        "only the slots of the tokens in the forward are passed"
    )


def test_a_cpu_has_no_branch() -> None:
    assert overlap.captured_branch(torch.device("cpu")) is None


@pytest.mark.parametrize("mode", ["NONE", "FULL", "PIECEWISE"])
def test_a_piecewise_graph_has_no_branch(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode[mode])
    in_forward(monkeypatch, context)
    monkeypatch.setattr(overlap, "branch_of", lambda _device: "branch")
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        found = overlap.captured_branch(torch.device("cuda"))
        assert found == ("branch" if capturing and mode != "PIECEWISE" else None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("spec", ["none", "int8", "topk(16)"])
def test_a_captured_step_writes_the_rows_of_an_uncaptured_one(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is reused as soon as an op was called, and values are overwritten once the next op has waited."""
    width, tokens, device = 4096, 64, torch.device("cuda")
    row_bytes, reduction = 2 * width, parse(spec)
    if reduction is not None:
        for layer in range(6):
            reduction.prepare(width, device, layer, 0)
    fields = [RowField("mlp_out", i, "bfloat16", width, row_bytes * i, reduction) for i in range(6)]
    rows = torch.zeros(tokens, 6 * row_bytes, dtype=torch.uint8, device=device)
    slots = torch.randperm(tokens, device=device)
    context = ForwardContext(
        no_compile_layers={"rows": RowMemory(rows, slots)}, cudagraph_runtime_mode=CUDAGraphMode.NONE
    )
    in_forward(monkeypatch, context)
    deferred, tensors, places = DeferredReductions(fields, device), [], []
    for field in fields:
        tensors.append(torch.zeros(1, dtype=torch.int32, device=device))
        reductions = {} if reduction is None else {field.offset: reduction}
        places.append(op.Place(field.offset, field.layer, reductions, deferred))
        op.stand_for(tensors[-1], places[-1])
    token, inputs = torch.zeros(1, dtype=torch.int32, device=device), torch.randn(6, tokens, width, device=device)

    def step() -> None:
        before = None
        for i, tensor in enumerate(tensors):
            value = inputs[i].bfloat16()
            torch.ops.dmi.tap([value], token, tensor, [0], True, "rows")
            if before is not None:
                before.fill_(-1)
            before = value if i % 2 else None
            del value
            torch.full((tokens, width), -2, dtype=torch.bfloat16, device=device)
        torch.ops.dmi.tap_end(slots, token, tensors[0], "rows")

    step()
    torch.cuda.synchronize()
    want = rows.clone()
    graph, branches, beside = torch.cuda.CUDAGraph(), [], overlap.Branch.beside
    monkeypatch.setattr(overlap.Branch, "beside", lambda self, *args: branches.append(self) or beside(self, *args))
    with torch.cuda.graph(graph):
        step()
    assert len(branches) == len(tensors)
    for _ in range(20):
        rows.zero_()
        graph.replay()
        assert torch.equal(rows, want)
    assert int(want.count_nonzero()) > 1000
