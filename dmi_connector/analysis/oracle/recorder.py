# SPDX-License-Identifier: Apache-2.0
"""Records values of a transformers model during a forward."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Recorder(ExitStack):
    """Collects rows [tokens, width] of hooks in layer order. The end of its `with` block removes its forward hooks."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.rows: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.layers: dict[str, list[int]] = defaultdict(list)

    def watch(
        self,
        module: torch.nn.Module,
        name: str,
        side: str,
        pick: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Record the first input or the first output of a module as hook `name`. pick: takes a part of the rows."""

        def hook(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            value = (args[0] if args else next(iter(kwargs.values()))) if side == "in" else output
            value = value[0] if isinstance(value, tuple) else value
            rows = value.reshape(self.tokens, -1)
            self.rows[name].append((pick(rows) if pick else rows).clone())

        self.callback(module.register_forward_hook(hook, with_kwargs=True).remove)

    def watch_end(self, layer: torch.nn.Module, index: int) -> None:
        """Assign the rows that are recorded during the forward of `layer` to layer number `index`.

        Call it after the other forward hooks of the layer were registered.
        """

        def hook(*_args: object) -> None:
            for name, parts in self.rows.items():
                self.layers[name] += [index] * (len(parts) - len(self.layers[name]))

        self.callback(layer.register_forward_hook(hook).remove)

    def watch_several(self, modules: Sequence[torch.nn.Module], name: str, add: bool) -> None:
        """Record the concatenated outputs of modules, or their sum. The modules run in this order."""
        parts: list[torch.Tensor] = []

        def hook(module: torch.nn.Module, _args: tuple[Any, ...], output: torch.Tensor) -> None:
            parts.append(output.reshape(self.tokens, -1))
            if module is modules[-1]:
                self.rows[name].append(sum(parts[1:], parts[0]) if add else torch.cat(parts, -1))
                parts.clear()

        for module in modules:
            self.callback(module.register_forward_hook(hook).remove)

    def watch_method(self, module: torch.nn.Module, name: str) -> None:
        """Record the rotated queries and keys that method `name` of an attention module gets."""
        method = getattr(module, name)

        def noted(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            _note_rotated(self.rows, query, key)
            return method(query, key, *args, **kwargs)

        setattr(module, name, noted)  # on the instance, where it shadows the method of the class
        self.callback(delattr, module, name)

    def watch_router(self, module: torch.nn.Module, top_k: int, scored: bool = True) -> None:
        """Record scores, weights and experts from the output of a router.

        The output is (scores, weights, experts) or (experts, weights, scores), or in Llama 4 (weights of all experts,
        scores). top_k: experts per token, for Llama 4. scored: whether to record the scores.
        """

        def hook(_module: torch.nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            if len(output) == 3:
                scores, weights, ids = output if output[0].is_floating_point() else reversed(output)
            else:
                every, scores = output
                ids = scores.topk(top_k, -1).indices
                weights = every.gather(-1, ids)
            ids, order = ids.sort(dim=-1)
            weights, heaviest = weights.gather(-1, order).sort(dim=-1, descending=True, stable=True)
            if scored:
                self.rows["router_logits"].append(scores.reshape(self.tokens, -1))
            self.rows["topk_ids"].append(ids.gather(-1, heaviest).reshape(self.tokens, -1))
            self.rows["topk_weights"].append(weights.reshape(self.tokens, -1))

        self.callback(module.register_forward_hook(hook).remove)


def _note_rotated(rows: dict[str, list[torch.Tensor]], query: torch.Tensor, key: torch.Tensor) -> None:
    """Record queries and keys [1, heads, tokens, head_dim] as rows [tokens, width]."""
    for name, value in (("q_rot", query), ("k_rot", key)):
        rows[name].append(value[0].transpose(0, 1).flatten(1).clone())


@contextmanager
def seen_attention(rows: dict[str, list[torch.Tensor]], layers: Container[int]) -> Iterator[None]:
    """Record the rotated queries and keys of attention in `layers`. They are not the input or output of a module."""

    def attention(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if module.layer_idx in layers:
            _note_rotated(rows, query, key)
        return sys.modules[type(module).__module__].eager_attention_forward(module, query, key, *args, **kwargs)

    # Every model looks up its attention function by the name "eager", for which the table has no entry.
    ALL_ATTENTION_FUNCTIONS["eager"] = attention
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["eager"]
