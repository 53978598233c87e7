# SPDX-License-Identifier: Apache-2.0
"""Logit lens: the model's final norm and unembedding, applied to the residual stream before each layer."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.dtypes import numpy_dtype
from dmi_connector.store.read.capture import Capture

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_NORMS = ("model.norm", "transformer.ln_f", "ln_f", "model.decoder.final_layer_norm", "language_model.model.norm")
_UNEMBEDDINGS = (
    "lm_head",
    "language_model.lm_head",
    "model.embed_tokens",
    "language_model.model.embed_tokens",
    "transformer.wte",
    "wte",
    "model.decoder.embed_tokens",
    "transformer.word_embeddings",
    "word_embeddings",
)
"""Names of modules, without ".weight". A model whose embedding is tied has no lm_head."""
_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")
_BLOCK = 4096
"""Tokens of the vocabulary that are worked out at a time."""


@dataclass(frozen=True)
class Weights:
    """The tensors of a model's directory (safetensors). Their bytes are read when they are used."""

    places: dict[str, tuple[Path, int, dict[str, Any]]]

    @classmethod
    def of(cls, directory: Path) -> Weights:
        """Read the headers of *.safetensors. Raises ValueError without such a file."""
        places = {}
        for path in sorted(directory.glob("*.safetensors")):
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            places.update({name: (path, 8 + size, of) for name, of in header.items() if name != "__metadata__"})
        if not places:
            raise ValueError(f"--model {directory} holds no *.safetensors; give the directory of the model's weights")
        return cls(places)

    def first(self, names: tuple[str, ...], kind: str = "weight") -> np.ndarray | None:
        """The first of these tensors that is there, mapped into memory in its stored dtype."""
        for name in names:
            place = self.places.get(f"{name}.{kind}")
            if place is not None:
                path, begin, about = place
                if about["dtype"] not in _DTYPES:
                    raise ValueError(
                        f"{path}: {name} has the dtype {about['dtype']}; the lens reads {', '.join(_DTYPES)}"
                    )
                dtype, offset = numpy_dtype(_DTYPES[about["dtype"]]), begin + about["data_offsets"][0]
                return np.memmap(path, dtype, "r", offset, tuple(about["shape"]))
        return None


@dataclass(frozen=True)
class Lens:
    """The way from the residual stream to logits, as the model's `config.json` and weights say.

    scale, shift: of the final norm, float32 [hidden]. centred: LayerNorm, which subtracts the mean; else RMSNorm.
    unembedding: [vocabulary, hidden] in its stored dtype. factor: by which logits are multiplied. soft_cap: c in
    c tanh(logits / c), None without one.
    """

    scale: np.ndarray
    shift: np.ndarray | None
    centred: bool
    epsilon: float
    unembedding: np.ndarray
    factor: float = 1.0
    soft_cap: float | None = None

    @classmethod
    @functools.lru_cache(maxsize=2)
    def of(cls, directory: Path) -> Lens:
        """The lens of a model's directory. Raises ValueError that says what the directory lacks."""
        try:
            config = json.loads((directory / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--model {directory} has no readable config.json ({error}); give a model's directory"
            ) from error
        config = {**config, **config.get("text_config", {})}
        weights = Weights.of(directory)
        scale, unembedding = weights.first(_NORMS), weights.first(_UNEMBEDDINGS)
        if scale is None or unembedding is None:
            raise ValueError(
                f"--model {directory}: no tensor there has the name of a final norm or unembedding that the lens knows"
            )
        shift = weights.first(_NORMS, "bias")
        gemma = str(config.get("model_type", "")).startswith("gemma")  # its norms multiply by 1 + weight
        return cls(
            np.asarray(scale, np.float32) + np.float32(gemma),
            None if shift is None else np.asarray(shift, np.float32),
            shift is not None or "rms_norm_eps" not in config,
            next((float(config[name]) for name in _EPSILONS if name in config), 1e-5),
            unembedding,
            float(config.get("logit_scale") or 1) / float(config.get("logits_scaling") or 1),
            config.get("final_logit_softcapping"),
        )

    def normed(self, rows: np.ndarray) -> np.ndarray:
        """The final norm of rows [n, hidden]: RMSNorm (Zhang and Sennrich, 2019) or LayerNorm (Ba et al., 2016)."""
        if self.centred:
            rows = rows - rows.mean(axis=-1, keepdims=True)
        scaled = rows / np.sqrt(np.square(rows).mean(axis=-1, keepdims=True) + np.float32(self.epsilon)) * self.scale
        return np.asarray(scaled if self.shift is None else scaled + self.shift, np.float32)

    def top(self, rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(token ids int64 [n, count], their probabilities float32 [n, count]) by falling probability.

        rows: residual stream, float32 [n, hidden]. The vocabulary is gone through in blocks, so that memory holds a
        part of the unembedding alone. Raises ValueError for rows of another width.
        """
        if rows.shape[-1] != self.unembedding.shape[1]:
            raise ValueError(
                f"the residual stream has {rows.shape[-1]} values and the model of --model {self.unembedding.shape[1]};"
                " give the directory of the store's own model, and capture resid_pre without a projection"
            )
        normed = self.normed(rows)
        logits = np.empty((len(rows), len(self.unembedding)), np.float32)
        for first in range(0, len(self.unembedding), _BLOCK):
            block = np.asarray(self.unembedding[first : first + _BLOCK], np.float32)
            logits[:, first : first + _BLOCK] = (block @ normed.T).T  # the other way round takes three times as long
        logits *= np.float32(self.factor)
        if self.soft_cap:
            logits = np.tanh(logits / np.float32(self.soft_cap)) * np.float32(self.soft_cap)
        some = np.argpartition(logits, -count, axis=-1)[:, -count:]
        order = np.argsort(-np.take_along_axis(logits, some, axis=-1), axis=-1)
        best = np.take_along_axis(some, order, axis=-1)
        high = logits.max(axis=-1, keepdims=True)
        total = np.exp(logits - high).sum(axis=-1, keepdims=True)
        return best, np.exp(np.take_along_axis(logits, best, axis=-1) - high) / total


def lacking(capture: Capture, model: Path | None) -> str | None:
    """What the lens of a store needs and has not, None where it has all."""
    if not any(name in capture for name in ("resid_pre", "resid_final")):
        return "The store has no residual stream. Capture the hooks resid_pre and resid_final (preset hidden-states)."
    if model is None:
        return (
            "The final norm and the unembedding are not known. Start dmi view with --model DIR, the model's directory."
        )
    return None


def residual_rows(capture: Capture, row: int) -> tuple[list[str], np.ndarray]:
    """(names of the places, the residual stream of one token there, float32 [places, hidden]).

    A place is the number of the layer that the stream enters, or "final" after the last.
    """
    one = slice(row, row + 1)
    places, rows = [], []
    if "resid_pre" in capture:
        places += [str(layer) for layer in capture.layers["resid_pre"]]
        rows.append(capture.numpy("resid_pre", tokens=one)[:, 0])
    if "resid_final" in capture:
        places.append("final")
        rows.append(capture.numpy("resid_final", tokens=one))
    return places, np.concatenate(rows)
