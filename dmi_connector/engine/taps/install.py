# SPDX-License-Identifier: Apache-2.0
"""Installs taps: forward hooks on a model's modules that hand tensors to the tap op.

TAP_POINTS is the table of what is tapped where. A stage of a layer ends where its values may be overwritten; they are
written by then. In eager mode each stage is written by one op. Under torch.compile one op writes the whole layer at its
end, and narrow layers share an op (batches.py); `Keep` says what of that a value needs.

    stage           hooks                               written before
    ATTENTION_IN    resid_pre, ln1, q, k, v             rotary, which may rotate q and k in place
    ATTENTION_OUT   kv_c, k_pe, q_rot, k_rot, z, attn_proj, attn_out
                                                        the add-and-norm, which may overwrite attn_out
    MLP_IN          resid_mid, ln2                      the end of the MLP; with experts, the experts
    MLP_OUT         mlp_post, mlp_proj, mlp_out         the next add-and-norm, which may overwrite them
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.model.architectures import Architecture
from dmi_connector.engine.taps import attention_summary
from dmi_connector.engine.taps.batches import ModelTaps, TapBatch, batches_of_layers
from dmi_connector.engine.taps.compilation import Compilation
from dmi_connector.engine.taps.final import install_final
from dmi_connector.engine.taps.inputs import install_inputs
from dmi_connector.engine.taps.routing import install_routing
from dmi_connector.engine.taps.values import copied, first, norm_outputs
from dmi_connector.hooks import HOOKS
from dmi_connector.layout import RowField, RowLayout

Read = Callable[["LayerFacts", tuple[Any, ...], Any], torch.Tensor]
"""Takes a value from a module's arguments and output."""


class Waits(enum.Enum):
    """Whether the values of a stage can wait for the layer's later stages."""

    NEVER = "never"
    COMPILED = "compiled"  # Inductor keeps what it is told to keep; eager kernels work in place
    ALWAYS = "always"


class Stage(NamedTuple):
    """A stretch of a layer.

    ends_at: the earliest module at which it ends. beside: its values stay until the next tap.
    """

    ends_at: str
    waits: Waits
    beside: bool = True


ATTENTION_IN = Stage("qkv", Waits.COMPILED)
ATTENTION_OUT = Stage("o_proj", Waits.COMPILED)
MLP_IN = Stage("ln2", Waits.ALWAYS)
EXPERTS_IN = Stage("ln2", Waits.NEVER, beside=False)
"""MLP_IN of layers with experts, whose kernels may work in place on their input."""
MLP_OUT = Stage("mlp", Waits.NEVER)
STAGES = (ATTENTION_IN, ATTENTION_OUT, MLP_IN, EXPERTS_IN, MLP_OUT)

_ATTENTION = ("layer", "ln1", "kv_norm", "qkv", "q_norm", "k_norm", "attn", "o_proj", "attn_norm")
MODULES = (*_ATTENTION, "before_mlp", "ln2", "down_proj", "mlp", "mlp_norm")
"""Modules of a layer in the order in which they run: attributes of `Architecture`."""
INPUTS = ("layer", "attn", "before_mlp")
"""Those whose inputs are tapped, before anything works on them."""


class Keep(enum.Enum):
    """What a compiled model needs so that a value is still there when it is written."""

    AS_IS = enum.auto()  # the value itself
    COPY = enum.auto()  # a copy: it is overwritten later, or never written to memory
    HALVES = enum.auto()  # a copy of the halves of each head
    STREAM = enum.auto()  # the value itself where the residual stream lasts, else a copy
    PRODUCT = enum.auto()  # the value itself where a matrix product writes it and nothing overwrites it, else a copy
    OUTPUT = enum.auto()  # a copy with experts, whose kernels may use its memory again, and of a product with a bias


class LayerFacts(NamedTuple):
    """One decoder layer.

    head_size: of q. q_size, kv_size: widths of q and k on this rank. shared: values of each key that all heads share,
    at its end, where latent attention gets keys of heads; else 0. experts: whether its MLP is a mixture of experts.
    mlp_taps: whether hooks of its MLP are selected. scale: by what the outputs of its blocks are multiplied before they
    are added.
    """

    module: nn.Module
    arch: Architecture
    compilation: Compilation
    head_size: int
    q_size: int
    kv_size: int
    shared: int
    experts: bool
    mlp_taps: bool
    scale: float


def _normed(layer: LayerFacts, args: tuple[Any, ...], output: Any) -> torch.Tensor:
    return norm_outputs(layer.arch, args, output)[0]


def _stream(layer: LayerFacts, args: tuple[Any, ...], output: Any) -> torch.Tensor:
    return norm_outputs(layer.arch, args, output)[1]


def _output(_layer: LayerFacts, _args: tuple[Any, ...], output: Any) -> torch.Tensor:
    return first(output)


def _added(layer: LayerFacts, args: tuple[Any, ...], output: Any) -> torch.Tensor:
    value = _output(layer, args, output)
    return value if layer.scale == 1.0 else value * layer.scale


def _input(number: int) -> Read:
    return lambda _layer, args, _output: args[number]


def _layer_input(layer: LayerFacts, args: tuple[Any, ...], _output: Any) -> torch.Tensor:
    value: torch.Tensor = args[layer.arch.stream_at]
    return value


def _part(number: int) -> Read:
    """0, 1, 2: queries, keys, values of a projection that returns them side by side."""

    def read(layer: LayerFacts, args: tuple[Any, ...], output: Any) -> torch.Tensor:
        value = _output(layer, args, output)
        if layer.arch.qkv_by_head:
            groups = value.unflatten(-1, (-1, layer.q_size // layer.kv_size + 2, layer.head_size))
            return groups.split((layer.q_size // layer.kv_size, 1, 1), -2)[number].flatten(-3)
        ends = (0, layer.q_size, layer.q_size + layer.kv_size, None)
        return value[..., ends[number] : ends[number + 1]]

    return read


def _heads(layer: LayerFacts, args: tuple[Any, ...], output: Any) -> torch.Tensor:
    value = _output(layer, args, output)
    return value.transpose(-3, -2) if layer.arch.heads_first else value


def _rotary_key(layer: LayerFacts, args: tuple[Any, ...], _output: Any) -> torch.Tensor:
    """The key that all heads share. Latent attention gets (q, kv_c, k_pe), or q, k and v of heads."""
    key: torch.Tensor = args[1][:, 0, -layer.shared :] if layer.shared else args[2]
    return key


class TapPoint(NamedTuple):
    """Where a hook is tapped.

    module: a field of `Architecture`; the point does not exist where that is "". unless, where: other fields; the point
    does not exist where `unless` is given, or `where` is not.
    """

    hook: str
    module: str
    read: Read
    keep: Keep
    stage: Stage
    unless: str = ""
    where: str = ""


TAP_POINTS = (
    TapPoint("resid_pre", "ln1", _stream, Keep.STREAM, ATTENTION_IN),
    TapPoint("resid_pre", "layer", _layer_input, Keep.STREAM, ATTENTION_IN, unless="ln1"),
    TapPoint("ln1", "ln1", _normed, Keep.AS_IS, ATTENTION_IN),
    TapPoint("v", "qkv", _part(2), Keep.AS_IS, ATTENTION_IN),
    TapPoint("q", "qkv", _part(0), Keep.HALVES, ATTENTION_IN, unless="q_norm"),
    TapPoint("k", "qkv", _part(1), Keep.HALVES, ATTENTION_IN, unless="k_norm"),
    TapPoint("q", "q_norm", _heads, Keep.HALVES, ATTENTION_IN),
    TapPoint("k", "k_norm", _heads, Keep.HALVES, ATTENTION_IN),
    TapPoint("kv_c", "kv_norm", _output, Keep.AS_IS, ATTENTION_OUT),
    TapPoint("k_pe", "attn", _rotary_key, Keep.AS_IS, ATTENTION_OUT),
    TapPoint("q_rot", "attn", _input(0), Keep.AS_IS, ATTENTION_OUT),
    TapPoint("k_rot", "attn", _input(1), Keep.AS_IS, ATTENTION_OUT),
    TapPoint("z", "o_proj", _input(0), Keep.AS_IS, ATTENTION_OUT),
    TapPoint("attn_proj", "o_proj", _output, Keep.PRODUCT, ATTENTION_OUT, where="attn_norm"),
    TapPoint("attn_out", "o_proj", _added, Keep.PRODUCT, ATTENTION_OUT, unless="attn_norm"),
    TapPoint("attn_out", "attn_norm", _added, Keep.COPY, ATTENTION_OUT),
    TapPoint("resid_mid", "ln2", _stream, Keep.COPY, MLP_IN),
    TapPoint("resid_mid", "before_mlp", _input(0), Keep.COPY, MLP_IN, unless="ln2"),
    TapPoint("ln2", "ln2", _normed, Keep.AS_IS, MLP_IN),
    TapPoint("mlp_post", "down_proj", _input(0), Keep.AS_IS, MLP_OUT),
    TapPoint("mlp_proj", "mlp", _output, Keep.OUTPUT, MLP_OUT, where="mlp_norm"),
    TapPoint("mlp_out", "mlp", _added, Keep.OUTPUT, MLP_OUT, unless="mlp_norm"),
    TapPoint("mlp_out", "mlp_norm", _added, Keep.COPY, MLP_OUT),
)
"""Where the hooks of a layer are. A new hook is a row here and in `hooks.HOOKS`. Routing and attention summaries run
inside opaque ops of vLLM and have functions of their own.
"""


def install(model: nn.Module, context: CaptureContext, compilation: Compilation) -> ModelTaps:
    """Register the taps of the selection on a freshly built model, before its first forward."""
    taps = ModelTaps(model, context, compilation)
    fields, arch = context.layout.fields, context.arch
    install_inputs(taps)
    shared = {layer: batch for batch in batches_of_layers(fields) for layer in batch}
    batches: dict[int, TapBatch] = {}
    joined = joined_before_attention(fields)
    layers: Any = model.get_submodule(arch.layers)
    for index in range(context.dims.layers):
        if index in joined:
            taps.before_attention(f"{arch.layers}.{index}.{arch.attn}", lambda _module, _args: taps.join())
        if any(f.layer == index and HOOKS[f.hook].scope != "once" for f in fields):
            mine = shared.get(index, [index])
            if mine[0] not in batches:
                batches[mine[0]] = taps.batch(mine, lasting=index in shared)
            install_layer(taps, layers[index], index, batches[mine[0]], more=index != mine[-1])
    install_final(taps)
    return taps


def joined_before_attention(fields: Sequence[RowField]) -> set[int]:
    """Layers before whose attention the model waits for the tap before: those after a layer that reduces.

    Slow reducing kernels beside attention made decode slower. `pattern` is written elsewhere.
    """
    reduced = (f for f in fields if f.reduction is not None and f.hook != "pattern")
    return {f.layer + 1 for f in reduced if HOOKS[f.hook].scope != "once"}


# ---- a layer --------------------------------------------------------------------------------------------------------


def install_layer(taps: ModelTaps, module: nn.Module, index: int, batch: TapBatch, more: bool = False) -> None:
    """Register the taps of one layer. more: further layers of the batch follow."""
    context, compilation = taps.context, taps.compilation
    arch, path = context.arch, f"{context.arch.layers}.{index}"
    experts = index in context.dims.moe_layers
    points = _points(arch, context.layout, index, experts)
    attn: Any = module.get_submodule(arch.attn)
    absorbed = hasattr(attn, "qk_head_dim")  # latent attention whose head_size is that of the cache
    head_size = attn.qk_head_dim if absorbed else attn.head_size
    sizes = head_size, attn.num_heads * head_size, attn.num_kv_heads * head_size
    shared = 0 if absorbed else context.dims.qk_rope_head_dim
    mlp_taps = any(point.stage in (MLP_IN, EXPERTS_IN, MLP_OUT) for point, _ in points)
    layer = LayerFacts(module, arch, compilation, *sizes, shared, experts, mlp_taps, context.block_scale)
    ends = {_end_of(arch, stage, points): stage for stage in STAGES if any(point.stage is stage for point, _ in points)}
    for name in MODULES:
        here = tuple((row_field, _reader(point, layer)) for point, row_field in points if point.module == name)
        stage = ends.get(name)
        if not here and stage is None:
            continue
        pause = _pause(stage, points, more) if stage is not None else None
        _register(taps, arch.path(index, name), name, layer, here, pause, batch)
    for point, row_field in points:
        context.coverage.expect(row_field, arch.path(index, point.module))
    if pattern := context.layout.find("pattern", index):
        attention_summary.install(attn, pattern, context.cache_layer, context.coverage)
        context.coverage.expect(pattern, f"{path}.{arch.attn}")
    if experts:
        install_routing(taps, module, index, batch)


Points = Sequence[tuple[TapPoint, RowField]]


def _points(arch: Architecture, layout: RowLayout, index: int, experts: bool) -> Points:
    """The tap points of a layer whose hooks are selected, with their fields."""
    found = []
    for point in TAP_POINTS:
        row_field = layout.find(point.hook, index)
        unless, where = point.unless and getattr(arch, point.unless), not point.where or getattr(arch, point.where)
        if row_field is not None and getattr(arch, point.module) and where and not unless:
            stage = EXPERTS_IN if experts and point.stage is MLP_IN else point.stage
            found.append((point._replace(stage=stage), row_field))
    return found


def _end_of(arch: Architecture, stage: Stage, points: Points) -> str:
    """The module at which a stage ends: after the last of its points, and where that module is, at `ends_at`."""
    mine = [point.module for point, _ in points if point.stage is stage]
    return max([*mine, *([stage.ends_at] if getattr(arch, stage.ends_at) else [])], key=MODULES.index)


class _Pause(NamedTuple):
    """Arguments of `TapBatch.pause` at the end of a stage."""

    more_compiled: bool
    more_eager: bool
    beside: bool


def _pause(stage: Stage, points: Points, more: bool) -> _Pause:
    """What to do at the end of a stage. more: further layers of the batch follow."""
    later = any(STAGES.index(point.stage) > STAGES.index(stage) for point, _ in points)
    return _Pause(
        more or (later and stage.waits is not Waits.NEVER), later and stage.waits is Waits.ALWAYS, stage.beside
    )


def _register(
    taps: ModelTaps,
    path: str,
    name: str,
    layer: LayerFacts,
    here: Sequence[tuple[RowField, Read]],
    pause: _Pause | None,
    batch: TapBatch,
) -> None:
    """Register one hook at `path` that takes the values of `here`, and ends a stage with `pause`."""

    def tap(args: tuple[Any, ...], output: Any) -> None:
        for row_field, read in here:
            batch.add(row_field, read(layer, args, output))
        if pause is not None:
            batch.pause(*pause)

    if name == "attn":
        taps.before_attention(path, lambda _module, args: tap(args, None))
    elif name in INPUTS:  # which may be given by their names
        taps.hook(
            path, lambda _module, args, kwargs: tap(args or tuple(kwargs.values()), None), before=True, with_kwargs=True
        )
    else:
        taps.hook(path, lambda _module, args, output: tap(args, output))


def _reader(point: TapPoint, layer: LayerFacts) -> Read:
    """How a value is read so that it is there when it is written (see `Keep`)."""
    read, keep, compilation = point.read, point.keep, layer.compilation
    if compilation.copies and keep is not Keep.HALVES:
        keep = Keep.COPY
    if read is _added and layer.scale != 1.0:
        keep = Keep.COPY
    if keep is Keep.AS_IS or (keep is Keep.OUTPUT and not layer.experts and not _has_bias(layer)):
        return read
    if keep is Keep.HALVES:
        return lambda facts, args, output: _copy_halves(read(facts, args, output), facts.head_size)
    lasts = keep is Keep.STREAM and compilation.stream_lasts
    if keep is Keep.PRODUCT:
        product = _written_by_product(layer.module.get_submodule(layer.arch.o_proj))
        lasts = product and compilation.products_last and not (layer.mlp_taps and compilation.in_place)
    kept = _rename if lasts else copied
    return lambda facts, args, output: kept(read(facts, args, output))


def _has_bias(layer: LayerFacts) -> bool:
    """Whether the MLP's last product adds a bias. Inductor may add it later, together with what is next."""
    path = layer.arch.down_proj
    return bool(path) and getattr(layer.module.get_submodule(path), "bias", None) is not None


def _written_by_product(linear: nn.Module) -> bool:
    """Whether a matrix product writes a linear layer's output, in the model's dtype.

    Inductor may fuse what follows the product, such as a bias or the scales of quantised weights, with what is next.
    """
    plain = isinstance(getattr(linear, "quant_method", None), UnquantizedLinearMethod)
    return plain and getattr(linear, "bias", None) is None


def _rename(value: torch.Tensor) -> torch.Tensor:
    """`value` under a name of its own: vLLM refuses graphs that use an add-and-norm's input under the same name."""
    return value.view(value.shape)


def _copy_halves(value: torch.Tensor, head_size: int) -> torch.Tensor:
    """A copy of heads, made of the two halves of each head.

    Rotary reads halves, so its kernel writes the copy too. Else Inductor lets the norm's kernel write it, which would
    otherwise only sum up squares.
    """
    if not torch.compiler.is_compiling():
        return value
    heads = value if value.shape[-1] % head_size else value.unflatten(-1, (-1, head_size))
    return torch.cat([copied(half) for half in heads.chunk(2, -1)], -1)
