# SPDX-License-Identifier: Apache-2.0
"""Defines `open_capture`, and `Capture`, which extends `StoreReader` with the functions of this package."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from dmi_connector.captures.attention import attention
from dmi_connector.captures.followed import FollowedCapture, follow_capture
from dmi_connector.captures.names import hook_and_layer, is_lens_name, names_rows
from dmi_connector.captures.own_values import check_own_values
from dmi_connector.captures.reduced import attention_summary, latents, project, restore, tally
from dmi_connector.captures.routed_experts import routed_experts
from dmi_connector.dtypes import as_torch
from dmi_connector.reduce.tally import Tally
from dmi_connector.store.format.remote_path import Given
from dmi_connector.store.read.arrays.hook_values import Tokens
from dmi_connector.store.read.hook_names import Layers
from dmi_connector.store.read.reader import StoreReader, finished_store

if TYPE_CHECKING:
    import torch
    import xarray

    from dmi_connector.captures.activation_cache import StoreActivations


@overload
def open_capture(
    path: Given, timeout: float | None = None, allow_incomplete: bool = False, follow: Literal[False] = False
) -> Capture: ...


@overload
def open_capture(
    path: Given, timeout: float | None = None, allow_incomplete: bool = False, *, follow: Literal[True]
) -> FollowedCapture[Capture]: ...


def open_capture(
    path: Given, timeout: float | None = None, allow_incomplete: bool = False, follow: bool = False
) -> Capture | FollowedCapture[Capture]:
    """Open a store: a directory NAME.zarr, a zip file of one, or the URL of either, as in s3://bucket/NAME.zarr.

    Waits up to `timeout` seconds until the store has its final name (None: 60, 0: no wait).

    allow_incomplete: open a store that lacks rows. Missing rows read as zeros, and `missing` lists them.

    follow: open a capture that is still being written, on this machine. Waits until the capture has begun.
    `FollowedCapture.follow` yields rows as they are written. A finished capture can be followed too.

    Raises TimeoutError if there is no store after `timeout` seconds; its message says what exists instead. Raises
    CaptureFailed (a FileNotFoundError) at once if there will be no store: the directory's index says that the capture
    failed, was aborted or was removed, or no process writes it any more. Raises FileNotFoundError for a bucket or a
    directory that does not exist, and for a store that is removed while it is opened. Without allow_incomplete, raises
    CaptureIncomplete for a store that lacks rows. Raises ValueError for a directory that is not a store of this format,
    for unknown dtypes or codecs, and for a URL with follow=True. Raises RemoteError (an OSError) if an object store
    refuses a request or does not answer, and ImportError if obstore is needed but not installed.
    """
    if follow:
        return follow_capture(path, timeout, lambda final: Capture(*finished_store(final, 0, allow_incomplete=True)))
    return Capture(*finished_store(path, timeout, allow_incomplete))


class Capture(StoreReader):
    """One finished capture, read-only. Made by `open_capture`.

    hooks: names that can be read, including aliases. layers: {hook: layer numbers}, [] for a hook that exists once.
    complete: whether the store has all rows. reason: why rows are missing, else None. missing: [start, stop) ranges of
    missing rows. prompt_len: number of tokens of the prompt. num_layers: number of layers of the model; negative layer
    numbers count from the last. attrs: the root attribute (docs/FORMAT.md, section 5).

    `capture["q"]`, `capture["q@3"]` (layer 3) and `capture["blocks.3.attn.hook_z"]` are short for `numpy`. `in` tests
    whether such a name exists, and iteration yields the names in `hooks`. `dmi prune` and retention do not remove the
    store before `close` or the end of a `with` block.
    """

    def __getitem__(self, name: str) -> np.ndarray:
        if not isinstance(name, str):
            raise KeyError(f"{name!r} is not the name of a hook; write cap['q'], or cap['q@3'] for one layer")
        return self.numpy(name)

    def __contains__(self, name: object) -> bool:
        """Whether `capture[name]` exists."""
        return names_rows(name, self._table, self.attrs)

    def _named(self, hook: str, layer: Layers) -> tuple[str, Any]:
        """Resolve a name as in `cap[...]` and an argument `layer` to (hook, layer).

        Raises ValueError for an invalid layer after the `@`, for a layer both in the name and in `layer`, and for
        TransformerLens' name of a hook whose reduction does not keep its values. Raises KeyError for TransformerLens'
        name of a tensor that is not a hook.
        """
        if self._table.holds(hook):
            return hook, layer
        name, own = hook_and_layer(hook, self.attrs)
        if own is not None and layer is not None:
            raise ValueError(f"{hook!r} names its layer; leave layer={layer!r} out")
        at: Any = layer if own is None else own
        if is_lens_name(hook, name):
            check_own_values(self, name, at)
        return name, at

    def numpy(self, hook: str, layer: Layers = None, tokens: Tokens = None, convert: bool = True) -> np.ndarray:
        """Like `StoreReader.numpy`. hook: a name as in `cap[...]`, which may include the layer, as in "q@3".

        Also raises ValueError for an invalid layer after the `@`, for a layer both in `hook` and in `layer`, and for
        TransformerLens' name of a hook whose reduction does not keep its values.
        """
        return super().numpy(*self._named(hook, layer), tokens, convert)

    def shape(self, hook: str, layer: Layers = None) -> tuple[int, ...]:
        """Like `StoreReader.shape`. hook: as in `numpy`."""
        return super().shape(*self._named(hook, layer))

    def torch(self, hook: str, layer: Layers = None, tokens: Tokens = None) -> torch.Tensor:
        """Like `numpy`, as a torch tensor in the stored dtype."""
        return as_torch(self.numpy(hook, layer, tokens, convert=False))

    def attention(self, layer: int, head: int | None = None, queries: slice | None = None) -> np.ndarray:
        """Attention weights computed from stored queries and keys; see `captures.attention.attention`."""
        return attention(self, layer, head, queries)

    def attention_summary(
        self, layer: int, head: int | None = None, tokens: Tokens = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The largest attention weights of each head, in one layer of `pattern`: (positions, weights, entropy).

        positions: int32 [tokens, heads, m] in descending order of weight, -1 if a token attends to fewer than m
        positions. weights: float32 of the same shape. entropy: float32 [tokens, heads], in nats. With `head`, the
        arrays have no dimension of heads. Raises KeyError if `pattern` was not captured, and ValueError for a head that
        does not exist.
        """
        return attention_summary(self, layer, head, tokens)

    def latents(self, hook: str, tokens: Tokens = None) -> tuple[np.ndarray, np.ndarray]:
        """The largest latents of each row, for a probe that is an autoencoder: (ids, values), each [tokens, k].

        ids: int64, in descending order of value. values: float32. If fewer than k latents are active, the rest have id
        -1 and value 0. Raises KeyError for a hook that was not captured, and ValueError for one that is not an
        autoencoder.
        """
        return latents(self, self._named(hook, None)[0], tokens)

    def project(
        self, hook: str, direction: np.ndarray, layer: int | None = None, basis: str | os.PathLike[str] | None = None
    ) -> np.ndarray:
        """Project a direction in a hook's space to the space of the stored rows, float32 [k].

        The dot products of the result with rows of `numpy(hook)` approximate those of the direction with the rows
        before the projection (for `pca`: with these rows minus their mean).

        direction: [width]. layer: one number, required for `pca` of a hook of several layers. basis: see `restore`.
        Raises ValueError for a hook that was not projected, or for another width.
        """
        hook, layer = self._named(hook, layer)
        return project(self, hook, direction, layer, basis)

    def restore(
        self,
        hook: str,
        layer: int | None = None,
        tokens: Tokens = None,
        basis: str | os.PathLike[str] | None = None,
    ) -> np.ndarray:
        """Restore float32 rows [tokens, width] of one layer of a hook that was stored as principal components.

        basis: path or URL of the server's basis file; by default the copy in `bases/`, next to the store or to a folder
        that contains it. Raises ValueError for a hook that was stored in another way, and for another basis than the
        one used. Raises FileNotFoundError if there is no basis.
        """
        hook, layer = self._named(hook, layer)
        return restore(self, hook, layer, tokens, basis)

    def tally(self, hook: str, layer: int | None = None, tokens: Tokens = None) -> Tally:
        """Sums of |x| per neuron over rows of a hook; see `dmi_connector.importance`."""
        hook, layer = self._named(hook, layer)
        return tally(self, hook, layer, tokens)

    def xarray(self, hooks: str | Sequence[str] | None = None) -> xarray.Dataset:
        """Hooks as a lazy xarray Dataset; see `captures.xarray_view.dataset`. hooks: None for all."""
        from dmi_connector.captures.xarray_view import dataset

        names = self.attrs["hooks"] if hooks is None else hooks
        return dataset(self, [names] if isinstance(names, str) else names)

    def activation_cache(self, model: Any = None, batch_dim: bool = True) -> StoreActivations:
        """The store as TransformerLens' ActivationCache: `cache["z", 3]` is a torch tensor in the stored dtype.

        It has each stored tensor that equals one in TransformerLens' cache of the unprocessed model, under all names
        and in the shapes that TransformerLens uses: `[batch, pos, d_model]`, and per head `[batch, pos, head, d_head]`.
        Patterns `[batch, head, query, key]` are computed from queries and keys. batch is 1, and batch_dim=False removes
        this dimension. pos counts the rows of the store. Each tensor is read on first use, and then kept.
        `cache.absent` and `cache.why_absent(name)` say why other tensors are absent.

        model: TransformerLens' model with the same weights. With a model, the cache also has `hook_scale` and
        `hook_normalized` of the norms, and methods that need weights work.

        Raises ImportError without transformer_lens (`dmi_connector[transformer-lens]`).
        """
        from dmi_connector.captures.activation_cache import StoreActivations  # needs transformer_lens

        return StoreActivations(self, model, batch_dim)

    def routed_experts(self, prompt_start: int = 0, check: bool = True) -> np.ndarray:
        """The experts of each token, in vLLM's format; see `captures.routed_experts.routed_experts`."""
        return routed_experts(self, prompt_start, check)
