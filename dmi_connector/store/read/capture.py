# SPDX-License-Identifier: Apache-2.0
"""`open_capture` opens a store, `Capture` gives its tensors."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dmi_connector.dtypes import as_torch
from dmi_connector.layout import TOKEN_ARRAYS
from dmi_connector.reduce import Reduction
from dmi_connector.reduce.attn import AttentionSummary
from dmi_connector.reduce.basis import BasisRef, LayerBasis
from dmi_connector.reduce.tally import Tally
from dmi_connector.store.format.locks import share
from dmi_connector.store.format.pca_files import find_basis
from dmi_connector.store.format.remote_path import Given, Place, place_of
from dmi_connector.store.read.arrays.hook_values import HookValues, Tokens
from dmi_connector.store.read.arrays.own_values import check_own_values
from dmi_connector.store.read.arrays.shard_reader import decode_plain
from dmi_connector.store.read.attention import attention, check_head
from dmi_connector.store.read.files.open_files import files_of, zarr_store_of
from dmi_connector.store.read.hook_names import HookTable, Source, parse_name
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.read.waiting import wait_for

if TYPE_CHECKING:
    import torch
    import xarray
    import zarr

    from dmi_connector.store.read.activation_cache import StoreActivations


class CaptureIncomplete(RuntimeError):
    """The store says that rows are missing. reason: why. missing: [start, stop) rows, as far as known."""

    def __init__(self, path: Given, reason: str | None, missing: list[list[int]]) -> None:
        super().__init__(
            f"capture {path} is incomplete: {reason or 'no reason given'};"
            f" missing rows: {missing or 'unknown'}."
            " Open it with allow_incomplete=True to read what is there (missing rows read as zeros)"
        )
        self.path, self.reason, self.missing = str(path), reason, missing


WAIT_S = 60.0
"""Seconds that `open_capture` waits for a store by default."""


def open_capture(path: Given, timeout: float | None = None, allow_incomplete: bool = False) -> Capture:
    """Open a store: a directory NAME.zarr, a zip file of one, or the URL of either, as in s3://bucket/NAME.zarr.

    Waits up to `timeout` seconds until it is there under its final name (None: 60, 0: no wait).

    allow_incomplete: open a store that lacks rows; these read as zeros, and `missing` lists them.

    Raises TimeoutError that says what was seen instead. Raises CaptureFailed (a FileNotFoundError) without more waiting
    where no store comes: the index of the directory says that the capture failed, was aborted or was removed, or no
    process writes it any more, and FileNotFoundError for a bucket or a directory that does not exist. Raises
    CaptureIncomplete for a store that lacks rows, ValueError for a directory that is no store of this format or has
    dtypes or codecs that it lacks, RemoteError (an OSError) where an object store refuses or does not answer,
    ImportError without obstore.
    """
    final = place_of(path)
    wait_for(final, WAIT_S if timeout is None else timeout)
    attrs = read_attrs(final)
    if not attrs["complete"] and not allow_incomplete:
        raise CaptureIncomplete(final, attrs["reason"], attrs["missing"])
    return Capture(final, attrs)


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


class Capture:
    """One finished capture, read-only. Made by `open_capture`.

    hooks: names that can be read, aliases included. layers: hook -> layer numbers ([] for a hook that exists once).
    complete, reason, missing: whether rows are missing, why, and which [start, stop) rows. prompt_len: tokens of the
    prompt. num_layers: of the model; negative layer numbers count from there. attrs: the root attribute
    (docs/FORMAT.md, section 5).

    `capture["q"]` and `capture["blocks.3.attn.hook_z"]` are short for `numpy`; `in` says whether these names are there,
    and a loop gives the names of `hooks`. A Capture keeps `dmi prune` and
    retention from removing its store, until `close` or the end of a `with` block.
    """

    def __init__(self, path: Place, attrs: dict[str, Any]) -> None:
        self.path, self.attrs = path, attrs
        # Nothing of ours removes stores of an object store, or zip files.
        held = share(path) if isinstance(path, Path) and not path.is_file() else None
        self._release = weakref.finalize(self, _close, held)
        self.files = files_of(path)
        self._values = HookValues(self.files, attrs)
        self._table = HookTable.of(attrs)
        self.num_layers = self._table.num_layers
        self.hooks: list[str] = self._table.names
        self.layers: dict[str, list[int]] = {name: self._table.layers(name) for name in self.hooks}
        self.complete: bool = attrs["complete"]
        self.reason: str | None = attrs["reason"]
        self.missing: list[list[int]] = attrs["missing"]
        self.prompt_len: int = attrs["prompt_len"]

    @cached_property
    def group(self) -> zarr.Group:
        """The Zarr group, by zarr-python."""
        import zarr  # slow to import, and to open a store with

        from dmi_connector.store.format import zarr_bfloat16  # noqa: F401 (importing it registers the dtype)

        return zarr.open_group(zarr_store_of(self.path), mode="r", zarr_format=3, use_consolidated=False)

    def close(self) -> None:
        """Let the store be removed."""
        self._release()

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Capture, (self.path, self.attrs)

    def __repr__(self) -> str:
        state = "" if self.complete else f", incomplete: {self.reason}"
        return f"Capture({str(self.path)!r}, {self.attrs['num_tokens']} tokens, {len(self.hooks)} hooks{state})"

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [tokens]."""
        return self._plain("token_ids")

    @property
    def positions(self) -> np.ndarray:
        """int32 [tokens]: position of each row in the request's tokens."""
        return self._plain("positions")

    @property
    def phase(self) -> np.ndarray:
        """uint8 [tokens]: 0 for prompt tokens, 1 for generated ones."""
        return self._plain("phase")

    @property
    def media(self) -> np.ndarray:
        """int32 [tokens]: number in `attrs["media"]` of the image (or the like) that a row's embedding comes from; -1
        for text.
        """
        positions, found = self.positions, np.full(int(self.attrs["num_tokens"]), -1, np.int32)
        for number, item in enumerate(self.attrs.get("media", ())):
            for start, stop in item["positions"]:
                found[(positions >= start) & (positions < stop)] = number
        return found

    @property
    def mrope_positions(self) -> np.ndarray:
        """int32 [tokens, axes]: position of each row on the axes of M-RoPE. Raises KeyError for models without it."""
        return self.numpy("mrope_positions")

    @property
    def logits_positions(self) -> np.ndarray:
        """int32 [samples]: position of the token whose logits each row of `logits` holds.

        Raises KeyError without logits.
        """
        self._table.sources("logits")
        return self._plain("logits_positions")

    def array(self, hook: str) -> zarr.Array:
        """The Zarr array that holds `hook`, [layers, tokens, width] (logits: [samples, vocab]).

        Raises KeyError for an unknown hook, ValueError for `resid_post` when it lies in two arrays.
        """
        names = {source.array for source in self._table.sources(hook)}
        if len(names) > 1:
            raise ValueError(f"hook {hook!r} lies in several arrays {sorted(names)}: use numpy() or torch()")
        import zarr

        array = self.group[names.pop()]
        assert isinstance(array, zarr.Array)
        return array

    def numpy(self, hook: str, layer: int | None = None, tokens: Tokens = None, convert: bool = True) -> np.ndarray:
        """Decoded values as float32; integer hooks keep their dtype.

        Shape: [tokens, width] for one layer, [layers, tokens, width] for `layer=None`. Hooks that exist once, and
        logits, are always [tokens, width].

        layer: a layer number of the model, negative from its last. tokens: rows of the store, as a slice or a sequence
        of indexes (for logits: samples). convert: False leaves floats in the stored dtype (bfloat16 is that of
        ml_dtypes), which is quicker; reduced hooks are decoded to float32 all the same.

        Raises KeyError for a hook or layer that was not captured, IndexError for rows that are not there, ValueError
        for several layers in the place of one, for all layers of `resid_post` where these were reduced to different
        rows, and, with the file's name, for damaged values, FileNotFoundError for a file that is gone.
        """
        sources = self.sources(hook, layer)
        self._values.check_one_form(hook, sources)
        values = self._values.decoded(sources, tokens, convert)
        return values[0] if layer is not None or sources[0].layer is None else values

    def sources(self, hook: str, layer: int | None = None) -> list[Source]:
        """Where a hook lies, or one layer of it: arrays, and indexes along their layer axes. Raises KeyError."""
        try:
            return self._table.sources(hook) if layer is None else [self._table.source(hook, layer)]
        except KeyError as error:
            raise KeyError(f"{self.path}: {error.args[0]}") from error

    def reduction(self, hook: str, layer: int | None = None) -> Reduction | None:
        """The reduction that was applied to `hook`, or to one layer, before it was stored; None without one.

        Raises ValueError where layers of `resid_post` were reduced in different ways and none is named.
        """
        return self._values.reduction(hook, self.sources(hook, layer))

    def attention(self, layer: int, head: int | None = None, queries: slice | None = None) -> np.ndarray:
        """Attention weights rebuilt from stored queries and keys; see `store.read.attention.attention`."""
        return attention(self, layer, head, queries)

    def attention_summary(
        self, layer: int, head: int | None = None, tokens: Tokens = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What each head attended to most, in one layer of `pattern`: (positions, weights, entropy).

        positions: int32 [tokens, heads, m] by falling weight, -1 where a token sees fewer than m. weights: float32 of
        the same shape. entropy: float32 [tokens, heads], in nats. With `head`, without that dimension. Raises KeyError
        without `pattern`, ValueError for a head that does not exist.
        """
        reduction = self.reduction("pattern")
        # What this returns is the content of this one reduction, so it asks for its class.
        assert isinstance(reduction, AttentionSummary), "the pattern is stored in no other form"
        check_head(head, self.shape("pattern")[-1] // reduction.words)
        parts = reduction.split(self.numpy("pattern", layer, tokens))
        return parts if head is None else (parts[0][:, head], parts[1][:, head], parts[2][:, head])

    def project(
        self, hook: str, direction: np.ndarray, layer: int | None = None, basis: str | os.PathLike[str] | None = None
    ) -> np.ndarray:
        """A direction of a hook's space in the space that the hook was projected to, float32 [k].

        The dot products of the result with rows of `numpy(hook)` approximate those of the direction with the rows
        before projection (for `pca`: with the rows minus their mean).

        direction: [width]. layer: one number, required for `pca` of a hook of several layers. basis: see `restore`.
        Raises ValueError for a hook that was not projected, or for another width.
        """
        info = self.attrs["hooks"][self.sources(hook, layer)[0].array]
        reduction, direction = self.reduction(hook, layer), np.asarray(direction, np.float32)
        if reduction is None or not reduction.projects:
            raise ValueError(f"hook {hook!r} was not stored as a projection")
        if direction.shape != (info["reduce"]["width"],):
            raise ValueError(
                f"the direction has shape {direction.shape}, rows of {hook!r} ({info['reduce']['width']},)"
            )
        fitted = reduction.basis()
        own = None if fitted is None else self._basis(hook, fitted, layer, basis)
        return reduction.project(direction, own, int(info["shards"]))

    def restore(
        self,
        hook: str,
        layer: int | None = None,
        tokens: Tokens = None,
        basis: str | os.PathLike[str] | None = None,
    ) -> np.ndarray:
        """Rows [tokens, width] of one layer of a hook that was stored as principal components, in the hook's own space.

        basis: the file they were made with; by default the copy that the server put beside its stores. Raises
        ValueError for a hook stored otherwise and for another basis, FileNotFoundError without one.
        """
        reduction = self.reduction(hook, layer)
        fitted = None if reduction is None else reduction.basis()
        if reduction is None or fitted is None:
            raise ValueError(f"hook {hook!r} was not stored as principal components")
        own = self._basis(hook, fitted, layer, basis)
        scores = self.numpy(hook, layer, tokens)
        return reduction.restore(scores[0] if scores.ndim == 3 else scores, own)

    def _basis(
        self, hook: str, fitted: BasisRef, layer: int | None, basis: str | os.PathLike[str] | None
    ) -> LayerBasis:
        """The basis of one layer of a hook: that of the array it lies in, with the layer's number there."""
        source = self._only(hook, layer, "a basis")
        layers = self.attrs["hooks"][source.array]["layers"] or [0]
        return find_basis(fitted.sha256, self.path, basis).of(fitted.hook, layers[source.index], fitted.k)

    def _only(self, hook: str, layer: int | None, what: str) -> Source:
        """Where one layer of a hook lies. Raises ValueError where there are several and none is named."""
        sources = self.sources(hook, layer)
        if len(sources) > 1:
            raise ValueError(f"each layer of {hook!r} has {what} of its own; name one layer")
        return sources[0]

    def tally(self, hook: str, layer: int | None = None, tokens: Tokens = None) -> Tally:
        """Sums of |x| of each neuron over rows of a hook; see `dmi_connector.importance`."""
        if hook == "logits":
            raise ValueError("logits have a row for each sampled token, not for each token; average numpy('logits')")
        source = self._only(hook, layer, "neurons")
        check_own_values(self, hook, layer)
        reduced = self._values.reduced(source.array)
        (rows,) = self._values.stored({source.array: [source.index]}, tokens)
        if reduced is None and rows.dtype.kind in "iu":
            raise ValueError(f"{hook!r} holds whole numbers, which have no magnitude to average; name another hook")
        if reduced is None:
            return Tally.of(rows.astype(np.float32))
        return reduced.reduction.tally_slices(reduced.slices(rows), reduced.width, reduced.dtype)

    def runs(self, most: int) -> Iterator[slice]:
        """Slices of at most `most` rows that together hold all rows that are not missing."""
        first = 0
        for start, stop in [*sorted(self.missing), [len(self.token_ids)] * 2]:
            for begin in range(first, start, most):
                yield slice(begin, min(begin + most, start))
            first = max(first, stop)

    def xarray(self, hooks: Sequence[str] | None = None) -> xarray.Dataset:
        """Hooks as a lazy xarray Dataset, see `store.read.xarray_view.dataset`."""
        from dmi_connector.store.read.xarray_view import dataset

        return dataset(self, self.attrs["hooks"] if hooks is None else hooks)

    def activation_cache(self, model: Any = None, batch_dim: bool = True) -> StoreActivations:
        """The store as TransformerLens' ActivationCache: `cache["z", 3]` is a torch tensor in the stored dtype.

        It has each tensor that is the same in TransformerLens' cache of the unprocessed model, under all its names and
        in its shapes: `[batch, pos, d_model]`, by head `[batch, pos, head, d_head]`, patterns `[batch, head, query,
        key]`, worked out from queries and keys. batch is 1, or no dimension with batch_dim=False. pos are the rows of
        the store. Tensors are read when they are first asked for, and then kept. `cache.absent` and
        `cache.why_absent(name)` say why others are not there.

        model: of TransformerLens, with the same weights. With it the cache has `hook_scale` and `hook_normalized` of
        the norms, and those of its methods work that need weights.

        Raises ImportError without transformer_lens (`dmi_connector[transformer-lens]`).
        """
        from dmi_connector.store.read.activation_cache import StoreActivations

        return StoreActivations(self, model, batch_dim)

    def routed_experts(self, prompt_start: int = 0, check: bool = True) -> np.ndarray:
        """The experts of each token as vLLM returns them, see `store.read.routed_experts.routed_experts`."""
        from dmi_connector.store.read.routed_experts import routed_experts

        return routed_experts(self, prompt_start, check)

    def shape(self, hook: str) -> tuple[int, ...]:
        """The shape of `numpy(hook)`. Reads no values. Raises as that."""
        sources = self.sources(hook)
        self._values.check_one_form(hook, sources)
        array, width = self._values.array(sources[0].array), self._values.width(sources[0].array)
        return (array.shape[1], width) if sources[0].layer is None else (len(sources), array.shape[1], width)

    def chunk_rows(self, hook: str) -> tuple[int, int]:
        """(rows of an inner chunk, rows of a shard file) of the array that holds a hook."""
        array = self._values.array(self.sources(hook)[0].array)
        return array.chunk_rows, array.segment_rows

    def torch(self, hook: str, layer: int | None = None, tokens: Tokens = None) -> torch.Tensor:
        """Like `numpy`, as a torch tensor in the stored dtype."""
        return as_torch(self.numpy(hook, layer, tokens, convert=False))

    def __getitem__(self, name: str) -> np.ndarray:
        if not isinstance(name, str):
            raise KeyError(f"{name!r} is no name of a hook; write cap['q'], or cap.numpy('q', layer) for one layer")
        hook, layer = parse_name(name, self.attrs)
        if hook != name:  # TransformerLens' name is that of the hook's own values
            check_own_values(self, hook, layer)
        return self.numpy(hook, layer)

    def __contains__(self, name: object) -> bool:
        """Whether `capture[name]` is there."""
        if not isinstance(name, str):
            return False
        try:
            hook, layer = parse_name(name, self.attrs)
        except KeyError:  # a name of TransformerLens that means another tensor
            return False
        return self._table.holds(hook, layer)

    def __iter__(self) -> Iterator[str]:
        return iter(self.hooks)

    def _plain(self, name: str) -> np.ndarray:
        """A 1-D array."""
        try:
            return decode_plain(self.files, name, TOKEN_ARRAYS.get(name, "int32"))
        except ValueError as error:
            raise ValueError(f"{self.path}/{name}: {error}") from error
