# SPDX-License-Identifier: Apache-2.0
"""What taps disable in a layer, so that vLLM computes the values of hooks where taps read them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation, get_input_quant_key
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

from dmi_connector.engine.taps.batches import TapBatch
from dmi_connector.layout import RowField
from tests import tapkit as kit


class Attention(torch.nn.Module):
    """Attention of two query heads of four elements. The other widths are those of one head."""

    head_size, num_heads, num_kv_heads = 4, 2, 1


class Gated(torch.nn.Module):
    """Attention with a gate next to the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.attn, self.inner.qkv = Attention(), torch.nn.Identity()
        self.inner.q_norm, self.inner.k_norm = torch.nn.Identity(), torch.nn.Identity()
        self.inner.use_fused_qk_norm_rope_gate = True


@pytest.mark.parametrize(("hook", "fused"), [("v", True), ("q", False), ("k", False)])
def test_gated_attention_calls_its_norms_where_these_are_tapped(hook: str, fused: bool) -> None:
    block = Gated()
    paths: Any = {name: f"inner.{name}" for name in ("attn", "qkv", "q_norm", "k_norm")}
    kit.tap(block, kit.batch(False), [RowField(hook, 0, "float32", 4, 0)], **paths, gated=True)
    assert block.inner.use_fused_qk_norm_rope_gate == fused


class Delta(torch.nn.Module):
    """A fake gated delta net. It may compute core and norm of draft tokens in one op, as vLLM's does on a GPU."""

    def __init__(self, fused: bool | None) -> None:
        super().__init__()
        self.mixer = torch.nn.Module()
        for name in ("proj", "norm", "out"):
            setattr(self.mixer, name, torch.nn.Identity())
        if fused is not None:
            self.mixer.enable_fused_gdn_spec_decode = fused


@pytest.mark.parametrize(("hook", "fused"), [("mix_proj", True), ("mix_core", False), ("mix_z", True)])
def test_a_mixer_calls_its_norm_where_the_output_of_its_core_is_captured(hook: str, fused: bool) -> None:
    paths: Any = {"mix_in": "mixer.proj", "mix_norm": "mixer.norm", "mix_out": "mixer.out", "o_proj": "mixer.out"}
    block, fields = Delta(True), [RowField(hook, 0, "float32", 4, 0)]
    kit.tap(block, kit.batch(False), fields, **paths)
    assert block.mixer.enable_fused_gdn_spec_decode == fused
    other = Delta(None)  # Mamba 2 has no such op
    kit.tap(other, kit.batch(False), fields, **paths)
    assert not hasattr(other.mixer, "enable_fused_gdn_spec_decode")


@pytest.mark.parametrize("hook", ["q", "k", "q_rot", "k_rot", "v"])
def test_queries_and_keys_of_a_kernel_that_writes_the_cache_are_refused(hook: str) -> None:
    """vLLM's HunYuan V3 with HPC_ATTN gives attention keys without norm and rotary embedding."""
    paths: Any = {name: f"inner.{name}" for name in ("attn", "qkv", "q_norm", "k_norm")}
    block, fields = Gated(), [RowField(hook, 0, "float32", 4, 0)]
    block.inner.hpc_rope_norm = None
    kit.tap(block, kit.batch(), fields, **paths)
    block.inner.hpc_rope_norm = torch.nn.Identity()
    if hook == "v":
        kit.tap(block, kit.batch(), fields, **paths)
        return
    with pytest.raises(ValueError, match=rf"hooks: {hook} of Block cannot be captured with .* HPC_ATTN.*leave these"):
        kit.tap(block, kit.batch(), fields, **paths)


@pytest.mark.parametrize(("hook", "rows"), [("k", 0), ("k", 384), ("q", 384)])
def test_keys_between_values_are_refused(hook: str, rows: int) -> None:
    """vLLM 0.33 may have this order in the projection of MiMo V2 with FP8 weights."""
    paths: Any = {name: f"inner.{name}" for name in ("attn", "qkv", "q_norm", "k_norm")}
    block, fields = Gated(), [RowField(hook, 0, "float32", 4, 0)]
    block.inner.kv_chunk_rows = rows
    if hook == "q" or not rows:
        kit.tap(block, kit.batch(), fields, **paths)
        return
    with pytest.raises(ValueError, match=r"hooks: k of Block cannot be captured with these weights .*leave k out"):
        kit.tap(block, kit.batch(), fields, **paths)


def test_an_indexer_chooses_in_every_step_where_its_choice_is_captured() -> None:
    block = torch.nn.Module()
    block.indexer = torch.nn.Identity()
    block.indexer.indexer_op = SimpleNamespace(dense_mha_metadata_layer_name="model.layers.0.self_attn.attn")
    field = RowField("indexer_topk", 0, "int32", 4, 0)
    kit.tap(block, kit.batch(False), [field], indexer="indexer")
    assert block.indexer.indexer_op.dense_mha_metadata_layer_name == ""
    del block.indexer.indexer_op.dense_mha_metadata_layer_name
    with pytest.raises(ValueError, match="indexer_topk needs dense_mha_metadata_layer_name"):
        kit.tap(block, kit.batch(False), [field], indexer="indexer")


class Quantising(torch.nn.Module):
    """A fake MLP whose last layer takes quantised input, like vLLM's Llama on a GPU (`maybe_fused_act_quant`)."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = torch.nn.Identity(), torch.nn.Identity()
        self.down_proj._input_quant_key = kFp8StaticTensorSym

    def forward(self, x: torch.Tensor) -> Any:
        value = self.up_proj(x).relu()
        if get_input_quant_key(self.down_proj) is None:
            return self.down_proj(value)
        scale, data = torch.ones(1), value.to(torch.float8_e4m3fn)
        return self.down_proj(QuantizedActivation(data, scale, value.dtype, value.shape, kFp8StaticTensorSym))


@pytest.mark.parametrize("hook", ["mlp_post", "mlp_pre"])
def test_neurons_enter_a_quantised_layer_as_a_tensor_where_they_are_captured(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, torch.Tensor] = {}

    def write(batch: TapBatch, _beside: bool = True) -> None:
        found.update({f.hook: value.clone() for f, value in zip(batch.fields, batch.values, strict=True)})

    monkeypatch.setattr(TapBatch, "write", write)
    block, x = torch.nn.Module(), torch.randn(3, 4)
    block.mlp = Quantising()
    paths: Any = {"mlp": "mlp", "up_proj": "mlp.up_proj", "down_proj": "mlp.down_proj", "gated_mlp": False}
    kit.tap(block, kit.batch(), [RowField(hook, 0, "float32", 4, 0)], **paths)
    out = block.mlp(x)
    assert torch.equal(found[hook], x.relu() if hook == "mlp_post" else x)
    assert isinstance(out, QuantizedActivation) == (hook == "mlp_pre"), "vLLM may fuse what is not captured"


class Terms(torch.nn.Module):
    """A fake layer whose attention and MLP return terms of a sum over ranks, like vLLM 0.33's Cohere 2 with experts."""

    def __init__(self, ranks: int, reduced: bool, dense: bool) -> None:
        super().__init__()
        self.o_proj, self.mlp = torch.nn.Identity(), torch.nn.Module()
        for linear in (self.o_proj, self.mlp):
            linear.tp_size, linear.reduce_results = ranks, reduced
        if dense:
            self.mlp.down_proj = self.o_proj
        else:
            self.mlp.output_is_reduced = reduced or ranks == 1


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(("ranks", "reduced"), [(1, False), (2, False), (2, True)])
def test_terms_of_a_sum_over_ranks_are_refused(ranks: int, reduced: bool, dense: bool) -> None:
    for hook in ("z", "attn_out", "mlp_out"):
        fields = [RowField(hook, 0, "float32", 4, 0)]
        paths: Any = {"o_proj": "o_proj", "mlp": "mlp", "down_proj": "mlp.down_proj"}
        if hook == "z" or ranks == 1 or reduced:
            kit.tap(Terms(ranks, reduced, dense), kit.batch(), fields, **paths)
            continue
        with pytest.raises(ValueError, match=rf"tensor_parallel_size: a rank has only a part of {hook} of Block"):
            kit.tap(Terms(ranks, reduced, dense), kit.batch(), fields, **paths)


class Beside(torch.nn.Module):
    """A fake layer that runs its MLP in an opaque op beside attention, like vLLM's Cohere 2 with experts on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.dual_stream, self.o_proj, self.mlp = object(), torch.nn.Identity(), torch.nn.Identity()

    @torch.compiler.disable
    def fork(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dual_stream is None:
            return self.o_proj(x) + self.mlp(x)
        added = self.fork(x)
        return self.o_proj(x) + added


def test_a_compiled_layer_has_the_taps_of_an_mlp_that_vllm_runs_beside_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kit.without_cache(monkeypatch)
    block = Beside()
    fields = [RowField(hook, 0, "float32", 4, 16 * i) for i, hook in enumerate(("attn_out", "mlp_out"))]
    kit.tap(block, kit.batch(), fields, o_proj="o_proj", mlp="mlp", parallel=True)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(block, backend=backend)(torch.randn(3, 4))
    taps = [node for graph in graphs for node in graph.graph.nodes if node.target is torch.ops.dmi.tap]
    assert [len(node.args[0]) for node in taps] == [2], "one op of the layer writes both values"
