# SPDX-License-Identifier: Apache-2.0
"""A probe: the tap computes scores of a row.

A linear head or a small MLP from a file gives the scores. Without a file the scores are the norm of the row or its
largest values. The option `probes`, not `reduce`, names a probe.

Stored rows are the scores, float32. With tensor parallelism a rank may have only a slice of the hook. For a linear
head, each rank then stores the product of its slice with its part of the weights, and the first rank adds the bias. The
reader adds the products of all ranks, and applies the output function. For the form TOP, each rank stores the largest
values of its slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dmi_connector.reduce import largest
from dmi_connector.reduce.base import Keeps, LinearHead, Reduction
from dmi_connector.reduce.errors import ReduceError
from dmi_connector.reduce.probe_file import NORM_EPS, load
from dmi_connector.reduce.statistic import Statistic

if TYPE_CHECKING:
    import torch

NORM = "norm"
"""The `form` of a probe whose score is the L2 norm of the row."""
TOP = "top"
"""The `form` of a probe whose scores are the largest values of the row and their indexes (largest.py)."""
MOST_OUTPUTS = 64
"""Maximum number of outputs for our kernel of linear probes. With more, a library's matrix product is faster."""
_DEVICE: dict[tuple[str, int, Any], list[tuple[torch.Tensor, torch.Tensor]]] = {}
"""(weight [out, in], bias [out]) of each matrix, by SHA-256 of the file, layer and device. `prepare` fills it."""
_FIRST: dict[tuple[str, int, Any], int] = {}
"""For TOP: index of the first value of this rank's slice, by hook, layer and device. `prepare` fills it."""


@dataclass(frozen=True)
class Probe(Reduction):
    """Decoded rows are the scores, one per name in `outputs`.

    source, layers: the scored hook and its layers. If no layers are named, `layers` is () until `bind` sets them.
    sha256, path: hash and path of the file. form: the file's `kind`, NORM, or TOP. With NORM and TOP, `path` is the
    text of the option, and `sha256` is "". activation, output, norm: see `probe_file.ProbeFacts`. hidden: total number
    of values between the matrices. shards: number of slices of the hook.
    """

    source: str = ""
    layers: tuple[int, ...] = ()
    outputs: tuple[str, ...] = ()
    sha256: str = ""
    form: str = "linear"
    activation: str = "relu"
    output: str = "none"
    norm: str = "none"
    path: str = field(default="", compare=False)
    hidden: int = field(default=0, compare=False)
    shards: int = field(default=1, compare=False)
    kind: ClassVar[str] = "probe"
    keeps: ClassVar[Keeps] = Keeps.NOTHING
    computes: ClassVar[bool] = True
    at_end: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))  # JSON has lists
        object.__setattr__(self, "outputs", tuple(self.outputs))

    @classmethod
    def load(cls, path: str) -> Probe:
        """Make the probe of a file. Raises ReduceError."""
        file = load(path)
        facts = file.facts
        rest = (facts.activation, facts.output, facts.norm, file.path, file.hidden)
        return cls(facts.hook, facts.layers, facts.outputs, file.sha256, facts.kind, *rest)

    @classmethod
    def norm_of(cls, hook: str, text: str) -> Probe:
        """Make the probe whose score is the norm of the rows of `hook`. text: the text of the option."""
        return cls(hook, outputs=("norm",), form=NORM, path=text)

    @classmethod
    def top_of(cls, hook: str, k: int, text: str) -> Probe:
        """Make the probe with the k largest values of rows of `hook`. text: text of the option. Raises ReduceError."""
        largest.check(text, k)
        numbers = [""] if k == 1 else [f".{number}" for number in range(k)]
        outputs = tuple(name + number for name in ("neuron", "value") for number in numbers)
        return cls(hook, outputs=outputs, form=TOP, path=text)

    @property
    def width(self) -> int | None:
        """Width of the hook that the file was fitted to; None if any width is allowed."""
        return None if self.form in (NORM, TOP) else load(self.path).width

    @property
    def k(self) -> int:
        """For TOP: the number of values that are kept per row."""
        return len(self.outputs) // 2

    @property
    def linear(self) -> bool:
        """Whether the scores of a row, before the output function, are the sum of the scores of its slices."""
        return self.form == "linear" and self.norm == "none"

    @property
    def one_score(self) -> bool:
        """Whether a row has a single score."""
        return len(self.outputs) * max(1, len(self.layers)) == 1

    def settings(self) -> dict[str, Any]:
        values = asdict(self)
        for name in ("path", "hidden", "shards"):
            del values[name]
        return {"kind": self.kind, **values, "layers": list(self.layers), "outputs": list(self.outputs)}

    def bind(self, hook: str, layers: Sequence[int], width: int, shards: int) -> Probe:
        """A copy with the hook's name (which may differ from that in the file), layers and number of slices.

        Raises ReduceError if the probe cannot be computed from slices.
        """
        if self.form == TOP:
            largest.check(self.path, self.k, width, shards)
            return replace(self, source=hook, layers=tuple(layers), shards=shards)
        if shards > 1 and self.form == NORM:
            raise ReduceError(
                f"probes: {self.path} needs whole rows, and each of {shards} ranks has only a slice of {hook}; give a "
                "hook that every rank has whole (docs/HOOKS.md), or run on one rank"
            )
        if shards > 1 and not self.linear:
            raise ReduceError(
                f"probes: {self.path} is not a linear probe, and each of {shards} ranks has only a slice of {hook}; "
                "give a linear probe without a norm, or a hook that every rank has whole (docs/HOOKS.md), or run on "
                "one rank"
            )
        return replace(self, source=hook, layers=tuple(layers), shards=shards)

    def prepare(self, width: int, device: torch.device, layer: int, shard: int) -> None:
        import torch

        if self.form == TOP:
            _FIRST[self.source, layer, device] = shard * width if self.shards > 1 else 0
        if self.form in (NORM, TOP):
            return
        file = load(self.path)
        if file.sha256 != self.sha256:
            raise ReduceError(f"probes: {self.path} has changed since the engine started; start it again")
        number = file.facts.layers[self.layers.index(layer)] if file.facts.layers else 0
        found = []
        for place, (weight, bias) in enumerate(file.of(number)):
            if place == 0 and self.shards > 1:
                weight = weight[:, shard * width : (shard + 1) * width]
                bias = bias if shard == 0 else np.zeros_like(bias)
            found.append((torch.from_numpy(np.ascontiguousarray(weight)).to(device), torch.from_numpy(bias).to(device)))
        _DEVICE[self.sha256, layer, device] = found

    def stored_dtype(self, dtype: str) -> str:
        return "float32"

    def stored_width(self, width: int, dtype: str) -> int:
        return len(self.outputs)

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        return self.before(values, layer)

    def before(self, values: torch.Tensor, layer: int = 0) -> torch.Tensor:
        import torch
        from torch.nn import functional

        if self.form == TOP:
            return largest.largest(values, self.k, _FIRST[self.source, layer, values.device])
        found = values.float()
        if self.form == NORM:
            return torch.linalg.vector_norm(found, dim=1, keepdim=True)
        if self.norm == "unit":
            found = found / found.norm(dim=1, keepdim=True)
        elif self.norm == "layer":
            found = functional.layer_norm(found, found.shape[1:], eps=NORM_EPS)
        for number, (weight, bias) in enumerate(_DEVICE[self.sha256, layer, values.device]):
            if number:
                found = torch.tanh(found) if self.activation == "tanh" else getattr(functional, self.activation)(found)
            found = functional.linear(found, weight, bias)
        if self._finish == "none":
            return found
        return found.sigmoid() if self._finish == "sigmoid" else found.softmax(1)

    @property
    def _finish(self) -> str:
        """The output function that the rank applies: "none" if the hook has several slices."""
        return "none" if self.shards > 1 else self.output

    @property
    def one_kernel(self) -> bool:
        return self.linear and len(self.outputs) <= MOST_OUTPUTS

    def head(self, layer: int, device: torch.device) -> LinearHead:
        ((weight, bias),) = _DEVICE[self.sha256, layer, device]
        return LinearHead(weight, bias, self._finish)

    def before_layers(self, values: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        import torch

        return torch.stack([self.before(values[:, i], layer) for i, layer in enumerate(layers)], 1)

    def scratch(self, width: int, dtype: str) -> int:
        if self.form == TOP:
            return (8 if self.k == 1 else 32) * width  # two copies in float32, and for k > 1 three in int64
        if self.one_kernel:
            return 0
        copies = 2 if self.norm != "none" else 1
        return 4 * (copies * width + 2 * self.hidden + 2 * len(self.outputs))

    def fused(self, dtype: str) -> tuple[str, int]:
        return "copy", 0

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        return np.asarray(stored, np.float32)

    def merge(self, parts: list[np.ndarray]) -> np.ndarray:
        """The scores: the output function of the sum of the parts, or for TOP the largest values of all slices.

        A single part already holds the scores.
        """
        if len(parts) == 1:
            return parts[0]
        if self.form == TOP:
            return largest.merge(parts)
        total = np.asarray(np.sum(parts, axis=0, dtype=np.float32))
        if self.output == "none":
            return total
        if self.output == "sigmoid":
            return _sigmoid(total)
        powers = np.exp(total - total.max(-1, keepdims=True))
        return np.asarray(powers / powers.sum(-1, keepdims=True))

    def statistics(self) -> tuple[Statistic, ...]:
        if self.form == TOP:
            return (Statistic("largest value", lambda rows, _index: rows[:, self.k], signed=True),)
        return (Statistic("score of", lambda rows, index: rows[:, index], "output", signed=True),)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    """The logistic function. It takes exp only of values <= 0, which cannot overflow."""
    powers = np.exp(-np.abs(values))
    return np.where(values >= 0, 1 / (1 + powers), powers / (1 + powers))
