# SPDX-License-Identifier: Apache-2.0
"""The tap points of a layer's hooks (TAP_POINTS): where values are read, and how long they stay valid.

A layer has stages. After a stage, the model may overwrite the values of the stage. In eager mode one op writes the
values at the end of each stage, or later if `Waits` allows it. Under torch.compile one op writes the values of the
whole layer at the layer's end. A layer with experts has two such ops, and layers with few values may share one
(batches.py). `Keep` says which values a compiled model must copy, so that they last until then.

    stage           hooks                               written before
    ATTENTION_IN    resid_pre, ln1, q, k, v, mix_proj   rotary, which may rotate q and k in place, or a mixer's core
    ATTENTION_OUT   v as attention gets it, kv_c, k_pe, q_rot, k_rot, indexer_topk, z, mix_core, mix_z, attn_proj,
                    attn_out
                                                        the add-and-norm, which may overwrite attn_out
    MLP_IN          resid_mid, ln2                      the end of the MLP; with experts, their kernels
    MLP_OUT         mlp_pre, mlp_pre_linear, mlp_post, mlp_proj, mlp_out
                                                        the next add-and-norm, which may overwrite them
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from dmi_connector.engine.model.architectures import Architecture
from dmi_connector.engine.taps.compilation import Compilation
from dmi_connector.engine.taps.values import copied, first, norm_outputs

Read = Callable[["LayerFacts", tuple[Any, ...], Any], torch.Tensor]
"""(the layer, arguments of a module, its output; None in a pre-hook) -> the value of a tap point, [..., width]."""


class Waits(enum.Enum):
    """Whether the values of a stage are written together with those of later stages of the layer."""

    NEVER = "never"
    COMPILED = "compiled"  # compiled models keep the values; in eager mode kernels overwrite them
    ALWAYS = "always"


class Stage(NamedTuple):
    """A part of a layer whose values are written together.

    ends_at: the module at which it ends, unless a hook of the stage is read at a later module. waits: see `Waits`.
    """

    ends_at: str
    waits: Waits


ATTENTION_IN = Stage("qkv", Waits.COMPILED)
ATTENTION_OUT = Stage("o_proj", Waits.COMPILED)
MLP_IN = Stage("ln2", Waits.ALWAYS)
EXPERTS_IN = Stage("ln2", Waits.NEVER)
"""MLP_IN of a layer with experts. The kernels of experts may overwrite their input."""
MLP_OUT = Stage("mlp", Waits.NEVER)
STAGES = (ATTENTION_IN, ATTENTION_OUT, MLP_IN, EXPERTS_IN, MLP_OUT)

MODULES = (
    *("layer", "ln1", "kv_norm", "qkv", "q_norm", "k_norm", "mix_in"),
    *("indexer", "attn", "mix_norm", "o_proj", "mix_out"),
    "fills",
    "attn_norm",
    "before_mlp",
    "ln2",
    "gate_proj",
    "up_proj",
    "down_proj",
    "mlp",
    "mlp_norm",
)
"""Attributes of `Architecture` that name modules of a layer, in the order in which the modules run."""
INPUTS = ("layer", "attn", "mix_norm", "before_mlp")
"""The MODULES whose inputs are tapped, by a pre-hook."""


class Keep(enum.Enum):
    """Whether a compiled model needs a copy of a value, so that the value is unchanged when it is written to rows."""

    AS_IS = enum.auto()  # the value itself
    COPY = enum.auto()  # a copy: the value is overwritten later, or never written to memory
    HALVES = enum.auto()  # a copy of the halves of each head
    STREAM = enum.auto()  # the value itself if `Compilation.stream_lasts`, else a copy
    PRODUCT = enum.auto()  # the value itself if a matrix product writes it and nothing overwrites it, else a copy
    FIRST = enum.auto()  # for the MLP's first projections: the value itself if a product writes it, else a copy
    OUTPUT = enum.auto()  # a copy if the MLP ends with a bias, or has experts, whose kernels may reuse the memory


class LayerFacts(NamedTuple):
    """One decoder layer.

    module: the layer. head_size: head size of q; 0 without attention. q_size, kv_size: widths of q and k on this rank.
    shared: in latent attention with keys per head, the number of elements at the end of each key that are equal in all
    heads; otherwise 0. experts: whether its MLP is a mixture of experts. mlp_taps: whether hooks of its MLP are
    selected. scale: factor of the output of a block before it is added to the residual stream.
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


def added(layer: LayerFacts, args: tuple[Any, ...], output: Any) -> torch.Tensor:
    """What a block adds to the residual stream: its output times `LayerFacts.scale`."""
    value = _output(layer, args, output)
    return value if layer.scale == 1.0 else value * layer.scale


def _input(number: int) -> Read:
    return lambda _layer, args, _output: args[number]


def _layer_input(layer: LayerFacts, args: tuple[Any, ...], _output: Any) -> torch.Tensor:
    value: torch.Tensor = args[layer.arch.stream_at]
    return value


def _part(number: int) -> Read:
    """A `Read` of queries (0), keys (1) or values (2) from the output of the projection that concatenates them."""

    def read(layer: LayerFacts, args: tuple[Any, ...], output: Any) -> torch.Tensor:
        value = _output(layer, args, output)
        if layer.arch.qkv_by_head:
            groups = value.unflatten(-1, (-1, layer.q_size // layer.kv_size + 2, layer.head_size))
            return groups.split((layer.q_size // layer.kv_size, 1, 1), -2)[number].flatten(-3)
        q_size = layer.q_size * (1 + layer.arch.gated)
        ends = (0, q_size, q_size + layer.kv_size, None)
        return value[..., ends[number] : ends[number + 1]]

    return read


def _heads(layer: LayerFacts, args: tuple[Any, ...], output: Any) -> torch.Tensor:
    value = _output(layer, args, output)
    return value.transpose(-3, -2) if layer.arch.heads_first else value


def _chosen(_layer: LayerFacts, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """The positions chosen for this step's tokens. All indexers write to one buffer, which may have more rows."""
    return output[: args[0].shape[0]]


def _rotary_key(layer: LayerFacts, args: tuple[Any, ...], _output: Any) -> torch.Tensor:
    """The rotary key, which all heads share. Latent attention gets (q, kv_c, k_pe), or (q, k, v) of all heads."""
    key: torch.Tensor = args[1][:, 0, -layer.shared :] if layer.shared else args[2]
    return key


def _gate(layer: LayerFacts, args: tuple[Any, ...], output: Any) -> torch.Tensor:
    """The input of the activation of the MLP. A projection that concatenates gate and up returns it first."""
    value = _output(layer, args, output)
    return value.chunk(2, -1)[0] if layer.arch.gated_mlp else value


def _linear(layer: LayerFacts, args: tuple[Any, ...], output: Any) -> torch.Tensor:
    """The factor by which the activated gate is multiplied."""
    value = _output(layer, args, output)
    return value if layer.arch.gate_proj else value.chunk(2, -1)[1]


Join = Callable[["LayerFacts", torch.Tensor, torch.Tensor], torch.Tensor]
"""(the layer, outputs of two modules in the order in which they run) -> the value of a tap point, a copy."""


def _side_by_side(_layer: LayerFacts, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Both outputs, concatenated. In a compiled model, copies of both are concatenated.

    Without copies, Inductor may write the outputs directly into the result of the concatenation, which changes their
    strides. But vLLM compiles the next graph, which reads the outputs, for the old strides.
    """
    return torch.cat([copied(one), copied(other)], -1)


def _sum(layer: LayerFacts, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    value = one + other
    return copied(value if layer.scale == 1.0 else value * layer.scale)


class TapPoint(NamedTuple):
    """Where a hook is tapped in a layer.

    `module`, `first`, `where` and `unless` hold names of attributes of `Architecture`. The point exists only if the
    layer has `module`, the attribute `where` is set (if one is named), and no attribute of `unless` is set. read: gets
    the arguments and the output of `module`. first: a module that runs earlier. If the layer has it, the value is the
    result of `join` on the outputs of both modules.
    """

    hook: str
    module: str
    read: Read
    keep: Keep
    stage: Stage
    unless: tuple[str, ...] = ()
    where: str = ""
    first: str = ""
    join: Join = _sum


TAP_POINTS = (
    TapPoint("resid_pre", "ln1", _stream, Keep.STREAM, ATTENTION_IN),
    TapPoint("resid_pre", "layer", _layer_input, Keep.STREAM, ATTENTION_IN, unless=("ln1",)),
    TapPoint("ln1", "ln1", _normed, Keep.AS_IS, ATTENTION_IN),
    TapPoint("v", "qkv", _part(2), Keep.AS_IS, ATTENTION_IN, unless=("v_at_attn",)),
    TapPoint("q", "qkv", _part(0), Keep.HALVES, ATTENTION_IN, unless=("q_norm",)),
    TapPoint("k", "qkv", _part(1), Keep.HALVES, ATTENTION_IN, unless=("k_norm",)),
    TapPoint("q", "q_norm", _heads, Keep.HALVES, ATTENTION_IN),
    TapPoint("k", "k_norm", _heads, Keep.HALVES, ATTENTION_IN),
    TapPoint("mix_proj", "mix_in", _output, Keep.COPY, ATTENTION_IN, first="mix_first", join=_side_by_side),
    TapPoint("kv_c", "kv_norm", _output, Keep.AS_IS, ATTENTION_OUT),
    TapPoint("k_pe", "attn", _rotary_key, Keep.AS_IS, ATTENTION_OUT),
    TapPoint("q_rot", "attn", _input(0), Keep.AS_IS, ATTENTION_OUT),
    TapPoint("k_rot", "attn", _input(1), Keep.AS_IS, ATTENTION_OUT),
    TapPoint("v", "attn", _input(2), Keep.AS_IS, ATTENTION_OUT, where="v_at_attn"),
    TapPoint("indexer_topk", "indexer", _chosen, Keep.COPY, ATTENTION_OUT),
    TapPoint("z", "o_proj", _input(0), Keep.AS_IS, ATTENTION_OUT),
    TapPoint("mix_core", "mix_norm", _input(0), Keep.AS_IS, ATTENTION_OUT),
    TapPoint("mix_z", "mix_out", _input(0), Keep.AS_IS, ATTENTION_OUT),
    TapPoint("attn_proj", "o_proj", _output, Keep.PRODUCT, ATTENTION_OUT, where="attn_norm"),
    TapPoint("attn_out", "o_proj", added, Keep.PRODUCT, ATTENTION_OUT, unless=("attn_norm",)),
    TapPoint("attn_out", "fills", _input(1), Keep.COPY, ATTENTION_OUT),
    TapPoint("attn_out", "attn_norm", added, Keep.COPY, ATTENTION_OUT),
    TapPoint("resid_mid", "ln2", _stream, Keep.COPY, MLP_IN),
    TapPoint("resid_mid", "before_mlp", _input(0), Keep.COPY, MLP_IN, unless=("ln2",)),
    TapPoint("ln2", "ln2", _normed, Keep.AS_IS, MLP_IN),
    TapPoint("mlp_pre", "gate_proj", _output, Keep.FIRST, MLP_OUT),
    TapPoint("mlp_pre", "up_proj", _gate, Keep.FIRST, MLP_OUT, unless=("gate_proj",)),
    TapPoint("mlp_pre_linear", "up_proj", _linear, Keep.FIRST, MLP_OUT),
    TapPoint("mlp_post", "down_proj", _input(0), Keep.AS_IS, MLP_OUT),
    TapPoint("mlp_proj", "mlp", _output, Keep.OUTPUT, MLP_OUT, where="mlp_norm"),
    TapPoint("mlp_out", "mlp", added, Keep.OUTPUT, MLP_OUT, unless=("mlp_norm",), first="mlp_first"),
    TapPoint("mlp_out", "mlp_norm", added, Keep.COPY, MLP_OUT),
)
"""The tap points of a layer. A new hook needs an entry here and in `hook_table.HOOKS`. Routing and attention summaries
are tapped inside opaque ops of vLLM (routing.py, attention_summary.py).
"""
