# SPDX-License-Identifier: Apache-2.0
"""Captures with known values, for the tests of dmi_connector.store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.dtypes import FLOATS
from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.store.format.completeness import Loss
from dmi_connector.store.write.client import OpenCapture, StoreClient
from dmi_connector.store.write.coordinator.capture_record import CaptureRecord
from dmi_connector.store.write.coordinator.captures import Captures, OnDone
from dmi_connector.store.write.ring import Extent, Ring
from dmi_connector.store.write.settings import WriteSettings

Values = dict[str, np.ndarray]
PATIENCE = int(os.environ.get("TEST_PATIENCE", 120))
"""Timeout in seconds for processes, which may start slowly on a busy machine."""


def until(condition: Callable[[], Any]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"the condition was not met within {PATIENCE} s"
        time.sleep(0.01)


class Store:
    """The coordinator's `Captures` in this process, with its own ring and real writers. No engine is needed."""

    def __init__(
        self,
        ring_bytes: int = 1 << 20,
        writers: int = 1,
        settings: WriteSettings | None = None,
        on_done: OnDone = lambda _record: None,
    ) -> None:
        self.ring = Ring(ring_bytes)
        self.captures = Captures(self.ring, writers, settings or WriteSettings(), on_done)
        self.pool, self.stats, self.flush = self.captures.pool, self.captures.stats, self.captures.flush
        self.abort = self.captures.abort

    def open(
        self,
        path: Path | str,
        *arrays: ArraySpec,
        attrs: Mapping[str, Any] | None = None,
        chunk: int = 128,
        segment: int = 256,
        codec: str = "none",
        elsewhere: Sequence[ArraySpec] = (),
        **names: Any,
    ) -> CaptureRecord:
        """Begin a capture of a prompt of 10 tokens."""
        layout = self.captures.register(PayloadLayout(arrays, chunk, segment, codec, tuple(elsewhere)))
        attrs = {"prompt_len": 10, "model": "tiny", **(attrs or {})}
        return self.captures.open(layout, str(path), attrs, **names)

    def put(
        self,
        record: CaptureRecord,
        values: Values,
        first: int,
        count: int,
        ids: np.ndarray | None = None,
        positions: np.ndarray | None = None,
    ) -> None:
        """Send rows [first, first + count) of `values` as one chunk.

        ids: token ids of all rows; default: the row numbers. positions: positions of the rows that are sent.
        """
        rows = np.arange(first, first + count)
        ids = rows if ids is None else np.asarray(ids)[first : first + count]
        positions = rows + record.start if positions is None else positions
        specs = [s for s in record.layout.arrays if not s.per_sample]
        parts = [np.ascontiguousarray(local(s, values[s.name])[:, first : first + count]) for s in specs]
        parts.append(np.stack([ids, positions], axis=1).astype("<i4"))
        with_extent(self.ring, parts, lambda extent: self.captures.chunk(record, extent, first, count))

    def put_payload(self, record: CaptureRecord, payload: bytes, first: int, count: int) -> None:
        """Send a chunk with a payload made by an exporter."""
        bits = np.frombuffer(payload, np.uint8)
        with_extent(self.ring, [bits], lambda extent: self.captures.chunk(record, extent, first, count))

    def feed(
        self,
        record: CaptureRecord,
        values: Values,
        length: int,
        skip: Sequence[int] = (),
        ids: np.ndarray | None = None,
    ) -> None:
        """Send all chunks of `length` rows except those whose first row is in `skip`."""
        chunk = record.layout.chunk_tokens
        for first in range(0, length, chunk):
            if first not in skip:
                self.put(record, values, first, min(chunk, length - first), ids)

    def put_rows(self, record: CaptureRecord, name: str, rows: np.ndarray, first: int, at: int) -> None:
        """Send per-sample rows. at: the token position of the first one."""
        positions = range(at, at + len(rows))
        with_extent(self.ring, [rows], lambda extent: self.captures.rows(record, name, extent, first, positions))

    def close(
        self,
        record: CaptureRecord,
        length: int,
        samples: Mapping[str, int] | None = None,
        ids: Sequence[int] | np.ndarray | None = None,
        losses: Sequence[Loss] = (),
    ) -> None:
        """Close a capture. ids: token ids; default: the row numbers."""
        ids = np.arange(length) if ids is None else ids
        self.captures.close(record, length, samples, ids, losses=losses)

    def write(
        self,
        path: Path,
        arrays: Sequence[ArraySpec],
        length: int,
        samples: int = 0,
        values: Values | None = None,
        codec: str = "zstd",
        wait: bool = True,
        attrs: Mapping[str, Any] | None = None,
        losses: Sequence[Loss] = (),
        ids: np.ndarray | None = None,
        **options: Any,
    ) -> Values:
        """Write one capture, half of whose rows belong to the prompt. Returns its values by array name."""
        values = values or {s.name: random_bits(s, samples if s.per_sample else length) for s in arrays}
        record = self.open(path, *arrays, attrs={"prompt_len": length // 2, **(attrs or {})}, codec=codec, **options)
        ids = np.arange(length) % 97 if ids is None else ids
        self.feed(record, values, length, ids=ids)
        counts = {s.name: samples for s in arrays if s.per_sample}
        for name in counts:
            for i in range(samples):
                self.put_rows(record, name, values[name][i : i + 1], i, length // 2 + i)
        self.close(record, length, counts, ids, losses)
        if wait:
            assert self.flush(PATIENCE), "the capture was not committed"
        return values

    def shutdown(self, timeout: float = PATIENCE) -> bool:
        """Stop the writers. Returns whether all captures were committed."""
        done = self.captures.shutdown(timeout)
        os.close(self.ring.fd)
        return done


# ---- the engine's side, with a coordinator process ----------------------------------------------------------------

Q = ArraySpec("q", "float32", (0, 1), 64)


def begin(client: StoreClient, path: Path, arrays: tuple[ArraySpec, ...] = (Q,), start: int = 0) -> OpenCapture:
    """Begin a capture of a prompt of 250 tokens, with the key "k" and the request id "r"."""
    layout = client.register(PayloadLayout(arrays, segment_tokens=256, codec="none"))
    return client.open_capture(layout, str(path), {"prompt_len": 250, "start": start, "model": "tiny"}, "r", "k")


def send(client: StoreClient, capture: OpenCapture, first: int, start: int = 0, ids: np.ndarray | None = None) -> None:
    """Send one chunk of VALUES. ids: the ids of all tokens; default: IDS."""
    payload = chunk_payload(first, start, ids)
    extent = client.ring.alloc(payload.nbytes, PATIENCE)
    assert extent is not None
    client.ring.view(extent)[:] = payload
    capture.chunk(extent, first, min(128, 300 - first))


def chunk_payload(first: int, start: int = 0, ids: np.ndarray | None = None) -> np.ndarray:
    """The payload of one chunk of VALUES with its header, see `send`."""
    count, ids = min(128, 300 - first), IDS if ids is None else ids
    header = np.stack([ids[first : first + count], np.arange(first, first + count, dtype="<i4") + start], axis=1)
    block = np.ascontiguousarray(VALUES[:, first : first + count]).view("u1").ravel()
    return np.concatenate([block, np.ascontiguousarray(header.astype("<i4")).view("u1").ravel()])


# ---- values -------------------------------------------------------------------------------------------------------


def with_extent(ring: Ring, parts: Sequence[np.ndarray], send: Callable[[Extent], None]) -> None:
    """Copy `parts` to an extent of the ring, and send it."""
    payload = np.concatenate([np.ascontiguousarray(p).view("u1").ravel() for p in parts])
    extent = ring.alloc(payload.nbytes, timeout=PATIENCE)
    assert extent is not None, "the ring did not drain"
    ring.view(extent)[:] = payload
    try:
        send(extent)
    finally:
        ring.release(extent)


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
    """An array as unsigned integers of the same size."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def to_float(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The float32 values of random_bits. Integers keep their type."""
    if dtype == "bfloat16":
        return (raw.astype("u4") << 16).view("f4")
    return raw.view(dtype).astype("f4") if dtype in FLOATS else raw.view(dtype)


def local(spec: ArraySpec, values: np.ndarray) -> np.ndarray:
    """The layers or columns that the rank of `spec` holds."""
    if spec.part_layers:
        return values[spec.first_layer : spec.first_layer + spec.local_layers]
    return values[..., spec.rank * spec.local_width : (spec.rank + 1) * spec.local_width]


def shard_specs(specs: Sequence[ArraySpec], ranks: int, rank: int) -> list[ArraySpec]:
    """The arrays of `specs` that tensor-parallel rank `rank` writes: its shards, and on rank 0 the unsharded ones."""
    return [replace(s, rank=rank) for s in specs if s.shards == ranks] + [
        s for s in specs if s.shards == 1 and rank == 0
    ]


VALUES = random_bits(Q, 300)
"""The values that `send` sends."""
IDS = (np.arange(300) % 97).astype("<i4")
"""The default token ids of `send`."""
