# SPDX-License-Identifier: Apache-2.0
"""Which values are copied before a compiled model may overwrite them, and where the model waits for taps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from dmi_connector.engine.model.architectures import ARCHITECTURES, Architecture
from dmi_connector.engine.taps import install, points
from dmi_connector.engine.taps.batches import TapBatch
from dmi_connector.engine.taps.compilation import Compilation
from dmi_connector.hooks import HOOKS
from dmi_connector.layout import RowField
from tests import tapkit as kit


class Linear(torch.nn.Module):
    def __init__(self, bias: bool = False, quantised: bool = False) -> None:
        super().__init__()
        self.bias = torch.ones(1) if bias else None
        self.quant_method = None if quantised else object.__new__(install.UnquantizedLinearMethod)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x * 2, None


class Norm(torch.nn.Module):
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + residual, x + residual


class Attention(torch.nn.Module):
    head_size = 4

    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = heads, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Block(torch.nn.Module):
    """The second half of a layer, with one head. o_proj: options of its output projection."""

    def __init__(self, **o_proj: bool) -> None:
        super().__init__()
        self.attn, self.o_proj, self.ln2, self.down_proj = Attention(), Linear(**o_proj), Norm(), Linear()
        self.mlp = self.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.o_proj(self.attn(x))
        normed, _ = self.ln2(out, x)
        return self.mlp(normed)[0]


class Rotated(torch.nn.Module):
    """The part of a layer before attention: two heads of size four, whose halves are rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.qkv, self.attn = Norm(), Linear(), Attention(heads=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed, residual = self.ln1(x, x)
        qkv, _ = self.qkv(normed)
        first, second = qkv[..., :8].view(-1, 2, 4).chunk(2, -1)
        return self.attn(torch.cat([second, first], -1).flatten(1)) + residual[..., :8]


def the_tap(graph: torch.fx.GraphModule) -> torch.fx.Node:
    """The only tap op of a graph."""
    (op,) = (node for node in graph.graph.nodes if node.target is torch.ops.dmi.tap)
    return op


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    kit.without_cache(monkeypatch)


def test_the_table_has_a_row_for_every_hook_of_a_layer() -> None:
    """Routing and attention summaries run inside opaque ops, and have their own functions."""
    special = {"router_logits", "topk_ids", "topk_weights", "pattern"}
    assert {point.hook for point in points.TAP_POINTS} == {
        name for name, hook in HOOKS.items() if hook.scope == "layer" and name not in special
    }
    assert {point.module for point in points.TAP_POINTS} <= set(points.MODULES)


@pytest.mark.parametrize(
    ("hooks", "in_place", "o_proj", "copied"),
    [
        ("attn_out,mlp_out", False, {}, False),
        ("attn_out,mlp_out", True, {}, True),
        ("attn_out", True, {}, False),
        ("attn_out,mlp_out", False, {"bias": True}, True),
        ("attn_out,mlp_out", False, {"quantised": True}, True),
        ("attn_out", False, {"untested": True}, True),
    ],
)
def test_attn_out_is_copied_where_it_may_change(
    hooks: str, in_place: bool, o_proj: dict[str, bool], copied: bool
) -> None:
    """It may be changed by an in-place norm before it is written, or by a compiler that rounds the values after a
    matrix product in another way.
    """
    names, untested = hooks.split(","), o_proj.get("untested", False)
    block = Block() if untested else Block(**o_proj)
    fields = [RowField(name, 0, "float32", 4, 16 * i) for i, name in enumerate(names)]
    kit.tap(
        block,
        kit.batch(in_place, copies=untested),
        fields,
        attn="attn",
        o_proj="o_proj",
        ln2="ln2",
        mlp="mlp",
        down_proj="down_proj",
    )
    found: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        steps, node = [], the_tap(graph).args[0][0]  # the nodes of attn_out, from the op back to its matrix product
        while "mul" not in str(node.target):
            steps.append(node)
            node = node.args[0]
        found.append([str(step.target) for step in steps])
        order = list(graph.graph.nodes)
        norm = min(order.index(user) for user in node.users if "add" in str(user.target))
        renamed = order.index(steps[-1]) < norm
        assert renamed or hooks == "attn_out", "vLLM refuses graphs that use a norm's input after the norm"
        return graph.forward

    torch.compile(block, backend=backend, fullgraph=True)(torch.ones(3, 4))
    (steps,) = found
    assert sum("neg" in step for step in steps) == (2 if copied else 0), steps


class FusedMLP(torch.nn.Module):
    """An MLP whose first projection returns gate and up next to each other. first: options of that projection."""

    def __init__(self, **first: bool) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = Linear(**first), Linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, -1)
        return self.down_proj(torch.sigmoid(gate) * up)[0]


@pytest.mark.parametrize(
    ("first", "copied"), [({}, False), ({"bias": True}, True), ({"quantised": True}, True), ({"lora": True}, True)]
)
def test_gate_and_up_are_copied_where_a_compiler_may_go_on_from_them_unrounded(
    first: dict[str, bool], copied: bool
) -> None:
    lora = first.pop("lora", False)
    block = torch.nn.Sequential(FusedMLP(**first))
    fields = [RowField(name, 0, "float32", 4, 16 * i) for i, name in enumerate(("mlp_pre", "mlp_pre_linear"))]
    kit.tap(
        block, kit.batch(products_last=not lora), fields, mlp="0", up_proj="0.gate_up_proj", down_proj="0.down_proj"
    )
    found: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        found.append(sum("neg" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    torch.compile(block, backend=backend, fullgraph=True)(torch.ones(3, 8))
    assert found == [4 if copied else 0]


@pytest.mark.parametrize(("hook", "module"), [("mlp_pre", "up_proj"), ("attn_out", "o_proj"), ("mlp_out", "down_proj")])
def test_a_module_that_vllm_did_not_build_is_named(hook: str, module: str) -> None:
    """This also holds if the hook depends on how that module computes."""
    paths = {"mlp": "mlp", "down_proj": "down_proj", module: "gone"}
    with pytest.raises(ValueError, match=r"Block has no module 'model.layers.0.gone' as vLLM built it") as refused:
        kit.tap(
            Block(),
            kit.batch(),
            [RowField(hook, 0, "float32", 4, 0), RowField("mlp_post", 0, "float32", 4, 16)],
            **paths,
        )
    assert "leave out the hooks" in str(refused.value)


@pytest.mark.parametrize("lasts", [False, True])
def test_a_stream_that_lasts_is_not_copied_and_heads_are_copied_by_halves(
    lasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, fields = Rotated(), [RowField("resid_pre", 0, "float32", 16, 0), RowField("q", 0, "float32", 8, 64)]
    kit.tap(block, kit.batch(stream_lasts=lasts), fields, attn="attn", qkv="qkv", ln1="ln1")
    found: list[tuple[int, list[int]]] = []
    written: list[list[torch.Tensor]] = []

    def negated(node: torch.fx.Node) -> int:
        return 1 + negated(node.args[0]) if "neg" in str(node.target) else 0

    def made_by(node: torch.fx.Node, what: str) -> torch.fx.Node:
        while what not in str(node.target) and "neg" not in str(node.target):
            node = node.args[0]
        return node

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        stream, q = the_tap(graph).args[0]
        halves = made_by(q, "cat").args[0]
        assert len(halves) == 2, "each half must be copied"
        found.append((negated(made_by(stream, "add")), [negated(half) for half in halves]))
        return graph.forward

    x = torch.arange(48.0).view(3, 16)
    compiled = torch.compile(block, backend=backend, fullgraph=True)(x)
    monkeypatch.setattr(TapBatch, "write", lambda self: written.append(list(self.values)))
    torch.testing.assert_close(block(x), compiled)
    assert found == [(0 if lasts else 2, [2, 2])]
    torch.testing.assert_close(written[0][0], 2 * x)
    torch.testing.assert_close(written[0][1], 4 * x[:, :8])


@pytest.mark.parametrize("shape", [(3, 16), (3, 4, 4), (2, 4), (2, 6), (3, 2, 3)])
def test_a_copy_by_halves_equals_its_source(shape: tuple[int, ...]) -> None:
    copied = torch.compile(lambda value: install._copy_halves(value, 4), backend="eager", fullgraph=True)
    value = torch.randn(shape)
    torch.testing.assert_close(copied(value).reshape(shape), value, rtol=0, atol=0)


def test_the_shared_key_of_latent_attention_is_found_beside_the_latent_and_in_keys_of_heads() -> None:
    key, made = torch.randn(5, 1, 2), torch.randn(5, 3, 4)
    heads = torch.cat([made, key.expand(-1, 3, -1)], -1)
    latent: Any = SimpleNamespace(shared=0)
    assert torch.equal(points._rotary_key(latent, (None, torch.randn(5, 7), key), None), key)
    over_heads: Any = SimpleNamespace(shared=2)
    assert torch.equal(points._rotary_key(over_heads, (None, heads, made), None), key[:, 0])


def test_values_of_gated_attention_are_found_after_the_gates() -> None:
    layer: Any = SimpleNamespace(arch=Architecture("Gated", "", gated=True), q_size=8, kv_size=4)
    qkv = torch.arange(24.0)[None]
    assert points._part(2)(layer, (), qkv).tolist() == [[20.0, 21.0, 22.0, 23.0]]


class Mixed(torch.nn.Module):
    """Attention, and a mixer with two input projections."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.attn, self.o_proj = Linear(), Attention(), Linear()
        self.mix_first, self.mix_in, self.mix_norm, self.mix_out = Linear(), Linear(), torch.nn.Identity(), Linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv(x)
        q = qkv[..., :4]
        q += 100
        attended, _ = self.o_proj(self.attn(q))
        first, _ = self.mix_first(x)
        projected, _ = self.mix_in(x + 1)
        mixed, _ = self.mix_out(self.mix_norm(projected + first))
        return attended + mixed


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """{hook: its value when it is written}."""
    found: dict[str, torch.Tensor] = {}

    def write(batch: TapBatch, _beside: bool = True) -> None:
        found.update({f.hook: value.clone() for f, value in zip(batch.fields, batch.values, strict=True)})
        batch.fields.clear()
        batch.values.clear()

    monkeypatch.setattr(TapBatch, "write", write)
    return found


def of_hooks(*hooks: str) -> list[RowField]:
    return [RowField(hook, 0, "float32", 4, 16 * i) for i, hook in enumerate(hooks)]


def test_two_projections_of_a_mixer_are_concatenated(written: dict[str, torch.Tensor]) -> None:
    block, paths = Mixed(), {name: name for name in ("mix_first", "mix_in", "mix_norm", "mix_out")}
    kit.tap(block, kit.batch(), of_hooks("mix_proj", "attn_out"), **paths, attn="", o_proj="mix_out")
    x = torch.arange(12.0).view(3, 4)
    block(x)
    torch.testing.assert_close(written["mix_proj"], torch.cat([2 * x, 2 * (x + 1)], -1))
    torch.testing.assert_close(written["attn_out"], 2 * (2 * (x + 1) + 2 * x))


def test_no_tensor_of_the_model_is_concatenated(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, Inductor let the matrix product of a concatenated tensor write into the result. That changed strides
    that the next graph of vLLM was compiled for, so the model gated with values of other positions.
    """
    kit.without_cache(monkeypatch)
    torch._dynamo.reset()
    joined: list[torch.fx.Node] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        joined.extend(node for node in graph.graph.nodes if node.target is torch.cat)
        return graph.forward

    block, paths = Mixed(), {name: name for name in ("mix_first", "mix_in", "mix_norm", "mix_out")}
    kit.tap(block, kit.batch(), of_hooks("mix_proj", "attn_out"), **paths, attn="", o_proj="mix_out")
    torch.compile(block, backend=backend, fullgraph=True)(torch.ones(3, 4))
    assert [[part.target for part in node.args[0]] for node in joined] == [[torch.neg, torch.neg]]


def test_the_graph_of_a_draft_has_no_tap_of_a_module_that_it_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft runs the modules while taps rest, the target while they do not. Each is compiled on its own."""
    kit.without_cache(monkeypatch)
    block, paths = Mixed(), {name: name for name in ("mix_first", "mix_in", "mix_norm", "mix_out")}
    shared = SimpleNamespace(shares_modules=True)
    taps = kit.tap(block, kit.batch(), of_hooks("mix_proj", "attn_out"), shared, **paths, attn="", o_proj="mix_out")
    ops: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        ops.append([str(node.target) for node in graph.graph.nodes if "dmi" in str(node.target)])
        return graph.forward

    assert taps.resting
    for resting in (True, False):
        torch._dynamo.reset()
        taps.resting = resting
        torch.compile(block, backend=backend, fullgraph=True)(torch.ones(3, 4))
    assert ops[0] == [] and ops[1] != []


class Fills(torch.nn.Module):
    """A mixer that writes to its second argument, and an MLP whose output is added to that of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.experts, self.mlp = Filling(), Linear(), Linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self.mixer(x, out)
        return self.experts(out)[0] + self.mlp(out + 1)[0]


class Filling(torch.nn.Module):
    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(3 * x)


def test_a_filled_argument_and_a_sum_of_two_modules_are_values(written: dict[str, torch.Tensor]) -> None:
    block = Fills()
    kit.tap(block, kit.batch(), of_hooks("attn_out", "mlp_out"), fills="mixer", mlp_first="experts", mlp="mlp")
    x = torch.arange(12.0).view(3, 4)
    added = block(x)
    torch.testing.assert_close(written["attn_out"], 3 * x)
    torch.testing.assert_close(written["mlp_out"], added)


@pytest.mark.parametrize(("name", "kept"), [("LlamaForCausalLM", False), ("Step3p5ForCausalLM", True)])
def test_the_output_of_attention_is_copied_where_the_model_adds_to_it_in_place(
    name: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a compiled Step 3.5, `attn_out` would otherwise be the sum."""
    copies: list[torch.Tensor] = []
    monkeypatch.setattr(install, "copied", lambda value: copies.append(value) or value.clone())
    monkeypatch.setattr(install, "_written_by_product", lambda linear: True)
    module = SimpleNamespace(get_submodule=lambda path: None)
    compilation = Compilation(in_place=False, stream_lasts=False)
    layer: Any = SimpleNamespace(
        arch=ARCHITECTURES[name], compilation=compilation, scale=1.0, experts=False, mlp_taps=False, module=module
    )
    [point] = [point for point in points.TAP_POINTS if (point.hook, point.module) == ("attn_out", "o_proj")]
    value = torch.ones(2, 3)
    read = install._reader(point, layer)(layer, (), (value, None))
    assert torch.equal(read, value) and bool(copies) == kept
