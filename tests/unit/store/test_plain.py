# SPDX-License-Identifier: Apache-2.0
"""Writers that are behind leave chunks uncompressed if that is faster. All readers support these chunks."""

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

from dmi_connector.captures.capture import open_capture
from dmi_connector.codecs.blosc_frame import plain_header
from dmi_connector.engine.sizing import write_settings
from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.settings import ServerOptions
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.arrays.array_writer import ArrayWriter
from dmi_connector.store.write.arrays.plain import Costs
from dmi_connector.store.write.arrays.shard_writer import FileCache, encode
from dmi_connector.store.write.coordinator import writer_pool
from dmi_connector.store.write.pace import Pace
from dmi_connector.store.write.settings import WriteSettings
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
    ArraySpec("mlp_post", "float16", (0, 1), 512),
    ArraySpec("logits", "float32", (), 33, per_sample=True),
)
"""Arrays of the stores. The zeros after 44 rows of `mlp_post` are a hole in the file."""
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
    """Two of three chunks are uncompressed."""
    monkeypatch.setattr(writer_pool, "WRITER", "tests.plainwriter")
    stores, path = kit.Store(8 << 20), tmp_path / "a.zarr"
    values = stores.write(path, ARRAYS, length, 5, codec=codec)
    assert stores.shutdown() and verify_store(path) == []
    chunk = min(length, 128) * 512 * 2
    frame = plain_header(2, chunk)
    shards = [file.read_bytes() for file in (path / "mlp_post").rglob("0") if file.is_file()]
    assert any(frame in shard for shard in shards)
    assert length < 300 or any(shard.count(frame) < 2 * -(-length // 128) for shard in shards)
    capture = open_capture(path, timeout=0)
    assert capture.complete and capture.attrs["codec"] == codec
    for spec in ARRAYS:
        for got in (capture.array(spec.name)[:], *others(path, spec)):
            np.testing.assert_array_equal(kit.bits(got), values[spec.name].reshape(got.shape))


def others(path: Path, spec: ArraySpec) -> list[np.ndarray]:
    """The array read by tensorstore, and by zarr-python unless it is bfloat16, which it does not support."""
    store = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path / spec.name)}}
    found = [tensorstore.open(store).result().read().result()]
    return found if spec.dtype == "bfloat16" else [*found, np.asarray(zarr.open_array(path / spec.name, mode="r")[:])]


class Machine:
    """A simulated writer that follows its `Costs`. Speeds are in MB/s of raw bytes, and for `writes` of stored
    bytes.
    """

    def __init__(self, compresses: float, writes: float, ratio: float = 0.66) -> None:
        self.costs, self.compresses, self.writes, self.ratio = Costs(), compresses, writes, ratio

    def run(self, chunks: int, mb: int = 4) -> float:
        """Write chunks while the writer is behind. Returns the share of uncompressed ones."""
        count = 0
        for _ in range(chunks):
            plain = self.costs.plain_next()
            ratio, seconds = (1.0, 0.0) if plain else (self.ratio, mb / self.compresses)
            self.costs.add(plain, mb * MB, int(ratio * mb * MB), seconds, ratio * mb / self.writes)
            count += plain
        return count / chunks


def test_chunks_are_plain_where_cores_are_the_limit_and_not_where_the_disk_is() -> None:
    assert Machine(600, 2000).run(640) > 0.95
    assert Machine(600, 100).run(640) == 0
    assert Machine(600, 100, ratio=1.0).run(640) > 0.95, "chunks that do not shrink must stay uncompressed"


def test_a_writer_that_stays_behind_notices_that_the_limit_is_another_one() -> None:
    machine = Machine(600, 2000)
    assert machine.run(640) > 0.95
    machine.writes = 100  # the page cache is full
    machine.run(640)
    assert machine.run(640) == 0
    machine.writes = 2000
    machine.run(640)
    assert machine.run(640) > 0.95


@pytest.mark.parametrize("seconds", [9.0, 0.0])
def test_one_outlier_of_either_measure_is_recovered_from(seconds: float) -> None:
    """A writer may give way to the engine for a while, or its first arrays may be too small to measure costs."""
    slow_disk, fast_disk = Machine(600, 100), Machine(600, 2000)
    for machine in (slow_disk, fast_disk):
        machine.run(10)
        machine.costs.add(False, 4096, 2048, seconds, writing_s=seconds)
        machine.costs.add(True, 4096, 4096, seconds, writing_s=0.0)
        machine.run(6400)
    assert slow_disk.run(640) == 0 and fast_disk.run(640) > 0.95


def test_nothing_is_plain_before_some_megabytes_were_compressed() -> None:
    costs = Costs()
    costs.add(False, MB, MB, encoding_s=1.0, writing_s=0.001)
    assert not any(costs.plain_next() for _ in range(100))
    costs.add(False, 3 * MB, 3 * MB, encoding_s=1.0, writing_s=0.001)
    assert [costs.plain_next() for _ in range(64)] == ([True] * 31 + [False]) * 2, (
        "one chunk in 32 must be compressed as a measurement"
    )


def test_a_file_system_that_writes_at_the_end_of_a_file_counts_as_slow() -> None:
    machine = Machine(600, 2000)
    shares = []
    for _ in range(100):
        shares.append(machine.run(8))
        machine.costs.add_writing(8 * 4 / 100)
    assert shares[-20:] == [0] * 20


@pytest.mark.parametrize("always", [False, True])
def test_writers_are_behind_while_most_of_the_ring_waits(tmp_path: Path, always: bool) -> None:
    """The writer is stopped, so all sent chunks wait. The ring has room for 15 chunks."""
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
    monkeypatch.setattr(Costs, "plain_next", lambda self: True)
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


def test_the_cost_of_a_chunk_is_measured(tmp_path: Path) -> None:
    costs = Costs()
    arrays = ArrayWriter(str(tmp_path), PayloadLayout((WIDE,), CHUNK, CHUNK, "zstd"), [0], FileCache(4), costs=costs)
    arrays.chunk(kit.random_bits(WIDE, CHUNK).view("u1").ravel(), 0, CHUNK)
    packed = costs._compression
    assert costs._compressed == CHUNK * WIDE.token_bytes
    assert packed.took > packed.gave > 0 and packed.seconds > 0
    assert costs._writing.took > 0 and costs._writing.seconds > 0
    logits = np.zeros((2, 33), "f4")
    samples = ArrayWriter(
        str(tmp_path), PayloadLayout((ARRAYS[-1],), CHUNK, CHUNK, "zstd"), [0], FileCache(4), costs=costs
    )
    samples.rows(logits.view("u1").ravel(), "logits", 0, [5, 6])
    assert costs._compressed == CHUNK * WIDE.token_bytes + logits.nbytes


@pytest.mark.parametrize("option", [{}, {"always_compress": True}, {"fsync": True}, {"upload": "s3://bucket/a"}])
def test_writers_always_compress_where_that_is_asked_and_where_more_than_the_write_takes_time(option: Any) -> None:
    options = ServerOptions.parse({"store_dir": "/x", **option})
    for rank in (0, 1):
        assert write_settings(options, rank, gpu=True).always_compress is bool(option)
