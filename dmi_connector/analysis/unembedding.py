# SPDX-License-Identifier: Apache-2.0
"""The final norm and the unembedding of a model, in numpy. The weights are read from its safetensors files."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.captures.capture import Capture
from dmi_connector.store.format.remote_path import local_path
from dmi_connector.store.read.files.thread_pool import in_threads

_NORMS = ("norm", "norm_f", "embedding_norm", "ln_f", "decoder.final_layer_norm", "final_layer_norm", "final_layernorm")
_EMBEDDINGS = (
    "embed_tokens",
    "embedding",
    "wte",
    "word_embeddings",
    "tok_embeddings",
    "embeddings",
    "decoder.embed_tokens",
)
_PREFIXES = (
    *("", "model.", "transformer.", "gpt_neox.", "backbone."),
    *("language_model.model.", "model.language_model.", "language_model.backbone."),
)
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "embed_out.weight", "output.weight")
_PLAIN_MODELS = ("olmo",)
"""Values of `model_type` whose norms have no weights."""
_RMS_MODELS = ("exaone", "lfm2", "lfm2_moe", "nemotron_h")
"""Values of `model_type` that have RMS norms, but whose config names epsilon as configs of LayerNorm models do."""
_RMS_EPS = ("rms_norm_eps", "layernorm_epsilon")
"""Names of epsilon in configs of RMS norms. The second one is that of MiMo V2."""
_EPS = (*_RMS_EPS, "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
_EPS_DEFAULT = 1e-5
"""Default eps of torch's LayerNorm, for models whose config has none (OPT, OLMo)."""
_DTYPES = ("BF16", "F16", "F32", "F64")
"""Supported dtypes of tensors, as safetensors names them."""
_BLOCK = 1024
"""Number of tokens of the vocabulary computed at a time. Their float32 weights and logits fit into a core's cache."""
_LEAST = np.finfo(np.float32).min
"""Replaces minus infinity in logits and log-probabilities, because minus infinity times 0 is NaN."""
_LOGITS = 1 << 24
"""Maximum number of logits to compute at a time: 64 MiB of float32 for each of several copies."""


@dataclass(frozen=True)
class Outcomes:
    """The predictions of n rows, and the probability of a given token after each row.

    logprobs: float32 [n], log-probabilities of the given tokens in nats; NaN for a token outside the vocabulary.
    entropy: float32 [n], in nats. best: int64 [n], the likeliest token. For a row with a NaN or an infinity, logprobs
    and entropy are NaN, and best is -1.
    """

    logprobs: np.ndarray
    entropy: np.ndarray
    best: np.ndarray


@dataclass(frozen=True)
class _Sums:
    """Partial sums over a block of the vocabulary, each [n]. `joined` merges two blocks, as in an online softmax.

    most: the largest logit, of the token `best`. total: sum of exp(logit - most). weighted: sum of exp(logit - most) *
    (logit - most). came: the logit of the given token; NaN if it is not in the block.
    """

    most: np.ndarray
    best: np.ndarray
    total: np.ndarray
    weighted: np.ndarray
    came: np.ndarray

    @classmethod
    def of(cls, logits: np.ndarray, first: int, came: np.ndarray) -> _Sums:
        """The sums of a block. logits: float32 [tokens, n], overwritten. first: token id of the block's first logit.
        came: ids of the given tokens, [n].
        """
        best = logits.argmax(0)
        columns = np.arange(logits.shape[1])
        most, own = logits[best, columns], np.full(len(columns), np.nan, np.float32)
        there = (came >= first) & (came < first + len(logits))
        own[there] = logits[came[there] - first, columns[there]]
        with np.errstate(invalid="ignore"):  # rows that are not finite give NaN
            logits -= np.where(most == -np.inf, np.float32(0), most)
            np.maximum(logits, _LEAST, out=logits)  # so that minus infinity times 0 is not NaN below
            shares = np.exp(logits)
            logits *= shares
        ones = np.ones(len(logits), np.float32)
        total, weighted = ((ones @ values).astype(np.float64) for values in (shares, logits))
        return cls(most, best + first, total, weighted, own)

    def joined(self, other: _Sums) -> _Sums:
        """The sums of both blocks. `self` is the earlier block, which wins ties."""
        after = other.most > self.most
        most, best = np.where(after, other.most, self.most), np.where(after, other.best, self.best)
        most[np.isnan(other.most)] = np.nan
        with np.errstate(invalid="ignore"):
            down = [np.maximum(one.most - most, _LEAST).astype(np.float64) for one in (self, other)]
            factors = [np.exp(d) for d in down]
            pairs = list(zip((self, other), down, factors, strict=True))
            total = sum(one.total * factor for one, _, factor in pairs)
            weighted = sum((one.weighted + d * one.total) * factor for one, d, factor in pairs)
        came = np.where(np.isnan(self.came), other.came, self.came)
        return _Sums(most, best, np.asarray(total), np.asarray(weighted), came)

    def outcomes(self) -> Outcomes:
        """The outcomes, once the sums cover the whole vocabulary."""
        with np.errstate(invalid="ignore"):
            logs, mean = np.log(self.total), self.weighted / self.total
            logprobs = (self.came - self.most - logs).astype(np.float32)
        finite = np.isfinite(logs)
        logprobs[~finite] = np.nan
        return Outcomes(
            logprobs,
            np.where(finite, logs - mean, np.nan).astype(np.float32),
            np.where(finite, self.best, -1),
        )


@dataclass(frozen=True)
class Unembedding:
    """The final norm and the unembedding of a model: logits = cap(scale * norm(row) @ weight.T + offset).

    weight: [vocabulary, width], in the dtype of its file; `weights_of` gives float32. gain, bias: float32 [width], of
    the final norm. eps: epsilon of the norm. centred: whether the norm subtracts the mean (LayerNorm) or not (RMSNorm).
    scale: factor of the logits. offset: float32 [vocabulary] or None. soft_cap: cap(x) is soft_cap * tanh(x /
    soft_cap); None: logits are not capped.
    """

    weight: np.ndarray
    gain: np.ndarray
    bias: np.ndarray
    eps: float
    centred: bool = False
    scale: float = 1.0
    offset: np.ndarray | None = None
    soft_cap: float | None = None

    @classmethod
    def load(cls, model: str | os.PathLike[str]) -> Unembedding:
        """Load from a model directory with config.json and safetensors files. Other tensors are not read.

        Raises ValueError for a path that is not such a directory, if the files lack the final norm or the embedding,
        and for tensors that are not floats of 16, 32 or 64 bits.
        """
        path = local_path(model)
        config = _config(path)
        files = _files(path)
        norms = [f"{prefix}{name}" for prefix in _PREFIXES for name in _NORMS]
        norm = next((name for name in norms if f"{name}.weight" in files), None)
        embeddings = (f"{prefix}{name}.weight" for prefix in _PREFIXES for name in _EMBEDDINGS)
        head = next((name for name in (*_HEADS, *embeddings) if name in files), None)
        if head is None or (norm is None and config.get("model_type") not in _PLAIN_MODELS):
            raise ValueError(
                f"model: the safetensors files of {path} lack {'a final norm' if head else 'an embedding'}"
            )
        weight = _tensor(files, head)
        gain = np.ones(weight.shape[1], np.float32) if norm is None else _vector(files, f"{norm}.weight")
        shifted = f"{norm}.bias" in files
        eps = next((name for name in _EPS if config.get(name) is not None), "")
        return cls(
            weight=weight,
            gain=gain + 1 if _adds_one(config.get("model_type", "")) else gain,
            bias=_vector(files, f"{norm}.bias") if shifted else np.zeros_like(gain),
            eps=float(config[eps]) if eps else _EPS_DEFAULT,
            centred=shifted or (eps not in _RMS_EPS and config.get("model_type") not in _RMS_MODELS),
            scale=_scale(config),
            offset=_vector(files, "lm_head.bias") if "lm_head.bias" in files else None,
            soft_cap=config.get("final_logit_softcapping"),
        )

    @classmethod
    def of(cls, capture: Capture, model: str | os.PathLike[str] | None = None) -> Unembedding:
        """Load the unembedding of the captured model. model: its directory; None: the directory that the store names.

        Raises ValueError as `load` does, and if the store names no model.
        """
        named = capture.attrs.get("model") if model is None else model
        if not named:
            raise ValueError(
                f"model: {capture.path} names no model; give the directory of the model's weights (`--model DIR`)"
            )
        return cls.load(named)

    def spread(self, rows: np.ndarray) -> np.ndarray:
        """The divisor of each row in the norm, float32 [n, 1]. rows: [n, width] of the residual stream."""
        rows = self.centre(self._checked(rows))
        return np.sqrt((rows**2).mean(-1, keepdims=True) + np.float32(self.eps))

    def centre(self, rows: np.ndarray) -> np.ndarray:
        """The rows minus their mean if `centred`, otherwise the rows."""
        return rows - rows.mean(-1, keepdims=True) if self.centred else rows

    def norm(self, rows: np.ndarray) -> np.ndarray:
        """The final norm, float32 [n, width]. Raises ValueError for rows of another width."""
        return np.asarray(self.centre(rows) / self.spread(rows) * self.gain + self.bias)

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """Logits float32 [n, vocabulary] of rows [n, width] of the residual stream. Raises ValueError as `norm` does.

        The vocabulary is processed in blocks, so that no float32 copy of a 16-bit `weight` is in memory.
        """
        normed = self.norm(rows)
        logits = np.empty((len(normed), len(self.weight)), np.float32)

        def fill(block: slice) -> None:
            logits[:, block] = self._logits_of(normed, block).T

        in_threads(fill, self._blocks())
        return logits

    def outcomes(self, rows: np.ndarray, came: np.ndarray) -> Outcomes:
        """The predictions of rows [n, width] of the residual stream, and the log-probabilities of the tokens `came`
        [n].

        Equal to `outcomes_of(log_softmax(logits(rows)), came)`, without an array of all logits. Raises ValueError as
        `norm` does.
        """
        normed = self.norm(rows)
        blocks = self._blocks()
        sums: dict[int, _Sums] = {}

        def fill(block: slice) -> None:
            sums[block.start] = _Sums.of(self._logits_of(normed, block), block.start, came)

        in_threads(fill, blocks)
        return functools.reduce(_Sums.joined, (sums[block.start] for block in blocks)).outcomes()

    def _blocks(self) -> list[slice]:
        """The vocabulary in blocks of _BLOCK tokens."""
        return [slice(at, min(at + _BLOCK, len(self.weight))) for at in range(0, len(self.weight), _BLOCK)]

    def _logits_of(self, normed: np.ndarray, block: slice) -> np.ndarray:
        """Logits of a block of the vocabulary, float32 [tokens, n]. normed: rows after the final norm, [n, width]."""
        logits = self.weights_of(block) @ normed.T  # for few rows faster than normed @ weights.T
        logits *= np.float32(self.scale)
        if self.offset is not None:
            logits += self.offset[block, None]
        if self.soft_cap:
            logits = np.tanh(logits / np.float32(self.soft_cap)) * np.float32(self.soft_cap)
        return np.asarray(logits)

    def weights_of(self, tokens: slice | np.ndarray | int) -> np.ndarray:
        """Rows of `weight`, float32."""
        return floats_of(self.weight[tokens])

    @property
    def block(self) -> int:
        """Number of rows whose logits take 64 MiB."""
        return max(1, _LOGITS // len(self.weight))

    def _checked(self, rows: np.ndarray) -> np.ndarray:
        if rows.shape[-1] != len(self.gain):
            raise ValueError(
                f"rows have {rows.shape[-1]} values, the model's final norm {len(self.gain)}; "
                "capture the residual stream in full, and give the model that was captured"
            )
        return rows


def floats_of(values: np.ndarray) -> np.ndarray:
    """Floats converted to float32. A float32 array is not copied."""
    if values.dtype.name == "bfloat16":  # twice as fast as astype
        return np.left_shift(values.view(np.uint16), np.uint32(16), dtype=np.uint32).view(np.float32)
    return np.asarray(values, np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of the probabilities, over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def outcomes_of(log_probabilities: np.ndarray, came: np.ndarray) -> Outcomes:
    """The predictions of distributions [n, vocabulary], and the log-probabilities of the tokens `came` [n]."""
    finite = ~np.isnan(log_probabilities).any(-1)
    logprobs, entropy = np.full((2, len(came)), np.nan, np.float32)
    best, own = np.full(len(came), -1, np.int64), log_probabilities[finite]
    right = finite & (came >= 0) & (came < log_probabilities.shape[1])
    logprobs[right] = log_probabilities[right, came[right]]
    entropy[finite], best[finite] = entropy_of(own), own.argmax(-1)
    return Outcomes(logprobs, entropy, best)


def entropy_of(log_probabilities: np.ndarray) -> np.ndarray:
    """Entropy in nats, over the last axis. A token whose logit is minus infinity adds nothing."""
    finite = np.maximum(log_probabilities, _LEAST)
    return np.asarray(-(np.exp(log_probabilities) * finite).sum(-1))


def _adds_one(model_type: str) -> bool:
    """Whether the norms of a model multiply by 1 + weight, instead of by weight."""
    one_more = ("gemma", "qwen3_next", "qwen3_5", "step3p5")
    starts = model_type.startswith(one_more) and not model_type.startswith("gemma4")
    return starts or model_type in ("nemotron", "plamo3")


def _scale(config: Mapping[str, Any]) -> float:
    """The factor by which a model multiplies its logits."""
    scaling = float(config.get("logits_scaling") or 1.0)
    if base := config.get("dim_model_base"):  # MiniCPM
        scaling = config["hidden_size"] / base
    if config.get("use_mup") and config.get("output_mult"):  # TeleFLM
        scaling = config["mup_scale_factor"] / config["output_mult"]
    if config.get("model_type") == "hyperclovax":  # its logits_scaling is a factor; that of other models is a divisor
        scaling = 1 / scaling
    return float(config.get("logit_scale") or 1.0) / scaling


def _config(path: Path) -> dict[str, Any]:
    """The config of a model. For a multimodal model, the fields of its text config take precedence."""
    try:
        config = json.loads((path / "config.json").read_bytes())
        return {**config, **(config.get("text_config") or config.get("llm_config") or {})}
    except (OSError, ValueError, TypeError, AttributeError) as error:  # the last two: not a JSON object
        raise ValueError(
            f"model: {path} has no readable config.json ({error}); give the directory of the model's weights "
            "(`--model DIR`)"
        ) from error


def _files(path: Path) -> dict[str, Path]:
    """{name of a tensor: its file}. Raises ValueError for a file that cannot be read."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np") as tensors:
                found |= dict.fromkeys(tensors.keys(), file)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"model: {file} cannot be read ({error}); copy the model again") from error
    return found


def _tensor(files: Mapping[str, Path], name: str) -> np.ndarray:
    """A tensor in its stored dtype. Raises ValueError for a dtype that is not in _DTYPES."""
    from safetensors import safe_open

    with safe_open(files[name], framework="np") as tensors:
        dtype = tensors.get_slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise ValueError(
                f"model: {name} in {files[name]} has the dtype {dtype}, not one of {', '.join(_DTYPES)}; "
                "give the directory of the model before it was quantised"
            )
        values: Any = tensors.get_tensor(name)
        return np.asarray(values)


def _vector(files: Mapping[str, Path], name: str) -> np.ndarray:
    return np.asarray(_tensor(files, name), np.float32)
