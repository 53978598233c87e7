# SPDX-License-Identifier: Apache-2.0
"""Reductions and probes for benchmarks, and the files that some of them read.

The files hold random values. Values do not change how long a reduction or probe takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dmi_connector.hooks import ModelDims

ENCODINGS = {
    "fp8": "fp8",
    "int8(32)": "int8(32)",
    "int8(affine)": "int8(affine)",
    "int8(channel)": "int8(channel={})",
    "topk(64)": "topk(64)",
    "topk(64) exact": "topk(64,exact)",
    "rp(512)": "rp(512)",
    "rp(512) sign": "rp(512,sign)",
    "rp(512) channel": "rp(512,channel={})",
    "cs(512)": "cs(512)",
    "pca(128)": "pca({})",
    "pq(8 bits)": "pq({})",
    "pq(4 bits)": "pq({})",
    "rp(32) by 128": "rp(32,group=128)",
    "round(5)": "round(5)",
    "full8": "full8",
    "rp8": "rp8",
    "topk8": "topk8",
    "summary": "summary",
}
"""{name of an encoding: reduction or mode of every hook}. {} is replaced by the path that `fitted_file` returns."""
PROBES = ("one", "layers", "latents", "keep")
"""Kinds of probes. "one": a linear probe of 16 outputs on one layer. "layers": such a probe on each layer. "latents":
an autoencoder of 16,384 latents (32 stored). "keep": a linear probe of one output, with which `dmi.keep_if`
keeps every hundredth request.
"""
OUTPUTS, LATENTS, KEPT_OF = 16, 16384, 100
CODES = {"pq(8 bits)": (8, 8), "pq(4 bits)": (4, 4)}
"""{encoding: (values per sub-vector, bits per code)}."""
COMPONENTS = 128
"""Number of principal components of a row."""


def dims_of(model: str) -> ModelDims:
    """The sizes of the model in the directory `model`."""
    from transformers import AutoConfig

    from dmi_connector.engine.model.architectures import ARCHITECTURES

    config = AutoConfig.from_pretrained(model)
    return ARCHITECTURES[config.architectures[0]].dims(config.get_text_config())


def rules(encoding: str, hooks: str, model: str, folder: Path) -> dict[str, str]:
    """The server option `reduce` for one encoding of all `hooks`. Writes the file of the encoding to `folder`."""
    text = ENCODINGS[encoding]
    return {"*": text.format(fitted_file(encoding, hooks, model, folder)) if "{}" in text else text}


def fitted_file(encoding: str, hooks: str, model: str, folder: Path) -> Path:
    """Write the file of an encoding, for all `hooks` that a wildcard reduces. Returns its path."""
    from safetensors.numpy import save_file

    from dmi_connector.hooks import HOOKS, parse_selection
    from dmi_connector.reduce.projection import RandomProjection

    dims = dims_of(model)
    kind, about_of, content = _kind(encoding, RandomProjection(512))
    tensors: dict[str, np.ndarray] = {}
    about: dict[str, dict[str, Any]] = {}
    for name, layers in parse_selection(hooks, dims).hooks.items():
        if HOOKS[name].dtype == "int32" or HOOKS[name].scope == "sampled":
            continue
        about[name] = {"width": dims.width(HOOKS[name]), **about_of(dims.width(HOOKS[name]))}
        shapes = kind.shapes(about[name])
        own = {part: content(part, shape) for part, shape in shapes.items()}
        tensors |= {f"{name}.{layer}.{part}": values for layer in layers for part, values in own.items()}
        about[name]["layers"] = list(layers)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{encoding.split('(')[0]}.safetensors"
    save_file(tensors, path, metadata={kind.metadata: json.dumps({"hooks": about})})
    return path


def _kind(encoding: str, projection: Any) -> tuple[Any, Callable[[int], dict[str, Any]], Callable[..., np.ndarray]]:
    """(class of the file, entry of a hook, values of a tensor).

    The entry is a function of the width of the hook, and the values are a function of the tensor's name and shape.
    """
    from dmi_connector.reduce.basis import Basis
    from dmi_connector.reduce.codebooks import Codebooks
    from dmi_connector.reduce.scales import Scales

    rng = np.random.default_rng(0)

    def random(name: str, shape: tuple[int, ...]) -> np.ndarray:
        drawn = rng.standard_normal(shape, np.float32)
        return np.asarray(np.abs(drawn) + np.float32(0.01) if name in ("scale", "std") else drawn / np.float32(16))

    if encoding in CODES:
        size, bits = CODES[encoding]
        return Codebooks, lambda width: {"m": width // size, "bits": bits}, random
    if encoding.startswith("pca"):
        return Basis, lambda _: {"k": COMPONENTS}, random
    if encoding == "rp(512) channel":
        return Scales, lambda _: {"projected": projection.k, "projection": projection.settings()}, random
    return Scales, lambda _: {}, random


def probes(kind: str, model: str, folder: Path) -> dict[str, str]:
    """The server option `probes` for a kind of PROBES. Writes the file of the probe to `folder`."""
    from dmi_connector.reduce.probe_file import ProbeFacts, save

    dims = dims_of(model)
    middle, rng = dims.layers // 2, np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return np.asarray(rng.standard_normal(shape, np.float32) / np.float32(dims.hidden**0.5))

    folder.mkdir(parents=True, exist_ok=True)
    if kind == "latents":
        _save_encoder(folder, dims.hidden, draw)
        return {"p": f"{folder}, hook=resid_pre, layer={middle}, k=32"}
    layers = tuple(range(dims.layers)) if kind == "layers" else (middle,)
    outputs = tuple(f"out{number}" for number in range(1 if kind == "keep" else OUTPUTS))
    stacks = {layer: [(draw(len(outputs), dims.hidden), draw(len(outputs)))] for layer in layers}
    save(folder / "probe.safetensors", ProbeFacts("resid_pre", layers, outputs), stacks)
    return {"p": str(folder / "probe.safetensors")}


def _save_encoder(folder: Path, width: int, draw: Callable[..., np.ndarray]) -> None:
    """Write an autoencoder of rows of `width` values, as SAELens does. draw: returns random values of a shape."""
    from safetensors.numpy import save_file

    sizes = {"W_enc": (width, LATENTS), "b_enc": (LATENTS,), "b_dec": (width,), "W_dec": (LATENTS, width)}
    save_file({name: draw(*size) for name, size in sizes.items()}, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps({"architecture": "standard"}))


def asked(kind: str, number: int) -> dict[str, Any]:
    """The options `dmi` of request number `number` in an engine with a kind of PROBES; {} for kind ""."""
    if kind in ("", "latents"):
        return {}
    if kind == "keep":
        return {"keep_if": "max(p) > -1e30" if number % KEPT_OF == 0 else "max(p) > 1e30"}
    return {"probes": {"p": {"inline": "max"}}}
