# SPDX-License-Identifier: Apache-2.0
"""Reads and writes files of probes: linear heads and small MLPs on a hook (docs/PROBES.md).

A file is in the safetensors format, with JSON in its metadata. Its SHA-256 identifies it. For each layer and each
matrix N of the probe, counted from 0, it has `LAYER.N.weight` [out, in] and `LAYER.N.bias` [out], as in torch's
`nn.Linear`. A hook that exists once has layer 0.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from dmi_connector.reduce.errors import ReduceError
from dmi_connector.reduce.tensors import FloatTensors
from dmi_connector.wording import show

METADATA = "dmi_probe"
"""Key of our JSON in the metadata of the safetensors file."""
KINDS = ("linear", "mlp")
ACTIVATIONS = ("relu", "gelu", "silu", "tanh")
"""Activations between the matrices of an MLP. gelu is the exact GELU."""
OUTPUTS = ("none", "sigmoid", "softmax")
"""Functions that are applied to the outputs of the last matrix."""
NORMS = ("none", "unit", "layer")
"""Normalisations of a row: "unit" divides it by its norm, "layer" gives it mean 0 and variance 1."""
NORM_EPS = 1e-5
"""Epsilon that is added to the variance, as in torch's `layer_norm`."""

Matrices = list[tuple[np.ndarray, np.ndarray]]
"""(weight [out, in], bias [out]) of each matrix of a probe, float32."""


@dataclass(frozen=True)
class ProbeFacts:
    """The JSON in a file.

    hook: the hook whose rows are scored. layers: its layers; () for a hook that exists once. outputs: names of the
    scores. kind: one of KINDS. activation: activation of an MLP, one of ACTIVATIONS. output: one of OUTPUTS. norm: one
    of NORMS.
    """

    hook: str
    layers: tuple[int, ...]
    outputs: tuple[str, ...]
    kind: str = "linear"
    activation: str = "relu"
    output: str = "none"
    norm: str = "none"


@dataclass(frozen=True)
class ProbeFile:
    """One file. width: width of the hook. hidden: total width of the hidden layers."""

    path: str
    sha256: str
    facts: ProbeFacts
    width: int
    hidden: int

    def of(self, layer: int) -> Matrices:
        """The matrices of one layer. Raises OSError if the file is gone."""
        return _matrices(FloatTensors(Path(self.path)), layer)


def is_probe(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a file of a probe. Never raises; `load` raises for an invalid file."""
    try:
        return METADATA in _metadata(Path(path))
    except (OSError, ValueError):
        return False


def load(path: str | os.PathLike[str]) -> ProbeFile:
    """Open a file of a probe. Raises ReduceError if it cannot be read, or is not a valid probe."""
    path = os.path.expanduser(os.fspath(path))
    try:
        found = os.stat(path)
    except OSError as error:
        raise ReduceError(f"probes: {path} cannot be read ({error.strerror}); give a file of a probe") from error
    return _load(path, found.st_mtime_ns, found.st_size)


def save(
    path: str | os.PathLike[str],
    facts: ProbeFacts,
    matrices: Mapping[int, Sequence[tuple[np.ndarray, np.ndarray]]],
    about: Mapping[str, str] | None = None,
) -> ProbeFile:
    """Write a file and read it back.

    matrices: matrices by layer, with key 0 for a hook that exists once. about: how the probe was made.

    Raises ReduceError for a probe that `load` would refuse, and OSError.
    """
    from safetensors.numpy import save_file

    tensors = {}
    for layer, stack in matrices.items():
        for number, (weight, bias) in enumerate(stack):
            tensors[f"{layer}.{number}.weight"] = np.ascontiguousarray(weight, np.float32)
            tensors[f"{layer}.{number}.bias"] = np.ascontiguousarray(bias, np.float32)
    save_file(tensors, path, metadata={METADATA: json.dumps({**asdict(facts), **({"about": about} if about else {})})})
    return load(path)


def _metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file. Raises OSError, ValueError."""
    with path.open("rb") as raw:
        size = int.from_bytes(raw.read(8), "little")
        text = raw.read(min(size, os.stat(path).st_size))
    try:
        header = json.loads(text)
    except RecursionError as error:
        raise ValueError("its header is nested too deep") from error
    found = header.get("__metadata__") if isinstance(header, dict) else None
    return found if isinstance(found, dict) else {}


@lru_cache(maxsize=64)
def _load(path: str, modified: int, size: int) -> ProbeFile:
    try:
        text = _metadata(Path(path)).get(METADATA)
        tensors = FloatTensors(Path(path))
        with open(path, "rb") as raw:
            digest = hashlib.file_digest(raw, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        raise ReduceError(f"probes: {path} is not a safetensors file ({error}); give a file of a probe") from error
    if text is None:
        raise ReduceError(
            f"probes: {path} has no {METADATA!r} in its metadata; make it with dmi fit-probe, or as in docs/PROBES.md"
        )
    facts = _facts(path, text)
    shapes = {layer: _checked(path, tensors, facts, layer) for layer in facts.layers or (0,)}
    widths = {shape[0] for shape in shapes.values()}
    if len(widths) > 1:
        raise ReduceError(
            f"probes: {path} takes rows of {sorted(widths)} values in its layers, but a hook has one width; make it"
            " again"
        )
    return ProbeFile(path, digest, facts, *next(iter(shapes.values())))


def _facts(path: str, text: str) -> ProbeFacts:
    """The JSON of a file. Raises ReduceError."""
    try:
        given = json.loads(text)
        given.pop("about", None)
        facts = ProbeFacts(**{**given, "layers": tuple(given.get("layers") or ()), "outputs": tuple(given["outputs"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReduceError(
            f"probes: {path}: its {METADATA} {show(text)} is not valid ({error!r}); make it again"
        ) from error
    if not isinstance(facts.hook, str):
        raise ReduceError(f"probes: {path}: hook {show(facts.hook)} is not valid; give the name of a hook")
    for name, choices in (("kind", KINDS), ("activation", ACTIVATIONS), ("output", OUTPUTS), ("norm", NORMS)):
        if (value := getattr(facts, name)) not in choices:
            raise ReduceError(f"probes: {path}: {name} {show(value)} is unknown; choose one of {', '.join(choices)}")
    names = facts.outputs
    if not names or not all(isinstance(n, str) and n for n in names) or len(set(names)) < len(names):
        raise ReduceError(f"probes: {path}: outputs {show(list(names))} is not valid; give different names of scores")
    layers = facts.layers
    if any(type(layer) is not int or layer < 0 for layer in layers) or list(layers) != sorted(set(layers)):
        raise ReduceError(
            f"probes: {path}: layers {show(list(layers))} is not valid; give layer numbers, ascending without repeats"
        )
    return facts


def _matrices(tensors: FloatTensors, layer: int) -> Matrices:
    found: Matrices = []
    while (weight := tensors.get(f"{layer}.{len(found)}.weight")) is not None:
        bias = tensors.get(f"{layer}.{len(found)}.bias")
        found.append((weight, np.zeros(weight.shape[:1], np.float32) if bias is None else bias))
    return found


def _checked(path: str, tensors: FloatTensors, facts: ProbeFacts, layer: int) -> tuple[int, int]:
    """Check the matrices of a layer. Returns (width of the hook, values between matrices). Raises ReduceError."""
    stack = _matrices(tensors, layer)
    if not stack or (len(stack) == 1) != (facts.kind == "linear"):
        raise ReduceError(
            f"probes: {path} has {len(stack)} matrices for layer {layer}, named {layer}.0.weight and so on; a linear"
            f" probe has 1, an mlp 2 or more; this one is {facts.kind}"
        )
    shapes = [weight.shape for weight, _ in stack]
    sizes = [shapes[0][-1], *(bias.shape[0] if bias.ndim == 1 else -1 for _, bias in stack)]
    if shapes != list(zip(sizes[1:], sizes[:-1], strict=True)) or sizes[-1] != len(facts.outputs):
        raise ReduceError(
            f"probes: {path}: matrices of layer {layer} have the shapes {[*map(tuple, shapes)]}; they have to be [out,"
            " in], as in nn.Linear, each with a bias [out], and the last out is the number of outputs, "
            f"{len(facts.outputs)}"
        )
    if not all(np.isfinite(part).all() for pair in stack for part in pair):
        raise ReduceError(f"probes: {path} holds values that are not finite in layer {layer}; make it again")
    return sizes[0], sum(sizes[1:-1])
