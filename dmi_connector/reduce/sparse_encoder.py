# SPDX-License-Identifier: Apache-2.0
"""Runs the encoder of a sparse autoencoder in numpy, from files of SAELens, sparsify, Gemma Scope or Llama Scope."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.reduce.tensors import FloatTensors

_NAMES = {"b_enc": ("b_enc", "encoder.bias"), "b_dec": ("b_dec", "decoder.bias")}
"""{tensor: its possible names in files}. The tensor `encoder.weight` is W_enc transposed."""
_GEMMA_SCOPE = "params.npz"
"""Name of the file of an encoder of Gemma Scope. These encoders are jumprelu encoders, without a settings file."""
_LLAMA_SCOPE = "hyperparams.json"
"""Name of the file with the settings of an encoder of Llama Scope, in the folder of its weights or the one above."""
_KINDS = ("standard", "jumprelu", "topk", "gated", "batchtopk", "matryoshka_batchtopk")
_NORMS = ("constant_norm_rescale", "layer_norm")
"""Normalisations of rows before they are encoded."""
LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True)
class SparseEncoder:
    """Computes latents of rows: relu((x - shift) W + b). Only latents above `threshold`, or the `k` largest, are kept.

    weight: W, float32 [d_in, latents]. bias: b, [latents]. shift: [d_in]. threshold: [latents], or None. k: None for
    all. norm: normalisation of x, "constant_norm_rescale" (to norm sqrt(d_in)), "layer_norm", or None. gate: (scale,
    bias) of a gated encoder, each [latents]. Its latents are relu((x - shift) W scale + bias) where (x - shift) W + b >
    0, else 0.
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
        """Read an encoder. path: a safetensors file with a `cfg.json` in the same directory, the `params.npz` of Gemma
        Scope, a file of Llama Scope with its `hyperparams.json`, or a directory with one of these.

        SAELens: the architectures standard, jumprelu, topk and gated; also batchtopk and matryoshka_batchtopk as saved
        in training, with the threshold from training. Activations may be normalised by constant_norm_rescale or
        layer_norm. sparsify: topk, also without a name of the architecture in `cfg.json`, as in older files. Raises
        ValueError for other encoders, and if a file or a tensor is missing. The normalisation expected_average_only_in
        is refused, because files lack its factor (fold it into the weights).
        """
        file = weights_file(path)
        if file.suffix == ".npz":
            return _of_gemma_scope(file)
        if (settings := _settings(file, _LLAMA_SCOPE)) is not None:
            return _of_llama_scope(file, settings)
        config = file.parent / "cfg.json"
        if not config.exists():
            raise ValueError(f"sae: {config} does not exist; copy the settings that were saved with the encoder")
        facts, tensors = _facts(config), FloatTensors(file)
        unnamed = "topk" if "encoder.weight" in tensors.names or facts.get("k") is not None else "standard"
        kind = facts.get("architecture", facts.get("activation", unnamed))
        k = facts.get("k", (facts.get("activation_fn_kwargs") or {}).get("k"))
        function = facts.get("activation_fn_str", facts.get("activation_fn", "relu"))  # older SAELens
        if kind == "standard" and function == "topk":
            kind = "topk"
        elif (kind == "standard" and function != "relu") or facts.get("finetuning_scaling_factor"):
            raise ValueError(
                f"sae: {config} has activation_fn_str {function!r} and finetuning_scaling_factor"
                f" {facts.get('finetuning_scaling_factor')!r}; relu and topk without the factor are supported"
            )
        if kind == "topk" and (type(k) is not int or k < 1):
            raise ValueError(f"sae: {config} has k {k!r}; a topk encoder needs an integer of at least 1")
        normed = facts.get("normalize_activations", "none")
        if kind not in _KINDS or normed not in ("none", None, *_NORMS):
            raise ValueError(
                f"sae: {config} has architecture {kind!r} and normalize_activations {normed!r}; encoders of"
                f" {', '.join(_KINDS)} work, without normalisation or with {' or '.join(_NORMS)}"
            )
        weight = _weight(tensors, file)
        width, latents = weight.shape
        bias = _get(tensors, "b_gate" if kind == "gated" else "b_enc", file, latents)
        if facts.get("rescale_acts_by_decoder_norm"):
            norm = np.linalg.norm(_get(tensors, "W_dec", file, latents, width), axis=1)
            weight, bias = weight * norm, bias * norm
        shifted = facts.get("apply_b_dec_to_input", not facts.get("transcode", False))
        shift = _get(tensors, "b_dec", file, width) if shifted else np.zeros(width, np.float32)
        threshold, gate = None, None
        if kind == "jumprelu":
            threshold = _get(tensors, "threshold", file, latents)
        elif kind.endswith("batchtopk"):
            threshold = np.full(latents, _get(tensors, "topk_threshold", file, 1), np.float32)
        elif kind == "gated":
            gate = np.exp(_get(tensors, "r_mag", file, latents)), _get(tensors, "b_mag", file, latents)
        return cls(
            weight, bias, shift, threshold, k if kind == "topk" else None, normed if normed in _NORMS else None, gate
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the arrays and settings that determine the latents."""
        parts = (self.weight, self.bias, self.shift, self.threshold)
        data = [b"" if part is None else np.ascontiguousarray(part).tobytes() for part in parts]
        gate = [part.tobytes() for part in self.gate or ()]
        return hashlib.sha256(b"".join([*data, repr(self.k).encode(), *gate, (self.norm or "").encode()])).hexdigest()

    @property
    def latents(self) -> int:
        """Number of latents."""
        return self.weight.shape[1]

    def encode(self, rows: np.ndarray) -> np.ndarray:
        """Encode rows [rows, d_in] to float32 [rows, latents].

        A row with a NaN has NaN latents. Raises ValueError for rows of another width, and for an array that is not 2-D.
        """
        if rows.ndim != 2:
            raise ValueError(f"sae: it takes rows [rows, {len(self.weight)}], not an array {list(rows.shape)}")
        if rows.shape[1] != len(self.weight):
            raise ValueError(f"sae: the encoder takes rows of {len(self.weight)} values, the hook has {rows.shape[1]}")
        found = (self.normed(rows) - self.shift) @ self.weight
        if self.gate is not None:
            closed = found + self.bias <= 0  # false for NaN, so NaN stays NaN
            found = np.where(closed, 0, found * self.gate[0] + self.gate[1])
        else:
            found += self.bias
        np.maximum(found, 0, out=found)
        if self.threshold is not None:
            found[found <= self.threshold] = 0
        if self.k is not None and self.k < self.latents:
            lower = np.argpartition(found, -self.k, axis=1)[:, : -self.k]
            np.put_along_axis(found, lower, 0, axis=1)
        return found

    def normed(self, rows: np.ndarray) -> np.ndarray:
        """Normalised rows, float32 [rows, d_in]."""
        if self.norm == "constant_norm_rescale":
            return np.asarray(rows * (rows.shape[1] ** 0.5 / np.linalg.norm(rows, axis=1, keepdims=True)))
        if self.norm == "layer_norm":
            centred = rows - rows.mean(1, keepdims=True)
            return np.asarray(centred / (centred.std(1, ddof=1, keepdims=True) + LAYER_NORM_EPS))
        return rows


def _of_gemma_scope(file: Path) -> SparseEncoder:
    """An encoder of Gemma Scope: jumprelu(x W + b), with one threshold per latent."""
    tensors = FloatTensors(file)
    weight = _weight(tensors, file)
    bias, threshold = (_get(tensors, name, file, weight.shape[1]) for name in ("b_enc", "threshold"))
    return SparseEncoder(weight, bias, np.zeros(len(weight), np.float32), threshold)


def _of_llama_scope(file: Path, settings: Path) -> SparseEncoder:
    """An encoder of Llama Scope: jumprelu(x s W + b) with one threshold, or the k largest.

    s scales rows to a mean norm of sqrt(d_in).
    """
    facts, tensors = _facts(settings), FloatTensors(file)
    activation, normed = facts.get("act_fn"), facts.get("norm_activation", "dataset-wise")
    if activation not in ("jumprelu", "topk", "relu") or normed != "dataset-wise":
        raise ValueError(
            f"sae: {settings} has act_fn {activation!r} and norm_activation {normed!r}; jumprelu, topk and relu work, "
            "with dataset-wise"
        )
    weight = _weight(tensors, file)
    bias = _get(tensors, "b_enc", file, weight.shape[1])
    norms = facts.get("dataset_average_activation_norm")
    norm = _number(settings, "dataset_average_activation_norm", norms.get("in") if isinstance(norms, dict) else norms)
    shift = np.zeros(len(weight), np.float32)
    if facts.get("apply_decoder_bias_to_pre_encoder"):
        shift = _get(tensors, "b_dec", file, len(weight))
    scale = np.float32(len(weight) ** 0.5 / norm)
    threshold = None
    if activation == "jumprelu":
        least = _number(settings, "jump_relu_threshold", facts.get("jump_relu_threshold"), zero=True)
        threshold = np.full(weight.shape[1], least, np.float32)
    k = int(_number(settings, "top_k", facts.get("top_k"))) if activation == "topk" else None
    return SparseEncoder(weight * scale, bias, shift / scale, threshold, k)


def _number(settings: Path, name: str, number: object, zero: bool = False) -> float:
    """A setting of Llama Scope. Raises ValueError unless it is a number above 0, or 0 with `zero`."""
    if not isinstance(number, int | float) or not (number > 0 or (zero and number == 0)):
        raise ValueError(
            f"sae: {settings} has {name} {number!r}; it needs a number {'of at least 0' if zero else 'above 0'}"
        )
    return number


def settings_of(given: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings that belong to an encoder's weights; {} if there are none. Raises ValueError."""
    file = weights_file(given)
    for name in (_LLAMA_SCOPE, "cfg.json"):
        if file.suffix != ".npz" and (found := _settings(file, name)) is not None:
            return _facts(found)
    return {}


def _settings(file: Path, name: str) -> Path | None:
    """The settings file in the folder of the weights, or in the one above, as for checkpoints/final.safetensors."""
    return next((found for folder in (file.parent, file.parent.parent) if (found := folder / name).exists()), None)


def _facts(config: Path) -> dict[str, Any]:
    """The content of a JSON file of settings. Raises ValueError that names the file."""
    try:
        found = json.loads(config.read_bytes())
    except ValueError as error:
        raise ValueError(f"sae: {config} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"sae: {config} holds {type(found).__name__}, not an object of settings")
    return found


def weights_file(given: str | os.PathLike[str]) -> Path:
    """The file of an encoder's weights: the given file, or the only one of the given directory. Raises ValueError."""
    path = Path(os.path.expanduser(given))
    if not path.is_dir():
        if not path.exists():
            raise ValueError(f"sae: {path} does not exist; give a safetensors file, or its directory")
        return path
    if (path / _GEMMA_SCOPE).exists():
        return path / _GEMMA_SCOPE
    found = sorted(path.glob("*.safetensors")) or sorted(path.glob("checkpoints/*.safetensors"))
    if len(found) != 1:
        raise ValueError(f"sae: {path} holds {len(found)} safetensors files; name one")
    return found[0]


def _weight(tensors: FloatTensors, file: Path) -> np.ndarray:
    """W_enc, float32 [d_in, latents]. Raises ValueError."""
    if "W_enc" not in tensors.names and "encoder.weight" in tensors.names:
        found, name = _get(tensors, "encoder.weight", file).T, "encoder.weight"
    else:
        found, name = _get(tensors, "W_enc", file), "W_enc"
    if found.ndim != 2:
        raise ValueError(f"sae: {file}: {name} has the shape {list(found.shape)}; it needs two dimensions")
    return np.ascontiguousarray(found)


def _get(tensors: FloatTensors, name: str, file: Path, *shape: int) -> np.ndarray:
    """A tensor as float32.

    shape: the required shape, which follows from that of W_enc; (1,) also allows a scalar. Raises ValueError if the
    tensor is missing, has no float dtype, or has another shape.
    """
    for known in _NAMES.get(name, (name,)):
        if (found := tensors.get(known)) is not None:
            if shape and found.shape != shape and (shape != (1,) or found.ndim):
                raise ValueError(
                    f"sae: {file}: {known} has the shape {list(found.shape)}, W_enc [d_in, latents] needs"
                    f" {list(shape)}; is W_enc transposed, or is the tensor that of another autoencoder?"
                )
            return found
    raise ValueError(f"sae: {file} holds no {name} of floats; it holds {', '.join(tensors.names)}")
