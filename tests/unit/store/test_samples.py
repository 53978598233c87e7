# SPDX-License-Identifier: Apache-2.0
"""Per-sample rows after the end: an engine may sample once more before it learns that a request has ended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dmi_connector.captures.capture import open_capture
from dmi_connector.layout import ArraySpec, PayloadLayout
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.arrays.array_writer import ArrayWriter
from dmi_connector.store.write.arrays.shard_writer import FileCache
from tests import storekit as kit

Q = ArraySpec("q", "float32", (0,), 4)
LOGITS = ArraySpec("logits", "float32", (), 33, per_sample=True)


@pytest.mark.parametrize("samples", [0, 1, 5, 63, 64, 65])
def test_a_surplus_sample_is_left_out(tmp_path: Path, samples: int) -> None:
    stores = kit.Store(1 << 20, writers=1)
    values = {"q": kit.random_bits(Q, 8), "logits": kit.random_bits(LOGITS, samples + 1)}
    path = tmp_path / "a.zarr"
    record = stores.open(path, Q, LOGITS, attrs={"prompt_len": 4})
    stores.feed(record, values, 8)
    for i in range(samples + 1):
        stores.put_rows(record, "logits", values["logits"][i : i + 1], i, 3 + i)
    stores.close(record, 8, {"logits": samples})
    assert stores.shutdown(kit.PATIENCE)
    assert verify_store(path) == []
    capture = open_capture(path, timeout=0)
    assert capture.complete, capture.reason
    assert capture.logits_positions.tolist() == [3 + i for i in range(samples)]
    np.testing.assert_array_equal(kit.bits(capture.array("logits")[:]), values["logits"][:samples])


@pytest.mark.parametrize("again", [62, 63, 64])
def test_a_sample_that_comes_again_takes_the_place_of_the_first(tmp_path: Path, again: int) -> None:
    """An engine that drops a step samples its positions again, even if their file was already full."""
    count = 80
    stores = kit.Store(1 << 20, writers=1)
    values = {"q": kit.random_bits(Q, 90), "logits": kit.random_bits(LOGITS, count + 2)}
    path = tmp_path / "a.zarr"
    record = stores.open(path, Q, LOGITS, attrs={"prompt_len": 4})
    stores.feed(record, values, 90)
    order = [*range(again + 1), *range(again - 1, count)]
    for at, i in enumerate(order):
        stores.put_rows(record, "logits", values["logits"][at : at + 1], i, 3 + i)
    stores.close(record, 90, {"logits": count})
    assert stores.shutdown(kit.PATIENCE) and verify_store(path) == []
    capture = open_capture(path, timeout=0)
    assert capture.logits_positions.tolist() == [3 + i for i in range(count)]
    newest = {i: at for at, i in enumerate(order)}
    expected = values["logits"][[newest[i] for i in range(count)]]
    np.testing.assert_array_equal(kit.bits(capture.array("logits")[:]), expected)


def test_verify_finds_damage_in_a_surplus_sample(tmp_path: Path) -> None:
    """It is in the shard, and is checked like other samples."""
    stores = kit.Store(1 << 20, writers=1)
    values = {"q": kit.random_bits(Q, 8), "logits": kit.random_bits(LOGITS, 3)}
    path = tmp_path / "a.zarr"
    record = stores.open(path, Q, LOGITS, attrs={"prompt_len": 4})
    stores.feed(record, values, 8)
    stores.put_rows(record, "logits", values["logits"], 0, 3)
    stores.close(record, 8, {"logits": 2})
    assert stores.shutdown(kit.PATIENCE) and verify_store(path) == []
    shard = path / "logits/c/0/0"
    data = bytearray(shard.read_bytes())
    data[2 * (33 * 4 + 4) + 7] ^= 16
    shard.write_bytes(data)
    assert [(p.where, p.what) for p in verify_store(path)] == [("logits/c/0/0", "the chunk does not match its crc32c")]


def test_a_missing_sample_makes_the_capture_incomplete(tmp_path: Path) -> None:
    stores = kit.Store(1 << 20, writers=1)
    values = {"q": kit.random_bits(Q, 8), "logits": kit.random_bits(LOGITS, 1)}
    path = tmp_path / "a.zarr"
    record = stores.open(path, Q, LOGITS, attrs={"prompt_len": 4})
    stores.feed(record, values, 8)
    stores.put_rows(record, "logits", values["logits"], 0, 3)
    stores.close(record, 8, {"logits": 2})
    assert stores.shutdown(kit.PATIENCE)
    capture = open_capture(path, timeout=0, allow_incomplete=True)
    assert not capture.complete and "logits" in str(capture.reason)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sample_that_one_rank_lacks_is_recorded(tmp_path: Path, rank: int) -> None:
    """Rank 0 stores the position -1 for the lost sample. Other ranks store no positions, so they report all rows."""
    spec = ArraySpec("logits", "float32", (), 6, 2, rank)
    writer = ArrayWriter(str(tmp_path), PayloadLayout((spec,), codec="none"), [0], FileCache(16))
    for sample in (0, 2):
        writer.rows(np.zeros(12, "u1"), "logits", sample, [5 + sample])
    writer.close(10, {"logits": 3})
    [loss] = writer.losses
    assert (loss.rows, "1 of 3 samples" in loss.words) == (((0, 10),) if rank else (), True)
