# SPDX-License-Identifier: Apache-2.0
"""`dmi export --to numpy` and `--to parquet`: columns of hooks next to the tokens of a store."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from dmi_connector import open_capture
from dmi_connector.analysis.export.columns import columns_of
from dmi_connector.captures.captures import open_captures
from dmi_connector.cli.export import FLAGS
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce import parse
from tests import snippets
from tests import storekit as kit

ROWS = 300
"""Number of rows, more than are read at a time."""
SPECS = [
    ArraySpec("resid_pre", "bfloat16", (0, 1), 16),
    ArraySpec("q", "bfloat16", (0, 1), 8),
    ArraySpec("resid_final", "bfloat16", (), 16),
    ArraySpec("logits", "float32", (), 20, per_sample=True),
]
HOOKS = "resid_pre@1,q@0,resid_final"


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("columns")
    owner = kit.Store(1 << 22)
    for name, key in (("a", "mine"), ("b", None)):
        owner.write(folder / f"{name}.zarr", SPECS, ROWS, attrs={"num_layers": 2}, key=key)
    assert owner.shutdown()
    yield folder


def test_arrays_of_numpy_are_those_of_the_store(stores: Path, tmp_path: Path) -> None:
    assert main(["export", str(stores), "--to", "numpy", "--hook", HOOKS, "-o", str(tmp_path)]) == 0
    for name in "ab":
        with np.load(tmp_path / f"{name}.npz") as found, open_capture(stores / f"{name}.zarr") as capture:
            assert found.files == ["token_ids", "positions", "phase", *HOOKS.split(",")]
            for array in ("token_ids", "positions", "phase"):
                assert np.array_equal(found[array], getattr(capture, array)) and len(found[array]) == ROWS
            assert np.array_equal(found["resid_pre@1"], capture.numpy("resid_pre", 1))
            assert np.array_equal(found["q@0"], capture.numpy("q", 0).reshape(ROWS, 8))
            assert np.array_equal(found["resid_final"], capture.numpy("resid_final"))
            assert found["resid_pre@1"].dtype == np.float32


def test_stores_with_values_of_another_projection_or_width_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """int8 keeps the values of the hook, so such stores may be mixed with unreduced ones."""
    made = {"int8": "int8", "one": "rp(16,seed=1)", "other": "rp(16,seed=2)"}
    specs = {name: ArraySpec("resid_final", "float32", (), width) for name, width in (("full", 32), ("narrow", 16))}
    for name, reduction in ((name, parse(text)) for name, text in made.items()):
        assert reduction is not None
        settings = {**reduction.settings(), "dtype": "float32", "width": 32}
        stored = reduction.stored_dtype("float32"), (), reduction.stored_width(32, "float32")
        specs[name] = ArraySpec("resid_final", *stored, reduce=settings)
    owner = kit.Store(1 << 22)
    for name, spec in specs.items():
        owner.write(tmp_path / f"{name}.zarr", [spec], 5)
    assert owner.shutdown()

    def exports(*names: str) -> int:
        paths = [str(tmp_path / f"{name}.zarr") for name in names]
        out = ["--hook", "resid_final", "-o", str(tmp_path / "-".join(names))]
        return main(["export", *paths, "--to", "webdataset", *out])

    assert exports("full", "int8") == exports("one") == exports("other") == exports("narrow") == 0
    for names in (("one", "other"), ("narrow", "one"), ("full", "narrow")):
        assert exports(*names) == 2
        words = f"{names[1]}.zarr holds rows of 'resid_final' of another width or reduction; leave it out"
        assert words in capsys.readouterr().err


def test_hooks_may_have_spaces_between_them(stores: Path) -> None:
    columns = columns_of(open_captures(stores), " resid_pre@1, q@-1 ,q@-1")
    assert [(column.name, column.layer) for column in columns] == [("resid_pre@1", 1), ("q@-1", 1)]


def test_a_table_of_parquet_has_a_row_per_token(stores: Path, tmp_path: Path) -> None:
    assert main(["export", str(stores), "--to", "parquet", "--hook", HOOKS, "-o", str(tmp_path)]) == 0
    for name, key in (("a", "mine"), ("b", None)):
        table = pq.read_table(tmp_path / f"{name}.parquet")
        assert table.column_names == ["key", "token_ids", "positions", "phase", *HOOKS.split(",")]
        with open_capture(stores / f"{name}.zarr") as capture:
            assert table["key"].to_pylist() == [key] * ROWS
            for array in ("token_ids", "positions", "phase"):
                assert np.array_equal(table[array].to_numpy(), getattr(capture, array))
            assert np.array_equal(np.array(table["resid_pre@1"].to_pylist(), np.float32), capture.numpy("resid_pre", 1))
            assert np.array_equal(
                np.array(table["q@0"].to_pylist(), np.float32), capture.numpy("q", 0).reshape(ROWS, 8)
            )


def samples(folder: Path) -> dict[str, dict[str, bytes]]:
    """The files of each sample in all shards. WebDataset splits names at their first dot."""
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted(folder.glob("shard-*.tar")):
        with tarfile.open(path) as shard:
            before = None
            for member in shard:
                name, _, extension = member.name.partition(".")
                assert name == before or name not in found, "the files of a sample must be adjacent"
                file = shard.extractfile(member)
                assert file is not None
                found.setdefault(name, {})[extension], before = file.read(), name
    return found


def test_a_sample_of_webdataset_is_a_store(stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["export", str(stores), "--to", "webdataset", "--hook", HOOKS, "--shard-size", "1k", "-o", str(tmp_path)]
    assert main(argv) == 0
    assert "2 shards written" in capsys.readouterr().out and len([*tmp_path.glob("*.tar")]) == 2
    found = samples(tmp_path)
    assert list(found) == ["a", "b"]
    for name, key in (("a", "mine"), ("b", None)):
        about = json.loads(found[name].pop("json"))
        arrays = {n.removesuffix(".npy"): np.load(io.BytesIO(data)) for n, data in found[name].items()}
        with open_capture(stores / f"{name}.zarr") as capture:
            assert (about["key"], about["prompt_len"]) == (key, capture.prompt_len)
            assert np.array_equal(arrays["token_ids"], capture.token_ids)
            assert np.array_equal(arrays["phase"], capture.phase)
            assert np.array_equal(arrays["resid_pre@1"], capture.numpy("resid_pre", 1))
            assert np.array_equal(arrays["resid_final"], capture.numpy("resid_final"))
    (tmp_path / "shard-000001.tar").unlink()
    assert main(argv) == 0, "a second run must write the missing shards"
    assert "1 shards written, 1 already existed" in capsys.readouterr().out and samples(tmp_path).keys() == {"a", "b"}
    assert main([*argv[:-1], str(tmp_path / "one"), "--shard-size", "1G"]) == 0
    assert [path.name for path in (tmp_path / "one").glob("*.tar")] == ["shard-000000.tar"]
    assert main([*argv, "--shard-size", "0"]) == 2
    assert "--shard-size 0 is not valid" in capsys.readouterr().err


def test_stores_that_are_not_finite_have_no_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owner = kit.Store(1 << 22)
    for name, bad in (("a", True), ("b.1", False), ("c", True)):
        values = {spec.name: kit.random_bits(spec, 0 if spec.per_sample else 20) for spec in SPECS}
        values["q"][0, 3, 2] = 0x7FC0 if bad else 0
        owner.write(tmp_path / f"in/{name}.zarr", SPECS, 20, values=values, attrs={"num_layers": 2})
    assert owner.shutdown()
    argv = ["export", str(tmp_path / "in"), "--to", "webdataset", "--hook", "q@0", "--shard-size", "1"]
    for finite, names, status in (("skip", ["b_1"], 3), ("keep", ["a", "b_1", "c"], 3), ("fail", [], 3)):
        out = tmp_path / finite
        assert main([*argv, "--finite", finite, "-o", str(out)]) == status
        assert list(samples(out)) == names
    assert "2 left out" in (text := "".join(capsys.readouterr())) and "2 kept" in text
    alone = ["export", str(tmp_path / "in/a.zarr"), *argv[2:], "-o", str(tmp_path / "alone")]
    assert main(alone) == 3 and "no store is left" in capsys.readouterr().err


def test_a_store_without_rows_becomes_an_empty_file(tmp_path: Path) -> None:
    owner = kit.Store(1 << 22)
    owner.write(tmp_path / "in/a.zarr", SPECS, 0, attrs={"num_layers": 2})
    assert owner.shutdown()
    for to in ("numpy", "parquet"):
        argv = ["export", str(tmp_path / "in"), "--to", to, "--hook", "q@0,q@0", "-o", str(tmp_path / to)]
        assert main(argv) == 0
    with np.load(tmp_path / "numpy/a.npz") as found:
        assert found["q@0"].shape == (0, 8) and found["token_ids"].shape == (0,)
    assert pq.read_table(tmp_path / "parquet/a.parquet").num_rows == 0


def test_the_default_size_of_a_shard_is_that_of_the_help(stores: Path, tmp_path: Path) -> None:
    argv = ["export", str(stores), "--to", "webdataset", "--hook", HOOKS, "-o", str(tmp_path)]
    assert FLAGS["shard_size"]["help"].endswith("(default: 1G)")
    assert main(argv) == main([*argv, "--shard-size", "1G"]) == 0


@pytest.mark.parametrize("to", ["numpy --hook q@0", "webdataset --hook q@0", "speculators", "zip"])
@pytest.mark.parametrize("inside", ["", "/data"])
def test_nothing_is_written_into_a_store(
    stores: Path, to: str, inside: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = stores / "a.zarr"
    before = sorted(store.rglob("*"))
    assert main(["export", str(stores), "--to", *to.split(), "-o", f"{store}{inside}"]) == 2
    told = f"dmi: export: {store} is a store, and an export must not add files to it; give another -o\n"
    assert capsys.readouterr().err == told
    assert sorted(store.rglob("*")) == before


@pytest.mark.parametrize("to", ["numpy", "parquet", "webdataset"])
@pytest.mark.parametrize(
    ("hook", "words"),
    [("resid_pre", "name one, as in 'resid_pre@0'"), ("logits", "a row for each sampled token"), ("z@0", "z")],
)
def test_hooks_that_are_not_columns_are_refused(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str, hook: str, words: str
) -> None:
    assert main(["export", str(stores), "--to", to, "--hook", hook, "-o", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not [*tmp_path.rglob("*.npz"), *tmp_path.rglob("*.parquet"), *tmp_path.rglob("*.tar")]


def test_the_pages_commands_work(stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "captures").symlink_to(stores)
    for words in snippets.commands("numpy and Parquet"):
        assert main([word.replace("@12", "@1") for word in words[1:]]) == 0
    assert [len(list(Path("data", folder).glob("?.*"))) for folder in ("arrays", "rows")] == [2, 2]
    (words,) = snippets.commands("WebDataset")
    assert main([word.replace("@12", "@1") for word in words[1:]]) == 0 and list(samples(Path("data/shards"))) == [
        "a",
        "b",
    ]
