# SPDX-License-Identifier: Apache-2.0
"""Computes results from reduced hooks: attention summaries, latents, projected directions, restored rows and sums."""

from __future__ import annotations

import os

import numpy as np

from dmi_connector.captures.attention import check_head
from dmi_connector.captures.own_values import check_own_values
from dmi_connector.reduce.attn import AttentionSummary
from dmi_connector.reduce.base import Reduction
from dmi_connector.reduce.basis import Basis, LayerBasis
from dmi_connector.reduce.latents import Latents
from dmi_connector.reduce.tally import Tally
from dmi_connector.store.read.arrays.hook_values import Tokens
from dmi_connector.store.read.fitted_files import find_fitted
from dmi_connector.store.read.hook_names import Source
from dmi_connector.store.read.reader import StoreReader


def attention_summary(
    capture: StoreReader, layer: int, head: int | None = None, tokens: Tokens = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(positions, weights, entropy); see `Capture.attention_summary`."""
    reduction = capture.reduction("pattern")
    # Only this reduction gives such a result, so its class is asserted.
    assert isinstance(reduction, AttentionSummary), "the pattern is stored in no other form"
    check_head(head, capture.shape("pattern")[-1] // reduction.words)
    parts = reduction.split(capture.numpy("pattern", layer, tokens))
    return parts if head is None else (parts[0][:, head], parts[1][:, head], parts[2][:, head])


def latents(capture: StoreReader, hook: str, tokens: Tokens = None) -> tuple[np.ndarray, np.ndarray]:
    """(ids, values); see `Capture.latents`."""
    (source,) = capture.sources(hook)[:1]
    reduction = capture.reduction(hook)
    if not isinstance(reduction, Latents):
        raise ValueError(f"hook {hook!r} holds no latents of an autoencoder")
    return reduction.pairs(capture.stored(source, tokens)[0])


def project(
    capture: StoreReader, hook: str, direction: np.ndarray, layer: int | None, basis: str | os.PathLike[str] | None
) -> np.ndarray:
    """Project a direction in a hook's space to the space of its stored rows, float32 [k]; see `Capture.project`."""
    info = capture.attrs["hooks"][capture.sources(hook, layer)[0].array]
    reduction, direction = capture.reduction(hook, layer), np.asarray(direction, np.float32)
    if reduction is None or not reduction.projects:
        raise ValueError(f"hook {hook!r} was not stored as a projection")
    if direction.shape != (info["reduce"]["width"],):
        width = info["reduce"]["width"]
        raise ValueError(
            f"the direction has shape {direction.shape}, but a row of {hook!r} has {width} values; give one of shape"
            f" ({width},)"
        )
    own = _basis(capture, hook, reduction, layer, basis) if _is_fitted_to_basis(reduction) else None
    return reduction.project(direction, own, int(info["shards"]))


def restore(
    capture: StoreReader, hook: str, layer: int | None, tokens: Tokens, basis: str | os.PathLike[str] | None
) -> np.ndarray:
    """Restore rows [tokens, width] from principal components; see `Capture.restore`."""
    reduction = capture.reduction(hook, layer)
    if reduction is None or not _is_fitted_to_basis(reduction):
        raise ValueError(f"hook {hook!r} was not stored as principal components")
    own = _basis(capture, hook, reduction, layer, basis)
    scores = capture.numpy(hook, layer, tokens)
    return reduction.restore(scores[0] if scores.ndim == 3 else scores, own)


def tally(capture: StoreReader, hook: str, layer: int | None = None, tokens: Tokens = None) -> Tally:
    """Sums of |x| per neuron over rows of a hook; see `dmi_connector.importance`."""
    if hook == "logits":
        raise ValueError("logits have a row for each sampled token, not for each token; average numpy('logits')")
    source = _only(capture, hook, layer, "neurons")
    check_own_values(capture, hook, layer)
    rows, reduced = capture.stored(source, tokens)
    if reduced is None and rows.dtype.kind in "iu":
        raise ValueError(f"{hook!r} holds integers, which have no magnitude to average; name another hook")
    if reduced is None:
        return Tally.of(rows.astype(np.float32))
    return reduced.tally(rows, (capture.attrs["hooks"][source.array]["layers"] or [0])[source.index])


def _basis(
    capture: StoreReader, hook: str, reduction: Reduction, layer: int | None, basis: str | os.PathLike[str] | None
) -> LayerBasis:
    """The basis of one layer of a hook. An alias has the basis of its stored array and layer."""
    source = _only(capture, hook, layer, "a basis")
    layers = capture.attrs["hooks"][source.array]["layers"] or [0]
    fitted = reduction.fitted()
    assert fitted is not None
    found: LayerBasis = reduction.part(find_fitted(Basis, fitted.sha256, capture.path, basis), layers[source.index])
    return found


def _is_fitted_to_basis(reduction: Reduction) -> bool:
    fitted = reduction.fitted()
    return fitted is not None and fitted.kind is Basis


def _only(capture: StoreReader, hook: str, layer: int | None, what: str) -> Source:
    """The source of one layer of a hook. Raises ValueError if the hook has several layers and `layer` is None."""
    sources = capture.sources(hook, layer)
    if len(sources) > 1:
        raise ValueError(f"each layer of {hook!r} has {what} of its own; name one layer")
    return sources[0]
