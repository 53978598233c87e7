# SPDX-License-Identifier: Apache-2.0
"""Installs taps: forward hooks that pass tensors of modules to `dmi::tap`. points.py lists where a layer is tapped."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.model.architectures import Architecture
from dmi_connector.engine.taps import attention_summary
from dmi_connector.engine.taps.batches import ModelTaps, TapBatch, batches_of_layers, in_layer
from dmi_connector.engine.taps.compilation import Compilation
from dmi_connector.engine.taps.final import install_final
from dmi_connector.engine.taps.inputs import install_inputs
from dmi_connector.engine.taps.points import (
    EXPERTS_IN,
    INPUTS,
    MLP_IN,
    MLP_OUT,
    MODULES,
    STAGES,
    TAP_POINTS,
    Keep,
    LayerFacts,
    Read,
    Stage,
    TapPoint,
    Waits,
    added,
)
from dmi_connector.engine.taps.routing import install_routing
from dmi_connector.engine.taps.values import as_built, copied, first
from dmi_connector.layout import RowField, RowLayout


def install(model: nn.Module, context: CaptureContext, compilation: Compilation) -> ModelTaps:
    """Register the taps of the selected hooks on a model. Call it before the model's first forward.

    Raises ValueError if vLLM built the model without a tapped module, or if `pattern` cannot be summarised.
    """
    taps = ModelTaps(model, context, compilation)
    fields, arch = context.layout.fields, context.arch
    install_inputs(taps)
    shared = {layer: batch for batch in batches_of_layers(fields) for layer in batch}
    batches: dict[int, TapBatch] = {}
    layers: Any = model.get_submodule(arch.layers)
    for index in context.here:
        if any(f.layer == index and in_layer(f) for f in fields):
            mine = shared.get(index, [index])
            if mine[0] not in batches:
                batches[mine[0]] = taps.batch(mine)
            install_layer(taps, layers[index], index, batches[mine[0]], more=index != mine[-1])
    install_final(taps)
    return taps


# ---- a layer --------------------------------------------------------------------------------------------------------


def install_layer(taps: ModelTaps, module: nn.Module, index: int, batch: TapBatch, more: bool = False) -> None:
    """Register the taps of layer `index`. module: the layer. more: whether later layers share the batch."""
    context, compilation = taps.context, taps.compilation
    arch = as_built(context.arch.of_layer(index, context.dims), module)
    path = f"{context.arch.layers}.{index}"
    experts = index in context.dims.moe_layers
    points = _points(arch, context.layout, index, experts)
    attn: Any = module.get_submodule(arch.attn) if arch.attn else None
    sizes = _sizes(attn, context.dims.qk_rope_head_dim) if arch.attn else (0, 0, 0, 0)
    if arch.gated and arch.attn and {"q", "k"} & {point.hook for point, _ in points}:
        _unfuse_norms(module.get_submodule(arch.attn.rpartition(".")[0]))
    if any(point.module == "mix_norm" for point, _ in points):
        _unfuse_cores(module.get_submodule(arch.mix_norm.rpartition(".")[0]))
    if any(point.hook == "indexer_topk" for point, _ in points):
        _choose_in_every_step(module.get_submodule(arch.indexer))
    if arch.attn:
        _check_inputs(module.get_submodule(arch.attn.rpartition(".")[0]), arch, {point.hook for point, _ in points})
    _use_one_stream(module)
    mlp_taps = any(point.stage in (MLP_IN, EXPERTS_IN, MLP_OUT) for point, _ in points)
    layer = LayerFacts(module, arch, compilation, *sizes, experts, mlp_taps, context.block_scale)
    if any(point.module == "down_proj" for point, _ in points) and (down_proj := _module(layer, "down_proj")):
        _pass_unquantised(down_proj)
    _check_sums(layer, points)
    ends = {_end_of(arch, stage, points): stage for stage in STAGES if any(point.stage is stage for point, _ in points)}
    for name in MODULES:
        mine = [(point, fields) for point, fields in points if point.module == name]
        here = tuple((fields, _joined(taps, point, index, layer)) for point, fields in mine)
        stage = ends.get(name)
        if not here and stage is None:
            continue
        pause = _pause(stage, points, more) if stage is not None else None
        _register(taps, arch.path(index, name), name, layer, here, pause, batch)
    for point, fields in points:
        for row_field in fields:
            context.coverage.expect(row_field, arch.path(index, point.module))
    if pattern := context.layout.find("pattern", index):
        attention_summary.install(attn, pattern, context.cache_layer, context.coverage)
        context.coverage.expect(pattern, f"{path}.{arch.attn}")
    if experts:
        install_routing(taps, arch, module, index, batch)


def _sizes(attn: Any, rotary: int) -> tuple[int, int, int, int]:
    """(head_size, q_size, kv_size, shared) of `LayerFacts`. rotary: `ModelDims.qk_rope_head_dim`."""
    absorbed = hasattr(attn, "qk_head_dim")  # vLLM's MLA: its `head_size` is the size of a cache entry
    head_size = attn.qk_head_dim if absorbed else attn.head_size
    return head_size, attn.num_heads * head_size, attn.num_kv_heads * head_size, 0 if absorbed else rotary


def _unfuse_norms(attention: Any) -> None:
    """Disable vLLM's fused kernel of gated attention. Taps need the norms of q and k to run as modules."""
    if hasattr(attention, "use_fused_qk_norm_rope_gate"):
        attention.use_fused_qk_norm_rope_gate = False


def _unfuse_cores(mixer: Any) -> None:
    """Disable vLLM's fused op that verifies draft tokens in gated delta nets. This op includes the norm after the core,
    so the norm would not run as a module. vLLM then verifies draft tokens with its other ops.
    """
    if hasattr(mixer, "enable_fused_gdn_spec_decode"):
        mixer.enable_fused_gdn_spec_decode = False


def _choose_in_every_step(indexer: Any) -> None:
    """Let an indexer choose tokens in every step.

    On a GPU vLLM skips the choice in steps whose prompts have at most index_topk tokens. The buffer that all indexers
    share then keeps choices of an earlier step or layer. Raises ValueError if the indexer lacks the attribute that
    turns this off.
    """
    if not hasattr(indexer.indexer_op, "dense_mha_metadata_layer_name"):
        raise ValueError(
            "hooks: indexer_topk needs dense_mha_metadata_layer_name of vLLM's SparseAttnIndexer, which this version "
            "lacks; leave indexer_topk out"
        )
    indexer.indexer_op.dense_mha_metadata_layer_name = ""


def _check_inputs(attention: Any, arch: Architecture, hooks: Set[str]) -> None:
    """Raise ValueError for hooks of queries and keys whose values are not in the tensors that taps read.

    With the attention backend HPC_ATTN, vLLM's HunYuan V3 computes norms and rotary embeddings in the kernel that
    writes keys to the cache. Attention then gets keys without norms and rotary embeddings. In vLLM 0.33, a projection
    of MiMo V2 with FP8 weights may return keys and values in alternating chunks.
    """
    hidden = sorted(hooks & {"q", "k", "q_rot", "k_rot"})
    if hidden and getattr(attention, "hpc_rope_norm", None) is not None:
        raise ValueError(
            f"hooks: {', '.join(hidden)} of {arch.name} cannot be captured with the attention backend HPC_ATTN, which "
            "computes norms and rotary embeddings in its own kernel; choose another backend (--attention-backend), or "
            "leave these hooks out"
        )
    if "k" in hooks and getattr(attention, "kv_chunk_rows", None):
        raise ValueError(
            f"hooks: k of {arch.name} cannot be captured with these weights and this tensor_parallel_size, because the "
            "projection then returns keys and values in alternating chunks; leave k out"
        )


def _check_sums(layer: LayerFacts, points: Points) -> None:
    """Raise ValueError for hooks of block outputs that vLLM sums over tensor-parallel ranks after the tapped module."""
    mlp = _module(layer, "mlp")
    later = {
        "o_proj": _is_part(_module(layer, "o_proj")),
        "mlp": _is_part(_module(layer, "down_proj")) or not getattr(mlp, "output_is_reduced", True),
    }
    outputs = {"attn_proj", "attn_out", "mlp_proj", "mlp_out"}
    hooks = sorted({point.hook for point, _ in points if later.get(point.module) and point.hook in outputs})
    if hooks:
        raise ValueError(
            f"tensor_parallel_size: a rank has only a part of {', '.join(hooks)} of {layer.arch.name}, because vLLM "
            f"sums over ranks later; set it to 1, or take them out of the hooks, as in 'vllm-full,-{hooks[0]}'"
        )


def _is_part(linear: nn.Module | None) -> bool:
    """Whether the output of a linear layer is one of several ranks' terms of a sum."""
    return getattr(linear, "tp_size", 1) > 1 and not getattr(linear, "reduce_results", True)


def _use_one_stream(layer: Any) -> None:
    """Let a layer run its MLP after attention, and on the model's CUDA stream.

    On a GPU vLLM 0.33 runs the MLPs of Cohere 2 with experts in an opaque op, in parallel with attention. In a compiled
    layer, the tap of the MLP writes the values of the whole layer. This tap would not run in the opaque op, so nothing
    would be written.
    """
    if getattr(layer, "dual_stream", None) is not None:
        layer.dual_stream = None


def _pass_unquantised(linear: Any) -> None:
    """Let vLLM pass the input of a linear layer to it unquantised.

    On a GPU vLLM may fuse the activation before a quantised layer with the quantisation of the layer's input. The input
    would then hold quantised values, and not be a tensor.
    """
    linear.requires_unquantized_input = True


Points = Sequence[tuple[TapPoint, Sequence[RowField]]]
"""Tap points, each with the fields to which its value is written."""


def _points(arch: Architecture, layout: RowLayout, index: int, experts: bool) -> Points:
    """The tap points of layer `index` whose hook is selected or probed. experts: whether the layer has experts."""
    found = []
    for point in TAP_POINTS:
        fields = layout.taking(point.hook, index)
        unless = any(getattr(arch, name) for name in point.unless)
        where = not point.where or getattr(arch, point.where)
        if fields and getattr(arch, point.module) and where and not unless:
            stage = EXPERTS_IN if experts and point.stage is MLP_IN else point.stage
            found.append((point._replace(stage=stage), fields))
    return found


def _end_of(arch: Architecture, stage: Stage, points: Points) -> str:
    """The module at which a stage ends: the module of its last point, or `Stage.ends_at` if that module runs later."""
    mine = [point.module for point, _ in points if point.stage is stage]
    return max([*mine, *([stage.ends_at] if getattr(arch, stage.ends_at) else [])], key=MODULES.index)


class _Pause(NamedTuple):
    """Arguments of `TapBatch.pause`."""

    more_compiled: bool
    more_eager: bool


def _pause(stage: Stage, points: Points, more: bool) -> _Pause:
    """The arguments of `TapBatch.pause` at the end of a stage. more: whether later layers share the batch."""
    later = any(STAGES.index(point.stage) > STAGES.index(stage) for point, _ in points)
    return _Pause(more or (later and stage.waits is not Waits.NEVER), later and stage.waits is Waits.ALWAYS)


def _register(
    taps: ModelTaps,
    path: str,
    name: str,
    layer: LayerFacts,
    here: Sequence[tuple[Sequence[RowField], Read]],
    pause: _Pause | None,
    batch: TapBatch,
) -> None:
    """Register a forward hook on the module at `path`: a pre-hook for modules in INPUTS. It adds values to the batch.

    name: the field of `Architecture` with this path. here: for each tap point of the module, its fields and the
    function that reads its value. pause: arguments of `TapBatch.pause`; None if no stage ends at this module.
    """

    def tap(args: tuple[Any, ...], output: Any) -> None:
        for fields, read in here:
            batch.add_all(fields, read(layer, args, output))
        if pause is not None:
            batch.pause(*pause)

    if name == "attn":
        taps.before_attention(path, lambda _module, args: tap(args, None))
    elif name in INPUTS:  # the model may pass its input as a keyword argument
        taps.hook(
            path, lambda _module, args, kwargs: tap(args or tuple(kwargs.values()), None), before=True, with_kwargs=True
        )
    else:
        taps.hook(path, lambda _module, args, output: tap(args, output))


def _joined(taps: ModelTaps, point: TapPoint, index: int, layer: LayerFacts) -> Read:
    """The function that reads the value of a point. If the layer has module `TapPoint.first`, it joins two outputs."""
    if not point.first or not getattr(layer.arch, point.first):
        return _reader(point, layer)
    noted: list[torch.Tensor] = []  # cleared, not replaced, for the reason in `TapBatch.write`

    def note(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        noted.clear()
        noted.append(first(output))

    def read(facts: LayerFacts, _args: tuple[Any, ...], output: Any) -> torch.Tensor:
        value = point.join(facts, noted[0], first(output))
        noted.clear()
        return value

    taps.hook(layer.arch.path(index, point.first), note)
    return read


def _reader(point: TapPoint, layer: LayerFacts) -> Read:
    """The function that reads the value of a point, and copies the value if `TapPoint.keep` requires a copy here."""
    read, keep, compilation = point.read, point.keep, layer.compilation
    if compilation.copies and keep is not Keep.HALVES:
        keep = Keep.COPY
    if read is added and layer.scale != 1.0:
        keep = Keep.COPY
    if keep is Keep.AS_IS or (keep is Keep.OUTPUT and not layer.experts and not _has_bias(layer)):
        return read
    if keep is Keep.FIRST and compilation.products_last and _written_by_product(_module(layer, point.module)):
        return read
    if keep is Keep.HALVES:
        return lambda facts, args, output: _copy_halves(read(facts, args, output), facts.head_size)
    lasts = keep is Keep.STREAM and compilation.stream_lasts
    if keep is Keep.PRODUCT:
        product = _written_by_product(_module(layer, "o_proj"))
        lasts = product and compilation.products_last and not (layer.mlp_taps and compilation.in_place)
        lasts = lasts and not layer.arch.adds_in_place
    kept = _rename if lasts else copied
    return lambda facts, args, output: kept(read(facts, args, output))


def _module(layer: LayerFacts, name: str) -> nn.Module | None:
    """The module in a layer at the path that the field `name` of `Architecture` gives.

    None if vLLM built the layer without this module. `ModelTaps.hook` then raises ValueError.
    """
    try:
        return layer.module.get_submodule(getattr(layer.arch, name))
    except AttributeError:
        return None


def _has_bias(layer: LayerFacts) -> bool:
    """Whether the last linear layer of the MLP has a bias. Inductor may fuse the bias addition with the next op."""
    return bool(layer.arch.down_proj) and getattr(_module(layer, "down_proj"), "bias", None) is not None


def _written_by_product(linear: nn.Module | None) -> bool:
    """Whether a matrix product writes the output of a linear layer, in the model's dtype.

    False with a bias or quantised weights: Inductor may fuse the addition or the scaling with the next operation.
    """
    plain = isinstance(getattr(linear, "quant_method", None), UnquantizedLinearMethod)
    return plain and getattr(linear, "bias", None) is None


def _rename(value: torch.Tensor) -> torch.Tensor:
    """A view of `value`, because vLLM refuses graphs in which a tap reads the same tensor as an add-and-norm."""
    return value.view(value.shape)


def _copy_halves(value: torch.Tensor, head_size: int) -> torch.Tensor:
    """A copy of heads [..., heads * head_size] or [..., head_size], made of two halves per head; in eager mode no copy.

    Rotary embedding reads halves of heads, so Inductor fuses this copy into the kernel of rotary embedding. It would
    fuse a copy of whole heads into the kernel of the norm. Without taps that kernel only sums squares.
    """
    if not torch.compiler.is_compiling():
        return value
    heads = value if value.shape[-1] % head_size else value.unflatten(-1, (-1, head_size))
    return torch.cat([copied(half) for half in heads.chunk(2, -1)], -1)
