# SPDX-License-Identifier: Apache-2.0
"""Taps: forward hooks that hand hidden tensors to one custom op, which writes them into the paged rows.

Values of a layer come in three groups, each intact until its end:

    attention in    resid_pre, ln1, q, k, v             before rotary, which may rotate q and k in place
    attention out   q_rot, k_rot, z, attn_out           before the add-and-norm, which may take attn_out over
    mlp             resid_mid, ln2, mlp_post, mlp_out   before the next add-and-norm, which may take them over

Eagerly each group is written by one op at its end. Under torch.compile one op writes the whole layer at its end: what
would be taken over until then is read from a copy, which Inductor fuses into the kernel that reads or makes the value
(norms that Inductor compiles take nothing over: `norms_in_place`). Where little more than the residual stream is
selected, one op writes several layers (`Held`). While a CUDA graph of a whole step is captured, ops write beside the
model's kernels; for that their values stay until the next op (tap_op.py).

The op mutates a one-element token buffer: that keeps it alive and in order under torch.compile, and costs nothing.
Offsets are counted from the first of the layer, and a tensor stands for where that is: so the graphs of equal layers
are equal, and vLLM compiles one of them.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm import envs
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from dmi_connector.engine import attend, tap_op
from dmi_connector.engine.at_end import AtEnd
from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.kernels import MAX_VALUES
from dmi_connector.hooks import HOOKS
from dmi_connector.layout import Segment, shard_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_COPIED = frozenset(("resid_pre", "resid_mid", "q", "k"))
"""Hooks whose values are copies of their own under torch.compile, which nothing takes over later."""
_HELD_BYTES = 64 << 10
"""Bytes of a token that `Held` keeps: a step of many tokens needs so much more memory for each."""


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

    def pause(self, more: bool) -> None:
        """End of a group: write now, or with the rest of the layer if `more` is to come and this is being compiled."""
        if not (more and torch.compiler.is_compiling()):
            self.flush()

    def flush(self, beside: bool = True) -> None:
        """Write now. beside: whether nothing changes the values unknown to the compiler before the next op."""
        segments, values = list(self.segments), list(self.values)
        # Emptied, not replaced: Dynamo carries out what happens to the lists themselves, and tensors left in one would
        # be outputs of the compiled graph, alive until the forward ends.
        self.segments.clear()
        self.values.clear()
        if segments:
            self.tapper.write(segments, values, beside)


class Held:
    """Values of layers in a row that one op writes, when the last of them is done: only under torch.compile, and only
    of layers of which nothing but narrow copies is selected. Graphs of layers that only hold are equal, and so are
    those that write.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._last: dict[int, int] = {}  # layer whose values are held -> the one after which they are written
        run: list[int] = []
        values = nbytes = 0
        for layer in sorted({s.layer for s in segments}):
            mine = [s for s in segments if s.layer == layer and HOOKS[s.hook].scope != "once"]
            if not mine or any(s.hook not in _COPIED or s.reduction is not None for s in mine):
                continue
            more = sum(s.nbytes for s in mine)
            if values + len(mine) > MAX_VALUES or nbytes + more > _HELD_BYTES:
                run, values, nbytes = [], 0, 0
            run, values, nbytes = [*run, layer], values + len(mine), nbytes + more
            self._last |= dict.fromkeys(run, layer)
        self._tappers: list[Tapper] = []
        self._segments: list[Segment] = []
        self._values: list[torch.Tensor] = []

    def takes(self, layer: int | None) -> bool:
        return layer in self._last

    def add(self, tapper: Tapper, layer: int, segments: list[Segment], values: list[torch.Tensor]) -> None:
        self._tappers.append(tapper)
        self._segments.extend(segments)
        self._values.extend(values)
        if self._last[layer] == layer:
            first, segments, values = self._tappers[0], list(self._segments), list(self._values)
            for held in (self._tappers, self._segments, self._values):  # emptied, not replaced: see `Group.flush`
                held.clear()
            first.write_now(segments, values)


class Kept:
    """Values of the last op of a compiled forward, which the next op, or `Tapper.join`, names: until then their memory
    is not reused.
    """

    def __init__(self) -> None:
        self._values: list[torch.Tensor] = []

    def exchange(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the op before; `values` are to be kept for the next."""
        kept = list(self._values)
        self._values.clear()  # emptied, not replaced: see `Group.flush`
        self._values.extend(values)
        return kept


class Tapper:
    """Writes groups of values of one layer, or of what exists once in a model (layer None)."""

    def __init__(
        self,
        model: nn.Module,
        context: CaptureContext,
        layer: int | None,
        at_end: AtEnd,
        kept: Kept,
        held: Held | None = None,
        in_place: bool = True,
    ) -> None:
        """in_place: see `norms_in_place`."""
        self.kept, self.in_place = kept, in_place
        self.layer, self.held = layer, held if held is not None and held.takes(layer) else None
        self.layer_name = context.layer_name
        self.token = model.get_buffer("dmi_token")
        mine = [s.offset for s in context.layout.segments if layer is not None and s.layer == layer]
        self.start = min(mine, default=0)
        name = f"dmi_base_{'once' if layer is None else layer}"
        model.register_buffer(name, torch.zeros(1, dtype=torch.int32), persistent=False)
        self.base = model.get_buffer(name)
        tap_op.stand_for(self.base, tap_op.Place(self.start, layer or 0, weakref.ref(at_end)))
        self.at_end = at_end
        self.settings: dict[str, str] = {}
        rank = get_tensor_model_parallel_rank() if context.tp > 1 else 0
        for segment in context.layout.segments:
            once = HOOKS[segment.hook].scope == "once"
            if segment.reduction is not None and (once if layer is None else not once and segment.layer == layer):
                shard = shard_of(HOOKS[segment.hook], context.dims, context.tp, rank).shard
                segment.reduction.prepare(segment.width, self.base.device, segment.layer, shard)
                self.settings[segment.hook] = json.dumps(segment.reduction.settings())

    def write(self, segments: list[Segment], values: list[torch.Tensor], beside: bool = True) -> None:
        """Write a group, now or with those of other layers, all copies of their own. beside: see `Group.flush`."""
        if self.held is not None and self.layer is not None and torch.compiler.is_compiling():
            self.held.add(self, self.layer, segments, values)
        else:
            self.write_now(segments, values, beside)

    def write_now(self, segments: list[Segment], values: list[torch.Tensor], beside: bool = True) -> None:
        """One op for each dtype among `segments` (nearly always one), of this layer or of later ones."""
        for dtype in dict.fromkeys(s.dtype for s in segments):
            rows = []
            offsets = []
            how = []
            for segment, value in zip(segments, values, strict=True):
                if segment.dtype == dtype:
                    rows.append(value.reshape(-1, segment.width).to(getattr(torch, dtype)))
                    offsets.append(segment.offset - self.start)
                    how.append("null" if segment.reduction is None else self.settings[segment.hook])
            reductions = "[" + ",".join(how) + "]" if any(h != "null" for h in how) else ""
            later = beside and not self.in_place and torch.compiler.is_compiling()
            kept = self.kept.exchange(rows if later else ())
            torch.ops.dmi.tap(rows, kept, self.token, self.base, offsets, reductions, later, self.layer_name)

    def join(self) -> None:
        """Let go of what is kept, in the piece of the compiled model that made it: vLLM splits models at attention, and
        each tensor that goes from one piece to another takes some microseconds of the engine's thread.
        """
        if torch.compiler.is_compiling() and (kept := self.kept.exchange(())):
            torch.ops.dmi.tap_join(kept, self.token)

    def end(self, like: torch.Tensor) -> None:
        """Nothing more is written in this forward. like: a tensor with one entry for each token."""
        if self.at_end.tokens or torch.compiler.is_compiling():
            torch.ops.dmi.tap_end(like, self.kept.exchange(()), self.token, self.base, self.layer_name)


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


def norms_in_place(vllm_config: VllmConfig) -> bool:
    """Whether an add-and-norm of a compiled model may overwrite what it is given, with no regard to other names of that
    (vLLM's `UnsafeCloneEliminationPass`): so do kernels of vLLM's own, while Inductor knows who reads what.
    """
    first = vllm_config.kernel_config.ir_op_priority.fused_add_rms_norm[:1]
    return first != ["native"] or envs.VLLM_BATCH_INVARIANT


def install(model: nn.Module, context: CaptureContext, in_place: bool) -> None:
    """Register the hooks of the selection on a freshly built model (before its first forward). in_place: see
    `norms_in_place`.
    """
    model.register_buffer("dmi_token", torch.zeros(1, dtype=torch.int32), persistent=False)
    at_end = AtEnd(context.layout.segments, model.get_buffer("dmi_token").device)
    kept = Kept()
    tapper = Tapper(model, context, None, at_end, kept, in_place=in_place)
    arch = context.arch
    layers: Any = model.get_submodule(arch.layers)
    held = Held(context.layout.segments)
    _install_inputs(model, context, tapper)
    for index in range(context.dims.layers):
        if any(s.layer == index for s in context.layout.segments):
            mine = Tapper(model, context, index, at_end, kept, held, in_place)
            _install_layer(layers[index], index, context, mine)
        attn = layers[index].get_submodule(arch.attn)
        attn.register_forward_pre_hook(lambda _module, _args: tapper.join())
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
    q_rot, k_rot, z, attn_out = (find(n) for n in ("q_rot", "k_rot", "z", "attn_out"))
    resid_mid, ln2, mlp_post, mlp_out = (find(n) for n in ("resid_mid", "ln2", "mlp_post", "mlp_out"))
    in_mlp = any((resid_mid, ln2, mlp_post, mlp_out))
    after_in = in_mlp or any((q_rot, k_rot, z, attn_out))
    if resid_pre or ln1:

        def at_ln1(args: tuple[Any, ...], output: Any) -> None:
            normed, residual = _norm_outputs(args, output)
            group.add(resid_pre, _copied(residual))
            group.add(ln1, normed)

        _after(module(arch.ln1), at_ln1)

    attn: Any = module(arch.attn)
    q_size, kv_size = attn.num_heads * attn.head_size, attn.num_kv_heads * attn.head_size

    def at_qkv(_args: tuple[Any, ...], output: Any) -> None:
        qkv = _first(output)
        group.add(v, qkv[..., q_size + kv_size :])
        if not arch.q_norm:
            group.add(q, _copied(qkv[..., :q_size]))
            group.add(k, _copied(qkv[..., q_size : q_size + kv_size]))
        if not (arch.q_norm and (q or k)):
            group.pause(after_in)

    def at_q_norm(_args: tuple[Any, ...], output: Any) -> None:
        group.add(q, _copied(_first(output)))
        if not k:
            group.pause(after_in)

    def at_k_norm(_args: tuple[Any, ...], output: Any) -> None:
        group.add(k, _copied(_first(output)))
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
        own = _renamed if _written_out(module(arch.o_proj)) and not (in_mlp and tapper.in_place) else _copied

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
