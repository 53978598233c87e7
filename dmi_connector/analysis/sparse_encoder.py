# SPDX-License-Identifier: Apache-2.0
"""The encoder of a sparse autoencoder that SAELens or sparsify saved, in numpy."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize

from dmi_connector.dtypes import numpy_dtype
from dmi_connector.store.format.remote_path import local_path

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NAMES = {"W_enc": ("W_enc",), "b_enc": ("b_enc", "encoder.bias"), "b_dec": ("b_dec",), "threshold": ("threshold",)}
"""What is needed -> its names in files. sparsify's encoder.weight is W_enc transposed."""
_KINDS = ("standard", "jumprelu", "topk", "gated", "batchtopk", "matryoshka_batchtopk")
_NORMS = ("constant_norm_rescale", "layer_norm")
"""How rows are normalised before they are encoded."""
_LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True)
class SparseEncoder:
    """Latents of rows: relu((x - shift) W + b), of which those above `threshold`, or the `k` largest, are kept.

    weight: float32 [d_in, latents]. bias: [latents]. shift: [d_in]. threshold: [latents], or None. k: None for all.
    norm: what is done to x before: "constant_norm_rescale" (norm sqrt(d_in)), "layer_norm", or None. gate: of a gated
    encoder, (scale, bias), each [latents]: latents with (x - shift) W + b > 0 are relu((x - shift) W scale + bias).
    """

    weight: np.ndarray
    bias: np.ndarray
    shift: np.ndarray
    threshold: np.ndarray | None = None
    k: int | None = None
    norm: str | None = None
    gate: tuple[np.ndarray, np.ndarray] | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SparseEncoder:
        """Read a safetensors file, or the only one of a directory, and the `cfg.json` beside it.

        SAELens: architectures standard, jumprelu, topk, gated and, as saved in training, batchtopk and
        matryoshka_batchtopk, with the threshold that training found; activations may be normalised by
        constant_norm_rescale or layer_norm. sparsify: topk, which its older files do not name. Raises ValueError for
        others, as for expected_average_only_in, whose factor files lack (fold it into the weights), and where a file or
        a tensor is missing.
        """
        file = _file(local_path(path))
        config = file.parent / "cfg.json"
        if not config.exists():
            raise ValueError(f"sae: {config} is not there; it says how the encoder works")
        facts, tensors = _facts(config), _tensors(file)
        unnamed = "topk" if "encoder.weight" in tensors or facts.get("k") is not None else "standard"
        kind = facts.get("architecture", facts.get("activation", unnamed))
        k = facts.get("k", (facts.get("activation_fn_kwargs") or {}).get("k"))
        function = facts.get("activation_fn_str", facts.get("activation_fn", "relu"))  # older SAELens
        if kind == "standard" and function == "topk":
            kind = "topk"
        elif (kind == "standard" and function != "relu") or facts.get("finetuning_scaling_factor"):
            raise ValueError(
                f"sae: {config} has activation_fn_str {function!r} and finetuning_scaling_factor"
                f" {facts.get('finetuning_scaling_factor')!r}; relu or topk without the factor work"
            )
        if kind == "topk" and (type(k) is not int or k < 1):
            raise ValueError(f"sae: {config} has k {k!r}; a topk encoder needs a whole number from 1 on")
        normed = facts.get("normalize_activations", "none")
        if kind not in _KINDS or normed not in ("none", None, *_NORMS):
            raise ValueError(
                f"sae: {config} has architecture {kind!r} and normalize_activations {normed!r}; encoders of"
                f" {', '.join(_KINDS)} work, without normalisation or with {' or '.join(_NORMS)}"
            )
        weight = _get(tensors, "W_enc", file)
        bias = _get(tensors, "b_gate" if kind == "gated" else "b_enc", file)
        if facts.get("rescale_acts_by_decoder_norm"):
            norm = np.linalg.norm(_get(tensors, "W_dec", file), axis=1)
            weight, bias = weight * norm, bias * norm
        shifted = facts.get("apply_b_dec_to_input", not facts.get("transcode", False))
        shift = _get(tensors, "b_dec", file) if shifted else np.zeros(len(weight), np.float32)
        threshold = _get(tensors, "threshold", file) if kind == "jumprelu" else None
        if kind.endswith("batchtopk"):
            threshold = np.full(weight.shape[1], _get(tensors, "topk_threshold", file), np.float32)
        gate = (np.exp(_get(tensors, "r_mag", file)), _get(tensors, "b_mag", file)) if kind == "gated" else None
        return cls(
            weight, bias, shift, threshold, k if kind == "topk" else None, normed if normed in _NORMS else None, gate
        )

    @property
    def digest(self) -> str:
        """SHA-256 of what it computes."""
        parts = (self.weight, self.bias, self.shift, self.threshold)
        data = [b"" if part is None else np.ascontiguousarray(part).tobytes() for part in parts]
        gate = [part.tobytes() for part in self.gate or ()]
        return hashlib.sha256(b"".join([*data, repr(self.k).encode(), *gate, (self.norm or "").encode()])).hexdigest()

    @property
    def latents(self) -> int:
        """Their number."""
        return self.weight.shape[1]

    def encode(self, rows: np.ndarray) -> np.ndarray:
        """float32 [rows, latents] of rows [rows, d_in]. Raises ValueError for rows of another width."""
        if rows.shape[1] != len(self.weight):
            raise ValueError(f"sae: it takes rows of {len(self.weight)} values, the hook has {rows.shape[1]}")
        found = (self._normed(rows) - self.shift) @ self.weight
        if self.gate is not None:
            open_ones = found + self.bias > 0
            found = np.where(open_ones, found * self.gate[0] + self.gate[1], 0)
        else:
            found += self.bias
        np.maximum(found, 0, out=found)
        if self.threshold is not None:
            found[found <= self.threshold] = 0
        if self.k is not None and self.k < self.latents:
            lower = np.argpartition(found, -self.k, axis=1)[:, : -self.k]
            np.put_along_axis(found, lower, 0, axis=1)
        return found

    def _normed(self, rows: np.ndarray) -> np.ndarray:
        if self.norm == "constant_norm_rescale":
            return np.asarray(rows * (rows.shape[1] ** 0.5 / np.linalg.norm(rows, axis=1, keepdims=True)))
        if self.norm == "layer_norm":
            centred = rows - rows.mean(1, keepdims=True)
            return np.asarray(centred / (centred.std(1, ddof=1, keepdims=True) + _LAYER_NORM_EPS))
        return rows


def _facts(config: Path) -> dict[str, Any]:
    """What a `cfg.json` says. Raises ValueError that names it."""
    try:
        found = json.loads(config.read_bytes())
    except ValueError as error:
        raise ValueError(f"sae: {config} is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"sae: {config} holds {type(found).__name__}, not an object of settings")
    return found


def _file(path: Path) -> Path:
    if not path.is_dir():
        if not path.exists():
            raise ValueError(f"sae: {path} is not there; give a safetensors file, or its directory")
        return path
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        raise ValueError(f"sae: {path} holds {len(found)} safetensors files; name one")
    return found[0]


def _tensors(path: Path) -> dict[str, Mapping[str, Any]]:
    """The tensors of a file by name, as bytes."""
    return dict(deserialize(path.read_bytes()))


def _get(tensors: Mapping[str, Mapping[str, Any]], name: str, file: Path) -> np.ndarray:
    """A tensor as float32. Raises ValueError where it is missing, or holds no floats."""
    if name == "W_enc" and name not in tensors and "encoder.weight" in tensors:
        return np.ascontiguousarray(_get(tensors, "encoder.weight", file).T)
    for known in _NAMES.get(name, (name,)):
        found = tensors.get(known)
        if found is not None and found["dtype"] in _DTYPES:
            values = np.frombuffer(found["data"], numpy_dtype(_DTYPES[found["dtype"]]))
            return values.reshape(found["shape"]).astype(np.float32)
    raise ValueError(f"sae: {file} holds no {name} of floats; it holds {', '.join(sorted(tensors))}")
