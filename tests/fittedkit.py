# SPDX-License-Identifier: Apache-2.0
"""Stores of hooks that are reduced with a fitted file, in the form that servers write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dmi_connector.layout import ArraySpec
from dmi_connector.reduce.basis import LayerBasis
from dmi_connector.reduce.fitted import FittedReduction
from dmi_connector.store.format.kept_files import BASES, keep_copy
from tests import storekit as kit


def basis_tensors(place: str, basis: LayerBasis) -> dict[str, np.ndarray]:
    """The tensors of a basis file, whose variance is that of the components. place: "HOOK.LAYER"."""
    tensors = {"mean": basis.mean, "components": basis.components, "std": basis.std}
    tensors["variance"] = (basis.std**2).sum(keepdims=True)
    return {f"{place}.{name}": tensor for name, tensor in tensors.items()}


def encoded(reduction: FittedReduction, values: np.ndarray, layers: Sequence[int], shards: int = 1) -> np.ndarray:
    """The values that the ranks store for [layers, tokens, width], concatenated."""
    parts = []
    for shard, part in enumerate(np.split(values, shards, -1)):
        for layer in layers:
            reduction.prepare(part.shape[-1], torch.device("cpu"), layer, shard)
        mine = [reduction.encode(torch.from_numpy(one.copy()), n) for n, one in zip(layers, part, strict=True)]
        parts.append(torch.stack(mine).numpy())
        assert parts[-1].shape[-1] == reduction.stored_width(part.shape[-1], "float32")
    return np.concatenate(parts, -1)


def write(
    path: Path,
    reduction: FittedReduction,
    values: np.ndarray,
    layers: Sequence[int],
    shards: int = 1,
    copy: bool = True,
) -> None:
    """Write a store of a hook with a bound reduction. copy: whether to copy the fitted file next to the store."""
    stored = encoded(reduction, values, layers, shards)
    settings = {**reduction.settings(), "dtype": "float32", "width": values.shape[-1]}
    spec = ArraySpec(reduction.hook, "uint8", tuple(layers), stored.shape[-1], reduce=settings)
    owner = kit.Store(4 << 20)
    owner.write(path, [spec], values.shape[1], values={reduction.hook: stored}, attrs={"num_layers": 6})
    assert owner.shutdown(kit.PATIENCE)
    if copy:
        keep_copy(reduction.source, reduction.sha256, BASES, str(path.parent), "private")
