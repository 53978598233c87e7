# SPDX-License-Identifier: Apache-2.0
"""How a group of taps looks to torch.compile."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

taps = pytest.importorskip("dmi_connector.engine.taps")


def test_tapped_values_are_not_outputs_of_the_graph() -> None:
    """Outputs live until the forward ends: for every layer at once that would be gigabytes."""
    from dmi_connector.layout import Segment

    token = torch.zeros(1, dtype=torch.int32)

    class Tapper:
        def write(self, segments: list[Segment], values: list[torch.Tensor]) -> None:
            torch.ops.dmi.tap(values, token, token.clone(), [s.offset for s in segments], "", "rows.0")

    group = taps.Group(Tapper())
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
