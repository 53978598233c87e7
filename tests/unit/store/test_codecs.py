# SPDX-License-Identifier: Apache-2.0
"""Codecs: each fulfils its contract, and a codec that is added to the table works everywhere."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr

from dmi_connector.captures.capture import open_capture
from dmi_connector.codecs import CODECS, Codec, zarr_names
from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.settings import ServerOptions
from dmi_connector.store.format import schema
from dmi_connector.store.read import metadata
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.arrays.array_writer import ArrayWriter
from dmi_connector.store.write.arrays.plain import Costs
from dmi_connector.store.write.arrays.shard_writer import FileCache, encode
from dmi_connector.store.write.coordinator import writer_pool
from dmi_connector.store.write.finish.repair import repair
from tests import storekit as kit
from tests.gzipcodec import GZIP

LENGTH, SAMPLES = 300, 5
DOCS = Path(__file__).parents[3] / "docs"
ARRAYS = (
    ArraySpec("q", "float32", (0, 1, 2), 24),
    ArraySpec("topk_ids", "int32", (0, 2), 2),
    ArraySpec("codes", "int8", (0, 1), 5),
    ArraySpec("logits", "float32", (), 33, per_sample=True),
)
WRITER = """
from dmi_connector.codecs import CODECS
from dmi_connector.store.write import pace, writer
from dmi_connector.store.write.arrays import plain
from tests.gzipcodec import GZIP

CODECS["gzip"] = GZIP
plain.Costs.plain_next = lambda self: True
pace.Pace.behind = property(lambda self: True)
writer.main()
"""
"""A writer that is always behind, and knows the added codec."""


@pytest.fixture(scope="module")
def added() -> Iterator[None]:
    """Adds a codec to the table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CODECS, "gzip", GZIP)
        yield


@pytest.fixture(scope="module")
def written(added: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, kit.Values]:
    """A store with codec gzip, from a writer process that is behind, and its values."""
    root = tmp_path_factory.mktemp("gzip")
    (root / "gzip_writer.py").write_text(WRITER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{root}:{os.environ.get('PYTHONPATH', '')}")
        patch.setattr(writer_pool, "WRITER", "gzip_writer")
        stores = kit.Store(4 << 20)
        values = stores.write(root / "a.zarr", ARRAYS, LENGTH, SAMPLES, codec="gzip")
        assert stores.shutdown()
    return root / "a.zarr", values


# ---- each codec ---------------------------------------------------------------------------------------------------


def decoded(codec: Codec, body: bytes, nbytes: int) -> bytes:
    out = np.empty(nbytes, np.uint8)
    codec.decode(np.frombuffer(body, np.uint8), out)
    return out.tobytes()


@pytest.mark.parametrize("codec", [*CODECS.values(), GZIP], ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8"])
@pytest.mark.parametrize("rows", [1, 16, 200])
def test_a_codec_decodes_what_it_encoded_and_refuses_other_lengths(codec: Codec, dtype: str, rows: int) -> None:
    chunk = np.arange(rows * 7).astype(dtype).reshape(rows, 7)
    body, nbytes = bytes(codec.encode(chunk)), chunk.nbytes
    assert decoded(codec, body, nbytes) == chunk.tobytes()
    plain = [codec.plain_head(chunk.itemsize, nbytes) + chunk.tobytes()] if codec.has_plain else []
    for stored in (body, *plain):
        assert decoded(codec, stored, nbytes) == chunk.tobytes()
        for wrong in (nbytes - 1, nbytes + 1, 2 * nbytes):
            with pytest.raises(ValueError, match=f"it has {nbytes} bytes, not {wrong}"):
                decoded(codec, stored, wrong)
        with pytest.raises(ValueError):
            decoded(codec, stored[: len(stored) // 2], nbytes)


@pytest.mark.parametrize(
    "codec", [*filter(lambda c: c.compresses, CODECS.values()), GZIP], ids=lambda codec: codec.name
)
def test_a_codec_decodes_no_garbage(codec: Codec) -> None:
    with pytest.raises(ValueError):
        decoded(codec, bytes(range(200)), 200)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_frame_that_lies_about_its_own_length_is_refused(codec: str) -> None:
    frame = bytearray(CODECS[codec].encode(np.arange(256, dtype="u2").reshape(2, 128)))
    frame[12] ^= 1
    with pytest.raises(ValueError, match=rf"it has \d+ bytes, not {len(frame)}"):
        decoded(CODECS[codec], bytes(frame), 512)


def test_codecs_of_one_zarr_codec_decode_each_others_chunks() -> None:
    """A reader identifies the codec of a chunk by the name in the metadata."""
    chunk = np.arange(700, dtype="u2").reshape(100, 7)
    for one in CODECS.values():
        for other in CODECS.values():
            if one.zarr_name == other.zarr_name:
                assert decoded(one, bytes(other.encode(chunk)), chunk.nbytes) == chunk.tobytes()


def test_the_docs_name_each_codec() -> None:
    """FORMAT.md and CAPTURING.md name the codecs. OPERATIONS.md names the Zarr codecs that metadata may have."""
    stored = (DOCS / "FORMAT.md").read_text().split("## 3. Codecs")[1].split("\n## ")[0]
    assert [name for name in CODECS if f"| `{name}` |" not in stored] == []
    [option] = [line for line in (DOCS / "CAPTURING.md").read_text().splitlines() if line.startswith("| `codec` |")]
    assert [name for name in CODECS if f'`"{name}"`' not in option] == []
    [allowed] = re.findall(r"codecs (`bytes`.*?)\. ", (DOCS / "OPERATIONS.md").read_text())
    assert set(re.findall(r"`(\w+)`", allowed)) == {"bytes", "crc32c", "sharding_indexed", *zarr_names()}


# ---- a codec that is added to the table -----------------------------------------------------------------------------


def test_options_and_metadata_know_an_added_codec(added: None) -> None:
    assert ServerOptions.parse({"store_dir": "/x", "codec": "gzip"}).codec == "gzip"
    found = schema.inner_codecs("gzip", 2, 100)
    assert [codec["name"] for codec in found] == ["bytes", "gzip", "crc32c"]


def test_a_chunk_of_a_codec_without_plain_ones_is_compressed_even_when_behind(added: None) -> None:
    chunk = np.zeros((3, 400), "u2")
    found = encode(chunk, "gzip", 5, plain=True)
    assert not found.head and not found.zeros
    assert decoded(GZIP, bytes(found.body), 5 * 800) == bytes(5 * 800)


def test_every_reader_reads_an_added_codec_that_a_writer_behind_wrote(written: tuple[Path, kit.Values]) -> None:
    path, values = written
    assert verify_store(path) == []
    capture = open_capture(path, timeout=0)
    assert capture.complete and capture.attrs["codec"] == "gzip"
    for spec in ARRAYS:
        own, plain = capture.numpy(spec.name), zarr.open_array(path / spec.name, mode="r")[:]
        for got in (own, capture.array(spec.name)[:], np.asarray(plain)):
            np.testing.assert_array_equal(kit.bits(got), values[spec.name].reshape(got.shape), spec.name)
    some = capture.numpy("q", 1, [299, 3, 130])
    np.testing.assert_array_equal(kit.bits(some), values["q"][1, [299, 3, 130]])


def test_verify_finds_a_flipped_bit_in_a_chunk_of_an_added_codec(
    written: tuple[Path, kit.Values], tmp_path: Path
) -> None:
    path = shutil.copytree(written[0], tmp_path / "a.zarr")
    shard = path / "q/c/0/0/0"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    assert [problem.what for problem in verify_store(path)] == ["the chunk does not match its crc32c in q/c/0/0/0"]


def test_a_cut_store_of_an_added_codec_is_repaired(added: None, tmp_path: Path) -> None:
    """Its writer died after three chunks. The file system lost the end of the last chunk."""
    spec, final = ARRAYS[0], tmp_path / "a.zarr"
    values = kit.random_bits(spec, 48)
    about = {"request_id": "r", "key": "k", "created": "2025-11-21T04:28:32+00:00", "rank": 0, "ranks": 1}
    about |= {"arrays": [spec.to_json()], "attrs": {"prompt_len": 10, "start": 0, "model": "tiny"}}
    layout = PayloadLayout((spec,), 16, 64, "gzip")
    arrays = ArrayWriter(f"{final}.partial", layout, [0], FileCache(4), about, costs=Costs())
    for first in (0, 16, 32):
        rows = np.ascontiguousarray(values[:, first : first + 16])
        arrays.chunk(rows.view("u1").ravel(), first, 16, np.arange(first, first + 16, dtype="<i4").tobytes())
    arrays.release()
    shard = tmp_path / "a.zarr.partial/q/c/0/0/0"
    os.truncate(shard, shard.stat().st_size - 1)
    (outcome,) = repair(tmp_path)
    assert (outcome.state, outcome.missing) == ("salvaged", [[32, 48]])
    assert verify_store(final) == []
    capture = open_capture(final, timeout=0, allow_incomplete=True)
    np.testing.assert_array_equal(kit.bits(capture.numpy("q", tokens=slice(0, 32))), values[:, :32])


def test_a_store_cannot_name_a_codec_outside_the_table(
    written: tuple[Path, kit.Values], monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata._checked.cache_clear()
    monkeypatch.delitem(CODECS, "gzip")
    with pytest.raises(ValueError, match=r"the metadata of array 'q' has the codec .*gzip.*; this format has bytes"):
        open_capture(written[0], timeout=0)
    assert {problem.where for problem in verify_store(written[0])} == {spec.name for spec in ARRAYS}
