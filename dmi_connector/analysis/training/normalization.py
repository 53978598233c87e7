# SPDX-License-Identifier: Apache-2.0
"""Normalisation of rows before training. It is fitted once, applied to each batch, and saved in a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dmi_connector.captures.finite import not_finite
from dmi_connector.captures.row_view import RowView
from dmi_connector.reduce.pca import fit as fit_components
from dmi_connector.store.format.remote_path import local_path

KINDS = ("mean_norm", "whiten")
_METADATA = "dmi_normalization"
_GIVE = "give a file of save_normalization"
_BLOCK = 4096
"""Rows read at a time."""
_LEAST_STD = 1e-3
"""Minimum standard deviation for whitening, relative to the largest one. Without a minimum, whitening would amplify the
noise of directions with almost no variance.
"""


@dataclass(frozen=True, eq=False)
class Normalization:
    """The normalisation of one hook: `apply(x)` is (x - mean) @ matrix, or (x - mean) * scale without a matrix.

    kind: "mean_norm" scales rows so that their mean norm is sqrt(width), as SAELens' `expected_average_only_in` does.
    "whiten" makes the mean 0 and the covariance the identity, without a rotation (ZCA). Standard deviations below a
    thousandth of the largest one are raised to that value.

    mean: float32 [width], 0 for "mean_norm". scale: 1 for "whiten". matrix: float32 [width, width]; None for
    "mean_norm".
    """

    kind: str
    mean: np.ndarray
    scale: float = 1.0
    matrix: np.ndarray | None = None

    @classmethod
    def fit(cls, rows: RowView, kind: str = "mean_norm", most: int = 1 << 17, seed: int = 0) -> Normalization:
        """Fit on the rows of a view of one layer. If there are more than `most` rows, `most` rows are drawn at random.

        Rows that are not finite are left out. "whiten" needs about 48 width² bytes of memory.

        Raises ValueError for another kind, for a view of several layers, and for too few rows. "whiten" needs width + 1
        rows, and "mean_norm" needs one row that is not 0.
        """
        if kind not in KINDS:
            raise ValueError(f"normalize {kind!r} is not valid; use one of {', '.join(KINDS)}, or a file")
        if len(rows.shape) != 2:
            raise ValueError(f"normalize: {rows.hook!r} has layers {rows.layers}; name one")
        count = len(rows)
        chosen = np.sort(np.random.default_rng(seed).permutation(count)[:most]) if count > most else np.arange(count)
        parts = (rows.read(chosen[first : first + _BLOCK]) for first in range(0, len(chosen), _BLOCK))
        blocks = (np.delete(part, not_finite(part), axis=0) for part in parts)
        if kind == "whiten":
            basis, _ = fit_components((block for block in blocks if len(block)), rows.width)
            least = _LEAST_STD * max(float(basis.std[0]), float(np.finfo("f4").tiny))
            std = np.maximum(basis.std.astype(np.float64), least)
            components = basis.components.astype(np.float64)
            return cls(kind, basis.mean, matrix=((components / std) @ components.T).astype(np.float32))
        norms = np.concatenate([np.linalg.norm(block.astype(np.float64), axis=1) for block in blocks] or [np.empty(0)])
        if not len(norms) or not norms.mean():
            raise ValueError(f"normalize: {rows.hook!r} has no finite row whose norm is not 0; give other rows")
        return cls(kind, np.zeros(rows.width, np.float32), float(np.sqrt(rows.width) / norms.mean()))

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., width] of any float dtype -> float32 of the same shape."""
        centred = rows.float() - torch.from_numpy(self.mean).to(rows.device)
        if self.matrix is None:
            return centred * self.scale
        return centred @ torch.from_numpy(self.matrix).to(rows.device)

    def invert(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `apply`, float32, for directions or reconstructions in the normalised space."""
        mean = torch.from_numpy(self.mean).to(rows.device)
        if self.matrix is None:
            return rows.float() / self.scale + mean
        matrix = torch.from_numpy(self.matrix).to(rows.device)
        return torch.linalg.solve(matrix.T, rows.float().reshape(-1, len(mean)).T).T.reshape(rows.shape) + mean

    @property
    def digest(self) -> str:
        """SHA-256 of mean, scale and matrix, in hexadecimal."""
        parts = [self.mean.tobytes(), repr(self.scale).encode(), b"" if self.matrix is None else self.matrix.tobytes()]
        return hashlib.sha256(b"".join(parts)).hexdigest()


def save_normalizations(path: str | os.PathLike[str], known: Mapping[str, Normalization]) -> None:
    """Write the normalisations of several hooks to a safetensors file. known: {hook: normalisation}.

    Raises OSError if the file cannot be written.
    """
    tensors: dict[str, np.ndarray] = {}
    for name, one in known.items():
        tensors[f"{name}.mean"] = np.ascontiguousarray(one.mean)
        if one.matrix is not None:
            tensors[f"{name}.matrix"] = np.ascontiguousarray(one.matrix)
    about = {name: {"kind": one.kind, "scale": one.scale} for name, one in known.items()}
    try:
        save_file(tensors, local_path(path), metadata={_METADATA: json.dumps(about)})
    except SafetensorError as error:  # such as a full disk
        raise OSError(f"normalize: {path} cannot be written ({error}); give another path") from error


def load_normalizations(path: str | os.PathLike[str]) -> dict[str, Normalization]:
    """Read a file of `save_normalizations`. Returns {hook: normalisation}.

    Raises ValueError for a file without normalisations, and FileNotFoundError without a file.
    """
    try:
        with safe_open(local_path(path), framework="np") as file:
            about = json.loads((file.metadata() or {}).get(_METADATA, "null"))
            if about is None:
                raise ValueError(f"normalize: {path} holds no normalisation; {_GIVE}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"normalize: {path} is not a safetensors file ({error}); {_GIVE}") from error
    return {
        name: Normalization(one["kind"], tensors[f"{name}.mean"], one["scale"], tensors.get(f"{name}.matrix"))
        for name, one in about.items()
    }


Given = str | os.PathLike[str] | Mapping[str, Normalization] | Normalization
"""The argument `normalize` of `TokenDataset`: a kind, a file, or fitted normalisations."""


def of_views(views: Mapping[str, RowView], given: Given | None, seed: int) -> dict[str, Normalization]:
    """The normalisation of each hook; {} if `given` is None.

    Raises ValueError if `given` is not valid, lacks a hook, or is for rows of another width.
    """
    if given is None:
        return {}
    if isinstance(given, str) and given in KINDS:
        return {name: Normalization.fit(view, given, seed=seed) for name, view in views.items()}
    if isinstance(given, Normalization):
        known: Mapping[str, Normalization] = dict.fromkeys(views, given)
    elif isinstance(given, Mapping):
        known = given
    else:
        if not local_path(given).is_file():
            raise ValueError(f"normalize {os.fspath(given)!r} is not valid; use one of {', '.join(KINDS)}, or a file")
        known = load_normalizations(given)
    for name, view in views.items():
        if name not in known:
            raise ValueError(f"normalize: {name!r} is not fitted, only {', '.join(known)}; fit on {name!r} too")
        if len(known[name].mean) != view.width:
            raise ValueError(f"normalize: {name!r} has {view.width} values per row, not {len(known[name].mean)}")
    return {name: known[name] for name in views}
