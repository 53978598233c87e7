# SPDX-License-Identifier: Apache-2.0
"""The tap computes the output of the last layer of models that use vLLM's Transformers backend."""

from __future__ import annotations

from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo import convert_frame

pytest.importorskip("vllm")
from dmi_connector.engine.model.architectures import TRANSFORMERS, Architecture
from dmi_connector.engine.model.coverage import Coverage
from dmi_connector.engine.taps.batches import ModelTaps, TapBatch
from dmi_connector.engine.taps.compilation import Compilation
from dmi_connector.engine.taps.final import install_final
from dmi_connector.layout import RowField
from tests import tapkit as kit


class Layer(torch.nn.Module):
    """A layer as in transformers: norms do not add the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.attn, self.mlp = (torch.nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(self.input_layernorm(x)) + self.mlp(x)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = torch.nn.ModuleList([Layer(), Layer()]), torch.nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Wrapper(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    kit.without_cache(monkeypatch)


def context_of(arch: Architecture, *fields: RowField) -> Any:
    return SimpleNamespace(
        drafting=None,
        may_sleep=False,
        last_stage=True,
        arch=arch,
        dims=SimpleNamespace(layers=2),
        layout=SimpleNamespace(
            fields=fields, scored=[], taking=lambda name, _layer: [one for one in fields if one.hook == name]
        ),
        coverage=Coverage(),
        cache_layer=kit.CACHE_LAYER,
        tp=1,
    )


BLOCKS = {"ln1": "input_layernorm", "o_proj": "attn", "mlp": "mlp"}
FINAL = RowField("resid_final", 0, "float32", 4, 16)


@pytest.mark.parametrize("fields", [(), (FINAL,)], ids=["other hooks", "resid_final"])
@pytest.mark.parametrize("norm", ["model.norm", ""], ids=["norm", "no norm"])
def test_a_step_of_taps_ends_once_also_without_a_final_norm(norm: str, fields: tuple[RowField, ...]) -> None:
    """Otherwise, work that is deferred to the end of a step, such as reductions and scores, would not run."""
    model, ends = Wrapper(), []
    arch = Architecture("Some", "some.module:Some", plain_norms=True, parallel=True, final_norm=norm, **BLOCKS)
    taps = ModelTaps(model, context_of(arch, *fields), Compilation(False, False))
    taps.ends = True
    install_final(taps)

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        ends.append(targets.count(torch.ops.dmi.tap_end))
        return graph.forward

    x = torch.ones(3, 4)
    torch.testing.assert_close(torch.compile(model.model, backend=backend, fullgraph=True)(x), model.model(x))
    assert ends == [1]


class AddNorm(torch.nn.Module):
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x + residual


@pytest.mark.parametrize("fused", [False, True])
def test_the_stream_is_where_the_norms_that_vllm_built_have_it(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 may build fused add-and-norms in Cohere 2 with experts, whose row has plain norms."""
    found: dict[str, torch.Tensor] = {}

    def write(batch: TapBatch) -> None:
        found.update({f.hook: value.clone() for f, value in zip(batch.fields, batch.values, strict=True)})

    monkeypatch.setattr(TapBatch, "write", write)
    model, x, residual = Wrapper(), torch.ones(3, 4), torch.full((3, 4), 5.0)
    model.model.norm = AddNorm()
    for layer in model.model.layers:
        layer.input_layernorm, layer.uses_rms_norm = AddNorm(), fused
    arch = Architecture("Some", "some.module:Some", plain_norms=True, parallel=True, **BLOCKS)
    install_final(ModelTaps(model, context_of(arch, FINAL), Compilation(False, False)))
    model.model.norm(x, residual)
    kit.tap(
        model.model.layers[0],
        kit.batch(),
        [RowField("resid_pre", 0, "float32", 4, 0)],
        ln1="input_layernorm",
        plain_norms=True,
        parallel=True,
    )
    model.model.layers[0].input_layernorm(x, residual)
    stream = x + residual if fused else x
    assert torch.equal(found["resid_final"], stream) and torch.equal(found["resid_pre"], stream)


def test_dynamo_sees_a_sum_of_the_last_terms_and_calls_no_update() -> None:
    """With CUDA graphs, vLLM refuses compiled code that calls a function named `update` (`bytecode_hook`)."""
    model = Wrapper()
    context = context_of(Architecture("Some", f"{TRANSFORMERS}:Some", plain_norms=True, parallel=True, **BLOCKS), FINAL)
    install_final(ModelTaps(model, context, Compilation(False, False)))
    found: list[list[str]] = []
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        (tap,) = (node for node in graph.graph.nodes if node.target is torch.ops.dmi.tap)
        steps, todo = [], list(tap.args[0])
        while todo:
            node = todo.pop()
            steps.append(str(node.target))
            todo += [one for one in node.args if isinstance(one, torch.fx.Node) and "neg" not in str(one.target)]
        found.append(steps)
        return graph.forward

    def note(_old: CodeType, new: CodeType) -> None:
        called.extend(new.co_names)

    handle = convert_frame.register_bytecode_hook(note)
    try:
        x = torch.ones(3, 4)
        torch.testing.assert_close(torch.compile(model.model, backend=backend, fullgraph=True)(x), model.model(x))
    finally:
        handle.remove()
    (steps,) = found
    assert sum("add" in step for step in steps) == 2, "the sum must have three terms: the stream, attention and MLP"
    assert called and "update" not in called
