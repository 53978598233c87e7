# SPDX-License-Identifier: Apache-2.0
"""`open_capture` opens a store. `Capture` extends `StoreReader` with the functions of this package."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from dmi_connector.captures.attention import attention
from dmi_connector.captures.followed import FollowedCapture, follow_capture
from dmi_connector.captures.names import hook_and_layer
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

    Raises TimeoutError, which says what exists instead. Raises CaptureFailed (a FileNotFoundError) at once if there
    will be no store: the directory's index says that the capture failed, was aborted or was removed, or no process
    writes it any more. Raises FileNotFoundError for a bucket or a directory that does not exist, and CaptureIncomplete
    for a store that lacks rows. Raises ValueError for a directory that is not a store of this format, or has unknown
    dtypes or codecs. Raises RemoteError (an OSError) if an object store refuses or does not answer, and ImportError
    without obstore.
    """
    if follow:
        return follow_capture(path, timeout, lambda final: Capture(*finished_store(final, 0, allow_incomplete=True)))
    return Capture(*finished_store(path, timeout, allow_incomplete))


class Capture(StoreReader):
    """One finished capture, read-only. Made by `open_capture`.

    hooks: names that can be read, aliases included. layers: hook -> layer numbers ([] for a hook that exists once).
    complete, reason, missing: whether rows are missing, why, and which [start, stop) rows. prompt_len: tokens of the
    prompt. num_layers: layers of the model; negative layer numbers count from the last. attrs: the root attribute
    (docs/FORMAT.md, section 5).

    `capture["q"]`, `capture["q@3"]` (layer 3) and `capture["blocks.3.attn.hook_z"]` are short for `numpy`; `in` says
    whether such a name exists, and iteration yields the names of `hooks`. `dmi prune` and retention do not remove the
    store until `close` or the end of a `with` block.
    """

    def __getitem__(self, name: str) -> np.ndarray:
        if not isinstance(name, str):
            raise KeyError(f"{name!r} is no name of a hook; write cap['q'], or cap['q@3'] for one layer")
        hook, layer = hook_and_layer(name, self.attrs)
        if hook != name.partition("@")[0]:  # a name of TransformerLens means the values before reduction
            check_own_values(self, hook, layer)
        return self.numpy(hook, layer)

    def __contains__(self, name: object) -> bool:
        """Whether `capture[name]` exists."""
        if not isinstance(name, str):
            return False
        try:
            hook, layer = hook_and_layer(name, self.attrs)
        except (KeyError, ValueError):  # a TransformerLens name that means another tensor, or a bad layer
            return False
        return self._table.holds(hook, layer)

    def numpy(self, hook: str, layer: Layers = None, tokens: Tokens = None, convert: bool = True) -> np.ndarray:
        """As `StoreReader.numpy`. hook: may include the layer, as in "q@3".

        Raises ValueError for a bad layer after the `@`, and if `layer` is given too.
        """
        if "@" in hook:
            if layer is not None:
                raise ValueError(f"{hook!r} names its layer; leave layer={layer!r} out")
            hook, layer = hook_and_layer(hook, self.attrs)
        return super().numpy(hook, layer, tokens, convert)

    def torch(self, hook: str, layer: Layers = None, tokens: Tokens = None) -> torch.Tensor:
        """Like `numpy`, as a torch tensor in the stored dtype."""
        return as_torch(self.numpy(hook, layer, tokens, convert=False))

    def attention(self, layer: int, head: int | None = None, queries: slice | None = None) -> np.ndarray:
        """Attention weights computed from stored queries and keys; see `captures.attention.attention`."""
        return attention(self, layer, head, queries)

    def attention_summary(
        self, layer: int, head: int | None = None, tokens: Tokens = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What each head attended to most, in one layer of `pattern`: (positions, weights, entropy).

        positions: int32 [tokens, heads, m] in descending order of weight, -1 where a token sees fewer than m. weights:
        float32 of the same shape. entropy: float32 [tokens, heads], in nats. With `head`, without that dimension.
        Raises KeyError without `pattern`, ValueError for a head that does not exist.
        """
        return attention_summary(self, layer, head, tokens)

    def latents(self, hook: str, tokens: Tokens = None) -> tuple[np.ndarray, np.ndarray]:
        """The largest latents of each row, for a probe that is an autoencoder: (ids, values), each [tokens, k].

        ids: int64, in descending order of value, -1 where fewer than k latents are active. values: float32, 0 there.
        Raises KeyError for a hook that was not captured, ValueError for one that is no autoencoder.
        """
        return latents(self, hook, tokens)

    def project(
        self, hook: str, direction: np.ndarray, layer: int | None = None, basis: str | os.PathLike[str] | None = None
    ) -> np.ndarray:
        """Project a direction of a hook's space to the space of the stored rows, float32 [k].

        The dot products of the result with rows of `numpy(hook)` approximate those of the direction with the rows
        before projection (for `pca`: with the rows minus their mean).

        direction: [width]. layer: one number, required for `pca` of a hook of several layers. basis: see `restore`.
        Raises ValueError for a hook that was not projected, or for another width.
        """
        return project(self, hook, direction, layer, basis)

    def restore(
        self,
        hook: str,
        layer: int | None = None,
        tokens: Tokens = None,
        basis: str | os.PathLike[str] | None = None,
    ) -> np.ndarray:
        """Restore rows [tokens, width] of one layer of a hook that was stored as principal components.

        basis: the basis file of the server. The default is the copy that the server put beside its stores. Raises
        ValueError for a hook that is stored in another way and for another basis, FileNotFoundError without a basis.
        """
        return restore(self, hook, layer, tokens, basis)

    def tally(self, hook: str, layer: int | None = None, tokens: Tokens = None) -> Tally:
        """Sums of |x| of each neuron over rows of a hook; see `dmi_connector.importance`."""
        return tally(self, hook, layer, tokens)

    def xarray(self, hooks: Sequence[str] | None = None) -> xarray.Dataset:
        """Hooks as a lazy xarray Dataset, see `captures.xarray_view.dataset`."""
        from dmi_connector.captures.xarray_view import dataset

        return dataset(self, self.attrs["hooks"] if hooks is None else hooks)

    def activation_cache(self, model: Any = None, batch_dim: bool = True) -> StoreActivations:
        """The store as TransformerLens' ActivationCache: `cache["z", 3]` is a torch tensor in the stored dtype.

        It has each tensor that is the same in TransformerLens' cache of the unprocessed model, under all its names and
        in its shapes: `[batch, pos, d_model]`, by head `[batch, pos, head, d_head]`, patterns `[batch, head, query,
        key]`, computed from queries and keys. batch is 1; batch_dim=False removes it. pos counts the rows of the store.
        Each tensor is read on first use, and then kept. `cache.absent` and `cache.why_absent(name)` say why other
        tensors are absent.

        model: TransformerLens' model with the same weights. With it the cache has `hook_scale` and `hook_normalized` of
        the norms, and the methods that need weights work.

        Raises ImportError without transformer_lens (`dmi_connector[transformer-lens]`).
        """
        from dmi_connector.captures.activation_cache import StoreActivations  # needs transformer_lens

        return StoreActivations(self, model, batch_dim)

    def routed_experts(self, prompt_start: int = 0, check: bool = True) -> np.ndarray:
        """The experts of each token as vLLM returns them, see `captures.routed_experts.routed_experts`."""
        return routed_experts(self, prompt_start, check)
