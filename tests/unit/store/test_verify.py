# SPDX-License-Identifier: Apache-2.0
"""verify finds every kind of damage, and reports where it is."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dmi_connector.cli import verify as verify_command
from dmi_connector.cli.main import main
from dmi_connector.dtypes import numpy_dtype
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce import parse
from dmi_connector.store.format import schema
from dmi_connector.store.format.checksum import crc32c, file_checksum
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.format.schema import INDEX_NAME
from dmi_connector.store.format.shard_index import EMPTY, index_bytes, read_index, shard_content
from dmi_connector.store.read import verify
from dmi_connector.store.read.files import store_files
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.read.verify import damaged_files, verify_dir, verify_store
from dmi_connector.store.write.finish.retention import remove_store
from tests import storekit as kit
from tests.shorter import soak

ARRAYS = (
    ArraySpec("q", "bfloat16", (0, 3), 16),
    ArraySpec("embed", "float32", (), 8),
    ArraySpec("logits", "float32", (), 21, per_sample=True),
)


@pytest.fixture(scope="module")
def stores() -> Iterator[kit.Store]:
    p = kit.Store(4 << 20)
    yield p
    assert p.shutdown(kit.PATIENCE)


@pytest.fixture(scope="module", params=["none", "zstd"])
def sound(request: pytest.FixtureRequest, stores: kit.Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "a.zarr"
    stores.write(path, ARRAYS, 300, 5, codec=request.param)
    assert verify_store(path) == []
    return path


def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "a.zarr"))


@pytest.mark.parametrize("lost", ["zarr.json", "q/c/0/0/0", "token_ids/c/0", "logits/zarr.json"])
def test_a_file_that_the_disk_does_not_give_is_a_problem_of_its_store(
    lost: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abc":
        shutil.copytree(sound, tmp_path / f"{name}.zarr")
    load = store_files.load_file

    def fails(path: Path) -> bytes | np.ndarray | None:
        if path == tmp_path / "b.zarr" / lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO))  # as read(2) of a bad sector
        return load(path)

    monkeypatch.setattr(store_files, "load_file", fails)
    assert main(["verify", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert f"b.zarr: {lost}: the file cannot be read: [Errno 5] Input/output error" in out
    assert out.count(".zarr: sound") == 2 and "3 checked, 1 damaged" in out
    assert all(problem.damage for problem in verify_store(tmp_path / "b.zarr"))


def test_verify_finds_every_flipped_bit(sound: Path, tmp_path: Path) -> None:
    """200 flips over the whole store, and one in each file. No byte of a store is padding. Each run flips other bits;
    DMI_TEST_SEED repeats a run.
    """
    path = copy(sound, tmp_path)
    seed = int(os.environ.get("DMI_TEST_SEED") or secrets.randbits(32))
    print(f"DMI_TEST_SEED={seed}")
    rng = np.random.default_rng(seed)
    files = sorted(p for p in path.rglob("*") if p.is_file())
    sizes = [p.stat().st_size for p in files]
    ends = np.cumsum(sizes)
    flat = [int(x) for x in rng.integers(0, ends[-1], 200)]
    flat += [int(end - 1 - rng.integers(0, size)) for end, size in zip(ends, sizes, strict=True)]
    for at in flat:
        n = int(np.searchsorted(ends, at, side="right"))
        data = bytearray(files[n].read_bytes())
        offset = at - int(ends[n] - sizes[n])
        bit = int(rng.integers(0, 8))
        data[offset] ^= 1 << bit
        original = files[n].read_bytes()
        files[n].write_bytes(data)
        where = f"bit {bit} of byte {offset} of {files[n].relative_to(path)}, DMI_TEST_SEED={seed}"
        assert verify_store(path), f"the flip of {where} was not found"
        files[n].write_bytes(original)
    assert verify_store(path) == []


def test_verify_names_the_tokens_of_a_flipped_bit(sound: Path, tmp_path: Path) -> None:
    path = copy(sound, tmp_path)
    shard = path / "q/c/0/1/0"  # the second shard begins at token 256
    data = bytearray(shard.read_bytes())
    data[5] ^= 4
    shard.write_bytes(data)
    assert "q layer 0 tokens 256 to 299" in [p.where for p in verify_store(path)]


def test_threads_find_what_one_thread_finds(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy(sound, tmp_path)
    for segment in "01":
        shard = path / f"q/c/0/{segment}/0"
        data = bytearray(shard.read_bytes())
        data[5] ^= 4
        shard.write_bytes(data)
    found = verify_store(path)
    assert len(found) == 2 and verify_store(path, threads=4) == found
    assert main(["verify", "--jobs", "4", str(path)]) == 1
    assert capsys.readouterr().out.splitlines() == [*map(str, found), "1 checked, 1 damaged"]


@pytest.mark.parametrize(
    "victim", ["q/c/0/1/0", "q/zarr.json", "token_ids/c/0", "zarr.json", "logits_positions/zarr.json"]
)
def test_verify_finds_a_missing_file(sound: Path, tmp_path: Path, victim: str) -> None:
    path = copy(sound, tmp_path)
    (path / victim).unlink()
    assert any(victim.split("/")[0] in p.where for p in verify_store(path))


def test_verify_finds_files_that_do_not_belong_to_the_store(sound: Path, tmp_path: Path) -> None:
    path = copy(sound, tmp_path)
    (path / "q/c/0/7").mkdir()
    (path / "q/c/0/7/0").write_bytes(b"x")
    assert [p.where for p in verify_dir(tmp_path)] == ["q/c/0/7/0"]
    with pytest.raises(ValueError, match="no finished store"):
        verify_dir(path)


def test_verify_finds_attributes_that_contradict_the_arrays(sound: Path, tmp_path: Path) -> None:
    """The checksum of the attributes is valid."""
    path = copy(sound, tmp_path)
    document = json.loads((path / "zarr.json").read_bytes())
    attrs = document["attributes"]["dmi"]
    attrs["num_tokens"], attrs["prompt_len"] = 299, 20
    attrs["checksum"] = crc32c(schema.canonical(attrs))
    (path / "zarr.json").write_bytes(schema.dump(document))
    where = [p.where for p in verify_store(path)]
    assert {"q", "embed", "token_ids", "positions"} <= set(where)


def test_verify_finds_values_that_are_not_finite(stores: kit.Store, tmp_path: Path) -> None:
    values = {s.name: kit.random_bits(s, 5 if s.per_sample else 300) for s in ARRAYS}
    values["q"][1, 140, 3] = 0x7F80  # +inf
    values["logits"].view("f4")[2, 4] = np.nan
    values["logits"].view("f4")[3, 4] = -np.inf  # a masked token, which is legal
    values["logits"].view("f4")[4, :2] = np.inf
    stores.write(tmp_path / "a.zarr", ARRAYS, 300, 5, values=values)
    problems = verify_store(tmp_path / "a.zarr")
    assert [(p.where, p.what) for p in problems] == [
        ("q layer 3 tokens 128 to 255", "1 values are not finite (the model computed them)"),
        ("logits sample 2", "1 values are not finite (the model computed them)"),
        ("logits sample 4", "2 values are not finite (the model computed them)"),
    ]
    assert (
        not any(p.damage for p in problems)
        and damaged_files(tmp_path / "a.zarr", read_attrs(tmp_path / "a.zarr")) == []
    )


@pytest.mark.parametrize(
    "spec", ["int8", "int8(affine)", "int8(32)", "fp8", "topk(8)", "topk(8,exact)", "rp(8)", "round(7)"]
)
def test_verify_finds_values_of_reduced_hooks_that_are_not_finite(stores: kit.Store, tmp_path: Path, spec: str) -> None:
    """Their bytes are integers, and always finite."""
    import torch

    rows = np.random.default_rng(0).standard_normal((200, 64)).astype("f4")
    rows[150] = np.nan
    reduction = parse(spec)
    assert reduction is not None
    stored = reduction.encode(torch.from_numpy(rows)).numpy()
    settings = {**reduction.settings(), "dtype": "float32", "width": 64}
    array = ArraySpec("q", reduction.stored_dtype("float32"), (2,), stored.shape[1], reduce=settings)
    stores.write(tmp_path / "a.zarr", [array], 200, values={"q": kit.bits(stored[None])})
    [problem] = verify_store(tmp_path / "a.zarr")
    assert problem.where == "q layer 2 tokens 128 to 199" and "values are not finite" in problem.what
    assert not problem.damage


def test_values_that_are_not_finite_hide_no_damage(stores: kit.Store, tmp_path: Path) -> None:
    values = {s.name: kit.random_bits(s, 5 if s.per_sample else 300) for s in ARRAYS}
    values["q"][1, 140, 3] = 0x7F80
    stores.write(tmp_path / "a.zarr", ARRAYS, 300, 5, values=values, codec="none")
    shard = tmp_path / "a.zarr/q/c/0/1/0"
    data = bytearray(shard.read_bytes())
    data[5] ^= 4
    shard.write_bytes(data)
    assert {p.damage for p in verify_store(tmp_path / "a.zarr")} == {True, False}
    assert all(p.damage for p in damaged_files(tmp_path / "a.zarr", read_attrs(tmp_path / "a.zarr")))


def test_sums_are_checked_beside_rows_that_are_not_finite(stores: kit.Store, tmp_path: Path) -> None:
    values = residual_stream("float32", 200)
    specs = [ArraySpec(n, "float32", (0, 1, 2), 32) for n in RESIDUAL]
    values["resid_mid"].view("f4")[1, 140, 3] = np.inf
    values["attn_out"].view("f4")[1, 150, 3] = np.nan
    attrs = {"identities": True, "num_layers": 3}
    stores.write(tmp_path / "a.zarr", specs, 200, values=values, attrs=attrs)
    assert [p.damage for p in verify_store(tmp_path / "a.zarr")] == [False, False]
    values["attn_out"][1, 160, 5] ^= 1 << 24
    stores.write(tmp_path / "b.zarr", specs, 200, values=values, attrs=attrs)
    damage = [p for p in verify_store(tmp_path / "b.zarr") if p.damage]
    assert [p.where for p in damage] == ["resid_mid layer 1 token 160"] and "nan" not in damage[0].what


def test_a_reduction_that_does_not_fit_its_rows_is_a_problem(stores: kit.Store, tmp_path: Path) -> None:
    settings = {"kind": "topk", "k": 8, "exact": True, "sample": 0, "dtype": "float32", "width": 4}
    array = ArraySpec("q", "uint8", (0,), 48, reduce=settings)
    stores.write(tmp_path / "a.zarr", [array], 20)
    [problem] = verify_store(tmp_path / "a.zarr")
    assert "the values cannot be decoded (" in problem.what and problem.damage


def rewrite(store: Path, change: dict[str, bytes], **attrs: object) -> None:
    """Forge files of a store, with matching sizes and checksums, and some root attributes."""
    document = json.loads((store / "zarr.json").read_bytes())
    own = document["attributes"]["dmi"]
    for path, data in change.items():
        (store / path).parent.mkdir(parents=True, exist_ok=True)
        (store / path).write_bytes(data)
        values = data[:-4] if path.endswith("/c/0") and path.count("/") == 2 else data
        own["files"][path] = [len(data), file_checksum(path, values)]
    own |= attrs
    own["checksum"] = crc32c(schema.canonical(own))
    (store / "zarr.json").write_bytes(schema.dump(document))


def plain(values: list[int], dtype: str) -> bytes:
    data = np.array(values, dtype).tobytes()
    return data + crc32c(data).to_bytes(4, "little")


def test_verify_finds_token_arrays_that_contradict_the_attributes(sound: Path, tmp_path: Path) -> None:
    """All checksums are valid."""
    for what, change, attrs, expected in (
        ("start", {}, {"start": 3}, {"positions": "row 0 is position 0, not 3"}),
        ("gap", {"positions/c/0": plain([*range(200), *range(201, 301)], "<i4")}, {}, {"positions": "row 200 is"}),
        ("phase", {"phase/c/0": plain([0] * 151 + [1] * 149, "u1")}, {}, {"phase": "does not change"}),
        ("prompt", {}, {"prompt_len": 151}, {"phase": "from 0 to 1 at prompt_len 151"}),
        ("short", {"token_ids/c/0": plain([1] * 299, "<i4")}, {}, {"token_ids": "it has 299 values for 300 tokens"}),
        ("samples", {"logits_positions/c/0": plain([1] * 4, "<i4")}, {}, {"logits": "does not have 5 values"}),
        (
            "document of samples",
            {"logits_positions/zarr.json": schema.dump(schema.plain_document("int32", 5, "token"))},
            {},
            {"logits": "zarr.json of logits_positions does not describe 5 samples"},
        ),
        (
            "document",
            {"phase/zarr.json": schema.dump(schema.plain_document("uint8", 301, "token"))},
            {},
            {"phase": "does not describe a token array of this length"},
        ),
        ("outside", {"q/c/0/7/0": b"x" * 40}, {}, {"q/c/0/7/0": "the file lies outside its array"}),
        ("unknown", {"x/c/0/0/0": b"x" * 40}, {}, {"x/c/0/0/0": "the file belongs to no array"}),
    ):
        path = Path(shutil.copytree(sound, tmp_path / f"{what}.zarr"))
        rewrite(path, change, **attrs)
        found = {p.where: p.what for p in verify_store(path)}
        assert found.keys() == expected.keys(), (what, found)
        assert all(words in found[where] for where, words in expected.items()), (what, found)


@pytest.mark.parametrize(("name", "value"), [("request_id", "other"), ("key", "k2"), ("created", "2020-01-01")])
def test_verify_compares_a_store_with_the_line_of_its_beginning(
    sound: Path, tmp_path: Path, name: str, value: str
) -> None:
    """Each of the three attributes distinguishes two requests."""
    path = copy(sound, tmp_path)
    shutil.copyfile(sound.parent / INDEX_NAME, tmp_path / INDEX_NAME)
    assert verify_store(path) == []
    own = json.loads((path / "zarr.json").read_bytes())["attributes"]["dmi"][name]
    rewrite(path, {}, **{name: value})
    [found] = verify_dir(tmp_path)
    assert found.where == "zarr.json"
    assert found.what == f"{name} is {value!r}, but the directory's index has {own!r}"
    (tmp_path / INDEX_NAME).unlink()
    assert verify_store(path) == [], "without an index, the difference cannot be found"


# ---- files that changed places ------------------------------------------------------------------------------------

EXCHANGED = (
    ArraySpec("k", "bfloat16", (0, 1), 16),
    ArraySpec("v", "bfloat16", (0, 1), 16),
    ArraySpec("ln1", "bfloat16", (0, 1), 16),
    ArraySpec("embed", "float32", (), 8),
    ArraySpec("logits", "float32", (), 21, per_sample=True),
)
EXCHANGES = {
    "two shards of a hook": ("a", "k/c/0/0/0", "a", "k/c/0/1/0"),
    "two shards of a hook that exists once": ("a", "embed/c/0/0/0", "a", "embed/c/0/1/0"),
    "a shard of two stores": ("a", "k/c/0/0/0", "b", "k/c/0/0/0"),
    "the last shard of two stores": ("a", "v/c/0/2/0", "b", "v/c/0/2/0"),
    "two segments of two stores": ("a", "k/c/0/0/0", "b", "k/c/0/1/0"),
    "two hooks": ("a", "k/c/0/0/0", "a", "v/c/0/0/0"),
    "the last shard of two hooks": ("a", "k/c/0/2/0", "a", "v/c/0/2/0"),
    "two hooks of two stores": ("a", "k/c/0/0/0", "b", "v/c/0/0/0"),
    "all of two hooks": ("a", "k", "a", "v"),
    "the shards of two hooks": ("a", "k/c", "a", "v/c"),
    "a hook of two stores": ("a", "embed", "b", "embed"),
    "a hook of many shards of two stores": ("a", "v", "b", "v"),
    "the metadata of two hooks": ("a", "k/zarr.json", "a", "v/zarr.json"),
    "the metadata of two token arrays": ("a", "token_ids/zarr.json", "a", "phase/zarr.json"),
    "the root documents of two stores": ("a", "zarr.json", "b", "zarr.json"),
    "token ids of two stores": ("a", "token_ids", "b", "token_ids"),
    "the values of token ids of two stores": ("a", "token_ids/c/0", "b", "token_ids/c/0"),
    "token ids and positions": ("a", "token_ids/c/0", "a", "positions/c/0"),
    "token ids and positions with their metadata": ("a", "token_ids", "a", "positions"),
    "two shards of logits": ("a", "logits/c/0/0", "a", "logits/c/1/0"),
    "logits of two stores": ("a", "logits/c/0/0", "b", "logits/c/0/0"),
    "the last logits of two stores": ("a", "logits/c/1/0", "b", "logits/c/1/0"),
    "all logits of two stores": ("a", "logits", "b", "logits"),
    "positions of tokens and of logits": ("a", "positions/c/0", "a", "logits_positions/c/0"),
    "two stores": ("a", "", "b", ""),
}
BETWEEN_RANKS = {
    "the ranks of a segment": ("a", "k/c/0/0/0", "a", "k/c/0/0/1"),
    "the ranks of the last segment": ("a", "v/c/0/2/0", "a", "v/c/0/2/1"),
    "two segments of rank 1": ("a", "k/c/0/0/1", "a", "k/c/0/1/1"),
    "segments of two ranks": ("a", "k/c/0/0/1", "a", "k/c/0/1/0"),
    "rank 1 of two hooks": ("a", "k/c/0/0/1", "a", "v/c/0/0/1"),
    "rank 1 of two stores": ("a", "k/c/0/1/1", "b", "k/c/0/1/1"),
    "two ranks of two stores": ("a", "k/c/0/1/0", "b", "k/c/0/1/1"),
    "all ranks of a segment and the next": ("a", "k/c/0/0", "a", "k/c/0/1"),
    "the layers of two ranks": ("a", "ln1/c/0/0/0", "a", "ln1/c/1/0/0"),
    "all layers of two ranks": ("a", "ln1/c/0", "a", "ln1/c/1"),
}


def make_pair(root: Path, codec: str, tp: int) -> Path:
    """Stores a and b of `tp` ranks. With codec none, corresponding files have the same size."""
    length, samples = 300, 70
    owners = [kit.Store(4 << 20) for _ in range(tp)]
    specs = [replace(s, shards=tp if s.name in ("k", "v") else 1) for s in EXCHANGED]
    if tp > 1:
        specs = [replace(s, shards=tp, part_layers=1) if s.name == "ln1" else s for s in specs]
    for seed, name in enumerate("ab"):
        rows = {s.name: samples if s.per_sample else length for s in specs}
        values = {s.name: kit.random_bits(s, rows[s.name], 10 * seed + i) for i, s in enumerate(specs)}
        options = {"codec": codec, "segment": 128, "chunk": 64, "request_id": name, "ranks": tp}
        ids = np.random.default_rng(seed).integers(0, 500, length)
        for rank, owner in enumerate(owners):
            own = kit.shard_specs(specs, tp, rank) if tp > 1 else specs
            wait = rank == tp - 1
            owner.write(root / f"{name}.zarr", own, length, samples, values, ids=ids, rank=rank, wait=wait, **options)
    assert all([owner.shutdown(kit.PATIENCE) for owner in owners])
    assert verify_dir(root) == []
    return root


@pytest.fixture(scope="module", params=["none", "zstd"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair(tmp_path_factory.mktemp("pair"), request.param, 1)


@pytest.fixture(scope="module", params=["none", "zstd"])
def pair_of_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair(tmp_path_factory.mktemp("pair"), request.param, 2)


@contextmanager
def exchanged(root: Path, first: str, one: str, second: str, other: str) -> Iterator[set[Path]]:
    """Exchange file `one` of store `first` with file `other` of store `second` during the block. Yields the stores."""

    def exchange() -> None:
        a, b, aside = root / f"{first}.zarr" / one, root / f"{second}.zarr" / other, root.parent / f"{root.name}-aside"
        a.rename(aside)
        b.rename(a)
        aside.rename(b)

    exchange()
    try:
        yield {root / f"{first}.zarr", root / f"{second}.zarr"}
    finally:
        exchange()


@pytest.mark.parametrize("what", EXCHANGES)
def test_verify_finds_files_that_changed_places(pair: Path, what: str) -> None:
    """The directory has a problem, and so has each store with a foreign file."""
    with exchanged(pair, *EXCHANGES[what]) as stores:
        assert verify_dir(pair)
        for store in stores:
            assert verify_store(store), store


@pytest.mark.parametrize("what", EXCHANGES | BETWEEN_RANKS)
def test_verify_finds_files_of_ranks_that_changed_places(pair_of_ranks: Path, what: str) -> None:
    with exchanged(pair_of_ranks, *(EXCHANGES | BETWEEN_RANKS)[what]) as stores:
        for store in stores:
            assert verify_store(store), store


# Without compression, all shards have the same size.
@pytest.mark.parametrize("pair_of_ranks", ["none", pytest.param("zstd", marks=pytest.mark.soak)], indirect=True)
@pytest.mark.parametrize("first", ["k/c/0/2/1", "token_ids/c/0", *soak("k/c/0/0/0", "v/c/0/1/1", "logits/c/1/0")])
def test_verify_finds_a_copy_in_the_place_of_any_other_file(pair_of_ranks: Path, tmp_path: Path, first: str) -> None:
    """Every other file of its own store and of the other store is replaced."""
    root = Path(shutil.copytree(pair_of_ranks, tmp_path / "root"))
    data = (root / "a.zarr" / first).read_bytes()
    for name in "ab":
        store = root / f"{name}.zarr"
        for path in sorted(p for p in store.rglob("*") if p.is_file() and p != root / "a.zarr" / first):
            own = path.read_bytes()
            path.write_bytes(data)
            assert verify_store(store), f"{first} in the place of {path.relative_to(root)}"
            path.write_bytes(own)
        assert verify_store(store) == []


def test_a_store_is_not_removed_while_it_is_verified(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[bool] = []
    run = verify._Check.run

    def removing(check: verify._Check, begun: Any) -> Any:
        removed.append(remove_store(pair / "a.zarr"))
        return run(check, begun)

    monkeypatch.setattr(verify._Check, "run", removing)
    assert verify_store(pair / "a.zarr") == [] and removed == [False]


def test_a_store_that_is_removed_meanwhile_is_not_damaged(
    pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is listed, but retention removes it before it is read."""
    listed = [*verify.stores_of(pair), pair / "gone.zarr"]
    for module in (verify, verify_command):
        monkeypatch.setattr(module, "stores_of", lambda _place: listed)
    assert verify_dir(pair) == []
    assert main(["verify", str(pair)]) == 0
    assert capsys.readouterr().out.endswith("2 checked, 0 damaged, 1 removed meanwhile\n")


def test_a_finished_store_has_no_journal_and_no_file_of_a_rank(pair_of_ranks: Path) -> None:
    assert not [p for p in pair_of_ranks.glob("*.zarr/.*")]


RESIDUAL = ("resid_pre", "attn_out", "resid_mid", "mlp_out")


def residual_stream(dtype: str, length: int, layers: int = 3, width: int = 32) -> kit.Values:
    """A residual stream whose sums are correct up to the rounding of `dtype`."""
    native = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    rng = np.random.default_rng(0)
    out: dict[str, list[np.ndarray]] = {name: [] for name in RESIDUAL}
    x = rng.standard_normal((length, width)).astype(native)
    for _ in range(layers):
        attn, mlp = (rng.standard_normal((2, length, width)) * 3).astype(native)
        mid = (x.astype("f8") + attn.astype("f8")).astype(native)
        for name, value in zip(RESIDUAL, (x, attn, mid, mlp), strict=True):
            out[name].append(value)
        x = (mid.astype("f8") + mlp.astype("f8")).astype(native)
    values = {name: kit.bits(np.stack(v)) for name, v in out.items()}
    return values | {"resid_final": kit.bits(x[None])}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_finds_where_the_residual_stream_does_not_add_up(stores: kit.Store, tmp_path: Path, dtype: str) -> None:
    values = residual_stream(dtype, 300)
    specs = [ArraySpec(n, dtype, (0, 1, 2), 32) for n in RESIDUAL] + [ArraySpec("resid_final", dtype, (), 32)]
    attrs = {"identities": True, "num_layers": 3}
    stores.write(tmp_path / "good.zarr", specs, 300, values=values, attrs=attrs)
    assert verify_store(tmp_path / "good.zarr") == []
    for name, layer, token, expected in (
        ("attn_out", 1, 130, ["resid_mid layer 1 token 130"]),
        ("resid_final", 0, 7, ["resid_final layer 0 token 7"]),
        ("resid_mid", 2, 199, ["resid_mid layer 2 token 199", "resid_final layer 0 token 199"]),
        ("mlp_out", 0, 299, ["resid_pre layer 1 token 299"]),
        ("resid_pre", 2, 256, ["resid_pre layer 2 token 256", "resid_mid layer 2 token 256"]),
    ):
        wrong = {k: v.copy() for k, v in values.items()}
        wrong[name][layer, token, 5] = wrong[name][layer, (token + 50) % 300, 5] ^ 0x100
        path = tmp_path / f"{name}.zarr"
        stores.write(path, specs, 300, values=wrong, attrs=attrs)
        assert [p.where for p in verify_store(path)] == expected
        stores.write(tmp_path / f"unflagged-{name}.zarr", specs, 300, values=wrong)
        assert verify_store(tmp_path / f"unflagged-{name}.zarr") == []


@pytest.mark.parametrize("lacking", RESIDUAL)
def test_sums_without_all_their_rows_are_not_checked_and_the_others_are(
    stores: kit.Store, tmp_path: Path, lacking: str
) -> None:
    """An incomplete store may lack a chunk of one hook. The same tokens of another layer are still compared."""
    values = residual_stream("float32", 200)
    values["resid_mid"][2, 150, 3] ^= 1 << 24  # in the chunk that is missing in layer 0
    specs = [ArraySpec(n, "float32", (0, 1, 2), 32) for n in RESIDUAL]
    path, attrs = tmp_path / "a.zarr", {"identities": True, "num_layers": 3}
    losses = [Loss.of(Cause.FELL_BEHIND, [[128, 200]])]
    stores.write(path, specs, 200, values=values, attrs=attrs, codec="none", losses=losses)
    data = (path / f"{lacking}/c/0/0/0").read_bytes()
    size = 16 * 3 * 2 + 4
    index = read_index(data[-size:], (3, 2)).copy()
    index[0, 1] = EMPTY
    body = data[:-size]
    crcs = [body[int(a + n) - 4 : int(a + n)] for a, n in sorted(map(tuple, index[index[..., 0] != EMPTY].tolist()))]
    content = shard_content(b"".join(crcs), index)
    document = json.loads((path / "zarr.json").read_bytes())
    own = document["attributes"]["dmi"]
    forged = body + index_bytes(index)
    (path / f"{lacking}/c/0/0/0").write_bytes(forged)
    own["files"][f"{lacking}/c/0/0/0"] = [len(forged), file_checksum(f"{lacking}/c/0/0/0", content)]
    own["checksum"] = crc32c(schema.canonical(own))
    (path / "zarr.json").write_bytes(schema.dump(document))
    assert [p.where for p in verify_store(path)] == ["resid_mid layer 2 token 150"]


TOLERATED = {"float32": 1e-5, "float16": 2 * 2.0**-11, "bfloat16": 2 * 2.0**-8}
"""Tolerances of docs/FORMAT.md, section 7: the error of a sum, relative to the largest magnitude in the three rows."""


@pytest.mark.parametrize("dtype", TOLERATED)
@pytest.mark.parametrize("values", [(64, -32, 32), (-32, 64, 32), (32, 32, 64)])
def test_a_sum_may_be_off_by_the_tolerance_and_no_more(
    stores: kit.Store, tmp_path: Path, dtype: str, values: tuple[float, float, float]
) -> None:
    """The largest magnitude of a row is 64, in one of the three rows. The error is in another column."""
    specs = [ArraySpec(name, dtype, (0,), 4) for name in RESIDUAL[:3]]
    for part, found in ((0.97, []), (1.03, ["resid_mid layer 0 token 150"])):
        rows = {
            name: np.full((1, 200, 4), 1.0 - (name == "attn_out")).astype(numpy_dtype(dtype)) for name in RESIDUAL[:3]
        }
        for name, value in zip(RESIDUAL, values, strict=False):
            rows[name][0, 150, 1] = value
        rows["resid_pre"][0, 150, 2], rows["resid_mid"][0, 150, 2] = 0, part * TOLERATED[dtype] * 64
        path = tmp_path / f"{part}.zarr"
        raw = {name: kit.bits(row) for name, row in rows.items()}
        stores.write(path, specs, 200, values=raw, attrs={"identities": True, "num_layers": 1})
        assert [p.where for p in verify_store(path) if "suspect" not in p.what] == found


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("dtype", TOLERATED)
def test_without_the_stream_between_them_both_blocks_are_added_at_once(
    stores: kit.Store, tmp_path: Path, dtype: str, parallel: bool
) -> None:
    """A sum of three is rounded twice, so its tolerance is 1.5 times as large."""
    names = ("resid_pre", "attn_out", "mlp_out", "resid_final")
    specs = [ArraySpec(name, dtype, (0,) if name != "resid_final" else (), 4) for name in names]
    for part, found in ((1.47, []), (1.53, ["resid_final layer 0 token 150"])):
        rows = {name: np.ones((1, 200, 4)).astype(numpy_dtype(dtype)) for name in names}
        rows["resid_final"][:] = 3
        for name, value in zip(names, (64, -32, -64, -32), strict=True):
            rows[name][0, 150, 1] = value
        rows["attn_out"][0, 150, 2], rows["mlp_out"][0, 150, 2], rows["resid_pre"][0, 150, 2] = 0, 0, 0
        rows["resid_final"][0, 150, 2] = part * TOLERATED[dtype] * 64
        path = tmp_path / f"{part}.zarr"
        raw = {name: kit.bits(row) for name, row in rows.items()}
        attrs = {"identities": True, "num_layers": 1, **({"parallel": True} if parallel else {})}
        stores.write(path, specs, 200, values=raw, attrs=attrs)
        assert [p.where for p in verify_store(path) if "suspect" not in p.what] == found


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(
    ("spec", "value", "suspect"),
    [
        (ArraySpec("q", "bfloat16", (0, 3), 16), 0, True),
        (ArraySpec("q", "float32", (0, 3), 16), 2.5, True),
        (ArraySpec("embed", "float32", (), 16), 0, True),
        (ArraySpec("topk_ids", "int32", (0, 3), 2), 0, True),
        (ArraySpec("topk_ids", "int32", (0, 3), 2), 1, False),
        (ArraySpec("topk_ids", "int32", (0, 3), 1), 0, False),
        (ArraySpec("topk_weights", "float32", (0, 3), 2), 0, True),
        (ArraySpec("topk_weights", "float32", (0, 3), 2), 0.5, False),
    ],
    ids=str,
)
def test_a_layer_of_one_value_is_suspect(
    spec: ArraySpec, value: float, suspect: bool, codec: str, stores: kit.Store, tmp_path: Path
) -> None:
    """Memory that no tap wrote looks like this. The same expert for many tokens and equal weights are legal."""
    arrays = (spec, ArraySpec("ln2", "float32", (0, 3), 8))
    values = {one.name: kit.random_bits(one, 300) for one in arrays}
    values[spec.name][-1] = np.array(value, numpy_dtype(spec.dtype)).view(f"u{spec.itemsize}")
    stores.write(tmp_path / "a.zarr", arrays, 300, values=values, codec=codec)
    where = f"{spec.name} layer 3" if spec.layers else spec.name
    shown = np.array(value, numpy_dtype(spec.dtype))
    found = [(p.where, p.what) for p in verify_store(tmp_path / "a.zarr")]
    assert found == ([(where, f"suspect: every value is {shown}, as in memory that no tap wrote")] if suspect else [])


@pytest.mark.parametrize(
    ("zero", "before_it"),
    [("attn_out", "z"), *(("mlp_out", hook) for hook in ("mlp_pre", "mlp_pre_linear", "mlp_post"))],
)
def test_a_zero_that_the_residual_stream_shows_is_not_suspect(
    zero: str, before_it: str, stores: kit.Store, tmp_path: Path
) -> None:
    """The weights of such a layer are zero, like those of layers that are added to a model before training."""
    values = residual_stream("float32", 200)
    before, after = {"attn_out": ("resid_pre", "resid_mid"), "mlp_out": ("resid_mid", "resid_final")}[zero]
    values[zero][2] = 0
    values[after][-1] = values[before][2]
    if zero == "attn_out":
        values["mlp_out"][2] = values["resid_final"][0] = values["resid_mid"][2]
        values["resid_final"][0] = kit.bits(2 * values["resid_mid"][2].view("f4"))
    specs = [ArraySpec(n, "float32", (0, 1, 2), 32) for n in RESIDUAL] + [ArraySpec("resid_final", "float32", (), 32)]
    fed = ArraySpec(before_it, "float32", (2,), 16)
    values[fed.name] = np.zeros((1, 200, 16), "u4")
    attrs = {"identities": True, "num_layers": 3}
    stores.write(tmp_path / "sums.zarr", [*specs, fed], 200, values=values, attrs=attrs)
    assert verify_store(tmp_path / "sums.zarr") == []
    stores.write(tmp_path / "alone.zarr", [fed], 200, values={fed.name: values[fed.name]}, attrs=attrs)
    assert [p.where for p in verify_store(tmp_path / "alone.zarr")] == [f"{fed.name} layer 2"]
