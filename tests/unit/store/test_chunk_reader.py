# SPDX-License-Identifier: Apache-2.0
"""Direct reads of shard files equal those of zarr-python, in any order. Damage is reported with its file."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.format.shard_index import index_bytes, read_index
from dmi_connector.store.read.files import thread_pool
from dmi_connector.store.read.files.thread_pool import in_threads, read_threads, set_read_threads
from tests import storekit as kit

ARRAYS = (
    ArraySpec("resid_pre", "bfloat16", (0, 2, 3), 16, shards=2, part_layers=2),
    ArraySpec("k", "float16", (1, 2), 6, shards=2),
    ArraySpec("z", "float32", (0, 1), 4),
    ArraySpec("topk_ids", "int32", (0, 1), 2),
    ArraySpec("embed", "bfloat16", (), 16),
    ArraySpec("logits", "float32", (), 10),
)
LENGTH, SAMPLES = 300, 70


def write(path: Path, codec: str, skip: tuple[int, ...] = (), length: int = LENGTH) -> kit.Values:
    """Write a store of ARRAYS from two ranks, without the chunks that begin at `skip`. Returns its values."""
    values = {s.name: kit.random_bits(s, SAMPLES if s.per_sample else length) for s in ARRAYS}
    parts = [kit.Store(4 << 20) for _ in range(2)]
    names = {"chunk": 32, "segment": 128, "codec": codec, "ranks": 2, "attrs": {"num_layers": 4}}
    losses = [Loss.of(Cause.FELL_BEHIND, [[n, min(n + 32, length)] for n in skip])] if skip else []
    try:
        records = [
            part.open(path, *kit.shard_specs(ARRAYS, 2, rank), rank=rank, **names) for rank, part in enumerate(parts)
        ]
        for part, record in zip(parts, records, strict=True):
            part.feed(record, values, length, skip)
        for i in range(SAMPLES):
            parts[0].put_rows(records[0], "logits", values["logits"][i : i + 1], i, 5 + i)
        for rank in (1, 0):
            parts[rank].close(records[rank], length, {} if rank else {"logits": SAMPLES}, losses=losses)
        for part in parts:
            assert part.flush(kit.PATIENCE)
    finally:
        for part in parts:
            part.shutdown()
    return values


@pytest.fixture(scope="module", params=["none", "lz4", "zstd"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Capture, kit.Values]:
    path = tmp_path_factory.mktemp("chunks") / "a.zarr"
    values = write(path, request.param)
    return open_capture(path, timeout=0), values


@pytest.fixture
def one_thread() -> Iterator[None]:
    set_read_threads(1)
    yield
    set_read_threads(None)


def test_every_array_reads_as_it_was_written_and_as_zarr_reads_it(written: tuple[Capture, kit.Values]) -> None:
    capture, values = written
    for spec in ARRAYS:
        expected = kit.to_float(values[spec.name], spec.dtype)
        expected = expected[0] if spec.name == "embed" else expected
        found = capture.numpy(spec.name)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        by_zarr = capture.array(spec.name)[:]
        kept = capture.numpy(spec.name, convert=False)
        assert kept.dtype == by_zarr.dtype
        np.testing.assert_array_equal(kit.bits(kept), kit.bits(by_zarr[0] if spec.name == "embed" else by_zarr))
        assert capture.shape(spec.name) == found.shape


def test_one_thread_reads_the_same(written: tuple[Capture, kit.Values], one_thread: None) -> None:
    capture, values = written
    np.testing.assert_array_equal(capture.numpy("resid_pre"), kit.to_float(values["resid_pre"], "bfloat16"))


@given(
    start=st.integers(-LENGTH - 5, LENGTH + 5),
    stop=st.integers(-LENGTH - 5, LENGTH + 5),
    step=st.sampled_from([None, 1, 2, 7, -1, -3]),
    name=st.sampled_from(["resid_pre", "k", "embed"]),
)
def test_a_slice_of_tokens_is_that_of_the_whole(
    written: tuple[Capture, kit.Values], start: int, stop: int, step: int | None, name: str
) -> None:
    capture, values = written
    spec = next(s for s in ARRAYS if s.name == name)
    expected = kit.to_float(values[name], spec.dtype)[:, start:stop:step]
    found = capture.numpy(name, tokens=slice(start, stop, step))
    np.testing.assert_array_equal(found, expected[0] if name == "embed" else expected)


@given(rows=st.lists(st.integers(-LENGTH, LENGTH - 1), max_size=60), layer=st.sampled_from([None, 0, 2, 3, -1]))
def test_tokens_in_any_order_are_those_of_the_whole(
    written: tuple[Capture, kit.Values], rows: list[int], layer: int | None
) -> None:
    capture, values = written
    expected = kit.to_float(values["resid_pre"], "bfloat16")[:, np.array(rows, np.int64)]
    index = None if layer is None else [0, 2, 3].index(layer % 4)
    for convert in (True, False):
        found = capture.numpy("resid_pre", layer, rows, convert).astype(np.float32)
        np.testing.assert_array_equal(found, expected if index is None else expected[index])


def test_a_mask_picks_tokens_and_one_of_another_length_is_refused(written: tuple[Capture, kit.Values]) -> None:
    capture, values = written
    mask = np.arange(LENGTH) % 3 == 0
    np.testing.assert_array_equal(capture.numpy("z", 1, mask), kit.to_float(values["z"], "float32")[1, mask])
    with pytest.raises(IndexError, match=r"has 300 rows, the mask of tokens has shape \(5,\)"):
        capture.numpy("z", 1, np.ones(5, bool))


@pytest.mark.parametrize("row", [LENGTH, -LENGTH - 1])
def test_a_row_that_does_not_exist_is_refused(written: tuple[Capture, kit.Values], row: int) -> None:
    with pytest.raises(IndexError, match=f"resid_pre has 300 rows, row {row} does not exist"):
        written[0].numpy("resid_pre", 0, [0, row])
    with pytest.raises(IndexError, match=f"resid_pre has no row {row}.5; give integers, a slice or a mask"):
        written[0].numpy("resid_pre", 0, [row + (0.5 if row > 0 else -0.5)])


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_missing_chunks_of_an_incomplete_store_read_as_zeros(codec: str, tmp_path: Path) -> None:
    values = write(tmp_path / "a.zarr", codec, skip=(32, 128, 160, 192, 224))
    capture = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    expected = kit.to_float(values["k"], "float16")
    expected[:, 32:64], expected[:, 128:256] = 0, 0
    assert not (tmp_path / "a.zarr/k/c/0/1/0").exists(), "a whole shard must be missing"
    np.testing.assert_array_equal(capture.numpy("k"), expected)
    np.testing.assert_array_equal(capture.numpy("k", tokens=[250, 40, 3]), expected[:, [250, 40, 3]])


# ---- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_flipped_bit_is_an_error_that_names_the_file(codec: str, tmp_path: Path) -> None:
    write(tmp_path / "a.zarr", codec)
    capture = open_capture(tmp_path / "a.zarr", timeout=0)
    flip(tmp_path / "a.zarr/resid_pre/c/0/1/0", 10)
    np.testing.assert_array_equal(capture.numpy("resid_pre", tokens=slice(0, 128)).shape, (3, 128, 16))
    for tokens in (None, [130]):
        with pytest.raises(ValueError, match=r"a\.zarr/resid_pre/c/0/1/0: the chunk does not match its crc32c; dmi"):
            capture.numpy("resid_pre", tokens=tokens)


def test_a_damaged_index_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    write(tmp_path / "a.zarr", "none")
    flip(tmp_path / "a.zarr/k/c/0/0/1", -6)
    with pytest.raises(ValueError, match=r"k/c/0/0/1: shard index does not match its crc32c"):
        open_capture(tmp_path / "a.zarr", timeout=0).numpy("k")


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("offset", [2**63 - 1, 2**64 - 2])
def test_an_offset_that_no_file_has_is_an_error_that_names_the_file(offset: int, codec: str, tmp_path: Path) -> None:
    """The index has a valid checksum, four chunks and two layers."""
    write(tmp_path / "a.zarr", codec)
    path = tmp_path / "a.zarr/z/c/0/0/0"
    data = path.read_bytes()
    index = read_index(data[-132:], (2, 4)).copy()
    index[..., 0] = offset
    path.write_bytes(data[:-132] + index_bytes(index))
    for tokens in (None, [3]):
        with pytest.raises(ValueError, match="z/c/0/0/0: "):
            open_capture(tmp_path / "a.zarr", timeout=0).numpy("z", tokens=tokens)


def test_a_shard_that_a_complete_store_lacks_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.zarr", "none")
    capture = open_capture(tmp_path / "a.zarr", timeout=0)
    os.unlink(tmp_path / "a.zarr/z/c/0/2/0")
    assert capture.numpy("z", tokens=slice(0, 256)).shape == (2, 256, 4)
    with pytest.raises(FileNotFoundError, match=r"z/c/0/2/0 does not exist"):
        capture.numpy("z")


def test_a_shard_of_another_store_is_not_a_memory_error(tmp_path: Path) -> None:
    """Chunks have another size and valid checksums."""
    write(tmp_path / "a.zarr", "zstd")
    write(tmp_path / "b.zarr", "none")
    capture = open_capture(tmp_path / "a.zarr", timeout=0)
    (tmp_path / "a.zarr/z/c/0/0/0").write_bytes((tmp_path / "b.zarr/z/c/0/0/0").read_bytes())
    with pytest.raises(
        ValueError, match=r"z/c/0/0/0: the chunk (cannot be decompressed \(it has \d+ bytes, not 512\)|at byte)"
    ):
        capture.numpy("z")


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_the_first_error_in_a_thread_is_raised() -> None:
    def work(item: int) -> None:
        if item == 3:
            raise ValueError("three")

    with pytest.raises(ValueError, match="three"):
        in_threads(work, range(8))


def test_threads_can_be_set_and_must_be_one_or_more() -> None:
    set_read_threads(3)
    assert read_threads() == 3
    set_read_threads(None)
    assert read_threads() == len(os.sched_getaffinity(0))
    with pytest.raises(ValueError, match="threads 0 is not valid"):
        set_read_threads(0)


def test_threads_can_be_set_while_another_thread_reads() -> None:
    pool = thread_pool._Pool("dmi-test", 2)
    executor = pool.executor()  # another thread is using it
    pool.resize(3)
    assert list(executor.map(abs, [-1, -2])) == [1, 2]
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("dmi-test")}
    assert threads and pool.executor() is not executor
    del executor
    for thread in threads:
        thread.join(kit.PATIENCE)
        assert not thread.is_alive()


def test_a_forked_process_reads_with_threads_of_its_own(written: tuple[Capture, kit.Values]) -> None:
    capture, values = written
    set_read_threads(2)
    try:
        in_threads(lambda _: None, range(4))  # start the threads of the pool
        assert thread_pool._pool._executor is not None
        child = os.fork()
        if child == 0:
            right = np.array_equal(capture.numpy("z"), kit.to_float(values["z"], "float32"))
            in_threads(lambda _: None, range(4))
            os._exit(0 if right else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        set_read_threads(None)


def test_reading_imports_neither_zarr_nor_any_extra(tmp_path: Path) -> None:
    write(tmp_path / "a.zarr", "zstd")
    code = (
        "import sys; from dmi_connector import open_captures\n"
        f"[c.numpy('z') for c in open_captures({str(tmp_path)!r})]\n"
        "found = {'zarr', 'xarray', 'dask', 'pandas', 'polars', 'torch', 'vllm', 'tqdm'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
