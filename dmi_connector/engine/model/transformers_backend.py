# SPDX-License-Identifier: Apache-2.0
"""Finds the row of a model in the table of architectures, or derives a row from the structure of its layers.

Rows are derived for text models that vLLM serves through its Transformers backend. This backend builds a model of the
transformers library, and replaces some of its modules by vLLM's layers. The forward of a decoder layer is the code of
transformers.

So a layer is traced with torch.fx, without its weights. Each module that the layer calls is one node of the graph. The
layer must return the sum of three terms: its input, an output that depends on attention (`attn_out`), and an output
that does not (`mlp_out`). No hook is guessed from the name of a module.
"""

from __future__ import annotations

import copy
import inspect
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx, nn

from dmi_connector.engine.model.architectures import (
    ARCHITECTURES,
    FORWARD,
    TRANSFORMERS,
    TRANSFORMERS_CLASSES,
    Architecture,
)
from dmi_connector.hooks import ModelDims

if TYPE_CHECKING:
    from vllm.config import ModelConfig


@dataclass(frozen=True)
class Generic(Architecture):
    """A derived `Architecture`, for a model without a row in the table.

    attn_norm, mlp_norm: the modules whose outputs a layer adds to the residual stream. mlp: the module whose input is
    the stream between these two. why: the reason why `attn_out` and `mlp_out` are missing; "" if they are there.
    """

    why: str = ""

    def dims(self, config: Any) -> ModelDims:
        """The sizes in a Hugging Face text config that the hooks of `only` need. Experts are not detected."""
        heads = getattr(config, "num_attention_heads", None) or 1
        return ModelDims(
            architecture=self.name,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate=0,
            vocab=config.vocab_size,
            features=self.features,
            only=frozenset(self.only),
        )


def row_of(model: ModelConfig) -> Architecture:
    """The `Architecture` of a model. Raises ValueError if the table has no row for it and none can be derived."""
    if model.using_transformers_backend():
        name = model.architectures[0]
        if name in ARCHITECTURES and ARCHITECTURES[name].in_transformers:
            return ARCHITECTURES[name]
        if model._get_transformers_backend_cls() not in TRANSFORMERS_CLASSES:
            raise ValueError(
                f"model: architecture {name!r} has no row in the table of architectures, and a row can be "
                "derived for text models only; use another model, or add a row (docs/HOOKS.md)"
            )
        return generic(name, model.hf_text_config, model.trust_remote_code)
    if model.architecture in ARCHITECTURES:
        return ARCHITECTURES[model.architecture]
    raise ValueError(
        f"model: architecture {model.architecture!r} has no row in the table of architectures; set "
        "model_impl='transformers' and owner='target', with which a row is derived for most text models, or add a row "
        "(docs/HOOKS.md)"
    )


def generic(name: str, config: Any, trust_remote_code: bool = False) -> Generic:
    """Derive the `Architecture` of a text model of transformers from the structure of its layers.

    name: architecture in the config. config: Hugging Face text config. trust_remote_code: whether code of the model
    repository may run. Raises ValueError if the decoder layers or their attention are not found.
    """
    from transformers import AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code).eval()
    try:
        layers, attention = _layers(model, config.num_hidden_layers)
        embed = _path(model, model.get_input_embeddings())
        blocks, why = _blocks(model.get_submodule(layers), attention)
    except _NotFound as error:
        raise ValueError(
            f"model: architecture {name!r} has no row in the table of architectures, and none could be derived from "
            f"its structure: {error}; use another model, or add a row (docs/HOOKS.md)"
        ) from error
    hooks = [hook for hook in ("attn_out", "resid_mid", "mlp_out") if blocks and (hook != "resid_mid" or blocks.middle)]
    return Generic(
        name,
        f"{TRANSFORMERS}:TransformersForCausalLM",
        layers=f"model.{layers}",
        embed=f"model.{embed}",
        final_norm="",
        positions=FORWARD,
        ln1="",
        qkv="",
        attn=f"{attention}.attn",
        attn_norm=blocks.attention if blocks else "",
        o_proj="",
        ln2="",
        mlp=blocks.middle if blocks else "",
        up_proj="",
        down_proj="",
        mlp_norm=blocks.mlp if blocks else "",
        parallel=blocks is not None and blocks.parallel,
        only=("embed", "resid_pre", *hooks, "resid_final", "logits"),
        why=why,
    )


class _NotFound(Exception):
    """Hooks cannot be derived from the structure of a model. The message says why."""


# ---- the model ------------------------------------------------------------------------------------------------------


def _layers(model: nn.Module, count: int) -> tuple[str, str]:
    """(path of the list of `count` decoder layers, path of attention in a layer). Raises _NotFound.

    Attention is the module that calls the attention interface of transformers, as for vLLM's Transformers backend.
    """
    from vllm.model_executor.models.transformers.fusers.attention import interface_call

    found: dict[tuple[str, str], set[int]] = {}
    for path, module in model.named_modules():
        number = getattr(module, "layer_idx", None)
        parts = re.fullmatch(r"(.+?)\.(\d+)\.(.+)", path)
        if parts and parts[2] == str(number) and interface_call(type(module).forward) is not None:
            found.setdefault((parts[1], parts[3]), set()).add(int(parts[2]))
    if len(found) != 1:
        places = f"its attention is in {len(found)} places of a layer"
        raise _NotFound(places if found else "no module calls the attention interface of transformers")
    ((layers, attention), numbers) = next(iter(found.items()))
    every: Any = model.get_submodule(layers)
    if numbers != set(range(count)) or len(every) != count:
        raise _NotFound(f"{len(numbers)} of {count} layers have attention, as in hybrid models")
    for layer in every:
        _check_state(layer, attention)
    return layers, attention


def _check_state(layer: nn.Module, attention: str) -> None:
    """Raise _NotFound if a module other than attention keeps a recurrent state, as Mamba does.

    vLLM's Transformers backend has a cache for attention only.
    """
    for path, module in layer.named_modules():
        caches = [name for name in inspect.signature(module.forward).parameters if name.startswith(("cache_", "past_"))]
        if path and caches and not _overlap(path, attention):
            raise _NotFound(f"{path} in a layer keeps a recurrent state ({caches[0]}), as in hybrid models")


def _path(model: nn.Module, module: nn.Module) -> str:
    return next(path for path, one in model.named_modules() if one is module)


# ---- a layer --------------------------------------------------------------------------------------------------------


class Blocks(NamedTuple):
    """Paths of modules in a layer.

    attention, mlp: the modules whose outputs the layer adds to its input. middle: the module whose input is the stream
    between these two additions; "" if there is none. parallel: whether both blocks read the same stream.
    """

    attention: str
    mlp: str
    middle: str = ""
    parallel: bool = False


def _blocks(layers: Any, attention: str) -> tuple[Blocks | None, str]:
    """(the modules whose outputs every layer adds to its input, ""), or (None, the reason why they are not found)."""
    found = set()
    for number, layer in enumerate(layers):
        try:
            found.add(blocks_of(layer, attention))
        except _NotFound as error:
            return None, f"layer {number} {error}"
    return (found.pop(), "") if len(found) == 1 else (None, "layers add the outputs of different modules")


def blocks_of(layer: nn.Module, attention: str) -> Blocks:
    """The modules whose outputs a layer adds to its input. attention: path of its attention. Raises _NotFound."""
    graph = _trace(layer)
    (returned,) = (node.args[0] for node in graph.nodes if node.op == "output")
    first = returned[0] if isinstance(returned, tuple | list) and returned else returned
    streams: set[fx.Node] = set()
    terms = list(_terms(layer, first, streams)) if isinstance(first, fx.Node) else []
    added = [term for term in terms if term.op != "placeholder"]
    if len(terms) != 3 or len(added) != 2:
        raise _NotFound(f"does not return the sum of its input and two outputs, but of {len(terms)} values")
    names = []
    for term in added:
        if term.op != "call_module":
            raise _NotFound(f"changes an output before it adds it ({term.name})")
        if [node.target for node in graph.nodes if node.op == "call_module"].count(term.target) != 1:
            raise _NotFound(f"calls {term.target} more than once")
        names.append(str(term.target))
    attends = [any(_overlap(name, attention) for name in _sources(term, streams)) for term in added]
    if sorted(attends) != [False, True]:
        raise _NotFound("does not add one output that depends on attention and one that does not")
    without = added[attends.index(False)]
    blocks = Blocks(names[attends.index(True)], names[attends.index(False)])
    middle = [node for node in streams if node.op != "placeholder" and node is not _whole(layer, first)]
    if all(_whole(layer, user) in streams for node in middle for user in node.users):
        return blocks._replace(parallel=True)  # the stream between the two sums has no other use
    given = {str(node.target) for node in graph.nodes if node.op == "call_module" and _gets(layer, node, middle)}
    return blocks._replace(middle=given.pop()) if len(given) == 1 and given <= _sources(without, streams) else blocks


def _gets(layer: nn.Module, call: fx.Node, values: Sequence[fx.Node]) -> bool:
    """Whether the first argument of a call is one of these values."""
    value = call.args[0] if call.args else None
    return isinstance(value, fx.Node) and _whole(layer, value) in values


class _Layer(nn.Module):
    """The root of a trace. It calls a layer with hidden states, and with None for other required arguments."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        every = list(inspect.signature(layer.forward).parameters.values())[1:]
        plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.needs = [p.name for p in every if p.default is p.empty and p.kind in plain]

    def forward(self, hidden_states: torch.Tensor) -> Any:
        return self.layer.forward(hidden_states, **dict.fromkeys(self.needs))


class _Tracer(fx.Tracer):
    """Traces each called module as one node. Paths of modules are relative to the layer."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def path_of_module(self, mod: nn.Module) -> str:
        return super().path_of_module(mod).removeprefix("layer.")


def _trace(layer: nn.Module) -> fx.Graph:
    """Trace the forward of a layer. Raises _NotFound."""
    try:
        return _Tracer().trace(_Layer(layer))
    except Exception as error:  # the layer's code may fail in any way on a traced value
        raise _NotFound(f"cannot be traced ({type(error).__name__})") from error


_ADDS = (operator.add, operator.iadd, torch.add, "add", "add_")
_DROPS = (nn.functional.dropout, torch.dropout)


def _terms(layer: nn.Module, node: fx.Node, streams: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield the terms of the sum `node`. The layer's input, and sums that contain it, are added to `streams`."""
    node = _whole(layer, node)
    adds = node.op in ("call_function", "call_method") and node.target in _ADDS and not node.kwargs
    terms = [node]
    if adds and len(node.args) == 2 and all(isinstance(value, fx.Node) for value in node.args):
        terms = [term for value in node.args for term in _terms(layer, value, streams)]  # type: ignore[arg-type]
    if any(term.op == "placeholder" for term in terms):
        streams.add(node)
    yield from terms


def _whole(layer: nn.Module, node: fx.Node) -> fx.Node:
    """The node that computes the value of `node`: skips dropout, and the selection of a module's first output."""
    while True:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return node
        drops = node.op == "call_module" and isinstance(layer.get_submodule(str(node.target)), nn.Dropout | nn.Identity)
        first = node.target is operator.getitem and node.args[1] == 0 and source.op == "call_module"
        if not (drops or first or node.target in _DROPS):
            return node
        node = source


def _sources(node: fx.Node, streams: set[fx.Node]) -> set[str]:
    """The modules on which a value depends, except those on which it depends through `streams` only."""
    found, waiting = set(), [node]
    seen = set(streams)
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.op == "call_module":
            found.add(str(one.target))
        waiting += one.all_input_nodes
    return found


def _overlap(one: str, other: str) -> bool:
    """Whether one of two module paths contains the other, or both are equal."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
