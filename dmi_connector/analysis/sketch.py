# SPDX-License-Identifier: Apache-2.0
"""Sketches of captured rows by Frequent Directions, for `dmi sketch`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dmi_connector.analysis.frequent_directions import FrequentDirections
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.followed import FollowedCapture
from dmi_connector.captures.one_model import OneModel
from dmi_connector.dtypes import FLOATS, ITEMSIZE
from dmi_connector.hooks import HOOKS, SAMPLED, parse_layers, selection_items
from dmi_connector.option_values import whole_number
from dmi_connector.reduce import Keeps
from dmi_connector.store.format.remote_path import Place, local_path, place_of
from dmi_connector.store.read.arrays.stored_reduction import StoredReduction
from dmi_connector.store.read.hook_names import HookTable

logger = logging.getLogger(__name__)

_METADATA = "dmi_sketch"
_COUNTS = ("error", "squared", "count", "not_finite")
"""Attributes of `FrequentDirections` that a sketch file holds for each layer, besides the rows of the sketch."""


@dataclass(eq=False)
class Sketch:
    """Sketches of hooks and layers of one capture, or of several that were merged.

    k: maximum number of rows of a sketch. hooks: {hook: {layer: its `FrequentDirections`}}; a hook that exists once has
    layer 0. row_bytes: {hook: bytes of a stored row before compression}. stores: names of the stores. model: their
    model; None if they do not name it. tokens: number of rows per hook and layer that were read. missing: number of
    rows that the stores lack. projections: {hook: settings of its reduction}, for hooks whose reduction does not keep
    their values.
    """

    k: int
    hooks: dict[str, dict[int, FrequentDirections]]
    row_bytes: dict[str, int]
    stores: list[str]
    model: str | None
    tokens: int
    missing: int
    projections: dict[str, Any] = field(default_factory=dict)

    def rows(self, hook: str) -> np.ndarray:
        """The sketches of a hook, float32 [layers, k, width]. A sketch with fewer than k rows is followed by zeros."""
        layers = self.hooks[hook].values()
        found = np.zeros((len(layers), self.k, next(iter(layers)).width), np.float32)
        for out, one in zip(found, layers, strict=True):
            rows = one.rows
            out[: len(rows)] = rows
        return found

    def error(self, hook: str) -> np.ndarray:
        """The error bound of each layer's sketch, float64 [layers]: `FrequentDirections.error`."""
        return np.array([one.error for one in self.hooks[hook].values()])

    def relative_error(self, hook: str) -> np.ndarray:
        """The error bound divided by the squared Frobenius norm of the rows that were read, float64 [layers]."""
        squared = np.array([one.squared for one in self.hooks[hook].values()])
        return self.error(hook) / np.where(squared > 0, squared, 1)

    def merge(self, other: Sketch) -> None:
        """Add a sketch of other captures.

        Raises ValueError if k, model, hooks, layers, widths or projections differ.
        """
        first, second = (which._forms() for which in (self, other))
        if (self.k, first) != (other.k, second):
            odd = sorted(dict(first.items() ^ second.items()))
            raise ValueError(
                f"sketches of {self.stores[0]} and {other.stores[0]} cannot be merged: k {self.k} and {other.k}, hooks"
                f" that differ: {', '.join(odd) or 'none'}; sketch both with the same k, hooks and reductions"
            )
        one = OneModel()
        for sketched in (self, other):
            one.check(place_of(sketched.stores[0]), sketched.model)
        for hook, layers in self.hooks.items():
            for layer, own in layers.items():
                own.merge(other.hooks[hook][layer])
        self.stores, self.model = [*self.stores, *other.stores], self.model or other.model
        self.tokens, self.missing = self.tokens + other.tokens, self.missing + other.missing

    def _forms(self) -> dict[str, tuple[int, str]]:
        """{HOOK@LAYER: (width, settings of the projection as text)}."""
        told = {hook: json.dumps(self.projections.get(hook), sort_keys=True) for hook in self.hooks}
        return {f"{hook}@{n}": (one.width, told[hook]) for hook, own in self.hooks.items() for n, one in own.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: a tensor [layers, k, width] for each hook. Raises OSError."""
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        about: dict[str, Any] = {"k": self.k, "stores": self.stores, "model": self.model}
        about |= {"tokens": self.tokens, "missing": self.missing, "hooks": {}}
        for hook, layers in self.hooks.items():
            counts = {name: [getattr(one, name) for one in layers.values()] for name in _COUNTS}
            about["hooks"][hook] = {"layers": [*layers], "row_bytes": self.row_bytes[hook], **counts}
            if hook in self.projections:
                about["hooks"][hook]["projection"] = self.projections[hook]
        tensors = {hook: self.rows(hook) for hook in self.hooks}
        try:
            save_file(tensors, local_path(path), metadata={_METADATA: json.dumps(about)})
        except SafetensorError as error:  # such as a full disk
            raise OSError(f"sketch: {path} cannot be written ({error}); give another path") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Sketch:
        """Read a file of `save`. Raises FileNotFoundError, and ValueError for another file."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(local_path(path), "numpy") as file:
                about = json.loads((file.metadata() or {})[_METADATA])
                hooks = {hook: _loaded(file.get_tensor(hook), own) for hook, own in about["hooks"].items()}
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no sketch ({error!r}); give a file that dmi sketch made") from error
        sizes = {hook: own["row_bytes"] for hook, own in about["hooks"].items()}
        counts = about["tokens"], about["missing"]
        projections = {hook: own["projection"] for hook, own in about["hooks"].items() if "projection" in own}
        return cls(about["k"], hooks, sizes, about["stores"], about["model"], *counts, projections)


def _loaded(rows: np.ndarray, own: Mapping[str, Any]) -> dict[int, FrequentDirections]:
    """The sketches of a hook. rows: [layers, k, width]. own: its entry in the metadata."""
    counts = zip(*(own[name] for name in _COUNTS), strict=True)
    return {
        layer: FrequentDirections.of(rows.shape[1], one[one.any(1)], *count)
        for layer, one, count in zip(own["layers"], rows, counts, strict=True)
    }


def sketch(capture: Capture | FollowedCapture[Capture], hooks: str, k: int = 64) -> Sketch:
    """Sketch the rows of hooks of one capture, each layer on its own. Missing rows are left out.

    The capture is read once, `chunk_tokens` rows at a time. A followed capture is read while it is written, and the
    function returns when the capture has ended. Each hook and layer needs 16 * k * width bytes of memory.

    hooks: a selection as in the server's option `hooks`, such as "resid_post@10-20,mlp_out". Reduced hooks are decoded.
    k: maximum number of rows of a sketch. Rows with a NaN or an infinity are left out, and a warning is logged with
    their number.

    Raises ValueError for a selection that cannot be parsed (SelectionError) or selects nothing, for a k below 1, and
    for hooks of integers, of sampled tokens only, or with a reduction that keeps no directions. Raises KeyError for a
    hook that was not captured, and the errors of `FollowedCapture.follow`.
    """
    if (whole_number(k) or 0) < 1:
        raise ValueError(f"k {k!r} is not valid; keep 1 row or more")
    names = _chosen(capture.attrs, hooks, capture.path)
    found: dict[str, FrequentDirections] = {}
    for name, rows in _blocks(capture, [*names]):
        if name not in found:
            found[name] = FrequentDirections(k, rows.shape[1])
        found[name].update(rows)
    end = capture.finished if isinstance(capture, FollowedCapture) else capture
    assert end is not None, "a followed capture has ended when its rows have"
    layers: dict[str, dict[int, FrequentDirections]] = {}
    for name, (hook, layer) in names.items():
        one = found.get(name) or FrequentDirections(k, end.shape(hook)[-1])
        if one.not_finite:
            logger.warning(
                "sketch: %d of %d rows of %s hold a value that is not finite; they are left out",
                one.not_finite,
                one.not_finite + one.count,
                name,
            )
        layers.setdefault(hook, {})[layer] = one
    stored = {hook: end.attrs["hooks"][HookTable.of(end.attrs).sources(hook)[0].array] for hook in layers}
    sizes = {hook: int(own["width"]) * ITEMSIZE[own["dtype"]] for hook, own in stored.items()}
    missing = sum(stop - start for start, stop in end.missing)
    tokens = end.attrs["num_tokens"] - missing
    projections = {hook: own["reduce"] for hook, own in stored.items() if _is_projection(own, end.path)}
    return Sketch(k, layers, sizes, [end.path.name], end.attrs.get("model"), tokens, missing, projections)


def is_sketch_of(found: Sketch, capture: Capture, hooks: str, k: int) -> bool:
    """Whether `found` is of a store of this name, with these numbers of rows, hooks, layers and k.

    hooks, k: as in `sketch`.
    """
    chosen: dict[str, set[int]] = {}
    for hook, layer in _chosen(capture.attrs, hooks, capture.path).values():
        chosen.setdefault(hook, set()).add(layer)
    missing = sum(stop - start for start, stop in capture.missing)
    rows = [capture.path.name], capture.attrs["num_tokens"] - missing, missing, k
    own = {hook: {*layers} for hook, layers in found.hooks.items()}
    return rows == (found.stores, found.tokens, found.missing, found.k) and own == chosen


def _is_projection(facts: Mapping[str, Any], path: Place) -> bool:
    reduced = StoredReduction.of(facts, path)
    return reduced is not None and Keeps.VALUES not in reduced.reduction.keeps


def _blocks(capture: Capture | FollowedCapture[Capture], names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, rows [n, width]) in blocks. The blocks are the same whether the capture is followed or not."""
    if isinstance(capture, FollowedCapture):
        for _, rows in capture.follow(names):
            yield from rows.items()
        return
    for run in capture.runs(int(capture.attrs["chunk_tokens"])):
        for name in names:
            yield name, capture.numpy(name, tokens=run)


def _chosen(attrs: Mapping[str, Any], spec: str, path: Place) -> dict[str, tuple[str, int]]:
    """{name: (hook, layer)} of the hooks and layers that a selection names. attrs: the root attribute of the store."""
    table, chosen = HookTable.of(attrs), dict[str, tuple[str, int]]()
    for item, match, hooks, lenient in selection_items(spec, dict.fromkeys((*HOOKS, *attrs["hooks"]))):
        for hook in hooks:
            if lenient and not table.holds(hook):
                continue
            try:
                kept = table.sources(hook)
            except KeyError as error:
                raise KeyError(f"{path}: {error.args[0]}") from error
            if match["layers"]:
                wanted = parse_layers(match["layers"], table.num_layers, str(path), item)
                kept = [source for source in kept if source.layer in wanted]
            whys = [_why_not(source.array, attrs, path) for source in kept]
            whys = whys or [f"captured layers are {table.layers(hook)}" if table.layers(hook) else "it has no layers"]
            named = {hook if s.layer is None else f"{hook}@{s.layer}": (hook, s.layer or 0) for s in kept}
            if match["drop"]:
                chosen = {name: place for name, place in chosen.items() if name not in named}
            elif not any(whys):
                chosen |= named
            elif not lenient:
                raise ValueError(f"hooks: {item!r} of {path} cannot be sketched: {max(whys)}; leave it out")
    if not chosen:
        raise ValueError(f"hooks: {spec!r} selects nothing of {path} that can be sketched; it holds {table.names}")
    return chosen


def _why_not(array: str, attrs: Mapping[str, Any], path: Place) -> str:
    """Why rows of an array cannot be sketched; "" if they can."""
    if array in SAMPLED:
        return "it has rows for sampled tokens only"
    reduced = StoredReduction.of(attrs["hooks"][array], path)
    if reduced is None:
        return "" if attrs["hooks"][array]["dtype"] in FLOATS else "it holds integers"
    kept = Keeps.DIRECTIONS in reduced.reduction.keeps
    return "" if kept else f"it was stored as {reduced.reduction.kind}, which keeps no directions"
