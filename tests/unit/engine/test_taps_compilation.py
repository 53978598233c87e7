# SPDX-License-Identifier: Apache-2.0
"""Which values of a compiled model persist, and which Inductor may overwrite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import pattern_matcher
from torch._inductor.custom_graph_pass import CustomGraphPass

pytest.importorskip("vllm")
from vllm.config import CompilationConfig
from vllm.config.compilation import PassConfig

from dmi_connector.engine.taps import compilation
from dmi_connector.engine.taps.values import copied

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
        ({**ONLY_NATIVE, "lora": True}, False, True),
        ({**ONLY_NATIVE, "eager": True}, False, False),
    ],
)
def test_lifetimes_of_values_depend_on_the_compilation_mode(
    config: dict[str, Any], in_place: bool, stream_lasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms keep their inputs only if Inductor compiles them. The stream persists only between piecewise graphs."""
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
        lora_config=object() if get("lora") else None,
        model_config=SimpleNamespace(enforce_eager=get("eager", False)),
    )
    assert compilation.compilation_of(vllm_config) == (in_place, stream_lasts, not get("lora"), False)
    monkeypatch.setattr(compilation.contract, "untested", lambda: "0.34.0")
    assert compilation.compilation_of(vllm_config) == (True, False, False, True), (
        "with an untested vLLM, nothing is known to persist"
    )


@pytest.mark.parametrize(
    ("config", "device", "refused"),
    [
        ({"mode": 3, "splitting_ops": ATTENTION}, "cuda", False),
        ({"mode": 3, "splitting_ops": ATTENTION[:2]}, "cuda", True),
        ({"mode": 3, "splitting_ops": []}, "cuda", True),
        ({"mode": 3, "splitting_ops": []}, "cpu", False),
        ({"mode": 3, "splitting_ops": ATTENTION, "use_inductor_graph_partition": True}, "cuda", True),
        ({"mode": 2, "splitting_ops": ATTENTION}, "cuda", True),
        ({"mode": 0, "splitting_ops": []}, "cuda", False),
    ],
)
@pytest.mark.parametrize("eager", [False, True])
def test_the_projection_of_a_mixer_is_refused_in_a_graph_that_is_not_split_there(
    config: dict[str, Any], device: str, refused: bool, eager: bool
) -> None:
    vllm_config: Any = SimpleNamespace(
        compilation_config=CompilationConfig(**{**config, "splitting_ops": list(config["splitting_ops"])}),
        model_config=SimpleNamespace(enforce_eager=eager),
        device_config=SimpleNamespace(device_type=device),
    )
    compilation.check_mixers(vllm_config, ("mix_core", "mix_z"))
    if not refused or eager:
        compilation.check_mixers(vllm_config, ("mix_proj",))
        return
    with pytest.raises(ValueError, match=r"compilation_config: the compiled graph is not split .* take mix_proj out"):
        compilation.check_mixers(vllm_config, ("mix_proj",))


def test_a_late_copy_has_the_values_that_an_undeclared_write_left_in_its_source() -> None:
    """This is why `mix_proj` is refused in such graphs: Inductor makes a copy where it is first used."""
    with torch.library._scoped_library("dmi_test", "FRAGMENT") as library:
        library.define("core(Tensor projected, Tensor(a!) out) -> ()")
        library.define("tap(Tensor value, Tensor(a!) token) -> ()")
        seen: list[torch.Tensor] = []

        def core(projected: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(projected)
            projected.zero_()  # as vLLM's `causal_conv1d_update` on a GPU

        library.impl("core", core, "CPU")
        library.impl("core", lambda *_: None, "Meta")
        library.impl("tap", lambda value, _token: seen.append(value.clone()), "CPU")
        library.impl("tap", lambda *_: None, "Meta")

        def mixer(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
            projected, out = x @ x, torch.empty_like(x)
            copy = copied(projected)
            torch.ops.dmi_test.core(projected, out)
            out = out @ x
            torch.ops.dmi_test.tap(copy, token)
            return out

        torch._dynamo.reset()
        torch.compile(mixer, fullgraph=True)(torch.eye(4), torch.zeros(1, dtype=torch.int32))
    assert seen[0].count_nonzero() == 0


def test_without_vllms_setting_norms_count_as_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.34 removes the setting."""
    config = {"model_config": SimpleNamespace(enforce_eager=True), "lora_config": None}
    config["compilation_config"] = CompilationConfig()
    for kernels in (SimpleNamespace(), SimpleNamespace(ir_op_priority=SimpleNamespace())):
        vllm_config: Any = SimpleNamespace(kernel_config=kernels, **config)
        assert compilation.compilation_of(vllm_config).in_place


@pytest.mark.parametrize("captured", [False, True])
def test_a_value_that_a_tap_reads_is_not_fused_with_the_next_op(captured: bool) -> None:
    """So vLLM's passes do not fuse quantisation into a norm, an activation or attention whose result is captured."""
    passes = pattern_matcher.PatternMatcherPass()
    pattern_matcher.register_replacement(
        lambda x: torch.sin(x).round(), torch.zeros_like, [torch.ones(4)], pattern_matcher.fwd_only, passes
    )
    fused: list[int] = []
    seen: list[torch.Tensor] = []

    def model(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        value = torch.sin(x)
        if captured:
            torch.ops.dmi_test.taps([value.reshape(-1, 4)], token)
        return value.round()

    with torch.library._scoped_library("dmi_test", "FRAGMENT") as library:
        library.define("taps(Tensor[] values, Tensor(a!) token) -> ()", tags=(torch.Tag.flexible_layout,))
        library.impl("taps", lambda values, _token: seen.append(values[0].clone()), "CPU")
        library.impl("taps", lambda *_: None, "Meta")
        torch._dynamo.reset()
        options: Any = {"post_grad_custom_post_pass": Applies(passes, fused)}
        x = torch.full((2, 4), 2.0)
        out = torch.compile(model, fullgraph=True, options=options)(x, torch.zeros(1, dtype=torch.int32))
    assert fused == [not captured] and torch.equal(out, torch.full_like(x, captured))
    assert len(seen) == captured and all(torch.allclose(value, torch.sin(x)) for value in seen)


class Applies(CustomGraphPass):
    """A pass of Inductor that applies patterns, and records the number of matches."""

    def __init__(self, passes: Any, counts: list[int]) -> None:
        self.passes, self.counts = passes, counts

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.counts.append(self.passes.apply(graph))

    def uuid(self) -> None:
        """None: Inductor does not cache the graph."""
