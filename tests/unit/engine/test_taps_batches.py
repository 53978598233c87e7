# SPDX-License-Identifier: Apache-2.0
"""The values that one op writes together, and the op in graphs of torch.compile."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from dmi_connector.engine.model.architectures import TRANSFORMERS, Architecture
from dmi_connector.engine.model.coverage import Coverage
from dmi_connector.engine.taps import batches
from dmi_connector.engine.taps.batches import ModelTaps, batches_of_layers
from dmi_connector.engine.taps.compilation import Compilation
from dmi_connector.layout import RowField
from dmi_connector.reduce import parse
from tests import tapkit as kit


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    kit.without_cache(monkeypatch)


def outputs_of(graph: torch.fx.GraphModule) -> int:
    """Number of tensors that a compiled graph returns."""
    (outputs,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
    return len(outputs)


def taps_of(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The tap ops of a graph."""
    return [node for node in graph.graph.nodes if node.target is torch.ops.dmi.tap]


def test_tapped_values_are_not_outputs_of_the_graph() -> None:
    """Outputs live until the end of the forward. For all layers, that would be gigabytes."""
    batch = kit.batch()
    seen: list[tuple[int, int]] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.append((outputs_of(graph), len(taps_of(graph))))
        return graph.forward

    def layer(x: torch.Tensor) -> torch.Tensor:
        for name in ("resid_pre", "attn_out"):
            batch.add(RowField(name, 0, "float32", 4, 64), x)
            x = x * 2
            batch.pause(more_compiled=True)
        batch.add(RowField("mlp_out", 0, "float32", 4, 128), x)
        batch.write()
        return x + 1

    x = torch.ones(3, 4)
    torch.testing.assert_close(torch.compile(layer, backend=backend, fullgraph=True)(x), x * 4 + 1)
    assert seen == [(1, 1)] and batch.values == [] and batch.fields == []


def test_layers_share_an_op_up_to_13_values_and_64_kib() -> None:
    hidden = batches_of_layers(kit.fields(*range(36)))
    assert hidden == [list(range(12)), list(range(12, 24)), list(range(24, 36))]
    assert batches_of_layers(kit.fields(*range(20), width=64)) == [list(range(13)), list(range(13, 20))]
    assert batches_of_layers(kit.fields(4, 9, 10, hooks=("resid_pre", "resid_mid"))) == [[4, 9, 10]]


def test_layers_whose_values_do_not_last_share_no_op() -> None:
    wide = [*kit.fields(0, 1, 2), RowField("mlp_out", 1, "bfloat16", 64, 1 << 20)]
    assert batches_of_layers(wide) == [[0, 2]]
    reduced = [replace(f, reduction=parse("int8")) if f.layer else f for f in kit.fields(0, 1)]
    assert batches_of_layers(reduced) == [[0]]


def test_values_of_several_layers_are_not_outputs_of_the_graph() -> None:
    seen: list[tuple[int, list[int]]] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.append((outputs_of(graph), [len(node.args[0]) for node in taps_of(graph)]))
        return graph.forward

    fields = kit.fields(*range(15), width=4)
    batches = {layers[0]: kit.batch() for layers in batches_of_layers(fields)}
    of_layer = {layer: (batches[layers[0]], layers[-1]) for layers in batches_of_layers(fields) for layer in layers}

    def model(x: torch.Tensor) -> torch.Tensor:
        for field in fields:
            x = x * 2
            batch, last = of_layer[field.layer]
            batch.add(field, x)
            batch.pause(more_compiled=field.layer != last)
        return x + 1

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(torch.ones(3, 4)), torch.full((3, 4), 2.0**15 + 1))
    assert seen == [(1, [13, 2])]
    assert all((batch.values, batch.fields) == ([], []) for batch in batches.values())


def test_ops_return_no_values() -> None:
    """So no value must live longer than the piecewise graph that computes it."""
    seen: list[tuple[int, int]] = []
    batch, fields = kit.batch(), kit.fields(0, 1, 2, width=4)

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.append((len(taps_of(graph)), outputs_of(graph)))
        return graph.forward

    def model(x: torch.Tensor) -> torch.Tensor:
        for field in fields:
            x = x * 2
            batch.add(field, x)
            batch.write()
        batch.end(x)
        return x + 1

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.ones(3, 4)), torch.full((3, 4), 9.0))
    assert seen == [(3, 1)]


@pytest.mark.parametrize("ends", [False, True])
def test_a_step_ends_with_an_op_only_if_the_op_has_work(ends: bool) -> None:
    seen: list[int] = []
    batch = kit.batch()
    batch.taps.ends = ends

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.append(sum(node.target is torch.ops.dmi.tap_end for node in graph.graph.nodes))
        return graph.forward

    def model(x: torch.Tensor) -> torch.Tensor:
        batch.end(x)
        return x + 1

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert seen == [int(ends)]


def taps_in(model: torch.nn.Module, base: str) -> ModelTaps:
    """Taps of a model with vLLM's class `base`. No hook is selected."""
    context: Any = SimpleNamespace(
        layout=SimpleNamespace(fields=[], scored=[]), arch=Architecture("Some", base), drafting=None, may_sleep=False
    )
    return ModelTaps(model, context, Compilation(False, False))


@pytest.mark.parametrize("may_sleep", [False, True])
def test_tensors_of_reductions_stay_when_an_engine_sleeps(monkeypatch: pytest.MonkeyPatch, may_sleep: bool) -> None:
    """One call of `kept_in_sleep` allocates the tensors of a layer's reductions, and nothing else."""
    prepared, kept = [], []
    reduction = parse("int8")
    monkeypatch.setattr(type(reduction), "prepare", lambda _, *what: prepared.append(what))
    monkeypatch.setattr(batches, "shard_of", lambda *_: SimpleNamespace(shard=2))
    monkeypatch.setattr(batches, "kept_in_sleep", lambda call, *how: kept.append((call(), len(prepared), *how)))
    fields = [replace(f, reduction=reduction) for f in kit.fields(3, width=4, hooks=("ln1", "q"))]
    fields += kit.fields(4, width=4)
    context: Any = SimpleNamespace(
        layout=SimpleNamespace(fields=fields, scored=[]),
        dims=SimpleNamespace(hooks=dict.fromkeys(("ln1", "q", "resid_pre"))),
        coverage=Coverage(),
        drafting=None,
        tp=1,
        may_sleep=may_sleep,
    )
    taps = ModelTaps(torch.nn.Module(), context, Compilation(False, False))
    device = torch.device("cpu")
    taps.batch([4])
    assert prepared == kept == []
    place = taps.batch([3]).place
    assert prepared == [(4, device, 3, 2)] * 2 and list(place.reductions.values()) == [reduction] * 2
    assert kept == [(None, 2, device, may_sleep)]


def test_a_missing_module_is_named() -> None:
    taps = taps_in(torch.nn.Module(), "some:Some")
    with pytest.raises(
        ValueError, match=r"model: Some has no module 'layers\.0\.qkv_proj' as vLLM built it; leave out"
    ):
        taps.hook("layers.0.qkv_proj", lambda *_: None)


@pytest.mark.parametrize("base", ["some:Some", f"{TRANSFORMERS}:TransformersForCausalLM"])
def test_calls_before_attention_run_in_their_order(base: str) -> None:
    """vLLM's Transformers backend calls the `forward` of attention directly, without hooks."""
    model, seen = torch.nn.Module(), []
    model.attn = torch.nn.Identity()
    taps = taps_in(model, base)
    for name in ("first", "second"):
        taps.before_attention("attn", lambda module, args, name=name: seen.append((name, module, args)))
    call = model.attn.forward if taps.context.arch.in_transformers else model.attn
    assert call(3) == 3
    assert seen == [("first", model.attn, (3,)), ("second", model.attn, (3,))]
