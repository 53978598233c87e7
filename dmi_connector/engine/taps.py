# SPDX-License-Identifier: Apache-2.0
"""Taps: forward hooks that hand hidden tensors to one custom op, which writes them into the paged rows.

Values of a layer come in three groups, each intact until its end:

    attention in    resid_pre, ln1, q, k, v             before rotary, which may rotate q and k in place
    attention out   q_rot, k_rot, z, attn_out           before the add-and-norm, which may take attn_out over
    mlp             resid_mid, ln2, mlp_post, mlp_out   before the next add-and-norm, which may take them over

Eagerly each group is written by one op at its end. Under torch.compile one op writes the whole layer at its end: what
would be taken over until then, or is not written out by itself, is read from a copy, which Inductor fuses into the
kernel that reads or makes the value. Which these are depends on how vLLM compiles the model (compilation.py). Where
little more than the residual stream is selected, one op writes several layers (tapper.py). While a CUDA graph of a
whole step is captured, ops write beside the model's kernels, at most up to the next op; for that their values stay
until then (tap_op.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from dmi_connector.engine import attend
from dmi_connector.engine.at_end import AtEnd
from dmi_connector.engine.compilation import Compilation
from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.tapper import Group, Held, Tapper
from dmi_connector.hooks import HOOKS
from dmi_connector.layout import Segment


def _norm_outputs(args: tuple[Any, ...], output: Any) -> tuple[Any, Any]:
    """(normed, residual stream) of a fused add-and-norm or of a plain norm."""
    return output if isinstance(output, tuple) else (output, args[0])


def _copied(value: Any) -> Any:
    """`value` for a tap, so that the compiled model computes the same as without it and may reuse the original.

    Inductor keeps sums and norms in float32 while it fuses them; what an opaque op reads it must write out in the
    model's dtype first, and everything after would go on from the rounded tensor. A copy of its own leaves the original
    where it was (a plain clone is removed as a no-op).
    """
    return torch.neg(torch.neg(value)) if torch.compiler.is_compiling() else value


def _copied_by_halves(value: torch.Tensor, head_size: int) -> torch.Tensor:
    """`_copied` of heads, of the two halves of each: so rotary reads them, whose kernel then writes the copy too. Else
    Inductor lets the kernel of the norm do it, which for the norm itself need only sum up squares. Where rotary reads
    them in another way, this gives as good a copy, but no quicker.
    """
    if not torch.compiler.is_compiling():
        return value
    heads = value if value.shape[-1] % head_size else value.unflatten(-1, (-1, head_size))
    return torch.cat([_copied(half) for half in heads.chunk(2, -1)], -1)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _after(module: nn.Module, hook: Callable[[tuple[Any, ...], Any], None]) -> None:
    def call(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hook(args, output)

    module.register_forward_hook(call)


def _renamed(value: torch.Tensor) -> torch.Tensor:
    """`value` by a name of its own: vLLM refuses graphs that use what an add-and-norm was given under the same name."""
    return value.view(value.shape)


def _written_out(linear: nn.Module) -> bool:
    """Whether a matrix product writes what a linear layer gives, in the model's dtype. What follows the product, as a
    bias or the scales of quantised weights, Inductor may fuse with what is next.
    """
    plain = isinstance(getattr(linear, "quant_method", None), UnquantizedLinearMethod)
    return plain and getattr(linear, "bias", None) is None


def install(model: nn.Module, context: CaptureContext, compilation: Compilation) -> None:
    """Register the hooks of the selection on a freshly built model (before its first forward)."""
    model.register_buffer("dmi_token", torch.zeros(1, dtype=torch.int32), persistent=False)
    at_end = AtEnd(context.layout.segments, model.get_buffer("dmi_token").device)
    tapper = Tapper(model, context, None, at_end, compilation)
    arch = context.arch
    layers: Any = model.get_submodule(arch.layers)
    held, joined = Held(context.layout.segments), joined_before_attention(context.layout.segments)
    _install_inputs(model, context, tapper)
    for index in range(context.dims.layers):
        if index in joined:
            layers[index].get_submodule(arch.attn).register_forward_pre_hook(lambda _module, _args: tapper.join())
        if any(s.layer == index for s in context.layout.segments):
            mine = Tapper(model, context, index, at_end, compilation, held)
            _install_layer(layers[index], index, context, mine)
    final, normed = context.layout.find("resid_final", 0), context.layout.find("final_ln", 0)

    def at_final_norm(args: tuple[Any, ...], output: Any) -> None:
        group = Group(tapper)
        values = _norm_outputs(args, output)
        if final:
            group.add(final, _copied(values[1]))
        group.add(normed, values[0])
        group.flush()
        tapper.end(values[0])

    _after(model.get_submodule(arch.final_norm), at_final_norm)


def joined_before_attention(segments: Sequence[Segment]) -> set[int]:
    """Layers before whose attention a branch ends: those after one whose tap reduces. `pattern` has its own op."""
    reduced = (s for s in segments if s.reduction is not None and s.hook != "pattern")
    return {s.layer + 1 for s in reduced if HOOKS[s.hook].scope != "once"}


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
    arch, group, compilation = context.arch, Group(tapper), tapper.compilation

    def find(name: str) -> Segment | None:
        return context.layout.find(name, index)

    def module(path: str) -> nn.Module:
        return layer.get_submodule(path)

    is_moe = index in context.dims.moe_layers
    resid_pre, ln1, q, k, v = (find(n) for n in ("resid_pre", "ln1", "q", "k", "v"))
    q_rot, k_rot, z, attn_out = (find(n) for n in ("q_rot", "k_rot", "z", "attn_out"))
    resid_mid, ln2, mlp_post, mlp_out = (find(n) for n in ("resid_mid", "ln2", "mlp_post", "mlp_out"))
    in_mlp = any((resid_mid, ln2, mlp_post, mlp_out))
    after_in = in_mlp or any((q_rot, k_rot, z, attn_out))
    if resid_pre or ln1:
        stream = _renamed if compilation.stream_lasts else _copied

        def at_ln1(args: tuple[Any, ...], output: Any) -> None:
            normed, residual = _norm_outputs(args, output)
            group.add(resid_pre, stream(residual))
            group.add(ln1, normed)

        _after(module(arch.ln1), at_ln1)

    attn: Any = module(arch.attn)
    head_size: int = attn.head_size
    q_size, kv_size = attn.num_heads * head_size, attn.num_kv_heads * head_size

    def at_qkv(_args: tuple[Any, ...], output: Any) -> None:
        qkv = _first(output)
        group.add(v, qkv[..., q_size + kv_size :])
        if not arch.q_norm:
            group.add(q, _copied_by_halves(qkv[..., :q_size], head_size))
            group.add(k, _copied_by_halves(qkv[..., q_size : q_size + kv_size], head_size))
        if not (arch.q_norm and (q or k)):
            group.pause(after_in)

    def at_q_norm(_args: tuple[Any, ...], output: Any) -> None:
        group.add(q, _copied_by_halves(_first(output), head_size))
        if not k:
            group.pause(after_in)

    def at_k_norm(_args: tuple[Any, ...], output: Any) -> None:
        group.add(k, _copied_by_halves(_first(output), head_size))
        group.pause(after_in)

    if any((resid_pre, ln1, q, k, v)):
        _after(module(arch.qkv), at_qkv)
        if arch.q_norm and q:
            _after(module(arch.q_norm), at_q_norm)
        if arch.k_norm and k:
            _after(module(arch.k_norm), at_k_norm)

    if q_rot or k_rot:

        def before_attn(_module: nn.Module, args: tuple[Any, ...]) -> None:
            group.add(q_rot, args[0])
            group.add(k_rot, args[1])

        attn.register_forward_pre_hook(before_attn)
    if pattern := find("pattern"):
        attend.install(attn, pattern, context.layer_name)
    if any((q_rot, k_rot, z, attn_out)):
        own = _renamed if _written_out(module(arch.o_proj)) and not (in_mlp and compilation.in_place) else _copied

        def at_o_proj(args: tuple[Any, ...], output: Any) -> None:
            group.add(z, args[0])
            group.add(attn_out, own(_first(output)))
            group.pause(in_mlp)

        _after(module(arch.o_proj), at_o_proj)

    if resid_mid or ln2:

        def at_ln2(args: tuple[Any, ...], output: Any) -> None:
            normed, residual = _norm_outputs(args, output)
            group.add(resid_mid, _copied(residual))
            group.add(ln2, normed)
            if is_moe or not (mlp_post or mlp_out):
                group.flush(beside=not is_moe)  # expert kernels may work in place on their input

        _after(module(arch.ln2), at_ln2)
    if mlp_post:

        def at_down_proj(args: tuple[Any, ...], _output: Any) -> None:
            group.add(mlp_post, args[0])

        _after(module(arch.down_proj), at_down_proj)
    if mlp_post or mlp_out:

        def at_mlp(_args: tuple[Any, ...], output: Any) -> None:
            out = _first(output)  # of experts, kernels may give their working memory, which is used again
            group.add(mlp_out, _copied(out) if is_moe else out)
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
            lambda _args, output: tapper.write([scores], [_first(output)], beside=False),
        )
    if ids or weights:
        router: Any = layer.get_submodule(context.arch.moe_experts).router
        select = router.select_experts

        def select_experts(*args: Any, **kwargs: Any) -> Any:
            topk_weights, topk_ids = select(*args, **kwargs)
            group = Group(tapper)
            group.add(ids, topk_ids)
            group.add(weights, topk_weights)
            group.flush(beside=False)
            return topk_weights, topk_ids

        router.select_experts = select_experts
