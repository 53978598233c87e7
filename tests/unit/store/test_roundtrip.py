# SPDX-License-Identifier: Apache-2.0
"""Stored values are read unchanged: every codec, dtype and edge length, with every reader."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore

from dmi_connector.captures.capture import open_capture
from dmi_connector.codecs import CODECS
from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.settings import ServerOptions
from dmi_connector.store.read.verify import verify_dir, verify_store
from dmi_connector.store.write.child_process import Child
from dmi_connector.store.write.ring import Extent
from dmi_connector.store.write.settings import WriteSettings
from tests import storekit as kit

LENGTHS = (0, 1, 127, 128, 129, 255, 256, 257, 300, 512, 513)
ALL = (
    ArraySpec("q", "bfloat16", (0, 1, 2), 24),
    ArraySpec("embed", "float32", (), 8),
    ArraySpec("ln1", "float16", (1,), 3),
    ArraySpec("topk_ids", "int32", (0, 2), 2),
    ArraySpec("codes", "int8", (0, 1), 5),
    ArraySpec("flags", "uint8", (0,), 1),
    ArraySpec("logits", "float32", (), 33, per_sample=True),
)


@pytest.fixture(scope="module")
def stores() -> Iterator[kit.Store]:
    p = kit.Store(8 << 20, writers=2)
    yield p
    assert p.shutdown(kit.PATIENCE)
    assert p.ring.used == 0


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("codec", CODECS)
def test_every_dtype_and_length_reads_as_it_was_written(
    stores: kit.Store, tmp_path: Path, codec: str, length: int
) -> None:
    samples = {0: 0, 1: 1, 300: 130}.get(length, 64)
    path = tmp_path / "a.zarr"
    values = stores.write(path, ALL, length, samples, codec=codec)
    assert verify_store(path) == []
    cap = open_capture(path, timeout=0)
    assert cap.complete and cap.missing == [] and cap.prompt_len == length // 2
    assert cap.token_ids.dtype == np.int32 and cap.token_ids.tolist() == [i % 97 for i in range(length)]
    assert cap.positions.tolist() == list(range(length))
    assert cap.phase.tolist() == [int(i >= length // 2) for i in range(length)]
    for spec in ALL:
        got = cap.array(spec.name)[:]
        assert str(got.dtype) == spec.dtype
        np.testing.assert_array_equal(kit.bits(got), values[spec.name].reshape(got.shape))
    expected = kit.to_float(values["q"], "bfloat16")
    assert cap.numpy("q").dtype == np.float32
    np.testing.assert_array_equal(cap.numpy("q"), expected)
    np.testing.assert_array_equal(cap.numpy("q", layer=1, tokens=slice(0, 100)), expected[1, :100])
    np.testing.assert_array_equal(cap.numpy("embed"), values["embed"][0].view("f4"))
    np.testing.assert_array_equal(cap.numpy("logits"), values["logits"].view("f4"))
    assert cap.logits_positions.tolist() == list(range(length // 2, length // 2 + samples))


def test_a_short_store_is_not_padded(stores: kit.Store, tmp_path: Path) -> None:
    stores.write(tmp_path / "a.zarr", ALL[:1], 50, codec="none")
    cap = open_capture(tmp_path / "a.zarr", timeout=0)
    assert cap.attrs["chunk_tokens"] == cap.attrs["segment_tokens"] == 50
    size = (tmp_path / "a.zarr/q/c/0/0/0").stat().st_size
    assert size == 3 * (50 * 24 * 2 + 4) + 3 * 16 + 4


@pytest.mark.parametrize(("gpu", "policy"), [(True, "block"), (True, "drop"), (False, "block")])
def test_writers_run_at_the_priority_that_gpu_and_policy_ask_for(gpu: bool, policy: str, tmp_path: Path) -> None:
    from dmi_connector.engine.sizing import write_settings

    settings = write_settings(ServerOptions.parse({"store_dir": str(tmp_path), "policy": policy}), 0, gpu)
    p = kit.Store(1 << 20, settings=settings)
    try:
        (writer,) = p.pool.processes
        assert writer.ready.wait(600)
        assert os.getpriority(os.PRIO_PROCESS, writer.pid) == min(19, os.nice(0) + (19 if gpu else 5))
        assert os.sched_getscheduler(writer.pid) == (
            os.SCHED_IDLE if gpu and policy == "block" else os.sched_getscheduler(0)
        )
    finally:
        p.shutdown()


def test_a_full_disk_is_listed_once_and_other_errors_with_their_file(tmp_path: Path) -> None:
    from dmi_connector.store.write.arrays.array_writer import ArrayWriter
    from dmi_connector.store.write.arrays.shard_writer import FileCache

    writer = ArrayWriter(str(tmp_path), PayloadLayout(ALL), [], FileCache(4))
    for first, path in ((0, "q/c/0/0/0"), (128, "k/c/0/0/0")):
        writer.failed(OSError(28, "No space left on device", path), (first, first + 128))
        writer.failed(PermissionError(13, "Permission denied", path))
    assert [(loss.words, loss.rows) for loss in writer.losses] == [
        ("OSError: [Errno 28] No space left on device", ((0, 128), (128, 256))),
        ("PermissionError: [Errno 13] Permission denied: 'q/c/0/0/0'", ()),
        ("PermissionError: [Errno 13] Permission denied: 'k/c/0/0/0'", ()),
    ]


def test_a_writer_that_may_not_use_sched_idle_warns_and_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dmi_connector.store.write import writer

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    writer._only_idle_time()
    assert "the scheduling class SCHED_IDLE cannot be set: [Errno 1]" in capsys.readouterr().err


def test_writers_are_paced_only_on_a_gpu_with_policy_block() -> None:
    from dmi_connector.engine.sizing import write_settings

    def share(gpu: bool, policy: str) -> float:
        options = ServerOptions.parse({"store_dir": "/x", "policy": policy})
        return write_settings(options, 0, gpu).least_share

    assert share(True, "block") == 0.05
    assert {share(True, "drop"), share(False, "block"), share(False, "drop")} == {1.0}


def test_a_store_written_with_fsync_is_sound(tmp_path: Path) -> None:
    p = kit.Store(1 << 20, settings=WriteSettings(fsync=True))
    p.write(tmp_path / "a.zarr", ALL, 300, 3)
    assert p.shutdown(kit.PATIENCE) and verify_store(tmp_path / "a.zarr") == []


def test_torch_tensors_have_the_stored_dtype(stores: kit.Store, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    values = stores.write(tmp_path / "a.zarr", ALL, 20, 2)
    cap = open_capture(tmp_path / "a.zarr", timeout=0)
    tensor = cap.torch("q", layer=-1, tokens=[3, 1])
    assert tensor.dtype == torch.bfloat16 and tuple(tensor.shape) == (2, 24)
    np.testing.assert_array_equal(tensor.view(torch.int16).numpy().view("u2"), values["q"][2, [3, 1]])
    assert cap.torch("embed").dtype == torch.float32 and cap.torch("topk_ids").dtype == torch.int32


def test_tensorstore_reads_all_arrays(stores: kit.Store, tmp_path: Path) -> None:
    for codec in ("none", "lz4", "zstd"):
        path = tmp_path / f"{codec}.zarr"
        values = stores.write(path, ALL, 300, 70, codec=codec)
        for spec in ALL:
            kvstore = {"driver": "file", "path": str(path / spec.name)}
            array = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()
            got = array.read().result()
            assert str(got.dtype) == spec.dtype
            np.testing.assert_array_equal(kit.bits(got), values[spec.name].reshape(got.shape))


def test_plain_zarr_reads_a_store_in_a_fresh_interpreter(stores: kit.Store, tmp_path: Path) -> None:
    """zarr knows bfloat16 only through an installed entry point, so the test writes the metadata of one."""
    values = stores.write(tmp_path / "a.zarr", ALL[:2], 300)
    values["q"].tofile(tmp_path / "expected.bin")
    info = tmp_path / "site" / "dmi_probe-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dmi_probe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[zarr.buffer]\nx = dmi_connector.store.format.zarr_bfloat16:RegisteredBuffer\n"
    )
    script = (
        "import sys, numpy as np, zarr\n"
        "got = zarr.open(sys.argv[1])['q'][:]\n"
        "assert str(got.dtype) == 'bfloat16', got.dtype\n"
        "assert np.array_equal(got.view('u2').ravel(), np.fromfile(sys.argv[2], 'u2'))\n"
        "assert zarr.open_group(sys.argv[1], mode='r')['embed'][:].dtype == 'float32'\n"
        # The path of an array works after a group was opened, because zarr loads no entry point for an array alone.
        "assert zarr.open(sys.argv[1] + '/q').dtype == got.dtype\n"
        "assert 'torch' not in sys.modules and 'vllm' not in sys.modules\n"
    )
    root = Path(__file__).resolve().parents[3]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{root}"}
    command = [sys.executable, "-c", script, str(tmp_path / "a.zarr"), str(tmp_path / "expected.bin")]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


TP = (
    ArraySpec("z", "bfloat16", (0, 1), 16, shards=2),
    ArraySpec("resid_pre", "float32", (0, 1), 6),
    ArraySpec("mlp_post", "float32", (1,), 4, shards=2),
)
PARTS = ArraySpec("ln1", "bfloat16", (0, 2, 3), 10, shards=2, part_layers=2)


@pytest.mark.parametrize("length", [0, 1, 128, 300])
def test_the_slices_of_two_ranks_read_as_one_array(stores: kit.Store, tmp_path: Path, length: int) -> None:
    other = kit.Store(1 << 20, settings=WriteSettings())
    specs = (*TP, PARTS)
    values = {s.name: kit.random_bits(s, length) for s in specs}
    stores.write(
        tmp_path / "a.zarr",
        kit.shard_specs(specs, 2, 0),
        length,
        values=values,
        ranks=2,
        wait=False,
    )
    other.write(tmp_path / "a.zarr", kit.shard_specs(specs, 2, 1), length, values=values, ranks=2, rank=1)
    assert stores.flush(kit.PATIENCE) and other.shutdown(kit.PATIENCE)
    assert verify_dir(tmp_path) == []
    cap = open_capture(tmp_path / "a.zarr", timeout=0)
    for spec in specs:
        np.testing.assert_array_equal(cap.numpy(spec.name), kit.to_float(values[spec.name], spec.dtype))
    assert not list((tmp_path / "a.zarr").glob(".rank*"))


@pytest.mark.parametrize(("length", "first"), [(40, 0), (300, 0), (300, 1)])
def test_a_rank_may_write_several_runs_of_the_layers(
    stores: kit.Store, tmp_path: Path, length: int, first: int
) -> None:
    """Ranks have ranges of layers of equal length. If a request selects fewer layers, a rank may write several ranges.

    first: the rank that writes the first range.
    """
    runs = [replace(PARTS, shards=3, part_layers=1, rank=rank) for rank in range(3)]
    other, values = kit.Store(), {PARTS.name: kit.random_bits(PARTS, length)}
    mine, theirs = (runs[:1], runs[1:]) if first == 0 else (runs[1:], runs[:1])
    stores.write(tmp_path / "a.zarr", mine, length, values=values, ranks=2, wait=False)
    other.write(tmp_path / "a.zarr", theirs, length, values=values, ranks=2, rank=1)
    assert stores.flush(kit.PATIENCE) and other.shutdown(kit.PATIENCE)
    assert verify_dir(tmp_path) == []
    cap = open_capture(tmp_path / "a.zarr", timeout=0)
    np.testing.assert_array_equal(cap.numpy("ln1"), kit.to_float(values["ln1"], "bfloat16"))
    np.testing.assert_array_equal(cap.numpy("ln1", 2), kit.to_float(values["ln1"][1], "bfloat16"))


@pytest.mark.parametrize("length", [0, 40, 300])
def test_a_hook_that_another_rank_writes_whole_is_in_the_store(stores: kit.Store, tmp_path: Path, length: int) -> None:
    z, resid, mlp = TP
    other, values = kit.Store(), {s.name: kit.random_bits(s, length) for s in TP}
    mine = {"values": values, "ranks": 2, "wait": False, "elsewhere": [resid]}
    stores.write(tmp_path / "a.zarr", [z, mlp], length, **mine)
    halves = [replace(z, rank=1), replace(mlp, rank=1)]
    other.write(tmp_path / "a.zarr", [*halves, resid], length, values=values, ranks=2, rank=1)
    assert stores.flush(kit.PATIENCE) and other.shutdown(kit.PATIENCE)
    assert verify_dir(tmp_path) == []
    cap = open_capture(tmp_path / "a.zarr", timeout=0)
    assert list(cap.attrs["hooks"]) == ["resid_pre", "z", "mlp_post"]
    for spec in TP:
        np.testing.assert_array_equal(cap.numpy(spec.name), kit.to_float(values[spec.name], spec.dtype))


def test_hooks_of_a_rank_that_never_finishes_are_named(tmp_path: Path) -> None:
    z, resid, _ = TP
    alone = kit.Store(settings=WriteSettings(rank_timeout=0.5))
    alone.write(tmp_path / "a.zarr", [z], 200, ranks=2, elsewhere=[resid])
    assert alone.shutdown(kit.PATIENCE)
    cap = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    assert list(cap.attrs["hooks"]) == ["z"] and "resid_pre" in str(cap.reason) and cap.missing == [[0, 200]]
    assert verify_store(tmp_path / "a.zarr") == []


def test_a_rank_that_never_finishes_makes_all_rows_missing(tmp_path: Path) -> None:
    alone = kit.Store(1 << 20, settings=WriteSettings(rank_timeout=0.5))
    alone.write(tmp_path / "a.zarr", kit.shard_specs(TP, 2, 0), 200, ranks=2)
    assert alone.shutdown(kit.PATIENCE)
    cap = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    assert not cap.complete and "ranks [1] did not finish" in str(cap.reason) and cap.missing == [[0, 200]]
    assert verify_store(tmp_path / "a.zarr") == []


def test_arrays_of_one_capture_are_spread_over_writers(
    stores: kit.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmi_connector.store.write.coordinator.writer_pool.SPREAD_BYTES", 1)
    record = stores.open(tmp_path / "b.zarr", *ALL)
    assert len({a.process for a in record.assignments}) == 2
    stores.abort(record)
    assert stores.flush(kit.PATIENCE) and not (tmp_path / "b.zarr.partial").exists()
    values = stores.write(tmp_path / "a.zarr", ALL, 300, 5)
    assert verify_store(tmp_path / "a.zarr") == []
    cap = open_capture(tmp_path / "a.zarr", timeout=0)
    np.testing.assert_array_equal(cap.numpy("q"), kit.to_float(values["q"], "bfloat16"))


@pytest.mark.parametrize("end", ["closed", "aborted", "killed"])
def test_the_load_of_a_writer_ends_with_its_captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Later captures then go to the writer with the least load."""
    monkeypatch.setattr("dmi_connector.store.write.coordinator.writer_pool.SPREAD_BYTES", 1)
    p = kit.Store(8 << 20, writers=2)
    try:
        record = p.open(tmp_path / "a.zarr", *ALL)
        assert sorted(p.pool.loads) == sorted(a.load for a in record.assignments)
        assert sum(p.pool.loads) == sum(spec.token_bytes for spec in ALL) and min(p.pool.loads) > 0
        if end == "killed":
            for process in p.pool.processes:
                process.process.kill()
        (p.abort if end == "aborted" else lambda record: p.close(record, 0, {"logits": 0}))(record)
        assert p.flush(kit.PATIENCE)
        assert p.pool.loads == [0, 0]
    finally:
        p.shutdown()


def test_only_one_writer_is_sent_the_token_ids_of_a_chunk(
    stores: kit.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journal has the token ids and the facts of the capture."""
    monkeypatch.setattr("dmi_connector.store.write.coordinator.writer_pool.SPREAD_BYTES", 1)
    sent: list[dict[str, Any]] = []
    post = Child.post
    monkeypatch.setattr(Child, "post", lambda child, message: (sent.append(message), post(child, message))[1])
    stores.write(tmp_path / "a.zarr", ALL, 200, 1)
    chunks = [(m["first"], "token_ids" in m) for m in sent if m["type"] == "chunk"]
    assert chunks == [(0, True), (0, False), (128, True), (128, False)]
    assert sorted(m["about"] is None for m in sent if m["type"] == "open") == [False, True]
    assert [m["generated"] for m in sent if m["type"] == "chunk"] == [True] * 4, (
        "each chunk must count as generated: each has rows after the 100 tokens of the prompt"
    )


def test_captures_that_share_an_extent_may_send_chunks_out_of_order(stores: kit.Store, tmp_path: Path) -> None:
    spec = ArraySpec("q", "float32", (0,), 4)
    values = kit.random_bits(spec, 256)
    records = [stores.open(tmp_path / f"{i}.zarr", spec) for i in range(2)]
    rows = np.arange(256, dtype="<i4")
    headers = np.stack([rows, rows], axis=1)
    half = 128 * (spec.token_bytes + 8)

    def send(extent: Extent) -> None:
        for record in records:
            stores.captures.chunk(record, extent, 128, 128, half)
            stores.captures.chunk(record, extent, 0, 128)
            stores.close(record, 256)

    parts = [values[:, :128], headers[:128], values[:, 128:], headers[128:]]
    kit.with_extent(stores.ring, parts, send)
    assert stores.flush(kit.PATIENCE)
    for i in range(2):
        np.testing.assert_array_equal(kit.bits(open_capture(tmp_path / f"{i}.zarr").numpy("q")), values)
    assert verify_dir(tmp_path) == []


def test_a_short_chunk_is_padded_with_zeros() -> None:
    from numcodecs import blosc

    from dmi_connector.store.write.arrays.shard_writer import encode

    rng = np.random.default_rng(0)
    for count in (3, 7, 1, 5, 5):  # one after the other, through the same memory
        chunk = rng.integers(1, 9, (count, 6), dtype="u2")
        whole = np.frombuffer(blosc.decompress(encode(chunk, "lz4", 8).body), "u2").reshape(8, 6)
        np.testing.assert_array_equal(whole, np.concatenate([chunk, np.zeros((8 - count, 6), "u2")]))


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_the_padding_of_a_last_chunk_takes_no_disk_space(stores: kit.Store, tmp_path: Path, codec: str) -> None:
    wide, path = ArraySpec("mlp_post", "bfloat16", (0, 1), 1024), tmp_path / "a.zarr"
    values = stores.write(path, (wide,), 130, 0, codec=codec)
    assert verify_store(path) == []
    np.testing.assert_array_equal(kit.bits(open_capture(path, timeout=0).array("mlp_post")[:]), values["mlp_post"])
    found = os.stat(path / "mlp_post/c/0/0/0")
    stored = 130 * wide.token_bytes
    if codec == "none":
        assert found.st_size > 256 * wide.token_bytes
    assert found.st_blocks * 512 < stored + (16 << 10), "two layers must have one hole each, and pages around it"


def test_holes_are_zeros_after_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dmi_connector.store.format.checksum import crc32c
    from dmi_connector.store.write.arrays.shard_writer import FileCache, ShardWriter, encode

    write, rows = os.pwritev, np.arange(1, 1 + 2 * 40000, dtype="u2").reshape(2, 40000)
    writer = ShardWriter(str(tmp_path / "shard"), (1, 2), FileCache(4))

    def full_disk(fd: int, views: list[memoryview], at: int) -> int:
        write(fd, [b"rubbish!" * 40000], at)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full_disk)
        with pytest.raises(OSError, match="No space left"):
            writer.append([(0, 0)], [encode(rows, "none")])
    encoded = encode(rows[:1], "none", 2)
    assert encoded.zeros == 80000 and writer.append([(0, 1)], [encoded]) == encoded.nbytes
    size, content = writer.close()
    data = (tmp_path / "shard").read_bytes()
    whole = np.concatenate([rows[:1], np.zeros_like(rows[:1])]).tobytes()
    crc = crc32c(whole).to_bytes(4, "little")
    assert data[: len(whole) + 4] == whole + crc
    assert (len(data), crc + data[-36:-4]) == (size, content)


@pytest.mark.parametrize("fault", ["the disk is full at the second write", "the third chunk cannot be encoded"])
def test_an_append_that_fails_halfway_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    from dmi_connector.store.format.checksum import crc32c
    from dmi_connector.store.format.shard_index import read_index
    from dmi_connector.store.write.arrays import shard_writer as shard
    from dmi_connector.store.write.arrays.shard_writer import Encoded, FileCache, ShardWriter, encode

    monkeypatch.setattr(shard, "_WRITE_BYTES", 500_000)
    rows = np.arange(3 * 300_000, dtype="u2").reshape(3, 1, 300_000)  # each chunk is written by itself
    writer = ShardWriter(str(tmp_path / "shard"), (1, 2, 3), FileCache(4))
    assert writer.append([(0, 0, 0)], [encode(rows[2], "none")]) == 600_004
    slots, write, writes = [(0, 1, i) for i in range(3)], os.pwritev, []

    def full_disk(fd: int, views: list[memoryview], at: int) -> int:
        writes.append(at)
        if len(writes) == 2:
            raise OSError(28, "No space left on device")
        return write(fd, views, at)

    def chunks(broken: bool) -> Iterator[Encoded]:
        for i, chunk in enumerate(rows):
            if broken and i == 2:
                raise ValueError("encoder")
            yield encode(chunk, "none")

    with monkeypatch.context() as patch:
        if "disk" in fault:
            patch.setattr(os, "pwritev", full_disk)
        with pytest.raises((OSError, ValueError), match=r"No space left|encoder"):
            writer.append(slots, chunks("encoded" in fault))
    assert (tmp_path / "shard").stat().st_size > 600_004, "bytes must be written before the failure"
    assert writer.append(slots[:1], [encode(rows[0], "none")]) == 600_004
    size, content = writer.close()
    data = (tmp_path / "shard").read_bytes()
    crcs = [crc32c(rows[i].tobytes()).to_bytes(4, "little") for i in (2, 0)]
    assert (len(data), b"".join(crcs) + data[-100:-4]) == (size, content)
    index = read_index(data[-100:], (1, 2, 3)).astype("i8")
    assert index[..., 0].tolist() == [[[0, -1, -1], [600_004, -1, -1]]]
    assert data[:600_000] == rows[2].tobytes() and data[600_004:1_200_004] == rows[0].tobytes()


def test_the_checksum_is_that_of_rfc_3720() -> None:
    from dmi_connector.store.format.checksum import crc32c

    assert crc32c(bytes(32)) == 0x8A9136AA and crc32c(bytes([255]) * 32) == 0x62A8AB43
    assert crc32c(np.arange(32, dtype=np.uint8)) == crc32c(bytes(range(20, 32)), crc32c(bytes(range(20)))) == 0x46DD794E


@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (5, 0), (1, 1), (1000, 77777), (3, 1 << 20)])
def test_checksums_of_two_parts_join_to_that_of_the_whole(sizes: tuple[int, int]) -> None:
    from dmi_connector.store.format.checksum import crc32c, crc32c_join

    a, b = (np.random.default_rng(n).bytes(n) for n in sizes)
    assert crc32c_join(crc32c(a), crc32c(b), len(b)) == crc32c(a + b)


def test_arrays_are_given_to_the_least_loaded_writers() -> None:
    from dmi_connector.store.write.coordinator.writer_pool import assign

    arrays = [ArraySpec(name, "float32", (0,), width) for name, width in (("a", 100), ("b", 40), ("c", 30), ("d", 20))]
    loads = [0, 0]
    assert assign(arrays, loads, spread=True) == {0: [0], 1: [1, 2, 3]} and loads == [400, 360]
    assert assign(arrays, loads, spread=False) == {1: [0, 1, 2, 3]} and loads == [400, 1120]
    assert assign([], loads, spread=True) == {0: []}


def test_bfloat16_is_made_of_its_own_dtype_alone() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    from dmi_connector.store.format.zarr_bfloat16 import BFloat16, DataTypeValidationError

    assert BFloat16.from_native_dtype(np.dtype(ml_dtypes.bfloat16)) == BFloat16()
    for other in ("float16", "uint16", "float32"):
        with pytest.raises(DataTypeValidationError, match=f"Invalid data type: {other}. Expected bfloat16"):
            BFloat16.from_native_dtype(np.dtype(other))
