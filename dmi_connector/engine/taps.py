# SPDX-License-Identifier: Apache-2.0
"""Taps: forward hooks that hand hidden tensors to one custom op, which writes them into the paged rows.

Values are gathered in groups and written by one op a group, at the last point where all of them are still intact:

    attention in    resid_pre, ln1, q, k, v             before rotary, which may rotate q and k in place
    attention out   q_rot, k_rot, z, attn_out           before the fused add-and-norm takes attn_out over
    mlp             resid_mid, ln2, mlp_post, mlp_out   before the next add-and-norm takes them over

The op mutates a one-element token buffer: that keeps it alive and in order under torch.compile, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.kernels import write_rows
from dmi_connector.hooks import Segment

_LIB = torch.library.Library("dmi", "FRAGMENT")
_LIB.define("tap(Tensor[] values, Tensor(a!) token, int[] offsets, str layer) -> ()")


def _tap(values: list[torch.Tensor], token: torch.Tensor, offsets: list[int], layer: str) -> None:
    """Write `values` ([tokens, width] each, last dimension contiguous) at byte `offsets` of this step's rows."""
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    owner = context.no_compile_layers.get(layer)
    slots = context.slot_mapping.get(layer) if isinstance(context.slot_mapping, dict) else None
    if owner is None or slots is None or owner.rows is None:
        return  # a profiling run: the cache does not exist yet
    write_rows(owner.rows, slots, values, offsets)


def _tap_fake(values: list[torch.Tensor], token: torch.Tensor, offsets: list[int], layer: str) -> None:
    return None


for _key in ("CPU", "CUDA"):
    _LIB.impl("tap", _tap, _key)
_LIB.impl("tap", _tap_fake, "Meta")


class Group:
    """Values of one layer that wait for their common write."""

    def __init__(self, tapper: Tapper) -> None:
        self.tapper = tapper
        self.segments: list[Segment] = []
        self.values: list[torch.Tensor] = []

    def add(self, segment: Segment | None, value: Any) -> None:
        if segment is not None:
            self.segments.append(segment)
            self.values.append(value)

    def flush(self) -> None:
        if self.segments:
            self.tapper.write(self.segments, self.values)
        self.segments = []
        self.values = []


class Tapper:
    """Writes groups of values; one a model."""

    def __init__(self, context: CaptureContext, token: torch.Tensor) -> None:
        self.layer_name = context.layer_name
        self.token = token

    def write(self, segments: list[Segment], values: list[torch.Tensor]) -> None:
        """One op for each dtype among `segments` (nearly always one)."""
        for dtype in dict.fromkeys(s.dtype for s in segments):
            rows = []
            offsets = []
            for segment, value in zip(segments, values, strict=True):
                if segment.dtype == dtype:
                    rows.append(value.reshape(-1, segment.width).to(getattr(torch, dtype)))
                    offsets.append(segment.offset)
            torch.ops.dmi.tap(rows, self.token, offsets, self.layer_name)


def _norm_outputs(args: tuple[Any, ...], output: Any) -> tuple[Any, Any]:
    """(normed, residual stream) of a fused add-and-norm or of a plain norm."""
    return output if isinstance(output, tuple) else (output, args[0])


def _unseen(value: Any) -> Any:
    """`value` for a tap, made so that Inductor computes the same as without the tap.

    Inductor keeps sums and norms in float32 while it fuses them; what an opaque op reads it must write out in the
    model's dtype first, and everything after would go on from the rounded tensor. A copy of its own leaves the original
    where it was (a plain clone is removed as a no-op).
    """
    if torch.compiler.is_compiling() and value.dtype != torch.float32:
        return torch.neg(torch.neg(value))
    return value


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _after(module: nn.Module, hook: Callable[[tuple[Any, ...], Any], None]) -> None:
    def call(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hook(args, output)

    module.register_forward_hook(call)


def install(model: nn.Module, context: CaptureContext) -> None:
    """Register the hooks of the selection on a freshly built model (before its first forward)."""
    model.register_buffer("dmi_token", torch.zeros(1, dtype=torch.int32), persistent=False)
    tapper = Tapper(context, model.get_buffer("dmi_token"))
    arch = context.arch
    layers: Any = model.get_submodule(arch.layers)
    _install_inputs(model, context, tapper)
    for index in range(context.dims.layers):
        _install_layer(layers[index], index, context, tapper)
    final, normed = context.layout.find("resid_final", 0), context.layout.find("final_ln", 0)
    if final or normed:

        def at_final_norm(args: tuple[Any, ...], output: Any) -> None:
            group = Group(tapper)
            values = _norm_outputs(args, output)
            group.add(final, _unseen(values[1]))
            group.add(normed, values[0])
            group.flush()

        _after(model.get_submodule(arch.final_norm), at_final_norm)


def _install_inputs(model: nn.Module, context: CaptureContext, tapper: Tapper) -> None:
    """The row header (token id and position of the row, as the model saw them) and the embedding."""
    embed = context.layout.find("embed", 0)
    header_id, header_position = (
        Segment("token_ids", 0, "int32", 1, 0),
        Segment("positions", 0, "int32", 1, 4),
    )
    arch = context.arch

    header = Group(tapper)

    def at_embed(args: tuple[Any, ...], output: Any) -> None:
        header.add(header_id, args[0])
        if embed:
            tapper.write([embed], [output])

    _after(model.get_submodule(arch.embed), at_embed)

    def before_layer(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        header.add(header_position, kwargs["positions"] if "positions" in kwargs else args[0])
        header.flush()

    layers: Any = model.get_submodule(arch.layers)
    source = model.get_submodule(arch.positions) if arch.positions else layers[0]
    source.register_forward_pre_hook(before_layer, with_kwargs=True)


def _install_layer(layer: nn.Module, index: int, context: CaptureContext, tapper: Tapper) -> None:
    arch, group = context.arch, Group(tapper)

    def find(name: str) -> Segment | None:
        return context.layout.find(name, index)

    def module(path: str) -> nn.Module:
        return layer.get_submodule(path)

    is_moe = index in context.dims.moe_layers
    resid_pre, ln1, q, k, v = (find(n) for n in ("resid_pre", "ln1", "q", "k", "v"))
    if resid_pre or ln1:

        def at_ln1(args: tuple[Any, ...], output: Any) -> None:
            normed, residual = _norm_outputs(args, output)
            group.add(resid_pre, _unseen(residual))
            group.add(ln1, normed)

        _after(module(arch.ln1), at_ln1)

    attn: Any = module(arch.attn)
    q_size, kv_size = attn.num_heads * attn.head_size, attn.num_kv_heads * attn.head_size

    def at_qkv(_args: tuple[Any, ...], output: Any) -> None:
        qkv = _first(output)
        group.add(v, qkv[..., q_size + kv_size :])
        if not arch.q_norm:
            group.add(q, qkv[..., :q_size])
            group.add(k, qkv[..., q_size : q_size + kv_size])
        if not (arch.q_norm and (q or k)):
            group.flush()

    def at_q_norm(_args: tuple[Any, ...], output: Any) -> None:
        group.add(q, _unseen(_first(output)))
        if not k:
            group.flush()

    def at_k_norm(_args: tuple[Any, ...], output: Any) -> None:
        group.add(k, _unseen(_first(output)))
        group.flush()

    if any((resid_pre, ln1, q, k, v)):
        _after(module(arch.qkv), at_qkv)
        if arch.q_norm and q:
            _after(module(arch.q_norm), at_q_norm)
        if arch.k_norm and k:
            _after(module(arch.k_norm), at_k_norm)

    q_rot, k_rot, z, attn_out = (find(n) for n in ("q_rot", "k_rot", "z", "attn_out"))
    if q_rot or k_rot:

        def before_attn(_module: nn.Module, args: tuple[Any, ...]) -> None:
            group.add(q_rot, args[0])
            group.add(k_rot, args[1])

        attn.register_forward_pre_hook(before_attn)
    if any((q_rot, k_rot, z, attn_out)):

        def at_o_proj(args: tuple[Any, ...], output: Any) -> None:
            group.add(z, args[0])
            group.add(attn_out, _first(output))
            group.flush()

        _after(module(arch.o_proj), at_o_proj)

    resid_mid, ln2, mlp_post, mlp_out = (find(n) for n in ("resid_mid", "ln2", "mlp_post", "mlp_out"))
    if resid_mid or ln2:

        def at_ln2(args: tuple[Any, ...], output: Any) -> None:
            normed, residual = _norm_outputs(args, output)
            group.add(resid_mid, _unseen(residual))
            group.add(ln2, normed)
            if is_moe or not (mlp_post or mlp_out):
                group.flush()  # expert kernels may work in place on their input

        _after(module(arch.ln2), at_ln2)
    if mlp_post:

        def at_down_proj(args: tuple[Any, ...], _output: Any) -> None:
            group.add(mlp_post, args[0])

        _after(module(arch.down_proj), at_down_proj)
    if mlp_post or mlp_out:

        def at_mlp(_args: tuple[Any, ...], output: Any) -> None:
            group.add(mlp_out, _first(output))
            group.flush()

        _after(module(arch.mlp), at_mlp)
    if is_moe:
        _install_router(layer, index, context, tapper)


def _install_router(layer: nn.Module, index: int, context: CaptureContext, tapper: Tapper) -> None:
    """Routing hooks. They run inside vLLM's opaque MoE op, so each is written where it appears."""
    scores, ids, weights = (context.layout.find(n, index) for n in ("router_logits", "topk_ids", "topk_weights"))
    if scores:
        _after(
            layer.get_submodule(context.arch.moe_gate),
            lambda _args, output: tapper.write([scores], [_first(output)]),
        )
    if ids or weights:
        router: Any = layer.get_submodule(context.arch.moe_experts).router
        select = router.select_experts

        def select_experts(*args: Any, **kwargs: Any) -> Any:
            topk_weights, topk_ids = select(*args, **kwargs)
            group = Group(tapper)
            group.add(ids, topk_ids)
            group.add(weights, topk_weights)
            group.flush()
            return topk_weights, topk_ids

        router.select_experts = select_experts
