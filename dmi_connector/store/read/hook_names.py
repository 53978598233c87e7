# SPDX-License-Identifier: Apache-2.0
"""Maps hook names and their aliases to the arrays of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmi_connector.hooks import ALIASES
from dmi_connector.option_values import whole_number
from dmi_connector.wording import suggest

RESID_POST = "resid_post"
Layers = int | Sequence[int] | None
"""One layer number, several, or None for all."""


@dataclass(frozen=True)
class Source:
    """The location of one layer of a hook: an array, and an index along its layer axis.

    layer: None for a hook that exists once.
    """

    layer: int | None
    array: str
    index: int


class HookTable:
    """All hook names that can be read from a store.

    hooks: the attribute `hooks`. num_layers: number of layers of the model, to resolve negative layer numbers.
    """

    def __init__(self, hooks: Mapping[str, Mapping[str, Any]], num_layers: int) -> None:
        self.num_layers = num_layers
        self._sources: dict[str, list[Source]] = {}
        for name, hook in hooks.items():
            layers = list(hook["layers"])
            found = [Source(layer, hook["array"], i) for i, layer in enumerate(layers)]
            self._sources[name] = found or [Source(None, hook["array"], 0)]
        for alias, name in ALIASES.items():
            if name in self._sources:
                self._sources.setdefault(alias, self._sources[name])
        post = self._resid_post()
        if post:
            self._sources.setdefault(RESID_POST, post)

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> HookTable:
        """The names of a store. attrs: its root attribute."""
        layers = [layer for hook in attrs["hooks"].values() for layer in hook["layers"]]
        return cls(attrs["hooks"], int(attrs.get("num_layers") or max(layers, default=0) + 1))

    def _resid_post(self) -> list[Source]:
        """resid_post of layer l is resid_pre of layer l + 1, or resid_final for the last layer."""
        pre = self._sources.get("resid_pre", [])
        post = [Source(s.layer - 1, s.array, s.index) for s in pre if s.layer]
        final = self._sources.get("resid_final", [])
        return post + [Source(self.num_layers - 1, s.array, s.index) for s in final]

    @property
    def names(self) -> list[str]:
        """Hook names and aliases, in the order of the store."""
        return list(self._sources)

    def layers(self, name: str) -> list[int]:
        """Layer numbers of a hook; [] for a hook that exists once."""
        return [s.layer for s in self.sources(name) if s.layer is not None]

    def sources(self, name: str) -> list[Source]:
        """All layers of a hook in ascending order. Raises KeyError, which names the most similar hook."""
        if name not in self._sources:
            raise KeyError(
                f"hook {name!r} is not in this store{suggest(name, self.names) or ';'} it holds: {self.names}"
            )
        return self._sources[name]

    def holds(self, name: str, layer: int | None = None) -> bool:
        """Whether a layer of a hook is in the store. layer: None for any layer."""
        sources = self._sources.get(name, [])
        return bool(sources) if layer is None else self._find(sources, layer) is not None

    def _find(self, sources: list[Source], layer: int) -> Source | None:
        number = layer + self.num_layers if layer < 0 else layer
        if sources and sources[0].layer is None and layer == 0:
            return sources[0]
        return next((source for source in sources if source.layer == number), None)

    def chosen(self, name: str, layer: Layers) -> list[Source]:
        """All layers of a hook, one layer, or a list of layers. Raises like `source`; ValueError for an empty list."""
        if layer is None:
            return self.sources(name)
        if np.ndim(layer) != 1:
            return [self.source(name, layer)]  # type: ignore[arg-type]
        if not len(layer):  # type: ignore[arg-type]
            raise ValueError("layer [] names no layer; give layer numbers, or None for all")
        return [self.source(name, one) for one in layer]  # type: ignore[union-attr]

    def source(self, name: str, layer: int) -> Source:
        """One layer of a hook. Negative layers count from the model's last. A hook that exists once has layer 0.

        Raises KeyError for a layer that was not captured, and ValueError for a layer that is not an integer.
        """
        number = whole_number(layer)
        if number is None:
            raise ValueError(f"layer {layer!r} is not valid; give layer numbers, or None for all")
        source = self._find(self.sources(name), number)
        if source is not None:
            return source
        captured = self.layers(name) or "no layer axis: leave layer out"
        raise KeyError(f"hook {name!r} has no layer {layer} in this store; it has {captured}")
