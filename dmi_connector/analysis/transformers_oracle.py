# SPDX-License-Identifier: Apache-2.0
"""The expected value of every hook, from one forward of a transformers model over the whole sequence.

vLLM and transformers share no model code. So where a capture agrees with this oracle, tap points, rows and store are
right. Tests and demo use it, and so can a user: see `compare`. Needs torch and transformers.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from dmi_connector.store.read.capture import Capture

ONCE = ("embed", "resid_final", "final_ln")
"""Hooks that exist once. `Oracle.run` gives them a layer axis of length 1."""


@dataclass(frozen=True)
class Point:
    """Where to read a hook: the input or output of a module.

    module: path in a decoder layer, or in the base model for hooks of ONCE. side: "in" or "out"; of a tuple the first
    element counts. index, parts: the value is split `index` of `parts` equal splits of the last axis.
    """

    name: str
    module: str
    side: str = "out"
    index: int = 0
    parts: int = 1


_DECODER = (
    Point("resid_pre", "input_layernorm", "in"),
    Point("ln1", "input_layernorm"),
    Point("v", "self_attn.v_proj"),
    Point("z", "self_attn.o_proj", "in"),
    Point("attn_out", "self_attn.o_proj"),
    Point("resid_mid", "post_attention_layernorm", "in"),
    Point("ln2", "post_attention_layernorm"),
    Point("mlp_post", "mlp.down_proj", "in"),
    Point("mlp_out", "mlp"),
    Point("router_logits", "mlp.gate"),
)
_DECODER_QK = (Point("q", "self_attn.q_proj"), Point("k", "self_attn.k_proj"))
_DECODER_QK_NORM = (Point("q", "self_attn.q_norm"), Point("k", "self_attn.k_norm"))
_DECODER_ONCE = (
    Point("embed", "embed_tokens"),
    Point("resid_final", "norm", "in"),
    Point("final_ln", "norm"),
)
_GPT2 = (
    Point("resid_pre", "ln_1", "in"),
    Point("ln1", "ln_1"),
    Point("q", "attn.c_attn", index=0, parts=3),
    Point("k", "attn.c_attn", index=1, parts=3),
    Point("v", "attn.c_attn", index=2, parts=3),
    Point("z", "attn.c_proj", "in"),
    Point("attn_out", "attn.c_proj"),
    Point("resid_mid", "ln_2", "in"),
    Point("ln2", "ln_2"),
    Point("mlp_post", "mlp.c_proj", "in"),
    Point("mlp_out", "mlp"),
)
_GPT2_ONCE = (Point("embed", "wte"), Point("resid_final", "ln_f", "in"), Point("final_ln", "ln_f"))


class Oracle:
    """A transformers model with eager attention that computes every hook for a token sequence."""

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation="eager", local_files_only=True
        ).eval()
        self.config = self.model.config
        base = self.model.base_model
        self._gpt2 = self.config.model_type == "gpt2"
        self._base = base
        self._layers = base.h if self._gpt2 else base.layers

    @torch.no_grad()
    def run(self, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Every hook of one forward over `token_ids` (the prompt, then the generated tokens).

        Layer hooks are float32 [layers, tokens, width], those of ONCE [1, tokens, width], `logits` float32 [tokens,
        vocab] (row i predicts token i + 1), `token_ids` and `positions` int32 [tokens]. Models with experts add
        router_logits and topk_weights (float32) and topk_ids (int32), by descending weight, equal weights by id. The
        layer axis of a hook holds only layers that have it.
        """
        with _Recorder(len(token_ids)) as recorder:
            for point in _GPT2_ONCE if self._gpt2 else _DECODER_ONCE:
                recorder.watch(self._base.get_submodule(point.module), point)
            for layer in self._layers:
                self._watch_layer(recorder, layer)
            ids = torch.tensor([list(token_ids)], dtype=torch.long)
            logits = self.model(ids, use_cache=False).logits
        values = {name: torch.stack(parts).float() for name, parts in recorder.rows.items()}
        if "router_logits" in values:
            values["topk_ids"], values["topk_weights"] = self._route(values["router_logits"])
        values["logits"] = logits[0].float()
        values["token_ids"] = ids[0].int()
        values["positions"] = torch.arange(len(token_ids), dtype=torch.int32)
        return {name: value.numpy() for name, value in values.items()}

    @torch.no_grad()
    def greedy(self, token_ids: Sequence[int], n: int) -> list[int]:
        """The `n` tokens that greedy decoding appends to `token_ids`. It does not stop at an end token."""
        ids = list(token_ids)
        for _ in range(n):
            logits = self.model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits
            ids.append(int(logits[0, -1].argmax()))
        return ids[len(token_ids) :]

    def _watch_layer(self, recorder: _Recorder, layer: Any) -> None:
        if self._gpt2:
            points: tuple[Point, ...] = _GPT2
        else:
            points = _DECODER + (_DECODER_QK_NORM if hasattr(layer.self_attn, "q_norm") else _DECODER_QK)
            recorder.watch_rotary(layer.self_attn)
        present = dict(layer.named_modules())
        for point in points:
            if point.module in present:
                recorder.watch(present[point.module], point)

    def _route(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids int32 and weights float32 [layers, tokens, k] of logits [layers, tokens, experts]."""
        probs, order = router_logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        weights = probs[..., : self.config.num_experts_per_tok]
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return order[..., : self.config.num_experts_per_tok].int(), weights.contiguous()


class _Recorder(ExitStack):
    """Collects rows [tokens, width] in layer order with forward hooks, which its `with` block removes."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.rows: dict[str, list[torch.Tensor]] = defaultdict(list)

    def watch(self, module: torch.nn.Module, point: Point) -> None:
        def hook(_module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            value = args[0] if point.side == "in" else output
            value = value[0] if isinstance(value, tuple) else value
            part = value.reshape(self.tokens, -1).chunk(point.parts, dim=-1)[point.index]
            self.rows[point.name].append(part.clone())

        self.callback(module.register_forward_hook(hook).remove)

    def watch_rotary(self, attn: torch.nn.Module) -> None:
        """Rotate q and k again with the model's own function, whose result is no input or output of a module.

        Only the attention module gets the cosines and sines. Its hook runs after those of q and k.
        """
        apply_rotary = sys.modules[type(attn).__module__].apply_rotary_pos_emb

        def hook(_module: torch.nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any], _out: Any) -> None:
            heads = [self.rows[name][-1].unflatten(-1, (-1, attn.head_dim)).transpose(0, 1)[None] for name in "qk"]
            for name, value in zip(
                ("q_rot", "k_rot"), apply_rotary(*heads, *kwargs["position_embeddings"]), strict=True
            ):
                self.rows[name].append(value[0].transpose(0, 1).flatten(1))

        self.callback(attn.register_forward_hook(hook, with_kwargs=True).remove)


def compare(capture: Capture, oracle: Oracle) -> dict[str, float]:
    """The largest absolute difference of each hook of `capture` from `oracle`, over all layers and tokens.

    Raises ValueError if the capture does not begin at position 0 (its earlier tokens are then unknown), or if its
    layers or shapes are not those of the oracle's model.
    """
    if capture.attrs["start"] != 0:
        raise ValueError(f"{capture.path} begins at position {capture.attrs['start']}: its earlier tokens are unknown")
    expected = oracle.run(capture.token_ids.tolist())
    errors = {}
    for hook, entry in capture.attrs["hooks"].items():
        want = expected[hook]
        if entry["layers"] and len(want) == capture.attrs["num_layers"]:
            want = want[entry["layers"]]
        if hook == "logits":
            want = want[capture.logits_positions]
        have = np.asarray(capture.array(hook)[...], dtype=np.float32)
        if have.shape != want.shape:
            raise ValueError(f"{capture.path}: {hook} has shape {have.shape}, the oracle's model gives {want.shape}")
        errors[hook] = float(np.abs(have - want).max(initial=0.0))
    return errors
