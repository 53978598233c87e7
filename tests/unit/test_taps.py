# SPDX-License-Identifier: Apache-2.0
"""How a group of taps looks to torch.compile."""

from __future__ import annotations

import json
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch_config

pytest.importorskip("vllm")
from vllm.config import CompilationConfig
from vllm.config.compilation import PassConfig

from dmi_connector.engine import compilation, taps
from dmi_connector.engine import tapper as tapper_module


def bare_tapper(in_place: bool, stream_lasts: bool = False) -> Any:
    """A tapper of layer 0 without a model."""
    how = compilation.Compilation(in_place, stream_lasts)
    token = torch.zeros(1, dtype=torch.int32)
    tapper = object.__new__(tapper_module.Tapper)
    vars(tapper).update(held=None, layer=0, start=0, token=token, base=token.clone())
    vars(tapper).update(layer_name="rows.0", settings={}, at_end=SimpleNamespace(tokens=0), compilation=how)
    return tapper


def test_tapped_values_are_not_outputs_of_the_graph() -> None:
    """Outputs live until the forward ends: for every layer at once that would be gigabytes."""
    from dmi_connector.layout import Segment

    token = torch.zeros(1, dtype=torch.int32)

    class Tapper:
        def write(self, segments: list[Segment], values: list[torch.Tensor], beside: bool) -> None:
            torch.ops.dmi.tap(values, token, token.clone(), [s.offset for s in segments], "", True, "rows.0")

    group = tapper_module.Group(Tapper())
    seen: list[tuple[int, int]] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        (outputs,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
        launches = sum(node.target is torch.ops.dmi.tap for node in graph.graph.nodes)
        seen.append((len(outputs), launches))
        return graph.forward

    def layer(x: torch.Tensor) -> torch.Tensor:
        for name in ("resid_pre", "attn_out"):
            group.add(Segment(name, 0, "float32", 4, 64), x)
            x = x * 2
            group.pause(more=True)
        group.add(Segment("mlp_out", 0, "float32", 4, 128), x)
        group.flush()
        return x + 1

    x = torch.ones(3, 4)
    torch._dynamo.reset()
    # The op needs vLLM's forward context when it runs; here only its graph is looked at.
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.forward_context.get_forward_context", lambda: _NoContext())
        torch.testing.assert_close(compiled(x), x * 4 + 1)
    assert seen == [(1, 1)] and group.values == [] and group.segments == []


def stream(*layers: int, width: int = 2560, hooks: tuple[str, ...] = ("resid_pre",)) -> list[Any]:
    """Segments of narrow hooks of these layers, in bf16, one after the other."""
    from dmi_connector.layout import Segment

    names = [(hook, layer) for layer in layers for hook in hooks]
    return [Segment(hook, layer, "bfloat16", width, 2 * width * i) for i, (hook, layer) in enumerate(names)]


def test_narrow_copies_of_layers_in_a_row_are_written_together() -> None:
    """Up to 13 values and 64 KiB of a token; layers of which more is selected write their own."""
    from dmi_connector.layout import Segment
    from dmi_connector.reduce import parse

    def ends(segments: list[Any]) -> dict[int, int]:
        return tapper_module.Held(segments)._last

    hidden = ends(stream(*range(36)))
    assert list(hidden) == list(range(36)) and [hidden[layer] for layer in (0, 11, 12, 35)] == [11, 11, 23, 35]
    assert set(ends(stream(*range(20), width=64)).values()) == {12, 19}, "13 values, then the rest"
    assert ends(stream(4, 9, 10, hooks=("resid_pre", "resid_mid"))) == {4: 10, 9: 10, 10: 10}
    wide = [*stream(0, 1, 2), Segment("mlp_out", 1, "bfloat16", 64, 1 << 20)]
    assert ends(wide) == {0: 2, 2: 2}, "what the next layer takes over is not held"
    assert ends([replace(s, reduction=parse("int8")) if s.layer else s for s in stream(0, 1)]) == {0: 0}


def test_what_is_held_is_no_output_of_the_graph() -> None:
    seen: list[tuple[int, list[int]]] = []

    class Tapper:
        def write_now(self, segments: list[Any], values: list[torch.Tensor]) -> None:
            token = torch.zeros(1, dtype=torch.int32)
            torch.ops.dmi.tap(values, token, token.clone(), [s.offset for s in segments], "", True, "rows.0")

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        (outputs,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
        seen.append((len(outputs), [len(n.args[0]) for n in graph.graph.nodes if n.target is torch.ops.dmi.tap]))
        return graph.forward

    segments = stream(*range(15), width=4)
    held, tapper = tapper_module.Held(segments), Tapper()

    def model(x: torch.Tensor) -> torch.Tensor:
        for segment in segments:
            x = x * 2
            held.add(tapper, segment.layer, [segment], [x])
        return x + 1

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.forward_context.get_forward_context", lambda: _NoContext())
        torch.testing.assert_close(compiled(torch.ones(3, 4)), torch.full((3, 4), 2.0**15 + 1))
    assert seen == [(1, [13, 2])]
    assert (held._values, held._segments, held._tappers) == ([], [], [])


@pytest.mark.parametrize("in_place", [False, True])
def test_ops_write_beside_the_model_unless_norms_work_in_place(in_place: bool) -> None:
    """And no value goes on from an op: so none has to outlive the piece of the model that made it."""
    beside: list[list[bool]] = []
    tapper = bare_tapper(in_place)

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        beside.append([n.args[5] for n in graph.graph.nodes if n.target is torch.ops.dmi.tap])
        assert [len(n.args) for n in graph.graph.nodes if n.target is torch.ops.dmi.tap_end] == [4]
        (outputs,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
        assert len(outputs) == 1
        return graph.forward

    segments = stream(0, 1, 2, width=4)

    def model(x: torch.Tensor) -> torch.Tensor:
        for segment in segments:
            x = x * 2
            tapper.write_now([segment], [x])
        tapper.end(x)
        return x + 1

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.forward_context.get_forward_context", lambda: _NoContext())
        for _ in range(2):
            torch.testing.assert_close(compiled(torch.ones(3, 4)), torch.full((3, 4), 9.0))
        torch.testing.assert_close(model(torch.ones(3, 4)), torch.full((3, 4), 9.0))
    assert beside == [[not in_place] * 3]


class Block(torch.nn.Module):
    """A layer as vLLM's models have them, of one head."""

    class Linear(torch.nn.Module):
        def __init__(self, bias: bool = False, quantised: bool = False) -> None:
            super().__init__()
            self.bias = torch.ones(1) if bias else None
            self.quant_method = None if quantised else object.__new__(taps.UnquantizedLinearMethod)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return x * 2, None

    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + residual, x + residual

    class Attention(torch.nn.Module):
        num_heads = num_kv_heads = 1
        head_size = 4

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def __init__(self, **o_proj: bool) -> None:
        super().__init__()
        self.attn, self.o_proj, self.ln2, self.down_proj = (
            self.Attention(),
            self.Linear(**o_proj),
            self.Norm(),
            self.Linear(),
        )
        self.mlp = self.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.o_proj(self.attn(x))
        normed, _ = self.ln2(out, x)
        return self.mlp(normed)[0]


@pytest.mark.parametrize(
    ("hooks", "in_place", "o_proj", "copied"),
    [
        ("attn_out,mlp_out", False, {}, False),
        ("attn_out,mlp_out", True, {}, True),
        ("attn_out", True, {}, False),
        ("attn_out,mlp_out", False, {"bias": True}, True),
        ("attn_out,mlp_out", False, {"quantised": True}, True),
    ],
)
def test_attn_out_is_copied_where_it_may_change(
    hooks: str, in_place: bool, o_proj: dict[str, bool], copied: bool
) -> None:
    """By a norm that works in place, after which it would be written; or by a compiler that would have to round what
    follows a matrix product.
    """
    from dmi_connector.engine.architectures import Architecture
    from dmi_connector.layout import Segment

    names = hooks.split(",")
    segments = {name: Segment(name, 0, "float32", 4, 16 * i) for i, name in enumerate(names)}
    context: Any = SimpleNamespace(
        arch=Architecture("Block", "", attn="attn", o_proj="o_proj", ln2="ln2", mlp="mlp", down_proj="down_proj"),
        dims=SimpleNamespace(moe_layers=()),
        layout=SimpleNamespace(find=lambda name, _layer: segments.get(name)),
    )
    block = Block(**o_proj)
    taps._install_layer(block, 0, context, bare_tapper(in_place))
    found: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        (op,) = (n for n in graph.graph.nodes if n.target is torch.ops.dmi.tap)
        steps, node = [], op.args[0][0]  # attn_out, from the op back to the product that made it
        while "mul" not in str(node.target):
            steps.append(node)
            node = node.args[0]
        found.append([str(step.target) for step in steps])
        order = list(graph.graph.nodes)
        norm = min(order.index(user) for user in node.users if "add" in str(user.target))
        renamed = order.index(steps[-1]) < norm
        assert renamed or hooks == "attn_out", "vLLM refuses graphs that name again what a norm was given"
        return graph.forward

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.forward_context.get_forward_context", lambda: _NoContext())
        torch.compile(block, backend=backend, fullgraph=True)(torch.ones(3, 4))
    (steps,) = found
    assert sum("neg" in step for step in steps) == (2 if copied else 0), steps


class Rotated(torch.nn.Module):
    """The part of a layer before its attention: two heads of four, rotated by halves."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.qkv, self.attn = Block.Norm(), Block.Linear(), Block.Attention()
        self.attn.num_heads, self.attn.num_kv_heads = 2, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed, residual = self.ln1(x, x)
        qkv, _ = self.qkv(normed)
        first, second = qkv[..., :8].view(-1, 2, 4).chunk(2, -1)
        return self.attn(torch.cat([second, first], -1).flatten(1)) + residual[..., :8]


@pytest.mark.parametrize("lasts", [False, True])
def test_what_lasts_is_not_copied_and_heads_are_copied_by_halves(lasts: bool) -> None:
    from dmi_connector.engine.architectures import Architecture
    from dmi_connector.layout import Segment

    segments = {name: Segment(name, 0, "float32", w, o) for name, w, o in (("resid_pre", 16, 0), ("q", 8, 64))}
    context: Any = SimpleNamespace(
        arch=Architecture("Rotated", "", attn="attn", qkv="qkv", ln1="ln1", mlp="", down_proj=""),
        dims=SimpleNamespace(moe_layers=()),
        layout=SimpleNamespace(find=lambda name, _layer: segments.get(name)),
    )
    block = Rotated()
    taps._install_layer(block, 0, context, bare_tapper(in_place=False, stream_lasts=lasts))
    found: list[tuple[int, list[int]]] = []
    rows: list[list[torch.Tensor]] = []

    def negated(node: torch.fx.Node) -> int:
        return 1 + negated(node.args[0]) if "neg" in str(node.target) else 0

    def made_by(node: torch.fx.Node, what: str) -> torch.fx.Node:
        while what not in str(node.target) and "neg" not in str(node.target):
            node = node.args[0]
        return node

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        (op,) = (n for n in graph.graph.nodes if n.target is torch.ops.dmi.tap)
        stream, q = op.args[0]
        halves = made_by(q, "cat").args[0]
        assert len(halves) == 2, "one for each half"
        found.append((negated(made_by(stream, "add")), [negated(half) for half in halves]))
        return graph.forward

    x = torch.arange(48.0).view(3, 16)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.forward_context.get_forward_context", lambda: _NoContext())
        compiled = torch.compile(block, backend=backend, fullgraph=True)(x)
        patch.setattr(tapper_module.Tapper, "write", lambda _self, _segments, values, _beside: rows.append(values))
        torch.testing.assert_close(block(x), compiled)
    assert found == [(0 if lasts else 2, [2, 2])]
    torch.testing.assert_close(rows[0][0], 2 * x)
    torch.testing.assert_close(rows[0][1], 4 * x[:, :8])
    copied = torch.compile(lambda value: taps._copied_by_halves(value, 4), backend="eager", fullgraph=True)
    for shape in ((3, 16), (3, 4, 4), (2, 4), (2, 6), (3, 2, 3)):
        value = torch.randn(shape)
        torch.testing.assert_close(copied(value).reshape(shape), value, rtol=0, atol=0)


ATTENTION = CompilationConfig._attention_ops
ONLY_NATIVE: dict[str, Any] = {"priority": ["native"], "splitting_ops": ATTENTION, "mode": 3}


@pytest.mark.parametrize(
    ("config", "in_place", "stream_lasts"),
    [
        (ONLY_NATIVE, False, True),
        ({**ONLY_NATIVE, "priority": ["vllm_c", "native"]}, True, False),
        ({**ONLY_NATIVE, "priority": []}, True, False),
        ({**ONLY_NATIVE, "invariant": True}, True, False),
        ({**ONLY_NATIVE, "backend": "eager"}, False, True),
        ({**ONLY_NATIVE, "mode": 2, "backend": "a.compiler.of_ones_own"}, True, False),
        ({**ONLY_NATIVE, "splitting_ops": []}, False, False),
        ({**ONLY_NATIVE, "mode": 2}, False, False),
        ({**ONLY_NATIVE, "partition": True}, False, False),
        ({**ONLY_NATIVE, "fuse_allreduce_rms": True}, False, True),
        ({**ONLY_NATIVE, "fuse_allreduce_rms": True, "tp": 2}, False, False),
        ({**ONLY_NATIVE, "tp": 2}, False, True),
        ({**ONLY_NATIVE, "fuse_norm_quant": True}, False, True),
        ({**ONLY_NATIVE, "fuse_norm_quant": True, "quantised": True}, False, False),
        ({**ONLY_NATIVE, "quantised": True}, False, True),
    ],
)
def test_what_lasts_depends_on_how_vllm_compiles(
    config: dict[str, Any], in_place: bool, stream_lasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only norms that Inductor compiles leave their inputs, and only pieces hand the residual stream on."""
    get = config.get
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(get("invariant", False))))
    passes = PassConfig(**{name: get(name, False) for name in ("fuse_norm_quant", "fuse_allreduce_rms")})
    ops = list(get("splitting_ops"))
    vllm_config: Any = SimpleNamespace(
        kernel_config=SimpleNamespace(ir_op_priority=SimpleNamespace(fused_add_rms_norm=get("priority"))),
        compilation_config=CompilationConfig(
            mode=get("mode"),
            splitting_ops=ops,
            use_inductor_graph_partition=get("partition", False),
            pass_config=passes,
            backend=get("backend", ""),
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=get("tp", 1)),
        quant_config=object() if get("quantised") else None,
    )
    assert compilation.compilation_of(vllm_config) == (in_place, stream_lasts)


def test_inductor_writes_nothing_twice() -> None:
    """What an op was given stays as it was while it is held; with any of the options on, it does not."""
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(inductor_compile_config={}))
    compilation.write_once(config)
    compilation.write_once(config)  # for a second model of one engine
    once = config.compilation_config.inductor_compile_config
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    library = torch.library.Library("dmi_test", "FRAGMENT")
    library.define("hold(Tensor value, Tensor(a!) token) -> ()", tags=(torch.Tag.flexible_layout,))
    library.impl("hold", lambda value, _token: held.append((value, value.clone())), "CPU")
    library.impl("hold", lambda *_: None, "Meta")

    def model(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.mm(x, x)
            torch.ops.dmi_test.hold(x, token)
            x = torch.mm(x + 1, token.expand_as(x))
        return x

    changed = []
    for options in (once, *({**once, name: True} for name in once)):
        torch._dynamo.reset()
        held.clear()
        # Memory planning takes buffers out of a pool with an op that torch's own check of ops refuses where CI is set.
        checked = functorch_config.error_on_custom_op_aliasing and not options["memory_planning"]
        with torch.inference_mode(), functorch_config.patch(error_on_custom_op_aliasing=checked):
            torch.compile(model, options=options)(torch.eye(64) + 1, torch.zeros(1))
        changed.append(sum(not torch.equal(value, before) for value, before in held))
    assert changed[0] == 0 and all(changed[1:]), f"values written over: {changed}"


class Context(SimpleNamespace):
    """Stands for vLLM's forward context, to which others may refer weakly."""


class Streams:
    """Stands for CUDA's streams: notes what a branch asks of them."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def wait_stream(self, _stream: Any) -> None:
        self.done.append("fork")

    def record_event(self) -> str:
        return "event"

    def wait_event(self, _event: Any) -> None:
        self.done.append("wait")


def test_an_op_waits_for_the_branch_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does the end; not one that writes in line. What they read is held until then, and what a forward left
    whose capture failed is forgotten.
    """
    from dmi_connector.engine import tap_op
    from dmi_connector.engine.at_end import AtEnd

    streams = Streams()
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: streams)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    branch, write = tap_op.Branch(torch.device("cpu")), tap_op._write
    monkeypatch.setattr(tap_op, "_captured_branch", lambda _device: branch)
    monkeypatch.setattr(tap_op, "_write", lambda *args: streams.done.append("write") or write(*args))
    rows, slots = torch.zeros(4, 64, dtype=torch.uint8), torch.arange(1, 3)
    at_end, base = AtEnd([], torch.device("cpu")), torch.zeros(1, dtype=torch.int32)
    tap_op.stand_for(base, tap_op.Place(0, 0, weakref.ref(at_end)))
    token = torch.zeros(1, dtype=torch.int32)

    def forward(*besides: bool, end: bool = True, join: bool = False) -> list[list[bool]]:
        """After each op (join: and what waits for it): which of the values are there yet."""
        context = Context(no_compile_layers={"rows": SimpleNamespace(rows=rows)}, slot_mapping={"rows": slots})
        monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: context)
        values: list[weakref.ref[torch.Tensor]] = []
        there = []
        streams.done.clear()
        for beside in besides:
            value = torch.ones(2, 4)
            values.append(weakref.ref(value))
            torch.ops.dmi.tap([value], token, base, [0], "", beside, "rows")
            del value
            if join:
                torch.ops.dmi.tap_join(token)
            there.append([v() is not None for v in values])
        if end:
            torch.ops.dmi.tap_end(token.expand(2), token, base, "rows")
            assert not any(v() is not None for v in values)
        return there

    alive = [[True], [False, True], [False, True, False], [False, False, False, True]]
    assert forward(True, True, False, True) == alive
    assert " ".join(streams.done) == "fork write wait fork write write wait fork write wait"
    assert rows.view(torch.float32)[1:3, :4].eq(1).all()
    assert forward(True, True, False, join=True) == [[False], [False, False], [False, False, False]]
    assert " ".join(streams.done) == "fork write wait fork write wait write"
    assert forward(True, end=False) == [[True]], "a forward that fails"
    assert forward(True) == [[True]]
    assert " ".join(streams.done) == "fork write wait", "the next one waits only for its own"


def test_branches_end_before_the_attention_after_what_reduces() -> None:
    """Not after copies, nor for attention summaries or what exists once."""
    from dmi_connector.layout import Segment
    from dmi_connector.reduce import parse

    specs = [("q", 0, "none"), ("z", 1, "int8"), ("q", 1, "none"), ("mlp_post", 3, "topk(4)")]
    specs += [("pattern", 5, "attn(2)"), ("final_ln", 0, "int8"), ("resid_pre", 7, "rp(4)")]
    segments = [Segment(hook, layer, "float32", 8, 64 * i, parse(spec)) for i, (hook, layer, spec) in enumerate(specs)]
    assert taps.joined_before_attention(segments) == {2, 4, 8}


def test_only_a_whole_step_has_a_branch() -> None:
    from dmi_connector.engine import tap_op

    assert tap_op._captured_branch(torch.device("cpu")) is None


@pytest.mark.parametrize("mode", ["NONE", "FULL", "PIECEWISE"])
def test_a_piece_of_a_model_has_no_branch(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CUDAGraphMode

    from dmi_connector.engine import tap_op

    context = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode[mode])
    monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: context)
    monkeypatch.setattr(tap_op, "_branch", lambda _device: "branch")
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        found = tap_op._captured_branch(torch.device("cuda"))
        assert found == ("branch" if capturing and mode != "PIECEWISE" else None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("spec", ["none", "int8", "topk(16)"])
def test_taps_of_a_captured_step_write_beside_the_model(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other values go where there is room as soon as an op was called, over old ones once the next op has waited: rows
    still hold what they should.
    """
    from vllm.config import CUDAGraphMode

    from dmi_connector.engine import tap_op
    from dmi_connector.engine.at_end import AtEnd
    from dmi_connector.layout import Segment
    from dmi_connector.reduce import parse

    width, tokens, device = 4096, 64, torch.device("cuda")
    row_bytes = 2 * width
    segments = [Segment("mlp_out", i, "bfloat16", width, row_bytes * i, parse(spec)) for i in range(6)]
    rows = torch.zeros(tokens, 6 * row_bytes, dtype=torch.uint8, device=device)
    slots = torch.randperm(tokens, device=device)
    context = Context(
        no_compile_layers={"rows": SimpleNamespace(rows=rows)},
        slot_mapping={"rows": slots},
        cudagraph_runtime_mode=CUDAGraphMode.NONE,
    )
    monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: context)
    at_end, bases = AtEnd(segments, device), []
    for segment in segments:
        bases.append(torch.zeros(1, dtype=torch.int32, device=device))
        tap_op.stand_for(bases[-1], tap_op.Place(segment.offset, segment.layer, weakref.ref(at_end)))
    how = "" if parse(spec) is None else json.dumps([parse(spec).settings()])
    token, inputs = torch.zeros(1, dtype=torch.int32, device=device), torch.randn(6, tokens, width, device=device)

    def step() -> None:
        before = None
        for i, base in enumerate(bases):
            value = inputs[i].bfloat16()
            torch.ops.dmi.tap([value], token, base, [0], how, True, "rows")
            if before is not None:
                before.fill_(-1)
            before = value if i % 2 else None
            del value
            torch.full((tokens, width), -2, dtype=torch.bfloat16, device=device)
        torch.ops.dmi.tap_end(slots, token, bases[0], "rows")

    step()
    torch.cuda.synchronize()
    want = rows.clone()
    graph, branches, beside = torch.cuda.CUDAGraph(), [], tap_op.Branch.beside
    monkeypatch.setattr(tap_op.Branch, "beside", lambda self, *args: branches.append(self) or beside(self, *args))
    with torch.cuda.graph(graph):
        step()
    assert len(branches) == len(bases)
    for _ in range(20):
        rows.zero_()
        graph.replay()
        assert torch.equal(rows, want)
    assert int(want.count_nonzero()) > 1000


@pytest.mark.parametrize(("spec", "writers"), [("none", 1), ("int8", 1), ("topk(16)", 2), ("rp(8)", 2)])
@pytest.mark.parametrize("tokens", [3, 600])
def test_other_kernels_are_compiled_on_padding(
    spec: str, writers: int, tokens: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One token, many, and more than are put aside; no row changes but the null block, which the torch twins write
    padding to. What fails is told and left to the step that needs it.
    """
    from dmi_connector.engine import tap_op
    from dmi_connector.engine.at_end import AtEnd
    from dmi_connector.engine.kernels import DECODE_TOKENS
    from dmi_connector.layout import Segment
    from dmi_connector.reduce import parse

    width, reduction = 64, parse(spec)
    if reduction is not None:
        reduction.prepare(width, torch.device("cpu"), 0, 0)
    at_end = AtEnd([Segment("mlp_out", 0, "bfloat16", width, 0, reduction)], torch.device("cpu"))
    place = tap_op.Place(0, 0, weakref.ref(at_end))
    rows = torch.full((700, 256), 7, dtype=torch.uint8)
    seen: list[int] = []
    write = tap_op._write
    monkeypatch.setattr(tap_op, "_write", lambda *a: (seen.append(len(a[4][0])), write(*a))[1])
    values = [torch.randn(tokens, width).bfloat16()]
    how = "" if reduction is None else json.dumps([reduction.settings()])
    tap_op._tap_of(place, values, [0], how)
    tap_op.compile_others(place, rows, values, [0], how)
    aside = [at_end.tokens + 1] if at_end.tokens else []
    assert seen == [1, *aside, DECODE_TOKENS + 1]
    assert len(place.taps) == writers and bool((rows[1:] == 7).all())
    monkeypatch.setattr(tap_op, "_write", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    tap_op.compile_others(place, rows, values, [0], how)
    assert "could not be compiled ahead (RuntimeError: no memory)" in caplog.text


class _NoContext:
    no_compile_layers: dict[str, Any] = {}
    slot_mapping: dict[str, Any] = {}


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
    """A value on a GPU is stood for by what is asked of it."""
    from dmi_connector.engine.tap_op import tokens_at_once
    from dmi_connector.reduce import parse

    value = SimpleNamespace(is_cuda=device == "cuda", shape=(20_000, 2560), dtype=dtype)
    assert tokens_at_once([value] * len(specs), [parse(spec) for spec in specs]) == tokens
