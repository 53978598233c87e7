# SPDX-License-Identifier: Apache-2.0
"""The hook vocabulary, its presets, and selections.

A *hook* names one tensor of the forward pass. A *selection* says which hooks of which layers a server captures.
Nothing here imports torch or vllm.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dmi_connector.hook_table import (
    ALIASES,
    ALWAYS,
    BLOCKS,
    FEATURES,
    HOOKS,
    INSTEAD,
    PRESETS,
    PROBE,
    USUAL,
    Hook,
)
from dmi_connector.wording import show, suggest

__all__ = [
    "ALIASES",
    "ALWAYS",
    "FEATURES",
    "HOOKS",
    "PRESETS",
    "PROBE",
    "SAMPLED",
    "USUAL",
    "Hook",
    "ModelDims",
    "Selection",
    "SelectionError",
    "check_names",
    "hook_dtype",
    "narrow",
    "parse_layers",
    "parse_selection",
    "selection_items",
]


@dataclass(frozen=True)
class ModelDims:
    """The sizes of a model, from which the widths and layers of its hooks follow. Sizes are before sharding.

    hidden: width of the residual stream. intermediate: width of an MLP. vocab: number of logits per token. experts,
    top_k: experts per layer, and experts chosen per token. moe_layers: layers with experts.

    head_dim: head size of queries and keys. v_head_dim: head size of values, 0 if it equals head_dim. kv_lora_rank,
    qk_rope_head_dim: in latent attention, sizes of the latent and of the rotary part of a head. features: names in
    FEATURES that the model has. index_topk, indexer_layers: number of tokens that an indexer chooses, and the layers
    with an indexer of their own. rope_axes: number of position axes of M-RoPE, 0 without M-RoPE. only: the hooks that
    can be captured; None: all.

    For hybrid models: attn_layers, mlp_layers: layers with attention, layers with an MLP; None: all. mixer_layers:
    layers with a mixer, such as Mamba or linear attention. mixer_proj: total width of the outputs of a mixer's input
    projections. mixer_inner: width of the output of its core.

    probes: the hooks of the engine's probes.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    top_k: int = 0
    moe_layers: tuple[int, ...] = ()
    features: frozenset[str] = USUAL
    v_head_dim: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    index_topk: int = 0
    indexer_layers: tuple[int, ...] = ()
    rope_axes: int = 0
    only: frozenset[str] | None = None
    attn_layers: tuple[int, ...] | None = None
    mlp_layers: tuple[int, ...] | None = None
    mixer_layers: tuple[int, ...] = ()
    mixer_proj: int = 0
    mixer_inner: int = 0
    probes: tuple[Hook, ...] = ()

    @cached_property
    def hooks(self) -> Mapping[str, Hook]:
        """HOOKS and the probes, by name."""
        return {**HOOKS, **{probe.name: probe for probe in self.probes}}

    def width(self, hook: Hook) -> int:
        """Elements of one row of `hook`, before sharding."""
        return {
            "H": self.hidden,
            "Q": self.heads * self.head_dim,
            "K": self.kv_heads * self.head_dim,
            "Z": self.heads * (self.v_head_dim or self.head_dim),
            "C": self.kv_lora_rank,
            "R": self.qk_rope_head_dim,
            "I": self.intermediate,
            "V": self.vocab,
            "E": self.experts,
            "T": self.top_k,
            "A": self.heads,
            "M": self.rope_axes,
            "X": self.index_topk,
            "P": self.mixer_proj,
            "N": self.mixer_inner,
        }[hook.width]

    def layers_of(self, hook: Hook) -> tuple[int, ...]:
        """Layers where `hook` exists: (0,) if it exists once or per sample, () if the model lacks it."""
        if hook.source:
            return hook.layers
        if (hook.only == "mrope" and not self.rope_axes) or (self.only is not None and hook.name not in self.only):
            return ()
        if hook.scope != "layer":
            return (0,)
        if (hook.only in FEATURES and hook.only not in self.features) or hook.unless in self.features:
            return ()
        if hook.only == "moe":
            return self.moe_layers
        if hook.only == "indexer":
            return self.indexer_layers
        if hook.only == "dense":
            return tuple(i for i in self._with("mlp") if i not in set(self.moe_layers))
        return self.mixer_layers if hook.only in ("mixer", "gated_mixer") else self._with(hook.block)

    def _with(self, block: str) -> tuple[int, ...]:
        """Layers that have `block`, a name in BLOCKS. "": all layers."""
        every = tuple(range(self.layers))
        if block == "mlp":
            return every if self.mlp_layers is None else self.mlp_layers
        if block == "" or self.attn_layers is None:
            return every
        found = {*self.attn_layers, *(self.mixer_layers if block == "tokens" else ())}
        return tuple(sorted(found))


class SelectionError(ValueError):
    """A hook selection is malformed, empty, or names something that does not exist. The message says how to fix it."""


def _at(name: str, layers: Iterable[int]) -> str:
    """A hook and its layers as an item of a selection, such as "q@0+2"."""
    return f"{name}@{'+'.join(map(str, sorted(layers)))}"


@dataclass(frozen=True)
class Selection:
    """The hooks and layers to capture.

    hooks: hook name -> layers, in the order of `HOOKS`, then the probes. The layers of a hook that exists once or per
    sample are (0,).
    """

    hooks: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        return ",".join(_at(name, layers) for name, layers in self.hooks.items())

    @property
    def row_hooks(self) -> dict[str, tuple[int, ...]]:
        """The hooks that rows hold: all except those in SAMPLED."""
        return {n: ls for n, ls in self.hooks.items() if n not in SAMPLED}


SAMPLED = frozenset(name for name, hook in HOOKS.items() if hook.scope == "sampled")
"""Hooks with one row for each sampled position."""
_ITEM = re.compile(r"^(?P<drop>-?)(?P<name>[A-Za-z_*?][\w.*?-]*)(?:@(?P<layers>.+))?$")
_RANGE = re.compile(r"^(-?\d{1,9})(?:-(-?\d{1,9}))?(?::([1-9]\d{0,8}))?$", re.ASCII)


def parse_layers(text: str, count: int, model: str, item: str) -> set[int]:
    """The layers of a selection such as "0-35:4+-1". count: layers of the model. model, item: named in errors.

    Raises SelectionError.
    """
    layers: set[int] = set()
    for part in text.split("+"):
        match = _RANGE.match(part)
        if match is None:
            raise SelectionError(
                f"hooks: {item!r} has the layer range {part!r}, which is not valid; write a layer (3), a range "
                "(10-20), a stride (0-35:4), negative layers from the end (-1), or several joined by + (0+5+10-20)"
            )
        start, stop = int(match[1]), int(match[2] if match[2] is not None else match[1])
        ends = [x + count if x < 0 else x for x in (start, stop)]
        for given, layer in zip((start, stop), ends, strict=True):
            if not 0 <= layer < count:
                raise SelectionError(f"hooks: {item!r} names layer {given}, but {model} has layers 0 to {count - 1}")
        if ends[0] > ends[1]:
            raise SelectionError(f"hooks: {item!r} has the empty range {part!r}; write the smaller layer first")
        layers.update(range(ends[0], ends[1] + 1, int(match[3] or 1)))
    return layers


def _names(name: str, item: str, hooks: Iterable[str]) -> tuple[tuple[str, ...], bool]:
    """The hooks that a name stands for. Returns (hook names, lenient).

    lenient: True for presets and wildcards, which skip hooks that the model lacks. item: the item with the name, for
    messages. hooks: the names of all hooks. Raises SelectionError for an unknown name.
    """
    if name in hooks or name in ALWAYS or name == "resid_post":
        return (name,), False
    if name in ALIASES:
        return (ALIASES[name],), False
    if name in PRESETS:
        return PRESETS[name], True
    # pattern is expensive, so only its full name selects it
    wanted = tuple(n for n in fnmatch.filter(hooks, name) if n != "pattern") if any(c in name for c in "*?") else ()
    if wanted:
        return wanted, True
    if name.startswith(PROBE):
        own = [hook for hook in hooks if hook.startswith(PROBE)]
        raise SelectionError(
            f"hooks: {item!r} is not a known probe{suggest(name, own) or ';'} known probes: {', '.join(own) or 'none'};"
            f' the option probes of a server adds others, as in {{"{name.removeprefix(PROBE)}": "FILE.safetensors"}}'
        )
    known = list(dict.fromkeys((*hooks, *ALIASES, "resid_post", *PRESETS, *ALWAYS)))
    raise SelectionError(f"hooks: {item!r} is unknown{suggest(name, known) or ';'} known names: {', '.join(known)}")


def selection_items(
    spec: str | Iterable[str], hooks: Iterable[str]
) -> Iterator[tuple[str, re.Match[str], tuple[str, ...], bool]]:
    """Yield the items of a selection as (text, match of _ITEM, hook names, lenient). hooks, lenient: as in `_names`.

    Raises SelectionError.
    """
    for raw in spec.split(",") if isinstance(spec, str) else spec:
        if not isinstance(raw, str):
            raise SelectionError(f"hooks: {raw!r} is a {type(raw).__name__}; write hook names as strings")
        item = raw.strip()
        match = _ITEM.match(item)
        if match is None:
            raise SelectionError(f"hooks: cannot read {item!r}; write a hook or preset name, as in 'mlp_post@10-20'")
        yield item, match, *_names(match["name"], item, hooks)


def check_names(spec: str | Iterable[str], probes: Iterable[str] = ()) -> None:
    """Raise SelectionError if a selection is malformed, names an unknown hook, or does not select each of `probes`.

    probes: names without the prefix PROBE. Layers are not checked.
    """
    own = [PROBE + name for name in probes]
    named = {
        name for _, match, names, _ in selection_items(spec, (*HOOKS, *own)) if not match["drop"] for name in names
    }
    if unused := [name for name in own if name not in named]:
        raise SelectionError(
            f"probes: {unused[0].removeprefix(PROBE)!r} is not captured; add {unused[0]} to hooks, or remove the probe"
        )


def parse_selection(spec: str | Iterable[str], dims: ModelDims, only: Selection | None = None) -> Selection:
    """Parse a selection such as ``"hidden-states,mlp_post@10-20,-logits"``, or a list of such items, for a model.

    Items add hooks from left to right. An item that starts with ``-`` removes hooks, or some of their layers.

    only: a selection that limits the result. With `only`, a hook without ``@`` means its layers in `only`. A named hook
    or layer outside `only` is an error; presets and wildcards skip it.

    Raises:
        SelectionError: an unknown name, a layer that the model lacks, a hook that is in none of the named layers, a
            hook or layer that `only` excludes, or an empty result. Named layers without the hook are skipped otherwise.
    """
    chosen: dict[str, set[int]] = {}
    absent: list[tuple[str, str]] = []  # (item, name in ALWAYS that the model lacks)
    for item, match, names, lenient in selection_items(spec, dims.hooks):
        for name in names:
            if name in ALWAYS:
                absent += [] if _has(name, dims) or lenient or match["drop"] else [(item, name)]
                continue
            pairs = _layers_for(name, match["layers"], dims, item)
            if only is not None and not match["layers"]:  # resid_post: a server may capture only one of its two hooks
                pairs = [pair for pair in pairs if pair[0] in only.hooks] or pairs
            for target, layers in pairs:
                available = set(dims.layers_of(dims.hooks[target]))
                if not available & layers and not lenient:
                    raise _does_not_exist(item, target, dims)
                layers = layers & available
                if only is not None and not match["drop"]:
                    served = set(only.hooks.get(target, ()))
                    if not served and not lenient:
                        raise SelectionError(
                            f"hooks: {item!r} is not captured by this server; it captures {', '.join(only.hooks)}"
                        )
                    lacking = layers - served if match["layers"] or not layers & served else set()
                    if lacking and not lenient:
                        raise SelectionError(
                            f"hooks: {item!r} needs {_at(target, lacking)}, which this server does not capture; it "
                            f"captures {_at(target, served)}"
                        )
                    layers = layers & served
                if match["drop"]:
                    chosen[target] = chosen.get(target, set()) - layers
                else:
                    chosen[target] = chosen.get(target, set()) | layers
    hooks = {name: tuple(sorted(chosen[name])) for name in dims.hooks if chosen.get(name)}
    if not hooks and absent:
        raise _does_not_exist(*absent[0], dims)
    if not hooks:
        shown = spec if isinstance(spec, str) else ",".join(spec)
        raise SelectionError(
            f"hooks: {shown!r} selects nothing; name at least one hook or preset ({', '.join(PRESETS)}), before items "
            "that start with -, as in 'vllm-full,-logits'"
        )
    always = {name: (0,) for name in ALWAYS if name in HOOKS and _has(name, dims)}
    return Selection({name: (hooks | always)[name] for name in dims.hooks if name in hooks or name in always})


def narrow(served: Selection, hooks: Iterable[str] | None, layers: Sequence[int] | None, dims: ModelDims) -> Selection:
    """The part of the server's selection `served` that a request captures.

    hooks: items as in `parse_selection`, None for all. layers: layer numbers, negative from the end, None for all.
    `layers` does not affect hooks that exist once. Raises SelectionError as `parse_selection` does, and for a layer
    that none of the chosen hooks has.
    """
    try:
        chosen = served if hooks is None else parse_selection(hooks, dims, only=served)
    except SelectionError as error:  # it names the server's option "hooks"
        raise SelectionError(f"dmi.{error}") from None
    if layers is None:
        return chosen
    last = dims.layers - 1
    if outside := [layer for layer in layers if not -dims.layers <= layer <= last]:
        raise SelectionError(f"dmi.layers: {show(outside[0])} is outside this model; it has layers 0 to {last}")
    there = {layer for name, own in chosen.hooks.items() if dims.hooks[name].layered for layer in own}
    if lacking := [layer for layer in layers if layer % dims.layers not in there]:
        raise SelectionError(f"dmi.layers: {show(lacking)} is in none of the chosen hooks; captured: {chosen}")
    keep = {layer % dims.layers for layer in layers}
    kept = {
        name: own if not dims.hooks[name].layered else tuple(layer for layer in own if layer in keep)
        for name, own in chosen.hooks.items()
    }
    return Selection({name: own for name, own in kept.items() if own})


def _layers_for(name: str, text: str | None, dims: ModelDims, item: str) -> list[tuple[str, set[int]]]:
    """(stored hook, layers) pairs of a hook name. text: layers as in an item, None for all. Raises SelectionError."""
    layers = set(range(dims.layers)) if text is None else parse_layers(text, dims.layers, dims.architecture, item)
    if name == "resid_post":
        inner = {layer + 1 for layer in layers if layer + 1 < dims.layers}
        found = [("resid_pre", inner)] if inner else []
        return found + ([("resid_final", {0})] if dims.layers - 1 in layers else [])
    if dims.hooks[name].scope != "layer":
        if text is not None:
            raise SelectionError(f"hooks: {item!r} gives layers, but {name} exists once; write {name!r}")
        layers = {0}
    return [(name, layers)]


def _has(name: str, dims: ModelDims) -> bool:
    """Whether a model has `name`, one of ALWAYS."""
    return name not in HOOKS or bool(dims.layers_of(HOOKS[name]))


def _does_not_exist(item: str, name: str, dims: ModelDims) -> SelectionError:
    why = _why_absent(dims.hooks[name], dims)
    return SelectionError(f"hooks: {item!r} does not exist in {dims.architecture}{why}; remove it from the selection")


def _why_absent(hook: Hook, dims: ModelDims) -> str:
    if hook.source:
        return f" in those layers: it is computed from {_at(hook.source, hook.layers)}"
    if dims.only is not None and hook.name not in dims.only:
        return f", of which these hooks are known: {', '.join(name for name in HOOKS if name in dims.only)}"
    if hook.only == "mrope":
        return ", whose tokens have one position each (no M-RoPE)"
    if hook.only == "moe" and not dims.moe_layers:
        return ", which has no experts"
    if hook.only in ("mixer", "gated_mixer") and not dims.mixer_layers:
        return ", which has attention in every layer"
    if hook.only in FEATURES and hook.only not in dims.features:
        return f", {FEATURES[hook.only]}"
    if hook.unless in dims.features:
        return f", {INSTEAD[hook.unless]}"
    if hook.only == "dense" and dims.moe_layers:
        return " in those layers, which are mixtures of experts"
    if hook.only in ("mixer", "gated_mixer"):
        return " in those layers, which have no mixer"
    return f" in those layers, {BLOCKS[hook.block]}" if hook.block else " in those layers"


def hook_dtype(hook: Hook, model_dtype: str) -> str:
    """The name of the dtype of a hook's values. model_dtype: the dtype of the model."""
    return model_dtype if hook.dtype == "model" else hook.dtype
