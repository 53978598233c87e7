# SPDX-License-Identifier: Apache-2.0
"""`open_capture(path, follow=True)`: rows of a capture that is still being written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dmi_connector import CaptureFailed, open_capture
from dmi_connector.captures.followed import _held
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce import parse
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.read.hook_names import Source
from dmi_connector.store.read.partial import PartialStore
from tests import storekit as kit

Q = ArraySpec("q", "float32", (0, 2), 8)
RESID = ArraySpec("resid_pre", "bfloat16", (1, 2), 16)
LOGITS = ArraySpec("logits", "float32", (), 33)
IDS = (np.arange(400) * 7 % 97).astype("<i4")


@pytest.fixture(scope="module")
def store() -> Iterator[kit.Store]:
    made = kit.Store(writers=2)
    yield made
    assert made.shutdown()


def never() -> None:
    raise AssertionError("there is nothing to wait for")


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_rows_come_while_they_are_written(store: kit.Store, tmp_path: Path, codec: str) -> None:
    path = tmp_path / "a.zarr"
    values = {spec.name: kit.random_bits(spec, 300) for spec in (Q, RESID)}
    record = store.open(path, Q, RESID, codec=codec)
    with open_capture(path, kit.PATIENCE, follow=True) as cap:
        assert (cap.complete, cap.layers["q"], cap.prompt_len) == (None, [0, 2], 10) and "resid_pre" in cap
        one, every = cap.follow("resid_pre@2"), cap.follow(["q", "token_ids", "positions", "phase"])
        expected = {"resid_pre": kit.to_float(values["resid_pre"], "bfloat16"), "q": values["q"].view("f4")}
        for first in (0, 128):
            store.put(record, values, first, 128, IDS)
            at, rows = next(one)
            assert at == first and np.array_equal(rows, expected["resid_pre"][1, at : at + 128])
            at, many = next(every)
            assert at == first and np.array_equal(many["q"], expected["q"][:, at : at + 128])
            assert np.array_equal(many["token_ids"], IDS[at : at + 128])
            assert np.array_equal(many["positions"], np.arange(at, at + 128))
            assert np.array_equal(many["phase"], np.arange(at, at + 128) >= 10)
        assert cap.complete is None
        store.put(record, values, 256, 44, IDS)
        store.close(record, 300, ids=IDS[:300])
        (last,) = one
        assert last[0] == 256 and np.array_equal(last[1], expected["resid_pre"][1, 256:])
        ((at, many),) = every
        assert at == 256 and np.array_equal(many["q"], expected["q"][:, 256:])
        assert np.array_equal(many["token_ids"], IDS[256:300])
        assert (cap.complete, cap.reason, cap.missing) == (True, None, [])
        assert cap.finished is not None and np.array_equal(cap.finished.numpy("q"), expected["q"])
        again = [rows for _, rows in cap.follow("q@0", pause=never)]
        assert np.array_equal(np.concatenate(again), expected["q"][0])


def test_an_incomplete_capture_says_so_and_lost_rows_are_left_out(store: kit.Store, tmp_path: Path) -> None:
    path, values = tmp_path / "a.zarr", {"q": kit.random_bits(Q, 400)}
    record = store.open(path, Q)
    cap = open_capture(path, kit.PATIENCE, follow=True)
    rows = cap.follow("q@2")
    store.put(record, values, 0, 128)
    assert next(rows)[0] == 0
    store.put(record, values, 256, 128)  # rows 128 to 255 are lost
    store.close(record, 384, losses=[Loss.of(Cause.FELL_BEHIND, [[128, 256]])])
    found = list(rows)
    assert [(at, len(part)) for at, part in found] == [(256, 128)]
    assert np.array_equal(found[0][1], values["q"].view("f4")[1, 256:384])
    assert (cap.complete, cap.missing) == (False, [[128, 256]]) and "fell behind" in str(cap.reason)
    cap.close()


def test_rows_of_other_tokens_are_never_given(store: kit.Store, tmp_path: Path) -> None:
    path, values = tmp_path / "a.zarr", {"q": kit.random_bits(Q, 384)}
    record = store.open(path, Q)
    cap = open_capture(path, kit.PATIENCE, follow=True)
    store.put(record, values, 0, 128)
    store.put(record, values, 128, 128, positions=np.arange(5, 133))
    store.put(record, values, 256, 128)
    partial, source = PartialStore(path), Source(0, "q", 0)

    def last() -> np.ndarray | None:
        partial.refresh()
        return partial.rows([source], 256)

    kit.until(lambda: last() is not None)
    assert partial.rows([source], 128) is None and partial.token_ids(128) is None
    rows = cap.follow("q@0")
    assert next(rows)[0] == 0
    store.close(record, 384)
    assert [at for at, _ in rows] == [256] and cap.complete is False and cap.missing == [[128, 256]]
    cap.close()


def test_ranks_and_layers_of_ranks_are_joined(store: kit.Store, tmp_path: Path) -> None:
    path, values = tmp_path / "a.zarr", {}
    columns, parts = ArraySpec("q", "float32", (0, 2), 8, shards=2), ArraySpec("resid_pre", "float32", (0, 1, 2), 4)
    parts = replace(parts, shards=2, part_layers=2)
    values = {spec.name: kit.random_bits(spec, 128) for spec in (columns, parts)}
    records = []
    for rank in (0, 1):
        mine = [replace(columns, rank=rank), replace(parts, rank=rank)]
        records.append(store.open(path, *mine, rank=rank, ranks=2))
    cap = open_capture(path, kit.PATIENCE, follow=True)
    for record in records:
        store.put(record, values, 0, 128)
    _, rows = next(cap.follow(["q", "resid_pre", "resid_pre@2"]))
    assert np.array_equal(rows["q"], values["q"].view("f4"))
    assert np.array_equal(rows["resid_pre"], values["resid_pre"].view("f4"))
    assert np.array_equal(rows["resid_pre@2"], values["resid_pre"].view("f4")[2])
    for record in records:
        store.abort(record)


def test_a_short_capture_and_reduced_rows(store: kit.Store, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    reduction = parse("int8")
    assert reduction is not None
    real = np.random.default_rng(0).standard_normal((2, 20, 32)).astype("f4")
    stored = np.stack([reduction.encode(torch.tensor(rows)).numpy() for rows in real])
    settings = {**reduction.settings(), "dtype": "float32", "width": 32}
    spec = ArraySpec("q", str(stored.dtype), (0, 2), stored.shape[-1], reduce=settings)
    record = store.open(tmp_path / "a.zarr", spec)
    cap = open_capture(tmp_path / "a.zarr", kit.PATIENCE, follow=True)
    store.put(record, {"q": stored}, 0, 20)
    _, rows = next(cap.follow("q"))
    assert np.abs(rows - real).max() < 0.05
    store.close(record, 20)
    (live,) = cap.follow("q")
    assert np.array_equal(live[1], rows) and cap.complete
    cap.close()


def test_logits_that_may_be_computed_again_are_not_followed_yet(store: kit.Store, tmp_path: Path) -> None:
    values = kit.random_bits(LOGITS, 80)
    record = store.open(tmp_path / "a.zarr", Q, LOGITS)
    cap = open_capture(tmp_path / "a.zarr", kit.PATIENCE, follow=True)
    rows = cap.follow("logits")
    for i in range(20):
        store.put_rows(record, "logits", values[i : i + 1], i, 10 + i)
    found = next(rows)
    got = [found]
    while got[-1][0] + len(got[-1][1]) < 12:
        got.append(next(rows))
    assert got[-1][0] + len(got[-1][1]) == 12, "the last eight samples may be replaced"
    for i in range(20, 80):
        store.put_rows(record, "logits", values[i : i + 1], i, 10 + i)
    store.put(record, {"q": kit.random_bits(Q, 100)}, 0, 100)
    store.close(record, 100, {"logits": 80})
    got += list(rows)
    assert np.array_equal(np.concatenate([part for _, part in got]), values.view("f4"))
    with pytest.raises(ValueError, match="follow them alone"):
        cap.follow(["logits", "token_ids"])
    cap.close()


NAMES = {
    "resid_pre": True,
    "resid_pre@2": True,
    "resid_post@1": True,
    "resid_pre@0": False,
    "resid_pre@x": False,
    "v": False,
    "blocks.2.hook_resid_pre": True,
    "blocks.0.hook_resid_pre": False,
    "blocks.0.attn.hook_q": False,
    "blocks.0.hook_nothing": False,
}
"""{name: whether a store of q in layers 0, 2 and resid_pre in layers 1, 2 has rows of this name}."""


def test_a_name_is_in_a_followed_capture_if_its_rows_can_be_followed(store: kit.Store, tmp_path: Path) -> None:
    record = store.open(tmp_path / "a.zarr", Q, RESID)
    values = {spec.name: kit.random_bits(spec, 100) for spec in (Q, RESID)}
    with open_capture(tmp_path / "a.zarr", kit.PATIENCE, follow=True) as cap:
        for ended in (False, True):
            assert {name: name in cap for name in NAMES} == NAMES and 3 not in cap
            for name, held in NAMES.items():
                if held:
                    cap.follow(name)
                else:
                    with pytest.raises((KeyError, ValueError)):
                        cap.follow(name)
            if not ended:
                rows = cap.follow("resid_pre@2")
                store.put(record, values, 0, 100)
                store.close(record, 100)
                assert len(list(rows)) == 1
        assert cap.finished is not None and {name: name in cap.finished for name in NAMES} == NAMES


def test_following_raises_for_aborts_bad_names_and_timeouts(store: kit.Store, tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    record = store.open(path, Q)
    cap = open_capture(path, kit.PATIENCE, follow=True)
    rows = cap.follow("q@0")
    store.put(record, {"q": kit.random_bits(Q, 128)}, 0, 128)
    assert next(rows)[0] == 0
    store.abort(record)
    with pytest.raises(CaptureFailed, match="aborted"):
        next(rows)
    with pytest.raises(KeyError, match="hook 'v' is not in this store"):
        cap.follow("v")
    with pytest.raises(ValueError, match="names no hook"):
        cap.follow([])
    with pytest.raises(TimeoutError):
        open_capture(tmp_path / "none.zarr", 0, follow=True)
    with pytest.raises(ValueError, match="is a URL; only stores on this machine"):
        open_capture("s3://bucket/a.zarr", 0, follow=True)


def test_a_damaged_chunk_is_an_error_that_names_the_file(store: kit.Store, tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    record = store.open(path, Q)
    cap = open_capture(path, kit.PATIENCE, follow=True)
    store.put(record, {"q": kit.random_bits(Q, 128)}, 0, 128)
    next(cap.follow("q@0"))
    (shard,) = (tmp_path / "a.zarr.partial/q/c").rglob("0/0/0")
    raw = bytearray(shard.read_bytes())
    raw[40] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(ValueError, match="q/c/0/0/0: the chunk does not match its crc32c"):
        next(cap.follow("q@0"))
    store.abort(record)


@pytest.mark.parametrize(("reduction", "kept"), [("int8", True), ("rp(4)", False)])
def test_a_foreign_name_means_values_that_a_projection_does_not_keep(
    store: kit.Store, tmp_path: Path, reduction: str, kept: bool
) -> None:
    torch = pytest.importorskip("torch")
    made = parse(reduction)
    assert made is not None
    stored = made.encode(torch.ones(20, 32)).numpy()[None]
    settings = {**made.settings(), "dtype": "float32", "width": 32}
    spec = ArraySpec("resid_pre", str(stored.dtype), (2,), stored.shape[-1], reduce=settings)
    record = store.open(tmp_path / "a.zarr", spec)
    with open_capture(tmp_path / "a.zarr", kit.PATIENCE, follow=True) as cap:
        name = "blocks.2.hook_resid_pre"
        if kept:
            cap.follow(name)
        else:
            with pytest.raises(ValueError, match="stored as rp, from which this cannot be computed"):
                cap.follow(name)
        assert cap.follow("resid_pre@2")
        store.abort(record)


def test_a_capture_that_has_ended_is_not_waited_for(store: kit.Store, tmp_path: Path) -> None:
    values = {"q": kit.random_bits(Q, 20)}
    record = store.open(tmp_path / "a.zarr", Q)
    with open_capture(tmp_path / "a.zarr", kit.PATIENCE, follow=True) as cap:
        store.put(record, values, 0, 20)
        store.close(record, 20)
        open_capture(tmp_path / "a.zarr", kit.PATIENCE).close()  # the capture has ended now
        rows = [part for _, part in cap.follow("q", pause=never)]
        assert np.array_equal(np.concatenate(rows, 1), values["q"].view("f4"))


def test_the_attributes_are_those_of_the_first_rank(tmp_path: Path) -> None:
    def journal(rank: int) -> SimpleNamespace:
        about = {"rank": rank, "ranks": 2, "attrs": {"of": rank}, "arrays": []}
        return SimpleNamespace(content=SimpleNamespace(about=about, arrays=[]))

    partial = PartialStore(tmp_path / "a.zarr")
    partial._tails = {"1": journal(1)}  # type: ignore[dict-item]
    assert partial.attrs() is None
    partial._tails["0"] = journal(0)  # type: ignore[assignment]
    found = partial.attrs()
    assert found is not None and (found["of"], found["tp"], found["hooks"]) == (0, 2, {})


def test_a_sample_at_position_0_is_held() -> None:
    """A sample whose position is -1 is missing."""
    assert list(_held(np.array([0, 1, -1, 3]))) == [slice(0, 2), slice(3, 4)]
