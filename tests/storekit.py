# SPDX-License-Identifier: Apache-2.0
"""Makes captures with known values for the tests of dmi_connector.store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.store.capture import CaptureHandle, CaptureSpec
from dmi_connector.store.persist import Persistence
from dmi_connector.store.schema import FLOATS, ArraySpec

Values = dict[str, np.ndarray]
PATIENCE = 120
"""Seconds that tests wait for processes: these may have to start, on a machine whose cores have other work."""


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {PATIENCE} s"
        time.sleep(0.01)


def random_bits(spec: ArraySpec, count: int, seed: int = 0) -> np.ndarray:
    """Finite values as unsigned integers: [layers, count, width], [count, width] for a per-sample array."""
    rng = np.random.default_rng([seed, len(spec.name), spec.width])
    shape = (count, spec.width) if spec.per_sample else (spec.n_layers, count, spec.width)
    if spec.dtype == "bfloat16":
        return (rng.standard_normal(shape, dtype=np.float32).view("u4") >> 16).astype("u2")
    if spec.dtype in FLOATS:
        return rng.standard_normal(shape).astype(spec.dtype).view(f"u{spec.itemsize}")
    return rng.integers(0, 2 ** (8 * spec.itemsize - 1), shape, dtype=f"u{spec.itemsize}")


def bits(values: np.ndarray) -> np.ndarray:
    """Any array as unsigned integers of the same size."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def to_float(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The float32 values of random_bits (integers keep their type)."""
    if dtype == "bfloat16":
        return (raw.astype("u4") << 16).view("f4")
    return raw.view(dtype).astype("f4") if dtype in FLOATS else raw.view(dtype)


def local(spec: ArraySpec, values: np.ndarray) -> np.ndarray:
    """The columns that the rank of `spec` holds."""
    return values[..., spec.rank * spec.local_width : (spec.rank + 1) * spec.local_width]


def feed(
    persistence: Persistence,
    handle: CaptureHandle,
    values: Values,
    length: int,
    chunk: int,
    skip: Sequence[int] = (),
) -> None:
    """Send all token chunks but those whose first row is in `skip`."""
    specs = [s for s in handle.spec.arrays if not s.per_sample]
    for first in range(0, length, chunk):
        count = min(chunk, length - first)
        if first in skip:
            continue
        parts = [np.ascontiguousarray(local(s, values[s.name])[:, first : first + count]) for s in specs]
        put(persistence, np.concatenate([p.view("u1").ravel() for p in parts]), handle, first, count)


def put(persistence: Persistence, payload: np.ndarray, handle: CaptureHandle, first: int, count: int) -> None:
    """Send one chunk payload."""
    extent = persistence.alloc(payload.nbytes, timeout=PATIENCE)
    assert extent is not None, "the ring did not drain"
    persistence.ring.view(extent)[:] = payload
    handle.chunk(extent, first, count)


def put_rows(persistence: Persistence, handle: CaptureHandle, name: str, rows: np.ndarray, first: int, at: int) -> None:
    """Send per-sample rows whose first token position is `at`."""
    extent = persistence.alloc(rows.nbytes, timeout=PATIENCE)
    assert extent is not None, "the ring did not drain"
    persistence.ring.view(extent)[:] = np.ascontiguousarray(rows).view("u1").ravel()
    handle.rows(name, extent, first, len(rows), range(at, at + len(rows)))


def store(
    persistence: Persistence,
    path: Path,
    arrays: Sequence[ArraySpec],
    length: int,
    samples: int = 0,
    values: Values | None = None,
    chunk: int = 128,
    segment: int = 256,
    codec: str = "zstd",
    attrs: Mapping[str, Any] | None = None,
    wait: bool = True,
    **spec_options: Any,
) -> Values:
    """Write one capture; returns its values by array name."""
    values = values or {s.name: random_bits(s, samples if s.per_sample else length) for s in arrays}
    spec = CaptureSpec(
        str(path),
        tuple(arrays),
        {"prompt_len": length // 2, "model": "tiny", **(attrs or {})},
        chunk_tokens=chunk,
        segment_tokens=segment,
        codec=codec,
        **spec_options,
    )
    handle = persistence.open_capture(spec)
    feed(persistence, handle, values, length, chunk)
    counts = {s.name: samples for s in arrays if s.per_sample}
    for name in counts:
        for i in range(samples):
            put_rows(persistence, handle, name, values[name][i : i + 1], i, length // 2 + i)
    handle.close(length, counts, token_ids=np.arange(length) % 97)
    if wait:
        assert persistence.flush(PATIENCE), "the capture was not committed"
    return values


def shard_specs(specs: Sequence[ArraySpec], ranks: int, rank: int) -> list[ArraySpec]:
    """What tensor-parallel rank `rank` writes of `specs`: its shards, and on rank 0 the rest."""
    return [replace(s, rank=rank) for s in specs if s.shards == ranks] + [
        s for s in specs if s.shards == 1 and rank == 0
    ]
