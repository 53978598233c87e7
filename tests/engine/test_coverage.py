# SPDX-License-Identifier: Apache-2.0
"""The engine does not start if a forward hook does not fire. `make soak` also compiles models.

A feature of vLLM may replace a tapped module, or skip it. Each test simulates this for one forward hook.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmi_connector import capture_args, open_capture
from dmi_connector.cli.tiny_models import make_model
from dmi_connector.engine.model.architectures import Architecture
from dmi_connector.engine.model.coverage import Coverage
from dmi_connector.engine.taps import attention_summary, install
from dmi_connector.engine.taps.batches import ModelTaps
from tests.engine.harness import ALL_HOOKS, Ask, Run, engine, generate, prompt


def refused(model: Path, store_dir: Path, hooks: str = ALL_HOOKS, owner: str = "target", **args: Any) -> str:
    """Start an engine that must be refused. Returns the message of the error."""
    own = args.pop("options", {})
    with pytest.raises(ValueError) as caught, engine(model, **capture_args(hooks, store_dir, owner, **own), **args):
        pytest.fail("the engine started")
    assert list(store_dir.glob("*.zarr*")) == []
    return str(caught.value)


def deaf(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Register no forward hooks on modules with this name."""
    hook = ModelTaps.hook

    def registered(self: ModelTaps, path: str, call: Callable[..., Any], *args: Any, **options: Any) -> None:
        if not path.endswith(module):
            hook(self, path, call, *args, **options)

    monkeypatch.setattr(ModelTaps, "hook", registered)


@pytest.mark.parametrize(
    ("owner", "eager"),
    [
        pytest.param("draft", True, id="eager-draft"),
        pytest.param("target", True, id="eager-target"),
        pytest.param("draft", False, id="compiled-draft", marks=pytest.mark.soak),
        pytest.param("target", False, id="compiled-target", marks=pytest.mark.soak),
    ],
)
def test_a_module_whose_hook_does_not_fire_is_named(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str, eager: bool
) -> None:
    deaf(monkeypatch, "self_attn.o_proj")
    # Compiling three layers takes twice as long as compiling one.
    model = tiny_model("qwen3") if eager else make_model("qwen3", tmp_path / "model", num_hidden_layers=1)
    reason = refused(model, tmp_path / "captures", "hidden-states,z,q", owner, enforce_eager=eager)
    assert f"hooks: z of layer {'0, 1, 2' if eager else '0'} was not written in a forward of" in reason
    assert "tapped at model.layers.0.self_attn.o_proj" in reason
    assert ("hooks: q" in reason) != eager, "compiled, the values of a layer wait for one op, which is missing"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: on a CPU vLLM compiles again at each start")
def test_a_cached_graph_without_taps_is_refused(
    known_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start does not trace the model, because it loads the graph of the first start."""
    model = make_model("qwen3", tmp_path / "model", num_hidden_layers=1)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    args = capture_args("resid_pre,mlp_out", tmp_path / "captures", "target")
    with monkeypatch.context() as patch:
        deaf(patch, ".mlp")
        patch.setattr(Coverage, "check", lambda self, tokens=None: None)
        with engine(model, **args):
            pass
    assert "hooks: mlp_out of layer 0 was not written" in refused(
        model, tmp_path / "captures", "resid_pre,mlp_out", enforce_eager=False
    )


def test_experts_with_internal_routing_are_refused_by_name(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing calls the router, as in vLLM's monolithic kernels."""
    inner = install.install_routing

    def unused(taps: ModelTaps, arch: Architecture, module: Any, index: int, batch: Any) -> None:
        inner(taps, arch, module, index, batch)
        del module.get_submodule(taps.context.arch.moe_experts).router.select_experts

    monkeypatch.setattr(install, "install_routing", unused)
    reason = refused(tiny_model("qwen3_moe"), tmp_path, enforce_eager=True)
    for hook in ("topk_ids", "topk_weights"):
        assert f"hooks: {hook} of layer 0, 1, 2 was not written" in reason
    assert "router.select_experts" in reason and "router_logits" not in reason


def test_attention_that_is_not_summarised_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = attention_summary.install

    def replaced(attn: Any, *args: Any) -> None:
        forward = attn.impl.forward
        inner(attn, *args)
        attn.impl.forward = forward

    monkeypatch.setattr(attention_summary, "install", replaced)
    reason = refused(
        tiny_model("qwen3"),
        tmp_path,
        "hidden-states,pattern",
        enforce_eager=True,
        options={"reduce": {"pattern": "attn(4)"}},
    )
    assert "hooks: pattern of layer 0, 1, 2 was not written" in reason and "self_attn.attn" in reason


def test_a_value_that_is_not_written_after_the_first_forward_is_found_by_the_check(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward hook stops firing after the first forward. With check="poison", its rows are listed as missing."""
    add = install.TapBatch.add

    def forgets(self: Any, row_field: Any, value: Any) -> None:
        coverage = self.taps.context.coverage
        if not (coverage.checked and row_field is not None and (row_field.hook, row_field.layer) == ("z", 1)):
            add(self, row_field, value)

    monkeypatch.setattr(install.TapBatch, "add", forgets)
    run = Run(tmp_path)
    args = capture_args("hidden-states,z", run.store_dir, "target", chunk_tokens=32, segment_tokens=64, check="poison")
    with engine(tiny_model("qwen3"), enforce_eager=True, **args) as llm:
        generate(llm, run, {"one": Ask(prompt(50))})
    capture = open_capture(run.store("one"), timeout=300, allow_incomplete=True)
    assert capture.missing == [[0, 61]] and not capture.complete
    assert capture.reason == "no tap wrote z of layer 1 in some row"
