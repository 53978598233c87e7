# SPDX-License-Identifier: Apache-2.0
"""Stores of tiny models without an engine: the activations of transformers, written by the package's writers.

Engine tests compare captures with the same oracle (`transformers_oracle`), so results on these stores apply to
captures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.engine.model.architectures import ARCHITECTURES
from dmi_connector.hooks import HOOKS
from dmi_connector.layout import ArraySpec
from tests import storekit as kit


def specs_of(values: dict[str, np.ndarray], oracle: Oracle) -> list[ArraySpec]:
    """The arrays of all hooks that have a row per token, with their layers."""
    dims = ARCHITECTURES[oracle.config.architectures[0]].dims(oracle.config)
    specs = []
    for name, hook in HOOKS.items():
        if name in values and hook.scope != "sampled":
            layers = dims.layers_of(hook) if hook.scope == "layer" else ()
            specs.append(ArraySpec(name, str(values[name].dtype), layers, values[name].shape[-1]))
    return specs


def attributes(oracle: Oracle, attention: dict[str, Any] | None) -> dict[str, Any]:
    """The attributes that an engine would write, without versions. attention: attention settings of the layers."""
    row = ARCHITECTURES[oracle.config.architectures[0]].fit(oracle.config)
    dims = row.dims(oracle.config)
    sizes = {name: getattr(dims, name) for name in ("hidden", "heads", "kv_heads", "head_dim", "vocab")}
    facts = {"model": oracle.config.name_or_path, "architecture": row.name, "dtype": "float32"}
    named = {"num_layers": dims.layers, "rotary": row.rotary, "qk_norm": bool(row.q_norm), "dims": sizes}
    return {**facts, **named, "attention": attention or {"scale": dims.head_dim**-0.5}}


def write(
    oracle: Oracle,
    path: Path,
    tokens: Sequence[int],
    attention: dict[str, Any] | None = None,
    hooks: Sequence[str] | None = None,
    **options: Any,
) -> Capture:
    """Write the store of one request of these tokens, and open it. hooks: only these. options: of `Store.write`."""
    with _owner() as owner:
        _write(owner, oracle, path, tokens, attention, hooks, **options)
    return open_capture(path, timeout=0)


def write_many(oracle: Oracle, folder: Path, requests: Sequence[Sequence[int]], hooks: Sequence[str]) -> Path:
    """Write a store with these hooks for each request. Its key is the number of the request. Returns the folder."""
    with _owner() as owner:
        for i, tokens in enumerate(requests):
            _write(owner, oracle, folder / f"{i:04}.zarr", tokens, None, hooks, key=str(i))
    return folder


@contextmanager
def _owner() -> Iterator[kit.Store]:
    owner = kit.Store(1 << 24)
    try:
        yield owner
    finally:
        assert owner.shutdown()


def _write(
    owner: kit.Store,
    oracle: Oracle,
    path: Path,
    tokens: Sequence[int],
    attention: dict[str, Any] | None,
    hooks: Sequence[str] | None,
    media: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> None:
    values = oracle.run(tokens)
    specs = [spec for spec in specs_of(values, oracle) if hooks is None or spec.name in hooks]
    raw = {spec.name: kit.bits(values[spec.name].astype(spec.dtype)) for spec in specs}
    ids = np.asarray(tokens)
    attrs = attributes(oracle, attention) | ({"media": media} if media else {})
    owner.write(path, specs, len(tokens), values=raw, ids=ids, attrs=attrs, **options)
