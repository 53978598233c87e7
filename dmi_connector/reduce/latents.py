# SPDX-License-Identifier: Apache-2.0
"""Computes the largest latents of a sparse autoencoder in the tap. The option `probes` names the autoencoder.

A stored row has the layout of topk(k,exact) over all latents in float32 (topk.py): ids in ascending order, then values.
If fewer than k latents are active, the row also has inactive ones, with value 0.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dmi_connector.reduce.base import Keeps, Reduction
from dmi_connector.reduce.errors import ReduceError
from dmi_connector.reduce.sparse_encoder import LAYER_NORM_EPS, SparseEncoder, settings_of, weights_file
from dmi_connector.reduce.statistic import Statistic
from dmi_connector.reduce.topk import TopK

if TYPE_CHECKING:
    import torch

DEFAULT_K = 32
"""Default number of stored latents per row, for an encoder whose file names no k."""
_SITES = {
    "hook_resid_pre": "resid_pre",
    "hook_resid_mid": "resid_mid",
    "hook_resid_post": "resid_post",
    "hook_attn_out": "attn_out",
    "attn.hook_z": "z",
    "hook_mlp_out": "mlp_out",
}
"""{TransformerLens' name of a hook that autoencoders are trained on: our name}."""
_DEVICE: dict[tuple[str, Any], _Weights] = {}
"""{(SHA-256 of the file, device): weights}. `prepare` fills it."""


@dataclass(frozen=True)
class _Weights:
    """The arrays of a `SparseEncoder`, on a device. gate: (scale, bias)."""

    weight: torch.Tensor
    bias: torch.Tensor
    shift: torch.Tensor | None
    threshold: torch.Tensor | None
    gate: tuple[torch.Tensor, torch.Tensor] | None
    norm: str | None


@dataclass(frozen=True)
class _Facts:
    """Facts about the file of an encoder.

    k: number of latents per row that the encoder keeps, None for all. trained_on: hook and layer in its settings.
    """

    sha256: str
    width: int
    latents: int
    k: int | None
    trained_on: tuple[str, int] | None


@dataclass(frozen=True)
class Latents(Reduction):
    """The k largest latents of each row. Decoded rows have all latents, and those that were not stored are 0.

    source, layers: the encoded hook and its layer, as in `probe.Probe`. latents: number of latents of the encoder. k:
    number of stored latents per row. sha256: hash of the file with the weights. path: path in the server's option.
    """

    source: str = ""
    layers: tuple[int, ...] = ()
    latents: int = 1
    k: int = DEFAULT_K
    sha256: str = ""
    path: str = field(default="", compare=False)
    kind: ClassVar[str] = "latents"
    keeps: ClassVar[Keeps] = Keeps.NOTHING
    computes: ClassVar[bool] = True
    at_end: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))  # JSON has lists

    @classmethod
    def load(cls, path: str, hook: str | None, layer: int | None, k: int | None) -> Latents:
        """Make the reduction from an encoder's file or directory. Raises ReduceError.

        hook: hook that the encoder encodes, None for the one in its settings. layer: layer of the hook. Without `hook`,
        None means the layer in the settings. With `hook`, None means that the hook exists once (`layers` is empty). k:
        number of stored latents; None for the encoder's own k, or DEFAULT_K if it has none.
        """
        facts = _facts_of(path)
        named = facts.trained_on
        if hook is None and named is not None:
            hook, layer = named[0], named[1] if layer is None else layer
        if hook is None:
            raise ReduceError(f"probes: {path} does not say which hook it encodes; add hook=NAME, layer=NUMBER")
        most = min(facts.latents, facts.k or facts.latents)
        kept = k if k is not None else most if facts.k is not None else min(DEFAULT_K, most)
        if not 1 <= kept <= most:
            raise ReduceError(
                f"probes: k={kept} of {path} is not valid; the encoder keeps {most} latents of a row, give 1 to {most}"
            )
        return cls(hook, () if layer is None else (layer,), facts.latents, kept, facts.sha256, path)

    @property
    def width(self) -> int:
        """Width of the rows that the encoder takes."""
        return _facts_of(self.path).width

    def settings(self) -> dict[str, Any]:
        values = asdict(self)
        del values["path"]
        return {"kind": self.kind, **values, "layers": list(self.layers)}

    def bind(self, hook: str, layers: Sequence[int], width: int, shards: int) -> Latents:
        """A copy for this hook and its layers. Raises ReduceError if each rank has only a slice of the hook."""
        if shards > 1:
            raise ReduceError(
                f"probes: {self.path} is an autoencoder, and each of {shards} ranks has only a slice of {hook}; give "
                "one of a hook that every rank has whole (docs/HOOKS.md), or run on one rank"
            )
        return replace(self, source=hook, layers=tuple(layers))

    def prepare(self, width: int, device: torch.device, layer: int, shard: int) -> None:
        import torch

        def put(part: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(part)).to(device)

        encoder = SparseEncoder.load(self.path)
        if _facts_of(self.path).sha256 != self.sha256:
            raise ReduceError(f"probes: {self.path} has changed since the engine started; start it again")
        _DEVICE[self.sha256, device] = _Weights(
            put(encoder.weight),
            put(encoder.bias),
            put(encoder.shift) if encoder.shift.any() else None,
            None if encoder.threshold is None else put(encoder.threshold),
            None if encoder.gate is None else (put(encoder.gate[0]), put(encoder.gate[1])),
            encoder.norm,
        )

    @property
    def _top(self) -> TopK:
        return TopK(self.k, exact=True)

    def stored_width(self, width: int, dtype: str) -> int:
        return self._top.stored_width(self.latents, "float32")

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        return self._top.encode(self.before(values, layer))

    def before(self, values: torch.Tensor, layer: int = 0) -> torch.Tensor:
        import torch

        own = _DEVICE[self.sha256, values.device]
        rows = values.float()
        if own.norm == "constant_norm_rescale":
            rows = rows * (rows.shape[1] ** 0.5 / rows.norm(dim=1, keepdim=True))
        elif own.norm == "layer_norm":
            rows = rows - rows.mean(1, keepdim=True)
            rows = rows / (rows.std(1, keepdim=True) + LAYER_NORM_EPS)
        if own.shift is not None:
            rows = rows - own.shift
        found = torch.addmm(own.bias, rows, own.weight)
        if own.gate is not None:  # NaN stays NaN, here and below
            scale, bias = own.gate
            found = ((found - own.bias) * scale + bias).masked_fill(found <= 0, 0)
        found = found.relu_()
        return found if own.threshold is None else found.masked_fill_(found <= own.threshold, 0)

    def before_layers(self, values: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        import torch

        return torch.stack([self.before(values[:, i], layer) for i, layer in enumerate(layers)], 1)

    def scratch(self, width: int, dtype: str) -> int:
        return 4 * (3 * width + 3 * self.latents)

    def fused(self, dtype: str) -> tuple[str, int]:
        return self._top.fused("float32")

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        return self._top.decode(stored, self.latents, "float32")

    def pairs(self, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64, values float32), each [..., k], in descending order of value. If fewer than k latents are
        active, the rest have id -1 and value 0.
        """
        ids, values = self._top.indexes(stored, self.latents), self._top.values(stored, self.latents, "float32")
        order = np.argsort(-values, axis=-1, kind="stable")
        ids, values = np.take_along_axis(ids, order, -1), np.take_along_axis(values, order, -1)
        return np.where(values == 0, -1, ids), values

    def statistics(self) -> tuple[Statistic, ...]:
        return (
            Statistic("value of", lambda rows, index: rows[:, index], "latent"),
            Statistic("active latents", lambda rows, _index: (rows > 0).sum(1)),
        )


def _facts_of(path: str) -> _Facts:
    """The facts about an encoder. Raises ReduceError if it is not an encoder, or its weights are not finite."""
    try:
        file = weights_file(path)
        found = os.stat(file)
        return _read_facts(path, os.fspath(file), found.st_mtime_ns, found.st_size, json.dumps(settings_of(path)))
    except (ValueError, KeyError, OSError) as error:
        raise ReduceError(f"probes: {path} cannot be used as a probe or an autoencoder ({error})") from error


@lru_cache(maxsize=64)
def _read_facts(path: str, file: str, modified: int, size: int, settings: str) -> _Facts:
    encoder = SparseEncoder.load(path)
    gate = encoder.gate or ()
    parts = (encoder.weight, encoder.bias, encoder.shift, encoder.threshold, *gate)
    if not all(part is None or np.isfinite(part).all() for part in parts):
        raise ValueError("its weights are not finite; download them again")
    with open(file, "rb") as raw:
        digest = hashlib.file_digest(raw, "sha256").hexdigest()
    return _Facts(digest, len(encoder.weight), encoder.latents, encoder.k, _trained_on(json.loads(settings)))


def hook_of(settings: dict[str, Any]) -> str | None:
    """The name of the hook in an encoder's settings, such as "blocks.12.hook_resid_post"; None if they name none."""
    inner = settings.get("metadata")
    inner = inner if isinstance(inner, dict) else {}
    named = settings.get("hook_name") or settings.get("hook_point_in") or inner.get("hook_name")
    return named if isinstance(named, str) else None


def _trained_on(settings: dict[str, Any]) -> tuple[str, int] | None:
    """The hook and layer that an encoder's settings name in TransformerLens' style; None without a known name."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", hook_of(settings) or "")
    return None if match is None or match[2] not in _SITES else (_SITES[match[2]], int(match[1]))
