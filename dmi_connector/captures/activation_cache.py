# SPDX-License-Identifier: Apache-2.0
"""Opens a store as TransformerLens' ActivationCache, which reads each tensor on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np

try:
    from transformer_lens import ActivationCache
except ImportError as error:
    raise ImportError(
        "activation_cache: transformer_lens is not installed; install dmi_connector[transformer-lens]"
    ) from error

from dmi_connector.captures import lens_names as names
from dmi_connector.captures.attention import attention, seen_by_attention
from dmi_connector.dtypes import as_torch, numpy_dtype
from dmi_connector.reduce import Keeps
from dmi_connector.store.read.reader import StoreReader

if TYPE_CHECKING:
    import torch

Read = Callable[[], np.ndarray]
Key = tuple[str, int | None]
"""(name of a hook or of a computed tensor, layer)."""


class LazyTensors(MutableMapping[str, "torch.Tensor"]):
    """Tensors by name. Each is read on first use, and then kept. Several names can share one tensor."""

    def __init__(self) -> None:
        self._keys: dict[str, Key] = {}
        self._reads: dict[Key, Read] = {}
        self._kept: dict[Key, torch.Tensor] = {}
        self._set: dict[str, torch.Tensor] = {}

    def add(self, name: str, key: Key, read: Read) -> None:
        """Add a name of a tensor. key: identifies the tensor; all names of a tensor have the same key."""
        self._keys[name] = key
        self._reads.setdefault(key, read)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._set:
            return self._set[name]
        key = self._keys[name]
        if key not in self._kept:
            self._kept[key] = as_torch(self._reads[key]())
        return self._kept[key]

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        self._keys.setdefault(name, (name, None))
        self._set[name] = value

    def __delitem__(self, name: str) -> None:
        del self._keys[name]
        self._set.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: object) -> bool:
        return name in self._keys


class StoreActivations(ActivationCache):  # type: ignore[misc, unused-ignore]
    """TransformerLens' ActivationCache over a store. `why_absent` says why the cache lacks a tensor."""

    def __init__(self, capture: StoreReader, model: Any = None, batch_dim: bool = True) -> None:
        self._capture, self._batch = capture, batch_dim
        self._eps = None if model is None else float(model.cfg.eps)
        self._centred = model is not None and model.cfg.normalization_type in ("LN", "LNPre")
        found = LazyTensors()
        for name, hook in names.equal_hooks(capture.attrs):
            self._add_hook(found, name, hook)
        if any(name in capture for name in seen_by_attention(capture)):
            self._add_patterns(found)
        if model is not None:
            self._add_norms(found)
        super().__init__(found, model, has_batch_dim=batch_dim)

    def __getitem__(self, key: Any) -> torch.Tensor:
        try:
            return super().__getitem__(key)
        except KeyError as error:
            name = error.args[0]
            raise KeyError(f"{name!r} is not in the cache: {self.why_absent(name)}") from None

    def why_absent(self, name: str) -> str:
        """Why the cache lacks a TransformerLens tensor, such as "blocks.0.mlp.hook_pre", in one sentence.

        Raises KeyError for a name that is in the cache.
        """
        if name in self.cache_dict:
            raise KeyError(f"{name!r} is in the cache")
        short, layer = names.split_name(name)
        block = next((full for full in self.cache_dict if layer is None and names.split_name(full)[0] == name), None)
        if block is not None:
            return f"the name needs a block, as in {block}"
        known = names.why_not_equal(short, self._capture.attrs)
        if known is not None:
            return known
        hook = dict(names.equal_hooks(self._capture.attrs)).get(short)
        if hook is not None and hook in self._capture and self._is_other(hook, layer):
            return f"{hook} was stored as a projection or a summary, which does not keep its values"
        if hook is not None:
            return f"{hook} {'' if layer is None else f'of layer {layer} '}was not captured"
        if short == names.PATTERN:
            return self._why_no_pattern(layer)
        if short in names.OF_NORMS:
            return "it is computed from the norm's input and epsilon: capture the input, give TransformerLens' model"
        return names.unlisted(short)

    @property
    def absent(self) -> dict[str, str]:
        """Name without the block's prefix -> reason, for known TransformerLens names that the cache has in no layer."""
        known = {**names.TL_NAMES, **names.QK_NAMES[True], **names.QK_NAMES[False], **names.ABSENT}
        known |= dict(names.equal_hooks(self._capture.attrs))  # names of post-norms, if the store has them
        there = {names.split_name(name)[0] for name in self.cache_dict}
        return {name: self.why_absent(name) for name in (*known, names.PATTERN, *names.OF_NORMS) if name not in there}

    # ---- what is there ----------------------------------------------------------------------------------------------

    def _add_hook(self, found: LazyTensors, name: str, hook: str) -> None:
        if hook not in self._capture:
            return
        for layer in self._layers(hook):
            if self._is_other(hook, layer):
                continue
            found.add(names.full_name(name, layer), (self._kind(name, hook), layer), self._reader(name, hook, layer))

    def _layers(self, hook: str) -> list[int | None]:
        return [*self._capture.layers[hook]] or [None]

    def _kind(self, name: str, hook: str) -> str:
        return f"{hook} by head" if name in names.QK_NAMES[True] and not self._wide_norm else hook

    @property
    def _wide_norm(self) -> bool:
        return self._capture.attrs.get("architecture") == "OlmoeForCausalLM"  # has one norm over all heads

    def _reader(self, name: str, hook: str, layer: int | None) -> Read:
        def read() -> np.ndarray:
            rows = self._capture.numpy(hook, layer, convert=False)
            normed = name in names.QK_NAMES[True]
            if hook in names.HEADS and not (normed and self._wide_norm):
                rows = rows.reshape(len(rows), self._heads(hook), -1)
                rows = np.ascontiguousarray(rows.swapaxes(0, 1)) if normed else rows
            return rows[None] if self._batch else rows

        return read

    def _heads(self, hook: str) -> int:
        return int(self._capture.attrs["dims"][names.HEADS[hook]])

    def _is_other(self, hook: str, layer: int | None) -> bool:
        """Whether a reduction did not keep the values of a hook. layer: None for the first stored layer."""
        number = next(iter(self._capture.layers[hook]), None) if layer is None else layer
        there = layer is None or layer in self._capture.layers[hook]
        reduction = self._capture.reduction(hook, number) if there else None
        return reduction is not None and Keeps.VALUES not in reduction.keeps

    def _add_patterns(self, found: LazyTensors) -> None:
        for layer in range(int(self._capture.attrs["num_layers"])):
            if not self._why_no_pattern(layer):
                found.add(names.full_name(names.PATTERN, layer), (names.PATTERN, layer), self._pattern_reader(layer))

    def _pattern_reader(self, layer: int) -> Read:
        def read() -> np.ndarray:
            weights = attention(self._capture, layer).astype(numpy_dtype(self._capture.attrs.get("dtype", "float32")))
            return weights[None] if self._batch else weights

        return read

    def _why_no_pattern(self, layer: int | None = None) -> str:
        """Why the pattern of a layer cannot be computed; "" if it can. layer: None for any layer."""
        hooks = seen_by_attention(self._capture)
        queries, keys = (set(self._capture.layers.get(hook, ())) for hook in hooks)
        if not queries & keys if layer is None else layer not in queries & keys:
            where = "one layer" if layer is None else f"layer {layer}"
            return f"it is computed from {hooks[0]} and {hooks[1]} of {where}, which were not both captured"
        for hook in hooks:
            if self._is_other(hook, layer):
                return f"{hook} was stored as a projection or a summary, which does not keep its values"
        lacking = [r for r in self._capture.missing if r[0] < self._capture.attrs["num_tokens"]]
        if self._capture.attrs["start"] or lacking:
            return "attention needs all earlier rows as keys, and the store lacks some"
        facts = self._capture.attrs.get("attention", {})
        if facts.get("sinks"):
            return "the model has attention sinks, which are not stored"
        if facts.get("image_blocks") and (self._capture.media >= 0).any():
            return "in this model image tokens see later tokens of their image, which is not computed"
        return ""

    def _add_norms(self, found: LazyTensors) -> None:
        for norm, hook in names.NORMS.items():
            if hook not in self._capture:
                continue
            for layer in (each for each in self._layers(hook) if not self._is_other(hook, each)):
                for part, normalized in ((f"{norm}.hook_scale", False), (f"{norm}.hook_normalized", True)):
                    read = self._norm_reader(hook, layer, normalized)
                    found.add(names.full_name(part, layer), (part, layer), read)

    def _norm_reader(self, hook: str, layer: int | None, normalized: bool) -> Read:
        def read() -> np.ndarray:
            rows = self._capture.numpy(hook, layer)
            if self._centred:
                rows = rows - rows.mean(-1, keepdims=True)
            scale = np.sqrt((rows**2).mean(-1, keepdims=True) + np.float32(self._eps))
            values = rows / scale if normalized else scale
            return values[None] if self._batch else values

        return read
