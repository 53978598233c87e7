# SPDX-License-Identifier: Apache-2.0
"""Writers that fall behind leave chunks as they are where that is quicker. Every reader reads them as others."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import blosc

from dmi_connector.engine.sizing import write_settings
from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.settings import ServerOptions
from dmi_connector.store.read.capture import open_capture
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write import writer_pool
from dmi_connector.store.write.array_writer import ArrayWriter
from dmi_connector.store.write.blosc_frame import plain_header
from dmi_connector.store.write.pace import Pace
from dmi_connector.store.write.plain import Costs
from dmi_connector.store.write.settings import WriteSettings
from dmi_connector.store.write.shard_writer import FileCache, encode
from dmi_connector.store.write.writer import Writer
from tests import storekit as kit

CHUNK = 128
WIDE = ArraySpec("mlp_post", "bfloat16", (0, 1, 2, 3), 512)
CHUNK_BYTES = CHUNK * (WIDE.token_bytes + 8)
TAKEN = -(-CHUNK_BYTES // 4096) * 4096
"""Bytes of the ring that a chunk takes."""
ARRAYS = (
    ArraySpec("q", "bfloat16", (0, 1, 2), 24),
    ArraySpec("embed", "float32", (), 8),
    ArraySpec("topk_ids", "int32", (0, 2), 2),
    ArraySpec("codes", "int8", (0, 1), 5),
    ArraySpec("logits", "float32", (), 33, per_sample=True),
)
WRITER = """
import itertools
from dmi_connector.store.write import pace, plain, writer

turns = itertools.cycle([True, True, False])
plain.Costs.plain_is_quicker = lambda self: next(turns)
pace.Pace.behind = property(lambda self: True)
writer.main()
"""
MB = 1 << 20


@given(size=st.sampled_from([1, 2, 4, 8]), count=st.integers(1, 3000), seed=st.integers(0, 2**32 - 1))
def test_blosc_decodes_a_plain_frame_of_any_size(size: int, count: int, seed: int) -> None:
    data = np.random.default_rng(seed).bytes(size * count)
    frame = plain_header(size, len(data)) + data
    assert blosc.decompress(frame) == data


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_plain_chunk_is_its_bytes_and_the_zeros_it_lacks(codec: str) -> None:
    chunk = np.arange(12, dtype="u2").reshape(3, 4)
    found = encode(chunk, codec, 5, plain=True)
    packed = found.head + bytes(found.body) + bytes(found.zeros)
    assert len(packed) + 4 == found.nbytes and blosc.decompress(packed) == chunk.tobytes() + bytes(16)


@pytest.mark.parametrize("length", [1, 128, 300, 513])
@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_every_reader_reads_stores_of_plain_and_compressed_chunks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, codec: str, length: int
) -> None:
    """Two of three chunks are plain."""
    (tmp_path / "plain_writer.py").write_text(WRITER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(writer_pool, "WRITER", "plain_writer")
    stores, path = kit.Store(8 << 20), tmp_path / "a.zarr"
    values = stores.write(path, ARRAYS, length, 5, codec=codec)
    assert stores.shutdown() and verify_store(path) == []
    capture = open_capture(path, timeout=0)
    assert capture.complete and capture.attrs["codec"] == codec
    for spec in ARRAYS:
        for got in (capture.array(spec.name)[:], *others(path, spec)):
            np.testing.assert_array_equal(kit.bits(got), values[spec.name].reshape(got.shape))


def others(path: Path, spec: ArraySpec) -> list[np.ndarray]:
    """The array as tensorstore reads it, and as zarr-python does, which knows no bfloat16."""
    store = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path / spec.name)}}
    found = [tensorstore.open(store).result().read().result()]
    return found if spec.dtype == "bfloat16" else [*found, np.asarray(zarr.open_array(path / spec.name, mode="r")[:])]


def test_plain_is_quicker_where_cores_are_the_limit_and_not_where_the_disk_is() -> None:
    costs = Costs()
    assert not costs.plain_is_quicker(), "nothing is known"
    costs.add(False, 100 * MB, 66 * MB, encoding_s=0.15, writing_s=0.03)
    assert costs.plain_is_quicker()
    costs.add(True, 100 * MB, 100 * MB, encoding_s=0.01, writing_s=0.05)
    assert costs.plain_is_quicker()
    costs.add(True, MB, MB, encoding_s=9.0, writing_s=0.0005)
    assert costs.plain_is_quicker(), "the writer had to give way for a while"
    for _ in range(20):  # the page cache is full: the disk itself takes 100 MB/s of this writer
        costs.add(True, 100 * MB, 100 * MB, encoding_s=0.01, writing_s=1.0)
    assert not costs.plain_is_quicker()
    for _ in range(20):
        costs.add(False, 100 * MB, 66 * MB, encoding_s=0.15, writing_s=0.03)
    assert costs.plain_is_quicker(), "what was long ago counts for little"


def test_where_nothing_shrinks_plain_is_quicker_on_any_disk() -> None:
    costs = Costs()
    costs.add(False, 100 * MB, 100 * MB, encoding_s=0.15, writing_s=9.0)
    assert costs.plain_is_quicker()


@pytest.mark.parametrize("always", [False, True])
def test_writers_are_behind_while_most_of_the_ring_waits(tmp_path: Path, always: bool) -> None:
    """The writer is stopped, so all that is sent waits. The ring has room for 15 chunks."""
    stores = kit.Store(16 * TAKEN, settings=WriteSettings(always_compress=always))
    record = stores.open(tmp_path / "a.zarr", WIDE, segment=1024, codec="zstd")
    process = stores.pool.processes[0]
    assert process.ready.wait(kit.PATIENCE)
    rows = {"mlp_post": kit.random_bits(WIDE, 14 * CHUNK)}
    pace = Pace(os.dup(stores.pool._pace.fd))
    os.kill(process.pid, signal.SIGSTOP)
    try:
        seen = []
        for first in range(0, 14 * CHUNK, CHUNK):
            stores.put(record, rows, first, CHUNK)
            seen.append(pace.behind)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert seen == [not always and number >= 12 for number in range(1, 15)]
    kit.until(lambda: stores.ring.used == 0)
    assert not pace.behind
    pace.close()
    stores.close(record, 14 * CHUNK)
    assert stores.shutdown() and verify_store(tmp_path / "a.zarr") == []


@pytest.mark.parametrize("behind", [False, True])
def test_a_writer_looks_before_each_chunk_whether_it_is_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, behind: bool
) -> None:
    monkeypatch.setattr(Costs, "plain_is_quicker", lambda self: True)
    pace: Any = SimpleNamespace(rest=lambda *_: None, behind=behind)
    ring = np.zeros(CHUNK_BYTES, "u1")
    writer = Writer(ring, lambda answer: None, FileCache(4), pace)
    layout = PayloadLayout((WIDE,), CHUNK, CHUNK, "zstd")
    writer.handle({"type": "layout", "number": 0, "layout": layout.to_json()})
    writer.handle(
        {"type": "open", "id": 1, "partial": str(tmp_path), "layout": 0, "arrays": [0], "about": None, "leads": True}
    )
    where = {"id": 1, "seq": 0, "offset": 0, "first": 0, "count": CHUNK, "generated": True, "sent": 0.0}
    writer.handle({"type": "chunk", **where})
    stored = (tmp_path / "mlp_post/c/0/0/0").stat().st_size
    assert stored >= 4 * CHUNK * 1024 if behind else stored < 5000


def test_what_a_chunk_costs_is_measured(tmp_path: Path) -> None:
    costs = Costs()
    arrays = ArrayWriter(str(tmp_path), PayloadLayout((WIDE,), CHUNK, CHUNK, "zstd"), [0], FileCache(4), costs=costs)
    arrays.chunk(kit.random_bits(WIDE, CHUNK).view("u1").ravel(), 0, CHUNK)
    packed = costs._compression
    assert packed.took == CHUNK * WIDE.token_bytes > packed.gave > 0 and packed.seconds > 0
    assert costs._writing.took == packed.gave and costs._writing.seconds > 0


def test_the_option_reaches_the_writers() -> None:
    for value in (False, True):
        options = ServerOptions.parse({"store_dir": "/x", "always_compress": value})
        assert write_settings(options, 0, gpu=True).always_compress is value
